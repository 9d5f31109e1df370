"""Figures of footprints and plans. Each function takes Axes (or makes them) and returns them; nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_mem.footprints import GIB, Footprint
from lora_mem.planning import sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"slots": "#4477aa", "packed": "#ee6677", "staged": "#ccbb44", "adapters": "#ee6677"}


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    # A figure of its own, outside pyplot: nothing is kept alive and nothing is shown by accident.
    axes: Axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    return axes


def plot_holders(footprints: Mapping[str, Footprint] | Sequence[Footprint], ax: Axes | None = None) -> Axes:
    """Stacked bars, one for each footprint, in GiB: slots, and one adapter's packed and staged tensors.

    Wherever they are, on the GPU or the host; memory that packed and staged share counts as packed.
    """
    ax = _axes(ax)
    named = footprints if isinstance(footprints, Mapping) else {f"{f.model} {f.strategy}": f for f in footprints}
    bottom = [0.0] * len(named)
    sizes: dict[str, Callable[[Footprint], int]] = {
        "slots": lambda result: result.slot_bytes,
        "packed": lambda result: result.packed_bytes,
        "staged": lambda result: result.staged_bytes - result.shared_bytes,
    }
    for holder, size in sizes.items():
        heights = [size(result) / GIB for result in named.values()]
        ax.bar(list(named), heights, bottom=bottom, label=holder, color=COLOURS[holder])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    ax.set_ylabel("GiB per worker")
    ax.legend()
    return ax


def plot_phases(footprint: Footprint, ax: Axes | None = None, *, sleep_mode: bool = True) -> Axes:
    """Stacked bars of the GPU by phase (rest, sync, generation, training), in GiB."""
    ax = _axes(ax)
    phases = footprint.phases(sleep_mode=sleep_mode)
    bottom = [0.0] * len(phases)
    for holder in ("slots", "adapters"):
        heights = [phase[holder] / GIB for phase in phases.values()]
        ax.bar(list(phases), heights, bottom=bottom, label=holder, color=COLOURS[holder])
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    ax.set_ylabel("GiB per worker")
    ax.set_title(f"{footprint.model} ({footprint.strategy})")
    ax.legend()
    return ax


def plot_rank_by_tp(
    model: Any,
    *,
    ranks: Sequence[int] = (8, 16, 32, 64, 128, 256),
    tensor_parallel_sizes: Sequence[int] = (1, 2, 4, 8),
    figure: str = "slot_bytes",
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Heat map of one figure over rank and tensor_parallel_size, in GiB; sizes that do not divide stay blank."""
    import numpy as np

    ax = _axes(ax)
    frame = sweep(model, rank=list(ranks), tensor_parallel_size=list(tensor_parallel_sizes), **options)
    grid = frame.pivot(index="rank", columns="tensor_parallel_size", values=figure) / GIB
    grid = grid.reindex(index=list(ranks), columns=list(tensor_parallel_sizes))
    values = grid.to_numpy(dtype=float)
    ax.imshow(values, aspect="auto", cmap="viridis")
    ax.set_xticks(range(len(grid.columns)), [str(value) for value in grid.columns])
    ax.set_yticks(range(len(grid.index)), [str(value) for value in grid.index])
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color="white")
    ax.set_xlabel("tensor_parallel_size")
    ax.set_ylabel("rank")
    ax.set_title(f"{figure}, GiB per worker")
    return ax
