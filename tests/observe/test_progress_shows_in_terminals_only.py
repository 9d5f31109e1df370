"""Progress bars: after two seconds, in a terminal or Jupyter, and never in a test or a log."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios

import pytest

SLOW = """
from lora_mem.observe import progress
progress.SECONDS = {delay}
print(sum(progress.progress(range(5), what="counting")))
"""


def on_a_terminal(delay: float, **environment: str) -> str:
    """What a script writes to stderr, where that is a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    kept = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
    command = [sys.executable, "-c", SLOW.format(delay=delay)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env={**kept, **environment}, text=True)
    os.write(theirs, b".")
    shown = os.read(ours, 100_000).decode()
    os.close(ours)
    os.close(theirs)
    assert done.stdout == "10\n"
    return shown


@pytest.mark.parametrize(
    ("delay", "environment", "shown"),
    [
        (0, {}, True),
        (2.0, {}, False),
        (0, {"LORA_MEM_PROGRESS": "0"}, False),
        (0, {"PYTEST_CURRENT_TEST": "some test"}, False),
    ],
)
def test_where_a_bar_is_shown(delay, environment, shown):
    assert ("counting" in on_a_terminal(delay, **environment)) is shown


def test_no_bar_in_a_log():
    done = subprocess.run([sys.executable, "-c", SLOW.format(delay=0)], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("10\n", "")
