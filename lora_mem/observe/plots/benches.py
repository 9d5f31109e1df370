"""Figures of the strategies side by side, by what a bench measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lora_mem.observe.plots.axes import STRATEGIES, axes_or_new, logarithmic, plot_bars
from lora_mem.observe.results import Bench, Sync
from lora_mem.sizing.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_sync(bench: Bench, ax: Axes | None = None) -> Axes:
    """Bars of one rank by strategy, in seconds: first and last sync, transport included, and the rebuild."""
    last = {sync.strategy: sync.seconds for sync in bench.syncs}
    first = {**last, **{sync.strategy: sync.seconds for sync in reversed(bench.syncs)}}
    rebuild = {sync.strategy: sync.rebuilding for sync in bench.syncs}
    ax = plot_bars({"first sync": first, "sync": last, "rebuild": rebuild}, "seconds", ax)
    ax.set_title(f"{bench.model}, {bench.layers} layers, rank {bench.rank}", fontsize="medium")
    return ax


def plot_seconds_by_rank(benches: Sequence[Bench], ax: Axes | None = None) -> Axes:
    """Seconds over rank, a line for each strategy: the last sync, transport included, and the rebuild (dashed)."""
    ax = axes_or_new(ax)
    for strategy, syncs in _last_syncs(benches).items():
        colour = STRATEGIES[strategy]
        ax.plot(list(syncs), [s.seconds for s in syncs.values()], "o-", color=colour, label=f"{strategy}: sync")
        ax.plot(list(syncs), [s.rebuilding for s in syncs.values()], "o--", color=colour, label=f"{strategy}: rebuild")
    _rank_axis(ax, benches)
    logarithmic(ax)
    ax.set_ylabel("seconds")
    ax.legend()
    return ax


def plot_bytes_by_rank(benches: Sequence[Bench], ax: Axes | None = None) -> Axes:
    """What a sync leaves over rank, in GiB, a line for each strategy: on the GPU, and pinned by us (dashed).

    Crosses are the calculator's: one packed adapter, and packed with staged.
    """
    ax = axes_or_new(ax)
    largest = max(bench.packed_bytes for bench in benches)
    for strategy, syncs in _last_syncs(benches).items():
        look: dict[str, Any] = {"marker": "o", "color": STRATEGIES[strategy]}
        # Wide under narrow: two generations on the host are as large as packed and staged on the GPU.
        retained = [sync.retained / GIB for sync in syncs.values()]
        ax.plot(list(syncs), retained, "-", linewidth=5, alpha=0.6, label=f"{strategy}: on the GPU", zorder=2, **look)
        pinned = [sync.pinned for sync in syncs.values()]
        if max(pinned) >= largest / 100:  # else the small adapter that evicts the large one, pinned under each strategy
            ax.plot(list(syncs), [p / GIB for p in pinned], "--", label=f"{strategy}: pinned", zorder=3, **look)
    known = {bench.rank: bench.predicted for bench in benches if bench.predicted}
    packed = [sizes["packed_bytes"] / GIB for sizes in known.values()]
    staged = [(sizes["staged_bytes"] - sizes["shared_bytes"]) / GIB for sizes in known.values()]
    both = [sum(sizes) for sizes in zip(packed, staged, strict=True)]
    for name, values, marker in (("packed", packed, "x"), ("packed and staged", both, "+")):
        ax.plot(list(known), values, marker, color="black", markersize=10, zorder=4, label=f"calculated: {name}")
    _rank_axis(ax, benches)
    ax.set_ylabel("GiB in one worker")
    ax.legend()
    return ax


def _last_syncs(benches: Sequence[Bench]) -> dict[str, dict[int, Sync]]:
    """For each strategy the last sync of each rank that a bench ran, by rank."""
    found: dict[str, dict[int, Sync]] = {}
    for bench in sorted(benches, key=lambda bench: bench.rank):
        for sync in bench.syncs:
            found.setdefault(sync.strategy, {})[bench.rank] = sync
    return found


def _rank_axis(ax: Axes, benches: Sequence[Bench]) -> None:
    ranks = [bench.rank for bench in benches]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [str(rank) for rank in ranks])
    ax.set_xlabel("rank")
    ax.set_title(f"{benches[0].model}, {benches[0].layers} layers, {benches[0].device}", fontsize="medium")
