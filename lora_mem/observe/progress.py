"""Progress bars on what takes more than two seconds: in a terminal and in Jupyter, not in tests, pipes and logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any

SECONDS = 2.0  # a bar appears after so long


def progress(of: Iterable[Any] | None = None, *, what: str = "", total: int | None = None) -> Any:
    """tqdm's bar over an iterable, or one of `total` to `update()`, for a `with` block; `what` stands before it.

    Off where `LORA_MEM_PROGRESS=0`, under pytest, and where stderr is not a terminal, unless that is Jupyter's.
    """
    from tqdm.auto import tqdm

    off = os.environ.get("LORA_MEM_PROGRESS") == "0" or "PYTEST_CURRENT_TEST" in os.environ
    # None leaves it to tqdm, which asks whether stderr is a terminal.
    disable = off or (False if "ipykernel" in sys.modules else None)
    return tqdm(of, desc=what or None, total=total, disable=disable, delay=SECONDS, leave=False)


def say(text: str) -> None:
    """A line on stderr that does not run into a bar."""
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stderr)
