"""What all figures share: one palette, axes of their own, stacked and grouped bars."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's bright scheme, which readers who are colour-blind can tell apart.
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = PALETTE

HOLDERS = {"slots": BLUE, "packed": RED, "registered": RED, "adapters": RED, "staged": YELLOW}
STRATEGIES = {"keep": RED, "offload": YELLOW, "stage": BLUE, "fill": GREEN}


def plot_bars(values: Mapping[str, Mapping[str, float]], unit: str, ax: Axes | None = None) -> Axes:
    """Grouped bars: for each series its value in each group, with the figure above it.

    Args:
        values: by series, then by group.
        unit: of the values, for the axis.
        ax: where to draw.
    """
    ax = axes_or_new(ax)
    longest_first = sorted(values.values(), key=len, reverse=True)
    groups = list(dict.fromkeys(group for series in longest_first for group in series))
    width = bar_width(len(values))
    for number, (label, series) in enumerate(values.items()):
        places = [beside(groups.index(group), number, len(values)) for group in series]
        bars = ax.bar(places, list(series.values()), width, label=label, color=PALETTE[number])
        ax.bar_label(bars, fmt=lambda v: f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}", fontsize="x-small")
    ax.margins(y=0.1)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(unit)
    if len(values) > 1:
        ax.legend(fontsize="small")
    return ax


def axes_or_new(ax: Axes | None) -> Axes:
    """The axes given, or new ones."""
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    # A figure of its own, outside pyplot: nothing is kept alive and nothing is shown by accident.
    axes: Axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    return axes


def stacked(
    ax: Axes,
    places: Sequence[Any],
    values: Mapping[str, Sequence[float]],
    colours: Mapping[str, str],
    *,
    across: bool = False,
) -> list[float]:
    """Bars upon one another, or `across` one after the other, a value of each name in each place; returns the sums."""
    sums = [0.0] * len(places)
    for name, sizes in values.items():
        if across:
            ax.barh(places, sizes, left=sums, label=name, color=colours[name])
        else:
            ax.bar(places, sizes, bottom=sums, label=name, color=colours[name])
        sums = [before + size for before, size in zip(sums, sizes, strict=True)]
    return sums


def beside(group: int, number: int, count: int) -> float:
    """The middle of one of several bars that make up a group."""
    return group + (number - (count - 1) / 2) * 0.8 / count


def bar_width(count: int) -> float:
    """The width of one of so many bars side by side."""
    return 0.72 / count


def name_rows(ax: Axes, names: Iterable[str]) -> None:
    """Names of rows, the first on top."""
    names = list(names)
    ax.set_yticks(range(len(names)), names)
    ax.invert_yaxis()


def logarithmic(ax: Axes) -> Axes:
    """A logarithmic scale upwards, with plain numbers."""
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    return ax


def unit_of(sizes: Iterable[float]) -> tuple[str, int]:
    """GiB or MiB, by the largest."""
    return ("GiB", 2**30) if max(sizes, default=0) >= 2**30 else ("MiB", 2**20)
