"""How a result of any floor is drawn, without that floor knowing matplotlib."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(result: Any, ax: Axes | None = None) -> Axes:
    """Draw a result with the plot that `lora_mem.observe.plots` registers for its type; returns matplotlib's Axes."""
    # By name, as an entry point is: plots import every floor below them.
    axes: Axes = importlib.import_module("lora_mem.observe.plots").draw(result, ax)
    return axes
