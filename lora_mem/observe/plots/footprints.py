"""Figures of what the calculator predicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_mem.observe.plots.axes import GREY, HOLDERS, axes_or_new, stacked
from lora_mem.sizing.footprints import Footprint
from lora_mem.sizing.planning import sweep
from lora_mem.sizing.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_holders(footprints: Mapping[str, Footprint] | Sequence[Footprint], ax: Axes | None = None) -> Axes:
    """Stacked bars, one for each footprint: slots, packed and staged once a sync is over, in GiB; hatched on the host.

    Memory that packed and staged share is drawn once, as packed.
    """
    from matplotlib.patches import Patch

    ax = axes_or_new(ax)
    named = footprints if isinstance(footprints, Mapping) else {f"{f.model} {f.strategy}": f for f in footprints}
    sizes: dict[str, list[float]] = {"slots": [], "packed": [], "staged": []}
    for result in named.values():
        sizes["slots"].append(result.slot_bytes / GIB)
        sizes["packed"].append(result.registered_adapters * result.packed_bytes / GIB)
        sizes["staged"].append(result.registered_adapters * (result.staged_bytes - result.shared_bytes) / GIB)
    stacked(ax, range(len(named)), sizes, HOLDERS)
    for holder, bars in zip(sizes, ax.containers, strict=True):
        for bar, result in zip(bars, named.values(), strict=True):
            bar.set_edgecolor("white")
            if holder != "slots" and result.strategy != "keep":
                bar.set_hatch("///")
    ax.set_xticks(range(len(named)), list(named))
    if max(map(len, named), default=0) > 16:
        ax.tick_params("x", rotation=25)
        for label in ax.get_xticklabels():
            label.set_horizontalalignment("right")
    ax.set_ylabel("GiB per worker")
    ax.margins(y=0.35)  # room for the legend
    handles = [Patch(color=HOLDERS[holder], label=holder) for holder in sizes]
    ax.legend(handles=[*handles, Patch(facecolor=GREY, hatch="///", edgecolor="white", label="on the host")])
    return ax


def plot_phases(footprint: Footprint, ax: Axes | None = None, *, sleep_mode: bool = True) -> Axes:
    """Stacked bars of what is on the GPU in each of `Footprint.phases`, in GiB."""
    ax = axes_or_new(ax)
    phases = footprint.phases(sleep_mode=sleep_mode)
    sizes = {holder: [phase[holder] / GIB for phase in phases.values()] for holder in ("slots", "adapters")}
    stacked(ax, list(phases), sizes, HOLDERS)
    ax.set_ylabel("GiB per worker")
    ax.margins(y=0.35)  # room for the legend
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

    ax = axes_or_new(ax)
    frame = sweep(model, rank=list(ranks), tensor_parallel_size=list(tensor_parallel_sizes), **options)
    grid = frame.pivot(index="rank", columns="tensor_parallel_size", values=figure) / GIB
    values = grid.reindex(index=list(ranks), columns=list(tensor_parallel_sizes)).to_numpy(dtype=float)
    ax.imshow(values, aspect="auto", cmap="viridis")
    bright = np.nanmin(values) + 0.6 * (np.nanmax(values) - np.nanmin(values))
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if value > bright else "white"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    ax.set_xticks(range(len(tensor_parallel_sizes)), [str(value) for value in tensor_parallel_sizes])
    ax.set_yticks(range(len(ranks)), [str(value) for value in ranks])
    ax.set_xlabel("tensor_parallel_size")
    ax.set_ylabel("rank")
    ax.set_title(f"{figure}, GiB per worker")
    return ax
