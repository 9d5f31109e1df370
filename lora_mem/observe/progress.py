"""Progress bars on what takes more than two seconds: in a terminal and in Jupyter, not in tests, pipes and logs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from typing import Any, TypeVar

T = TypeVar("T")

SECONDS = 2.0
"""A bar appears after so long."""


def progress(of: Iterable[T] | None = None, *, what: str = "", total: int | None = None) -> Any:
    """A bar over an iterable, or one to `update()`; use it in a `with` block or as the iterable. See `tqdm.auto.tqdm`.

    Off where `LORA_MEM_PROGRESS=0`, under pytest, and where stderr is no terminal, unless that is Jupyter's.

    Args:
        of: what to go through; without it `update()` counts.
        what: is going on, before the bar.
        total: how many; default the length of `of`.
    """
    from tqdm.auto import tqdm

    return tqdm(of, desc=what or None, total=total, disable=_off(), delay=SECONDS, leave=False)


def say(text: str) -> None:
    """A line on stderr that does not run into a bar."""
    from tqdm.auto import tqdm

    tqdm.write(text, file=sys.stderr)


def _off() -> bool | None:
    """None leaves it to tqdm, which asks whether stderr is a terminal."""
    if os.environ.get("LORA_MEM_PROGRESS") == "0" or "PYTEST_CURRENT_TEST" in os.environ:
        return True
    return False if "ipykernel" in sys.modules else None
