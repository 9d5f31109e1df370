"""The `%%lora_mem` magic: profiles a cell, and says what it cannot do."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch")


from phases import names


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    found = InteractiveShell()
    found.run_line_magic("load_ext", "lora_mem")
    return found


def test_the_magic_profiles_a_cell(shell, tmp_path):
    cell = "from lora_mem.observe.profiler import phase\nwith phase('mine'):\n    x = !echo 1\n"
    found = shell.run_cell_magic("lora_mem", f"kept --trace {tmp_path / 'trace.json'}", cell)
    assert names(found) == [(0, "mine")]
    assert shell.user_ns["kept"] is found
    assert shell.user_ns["x"] == ["1"]
    assert found.trace == str(tmp_path / "trace.json")


def test_the_magic_keeps_what_a_failing_cell_has_shown(shell):
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("lora_mem", "kept", "1 / 0")
    assert shell.user_ns["kept"].total.error == "ZeroDivisionError: division by zero"
    from IPython.core.error import UsageError

    with pytest.raises(UsageError, match="unrecognized arguments: --fast"):
        shell.run_cell_magic("lora_mem", "--fast", "1")


def test_the_magic_refuses_what_it_cannot_do(shell):
    from IPython.core.error import UsageError

    for name in ("5x", "class", "a.b"):
        with pytest.raises(UsageError, match=f"name is '{name}'; it must be a name for a Python variable"):
            shell.run_cell_magic("lora_mem", name, "ran = True")
    with pytest.raises(UsageError, match=r"cannot await.*`with lora_mem\.profile"):
        shell.run_cell_magic("lora_mem", "kept", "import asyncio\nran = True\nawait asyncio.sleep(0)")
    assert not {"ran", "kept", "5x", "class", "a.b"} & shell.user_ns.keys()


def test_what_the_magic_says_to_do_instead_awaits(shell):
    block = "with lora_mem.profile() as profiler, profiler.phase('mine'):\n    await asyncio.sleep(0.02)"
    shell.run_cell(f"import asyncio, lora_mem\n{block}").raise_error()
    assert shell.user_ns["profiler"].result.phase("mine").seconds >= 0.02
