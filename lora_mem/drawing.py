"""How a result of any floor is shown: as an HTML table, or drawn, without that floor knowing matplotlib."""

from __future__ import annotations

import html
import importlib
import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(result: Any, ax: Axes | None = None) -> Axes:
    """Draw a result with the plot that `lora_mem.observe.plots` registers for its type; returns matplotlib's Axes."""
    # By name, as an entry point is: plots import every floor below them.
    axes: Axes = importlib.import_module("lora_mem.observe.plots").draw(result, ax)
    return axes


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table without ids, so that it is the same each time; text that starts with a digit is set right."""
    body = ""
    for row in rows:
        cells = "".join(
            f"<td style='text-align:right;white-space:nowrap'>{html.escape(cell)}</td>"
            if re.match(r"[-+]?\d", cell)
            else f"<td>{html.escape(cell)}</td>"
            for cell in row
        )
        body += f"<tr>{cells}</tr>"
    columns = "".join(f"<th>{html.escape(column)}</th>" for column in head)
    top = f"<caption>{html.escape(caption)}</caption><thead><tr>{columns}</tr></thead>"
    return f"<table>{top}<tbody>{body}</tbody></table>"
