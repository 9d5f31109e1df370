"""Figures of every result. Each function takes Axes (or makes them) and returns them; nothing is shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from lora_mem.observe.plots.axes import plot_bars
from lora_mem.observe.plots.benches import plot_bytes_by_rank, plot_seconds_by_rank, plot_sync
from lora_mem.observe.plots.footprints import plot_holders, plot_phases, plot_rank_by_tp
from lora_mem.observe.plots.lives import plot_life_seconds, plot_lives
from lora_mem.observe.plots.profiles import plot_memory, plot_parts, plot_profile, plot_trace
from lora_mem.observe.profiles import Profile
from lora_mem.observe.results import Bench
from lora_mem.sizing.footprints import Footprint

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "draw",
    "plot_bars",
    "plot_bytes_by_rank",
    "plot_holders",
    "plot_life_seconds",
    "plot_lives",
    "plot_memory",
    "plot_parts",
    "plot_phases",
    "plot_profile",
    "plot_rank_by_tp",
    "plot_seconds_by_rank",
    "plot_sync",
    "plot_trace",
]


def draw(result: Footprint | Profile | Bench, ax: Axes | None = None) -> Axes:
    """Draw a result by its type, as its `plot` does; returns matplotlib's Axes.

    Raises:
        TypeError: there is no plot of this type.
    """
    plots: dict[type, Callable[..., Axes]] = {Footprint: plot_phases, Profile: plot_profile, Bench: plot_sync}
    if type(result) not in plots:
        names = ", ".join(kind.__name__ for kind in plots)
        raise TypeError(f"there is no plot of a {type(result).__name__}; there are plots of {names}")
    return plots[type(result)](result, ax)
