"""The set-up script says what is wrong in a line or two, without a traceback, and starts over after a broken run."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
spec = importlib.util.spec_from_file_location("setup_env", ROOT / "scripts" / "setup_env.py")
assert spec is not None
assert spec.loader is not None
setup_env = importlib.util.module_from_spec(spec)
spec.loader.exec_module(setup_env)


@pytest.fixture
def project(tmp_path):
    """A copy of what the script reads, in a folder of its own."""
    (tmp_path / "scripts").mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE", "lora_mem", "scripts/setup_env.py"):
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, tmp_path / name)
    return tmp_path


def run(project, **environment):
    hidden = ("LORA_MEM_PYTHON", "LORA_MEM_DEVICE", "PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL")
    kept = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        [sys.executable, project / "scripts" / "setup_env.py"],
        capture_output=True,
        text=True,
        env=kept | {"LORA_MEM_DEVICE": "cpu"} | environment,
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.mark.parametrize(
    ("version", "allowed"), [((3, 10, 9), False), ((3, 11, 0), True), ((3, 14, 2), True), ((3, 15, 0), False)]
)
def test_python(version, allowed):
    assert (setup_env.python_problem(version) == "") == allowed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PIP_NO_INDEX": "1"}, "No matching distribution found for setuptools"),
        pytest.param(
            {"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}, "reaches no package registry", marks=pytest.mark.exhaustive
        ),
    ],
)
def test_without_a_registry_and_after_a_broken_run(project, settings, message):
    (project / ".venv").mkdir()
    (project / ".venv" / "half-made").touch()
    done = run(project, PIP_CONFIG_FILE=os.devnull, PIP_RETRIES="1", **settings)
    assert done.returncode == 1
    assert message in done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert not (project / ".venv" / "half-made").exists()
    assert not (project / ".venv" / "lora_mem.stamp").exists()


def test_a_finished_environment_is_found_again_at_once(project):
    interpreter = project / ".venv" / "bin" / "python"
    interpreter.parent.mkdir(parents=True)
    interpreter.touch()
    stamp = "import setup_env; open(setup_env.STAMP, 'w').write(setup_env.stamp('cpu'))"
    subprocess.run([sys.executable, "-c", stamp], check=True, cwd=project / "scripts")
    done = run(project, PIP_NO_INDEX="1")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_room(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=2**30))
    with pytest.raises(setup_env.SetupError, match=r"1\.0 GiB are free .* needs \d+ GiB"):
        setup_env.check_room("cpu")


@pytest.mark.parametrize(
    ("system", "machine", "libc"),
    [("Darwin", "arm64", ("", "")), ("Linux", "ppc64le", ("glibc", "2.36")), ("Linux", "x86_64", ("glibc", "2.17"))],
)
def test_platforms_without_a_build(monkeypatch, system, machine, libc):
    monkeypatch.setattr(setup_env.platform, "system", lambda: system)
    monkeypatch.setattr(setup_env.platform, "machine", lambda: machine)
    monkeypatch.setattr(setup_env.platform, "libc_ver", lambda: libc)
    with pytest.raises(setup_env.SetupError, match="vLLM's builds"):
        setup_env.check_platform()


def test_no_venv_module(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(setup_env.SetupError, match="apt install python3"):
        setup_env.make_venv()


def test_device(monkeypatch):
    monkeypatch.setenv("LORA_MEM_DEVICE", "tpu")
    with pytest.raises(setup_env.SetupError, match="'tpu'; it must be gpu or cpu"):
        setup_env.chosen_device()
    monkeypatch.setenv("LORA_MEM_DEVICE", "")
    monkeypatch.setattr(setup_env, "has_nvidia_gpu", lambda: True)
    assert setup_env.chosen_device() == "gpu"


@pytest.mark.parametrize(
    ("interpreter", "message"), [("/no/such/python", "No such file"), ("false", "which fails: no reason was given")]
)
def test_an_existing_interpreter_that_will_not_do(project, interpreter, message):
    done = run(project, LORA_MEM_PYTHON=interpreter)
    assert done.returncode == 1
    assert message in done.stderr


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (
            "ERROR: No matching distribution found for torch==2.13.0+cpu; platform_machine",
            r"no torch==2\.13\.0\+cpu, .* set PIP_EXTRA_INDEX_URL",
        ),
        (
            "WARNING: Retrying after connection broken by 'NewConnectionError(...)'\n"
            "ERROR: No matching distribution found for setuptools>=68",
            "reaches no package registry; check the network",
        ),
        ("ERROR: Could not install packages: [Errno 28] No space left on device", "the disk is full"),
    ],
)
def test_what_pip_says_is_put_in_a_line(monkeypatch, output, message):
    monkeypatch.setattr(setup_env, "pip", lambda *arguments: SimpleNamespace(returncode=1, stdout=output))
    with pytest.raises(setup_env.SetupError, match=message):
        setup_env.install(Path("python"), "cpu")
