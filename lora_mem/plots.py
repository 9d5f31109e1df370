"""Figures of footprints and plans. Each function takes Axes (or makes them) and returns them; nothing is shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_mem.footprints import GIB, Footprint
from lora_mem.planning import sweep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from lora_mem.profiling import Memory, Profile

PHASE_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")

COLOURS = {"slots": "#4477aa", "packed": "#ee6677", "staged": "#ccbb44", "adapters": "#ee6677"}


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    # A figure of its own, outside pyplot: nothing is kept alive and nothing is shown by accident.
    axes: Axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    return axes


def plot_holders(footprints: Mapping[str, Footprint] | Sequence[Footprint], ax: Axes | None = None) -> Axes:
    """Stacked bars, one for each footprint: slots, packed and staged on the GPU at the peak of a sync, in GiB."""
    ax = _axes(ax)
    named = footprints if isinstance(footprints, Mapping) else {f"{f.model} {f.strategy}": f for f in footprints}
    bottom = [0.0] * len(named)
    for holder in ("slots", "packed", "staged"):
        field = "slot_bytes" if holder == "slots" else f"{holder}_bytes"
        heights = [getattr(result, field) / GIB for result in named.values()]
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


def plot_profile(profile: Profile, ax: Axes | None = None) -> Axes:
    """Bars of a profile's phases over time, one row for each name and depth; milliseconds, summed up at the end."""
    ax = _axes(ax)
    names = list(dict.fromkeys(phase.name for phase in profile.phases))
    rows = list(dict.fromkeys((phase.depth, phase.name) for phase in profile.phases))
    for phase in profile.phases:
        row = rows.index((phase.depth, phase.name))
        colour = PHASE_COLOURS[names.index(phase.name) % len(PHASE_COLOURS)]
        ax.barh(row, phase.seconds * 1e3, left=phase.start * 1e3, color=colour)
    for row, key in enumerate(rows):
        same = [phase for phase in profile.phases if (phase.depth, phase.name) == key]
        text = f" {sum(phase.seconds for phase in same) * 1e3:.1f} ms" + (f" in {len(same)}" if len(same) > 1 else "")
        end = max(phase.start + phase.seconds for phase in same) * 1e3
        ax.annotate(text, (end, row), va="center", fontsize="small")
    ax.set_yticks(range(len(rows)), ["  " * depth + name for depth, name in rows])
    ax.invert_yaxis()
    ax.set_xlim(0, (profile.total.start + profile.total.seconds) * 1.2e3)  # room for the text
    ax.set_xlabel("milliseconds since the profile began")
    return ax


def plot_memory(profile: Profile, ax: Axes | None = None) -> Axes:
    """GPU and host memory over time, above what the profile began with, in GiB or MiB; top-level phases shaded.

    By the samples, where there are any; else by the borders of the phases, with GPU peaks drawn where a phase ends.
    """
    ax = _axes(ax)
    series: list[tuple[float, Memory]] = [(sample.seconds, sample.memory) for sample in profile.samples]
    if not series:
        for phase in (profile.total, *profile.phases):
            series += [(phase.start, phase.before), (phase.start + phase.seconds, phase.after)]
        series.sort(key=lambda point: point[0])
    lines = {
        "allocated": ("GPU allocated", "#ee6677"),
        "device_used": ("GPU in use by anyone", "#bbbbbb"),
        "pinned": ("host page-locked", "#4477aa"),
        "host_resident": ("host resident", "#ccbb44"),
    }
    rest = profile.total.before
    changes = {
        name: [(second, getattr(memory, name) - getattr(rest, name)) for second, memory in series]
        for name in lines
        if getattr(rest, name) is not None
    }
    most = max((abs(value) for points in changes.values() for _, value in points), default=0)
    unit, scale = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    for name, points in changes.items():
        label, colour = lines[name]
        ax.plot([s * 1e3 for s, _ in points], [value / scale for _, value in points], label=label, color=colour)
    for number, phase in enumerate(phase for phase in profile.phases if phase.depth == 0):
        begin, end = phase.start * 1e3, (phase.start + phase.seconds) * 1e3
        ax.axvspan(begin, end, color="#000000", alpha=0.04 + 0.06 * (number % 2), linewidth=0)
        ax.annotate(
            phase.name, ((begin + end) / 2, 1.01), xycoords=("data", "axes fraction"), ha="center", fontsize="small"
        )
    ax.set_xlabel("milliseconds since the profile began")
    ax.set_ylabel(f"{unit} above the beginning")
    ax.legend(fontsize="small")
    return ax
