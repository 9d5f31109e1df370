"""Figures of profiles and traces: phases and memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from lora_mem.observe.plots.axes import (
    BLUE,
    CYAN,
    GREY,
    PALETTE,
    PURPLE,
    RED,
    YELLOW,
    axes_or_new,
    name_rows,
    stacked,
    unit_of,
)
from lora_mem.observe.profiles import Memory, Phase, Profile
from lora_mem.observe.traces import TracedPhase, read_device, read_trace

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

PARTS = ("activate", "pack", "build", "offload", "stage", "load", "rebuild")  # one colour each in all figures
DEVICE = {"kernels": GREY, "to host": PURPLE, "to device": CYAN}
MEMORY = {
    "allocated": ("GPU allocated", RED),
    "device_used": ("GPU in use by anyone", GREY),
    "pinned": ("host pinned", BLUE),
    "host_resident": ("host resident", YELLOW),
}


def plot_profile(profile: Profile, ax: Axes | None = None) -> Axes:
    """Bars of phases over time, in milliseconds: a row for each name and depth (dots), summed up at its end."""
    ax = axes_or_new(ax)
    colours = _phase_colours(phase.name for phase in profile.phases)
    rows: dict[tuple[int, str], list[Phase]] = {}
    for phase in profile.phases:
        rows.setdefault((phase.depth, phase.name), []).append(phase)
    for row, ((_, name), same) in enumerate(rows.items()):
        for phase in same:
            ax.barh(row, phase.seconds * 1e3, left=phase.start * 1e3, color=colours[name])
        text = f" {_milliseconds(same):.1f} ms" + (f" in {len(same)}" if len(same) > 1 else "")
        ax.annotate(text, (max(_end(phase) for phase in same) * 1e3, row), va="center", fontsize="small")
    name_rows(ax, ["· " * depth + name for depth, name in rows])
    ax.set_xlim(0, _end(profile.total) * 1.2e3)  # room for the text
    ax.set_xlabel("milliseconds since the profile began")
    return ax


def plot_memory(profile: Profile, ax: Axes | None = None) -> Axes:
    """GPU and host memory over time, above what the profile began with, in GiB or MiB; top-level phases shaded.

    By the samples, where there are any; else by the borders of the phases.
    """
    ax = axes_or_new(ax)
    series: list[tuple[float, Memory]] = [(sample.seconds, sample.memory) for sample in profile.samples]
    if not series:
        for phase in (profile.total, *profile.phases):
            series += [(phase.start, phase.before), (_end(phase), phase.after)]
        series.sort(key=lambda point: point[0])
    baseline = profile.total.before
    known = [figure for figure in MEMORY if getattr(baseline, figure) is not None]
    changes = {name: [getattr(memory, name) - getattr(baseline, name) for _, memory in series] for name in known}
    unit, scale = unit_of(abs(value) for values in changes.values() for value in values)
    milliseconds = [seconds * 1e3 for seconds, _ in series]
    for name, values in changes.items():
        label, colour = MEMORY[name]
        ax.plot(milliseconds, [value / scale for value in values], label=label, color=colour)
    for number, phase in enumerate(phase for phase in profile.phases if phase.depth == 0):
        begin, end = phase.start * 1e3, _end(phase) * 1e3
        ax.axvspan(begin, end, color="black", alpha=0.04 + 0.06 * (number % 2), linewidth=0)
        at = ((begin + end) / 2, 1.01)
        ax.annotate(phase.name, at, xycoords=("data", "axes fraction"), ha="center", fontsize="small")
    ax.set_xlabel("milliseconds since the profile began")
    ax.set_ylabel(f"{unit} above the beginning")
    ax.legend(fontsize="small")
    return ax


def plot_parts(phases: Mapping[str, Iterable[Phase]], ax: Axes | None = None) -> Axes:
    """One bar for each label, of phases that follow one another; milliseconds."""
    ax = axes_or_new(ax)
    rows = {label: list(parts) for label, parts in phases.items()}
    longest_first = sorted(rows.values(), key=len, reverse=True)
    names = list(dict.fromkeys(phase.name for parts in longest_first for phase in parts))
    values = {
        name: [_milliseconds(phase for phase in parts if phase.name == name) for parts in rows.values()]
        for name in names
    }
    totals = stacked(ax, list(rows), values, _phase_colours(names), across=True)
    for row, total in enumerate(totals):
        ax.annotate(f" {total:.1f} ms", (total, row), va="center", fontsize="small")
    ax.set_xlim(0, max(totals) * 1.15)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds")
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(names))
    return ax


def plot_trace(path: str | Path, ax: Axes | None = None, *, within: str = "total") -> Axes:
    """A trace over time, in milliseconds: a row for the phases of each name, and below what the device did meanwhile.

    Args:
        path: of a trace that `profile` wrote.
        ax: where to draw.
        within: the phase whose time is shown.

    Raises:
        ValueError: the trace has no such phase.
    """
    ax = axes_or_new(ax)
    phases, device = read_trace(path), read_device(path)
    shown = next((phase for phase in phases if phase.name == within), None)
    if shown is None:
        names = ", ".join(dict.fromkeys(phase.name for phase in phases)) or "none"
        raise ValueError(f"within is {within!r}; the trace's phases are {names}")
    begin, end = shown.start, _end(shown)
    rows: dict[str, list[tuple[float, float]]] = {}
    for phase in phases:
        if phase is not shown and begin <= phase.start and _end(phase) <= end:
            rows.setdefault(phase.name, []).append((phase.start, _end(phase)))
    colours = {name: PALETTE[number % 3] for number, name in enumerate(rows)}
    for kind, colour in DEVICE.items():
        found = [(max(first, begin), min(last, end)) for first, last in device[kind] if first < end and last > begin]
        if found:
            rows[f"device: {kind}"] = found
            colours[f"device: {kind}"] = colour
    for row, (name, spans) in enumerate(rows.items()):
        bars = [((first - begin) * 1e3, (last - first) * 1e3) for first, last in spans]
        ax.broken_barh(bars, (row - 0.4, 0.8), color=colours[name])
    name_rows(ax, rows)
    ax.set_xlim(0, shown.seconds * 1e3)
    ax.set_xlabel(f"milliseconds since {'the trace' if within == 'total' else repr(within)} began")
    return ax


def _end(phase: Phase | TracedPhase) -> float:
    return phase.start + phase.seconds


def _milliseconds(phases: Iterable[Phase]) -> float:
    return sum(phase.seconds for phase in phases) * 1e3


def _phase_colours(names: Iterable[str]) -> dict[str, str]:
    """The parts of a load have their own colours; other phases follow."""
    return {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(dict.fromkeys([*PARTS, *names]))}
