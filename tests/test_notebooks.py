"""Notebooks are committed as they were executed, and hold nothing that differs from machine to machine."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))
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


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_fit_to_be_committed(path):
    assert problems(path.read_text()) == []


def test_there_are_notebooks():
    assert NOTEBOOKS


def cell(source="1 + 1", count=1, text="2"):
    outputs = [{"output_type": "execute_result", "data": {"text/plain": [text], "image/png": "0xdeadbeef/tmp/"}}]
    return {"cell_type": "code", "source": [source], "execution_count": count, "outputs": outputs}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (cell(count=None), "was not run"),
        (cell(text="<Engine at 0x7f12ab34cd56>"), "a memory address"),
        (cell(text="'/home/me/model'"), "an absolute path"),
        (cell(source="open('/tmp/x')"), "an absolute path"),
        (cell(text="x" * MAX_BYTES), "at most 500,000"),
        ({**cell(), "outputs": [{"output_type": "error"}]}, "failed"),
    ],
)
def test_what_is_not_fit(bad, message):
    assert problems(json.dumps({"cells": [cell()]})) == []
    found = problems(json.dumps({"cells": [cell(), bad]}))
    assert len(found) == 1
    assert message in found[0]
