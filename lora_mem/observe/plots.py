"""Figures of every result. Each function takes Axes (or makes them) and returns them; nothing is shown.

Needs matplotlib and pandas, of the notebooks extra.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_mem.observe.results import Bench, Phase, Profile, Sync
from lora_mem.observe.traces import TracedPhase, read_device, read_trace
from lora_mem.sizing.footprints import Footprint
from lora_mem.sizing.planning import sweep
from lora_mem.sizing.units import GIB

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Paul Tol's bright scheme, which readers who are colour-blind can tell apart.
PALETTE = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
BLUE, RED, GREEN, YELLOW, CYAN, PURPLE, GREY = PALETTE

HOLDERS = {"slots": BLUE, "packed": RED, "registered": RED, "adapters": RED, "staged": YELLOW}
STRATEGIES = {"keep": RED, "offload": YELLOW, "stage": BLUE, "fill": GREEN}
PARTS = ("activate", "pack", "build", "offload", "stage", "load", "rebuild")  # one colour each in all figures
DEVICE = {"kernels": GREY, "to host": PURPLE, "to device": CYAN}
MEMORY = {
    "allocated": ("GPU allocated", RED),
    "device_used": ("GPU in use by anyone", GREY),
    "pinned": ("host pinned", BLUE),
    "host_resident": ("host resident", YELLOW),
}


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


def plot_holders(footprints: Mapping[str, Footprint], ax: Axes | None = None) -> Axes:
    """Stacked bars, one for each footprint: slots, packed and staged once a sync is over, in GiB; hatched on the host.

    Memory that packed and staged share is drawn once, as packed.
    """
    from matplotlib.patches import Patch

    results = footprints.values()
    sizes = {
        "slots": [result.slot_bytes for result in results],
        "packed": [result.registered_adapters * result.packed_bytes for result in results],
        "staged": [r.registered_adapters * (r.staged_bytes - r.shared_bytes) for r in results],
    }
    ax = _by_holder(sizes, footprints, ax)
    for holder, bars in zip(sizes, ax.containers, strict=True):
        for bar, result in zip(bars, results, strict=True):
            bar.set(edgecolor="white", hatch="///" if holder != "slots" and result.strategy != "keep" else "")
    handles = [Patch(color=HOLDERS[holder], label=holder) for holder in sizes]
    ax.legend(handles=[*handles, Patch(facecolor=GREY, hatch="///", edgecolor="white", label="on the host")])
    return ax


def plot_phases(footprint: Footprint, ax: Axes | None = None) -> Axes:
    """Stacked bars of what is on the GPU in each of `Footprint.phases`, in GiB."""
    phases = footprint.phases()
    sizes = {holder: [phase[holder] for phase in phases.values()] for holder in ("slots", "adapters")}
    ax = _by_holder(sizes, phases, ax)
    ax.set_title(f"{footprint.model} ({footprint.strategy})")
    return ax


def _by_holder(sizes: Mapping[str, Sequence[int]], places: Iterable[str], ax: Axes | None) -> Axes:
    ax = _stacked(sizes, places, HOLDERS, ax, scale=GIB)
    ax.margins(y=0.35)  # room for the legend
    ax.set_ylabel("GiB per worker")
    return ax


def plot_rank_by_tp(
    model: Any,
    *,
    ranks: Sequence[int] = (8, 16, 32, 64, 128, 256),
    tensor_parallel_sizes: Sequence[int] = (1, 2, 4, 8),
    ax: Axes | None = None,
    **options: Any,
) -> Axes:
    """Heat map of the slots over rank and tensor_parallel_size, in GiB; sizes that do not divide stay blank."""
    import numpy as np

    ax = _axes(ax)
    frame = sweep(model, rank=list(ranks), tensor_parallel_size=list(tensor_parallel_sizes), **options)
    grid = frame.pivot(index="rank", columns="tensor_parallel_size", values="slot_bytes") / GIB
    values = grid.reindex(index=list(ranks), columns=list(tensor_parallel_sizes)).to_numpy(dtype=float)
    ax.imshow(values, aspect="auto", cmap="viridis")
    bright = np.nanmin(values) + 0.6 * (np.nanmax(values) - np.nanmin(values))
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if value > bright else "white"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    ax.set_xticks(range(len(tensor_parallel_sizes)), list(map(str, tensor_parallel_sizes)))
    ax.set_yticks(range(len(ranks)), list(map(str, ranks)))
    ax.set(xlabel="tensor_parallel_size", ylabel="rank", title="slots, GiB per worker")
    return ax


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
    ax = _over_ranks(benches, ax)
    for strategy, syncs in _last_syncs(benches).items():
        colour = STRATEGIES[strategy]
        ax.plot(list(syncs), [s.seconds for s in syncs.values()], "o-", color=colour, label=f"{strategy}: sync")
        ax.plot(list(syncs), [s.rebuilding for s in syncs.values()], "o--", color=colour, label=f"{strategy}: rebuild")
    _logarithmic(ax).set_ylabel("seconds")
    ax.legend()
    return ax


def plot_bytes_by_rank(benches: Sequence[Bench], ax: Axes | None = None) -> Axes:
    """What a sync leaves over rank, in GiB, a line for each strategy: on the GPU, and pinned by us (dashed).

    Crosses are the calculator's: one packed adapter, and packed with staged.
    """
    ax = _over_ranks(benches, ax)
    for strategy, syncs in _last_syncs(benches).items():
        look: dict[str, Any] = {"marker": "o", "color": STRATEGIES[strategy]}
        # Wide under narrow: two generations on the host are as large as packed and staged on the GPU.
        retained = [sync.retained / GIB for sync in syncs.values()]
        ax.plot(list(syncs), retained, "-", linewidth=5, alpha=0.6, label=f"{strategy}: on the GPU", zorder=2, **look)
        pinned = [sync.pinned / GIB for sync in syncs.values()]
        # Else it is the small adapter that evicts the large one, which is pinned under each strategy.
        if max(pinned) >= max(bench.packed_bytes for bench in benches) / GIB / 100:
            ax.plot(list(syncs), pinned, "--", label=f"{strategy}: pinned", zorder=3, **look)
    known = {bench.rank: bench.predicted for bench in benches if bench.predicted}
    packed = [sizes["packed_bytes"] / GIB for sizes in known.values()]
    staged = [(sizes["staged_bytes"] - sizes["shared_bytes"]) / GIB for sizes in known.values()]
    both = [sum(sizes) for sizes in zip(packed, staged, strict=True)]
    for name, values, marker in (("packed", packed, "x"), ("packed and staged", both, "+")):
        ax.plot(list(known), values, marker, color="black", markersize=10, zorder=4, label=f"calculated: {name}")
    ax.set_ylabel("GiB in one worker")
    ax.legend()
    return ax


def _last_syncs(benches: Sequence[Bench]) -> dict[str, dict[int, Sync]]:
    """For each strategy the last sync of each rank that a bench ran, by rank."""
    found: dict[str, dict[int, Sync]] = defaultdict(dict)
    for bench in sorted(benches, key=lambda bench: bench.rank):
        for sync in bench.syncs:
            found[sync.strategy][bench.rank] = sync
    return found


def _over_ranks(benches: Sequence[Bench], ax: Axes | None) -> Axes:
    ax, ranks = _axes(ax), [bench.rank for bench in benches]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, list(map(str, ranks)))
    ax.set_xlabel("rank")
    ax.set_title(f"{benches[0].model}, {benches[0].layers} layers, {benches[0].device}", fontsize="medium")
    return ax


def plot_profile(profile: Profile, ax: Axes | None = None) -> Axes:
    """Bars of phases over time, in milliseconds: a row for each name and depth (dots), summed up at its end."""
    ax = _axes(ax)
    colours = _phase_colours(phase.name for phase in profile.phases)
    rows: dict[tuple[int, str], list[Phase]] = defaultdict(list)
    for phase in profile.phases:
        rows[phase.depth, phase.name].append(phase)
    for row, ((_, name), same) in enumerate(rows.items()):
        ax.barh(row, [p.seconds * 1e3 for p in same], left=[p.start * 1e3 for p in same], color=colours[name])
        text = f" {_milliseconds(same):.1f} ms" + (f" in {len(same)}" if len(same) > 1 else "")
        ax.annotate(text, (max(map(_end, same)) * 1e3, row), va="center", fontsize="small")
    _name_rows(ax, ["· " * depth + name for depth, name in rows])
    # Room for the text.
    ax.set(xlim=(0, _end(profile.total) * 1.2e3), xlabel="milliseconds since the profile began")
    return ax


def plot_memory(profile: Profile, ax: Axes | None = None) -> Axes:
    """GPU and host memory over time, above what the profile began with, in GiB or MiB; top-level phases shaded.

    By the samples, where there are any; else by the borders of the phases.
    """
    ax = _axes(ax)
    series = [(sample.seconds, sample.memory) for sample in profile.samples]
    if not series:
        phases = (profile.total, *profile.phases)
        borders = [(phase.start, phase.before) for phase in phases] + [(_end(phase), phase.after) for phase in phases]
        series = sorted(borders, key=lambda point: point[0])
    baseline = profile.total.before
    known = [figure for figure in MEMORY if getattr(baseline, figure) is not None]
    changes = {name: [getattr(memory, name) - getattr(baseline, name) for _, memory in series] for name in known}
    unit, scale = _unit(abs(value) for values in changes.values() for value in values)
    for name, values in changes.items():
        label, colour = MEMORY[name]
        ax.plot([at * 1e3 for at, _ in series], [value / scale for value in values], label=label, color=colour)
    for number, phase in enumerate(phase for phase in profile.phases if phase.depth == 0):
        begin, end = phase.start * 1e3, _end(phase) * 1e3
        ax.axvspan(begin, end, color="black", alpha=0.04 + 0.06 * (number % 2), linewidth=0)
        at = ((begin + end) / 2, 1.01)
        ax.annotate(phase.name, at, xycoords=("data", "axes fraction"), ha="center", fontsize="small")
    ax.set(xlabel="milliseconds since the profile began", ylabel=f"{unit} above the beginning")
    ax.legend(fontsize="small")
    return ax


def plot_parts(phases: Mapping[str, Iterable[Phase]], ax: Axes | None = None) -> Axes:
    """One bar for each label, of phases that follow one another; milliseconds."""
    rows = [list(parts) for parts in phases.values()]
    names = _names([phase.name for phase in parts] for parts in rows)
    values = {name: [_milliseconds(one for one in parts if one.name == name) for parts in rows] for name in names}
    ax = _stacked(values, phases, _phase_colours(names), ax, across=True)
    totals = [sum(row) for row in zip(*values.values(), strict=True)]
    for row, total in enumerate(totals):
        ax.annotate(f" {total:.1f} ms", (total, row), va="center", fontsize="small")
    ax.set(xlim=(0, max(totals) * 1.15), xlabel="milliseconds")
    ax.invert_yaxis()
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(names))
    return ax


def plot_trace(path: str | Path, ax: Axes | None = None, *, within: str = "total") -> Axes:
    """A trace that `profile` wrote over time, in milliseconds: a row for each phase's name, below it the device's work.

    Only the time of the phase called `within` is shown.

    Raises:
        ValueError: the trace has no such phase.
    """
    ax = _axes(ax)
    phases = read_trace(path)
    shown = next((phase for phase in phases if phase.name == within), None)
    if shown is None:
        names = ", ".join(dict.fromkeys(phase.name for phase in phases)) or "none"
        raise ValueError(f"within is {within!r}; the trace's phases are {names}")
    begin, end = shown.start, _end(shown)
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for phase in phases:
        if phase is not shown and begin <= phase.start and _end(phase) <= end:
            rows[phase.name].append((phase.start, _end(phase)))
    colours = {name: PALETTE[number % 3] for number, name in enumerate(rows)}
    for kind, spans in read_device(path).items():
        if found := [(max(first, begin), min(last, end)) for first, last in spans if first < end and last > begin]:
            rows[f"device: {kind}"], colours[f"device: {kind}"] = found, DEVICE[kind]
    for row, (name, times) in enumerate(rows.items()):
        bars = [((first - begin) * 1e3, (last - first) * 1e3) for first, last in times]
        ax.broken_barh(bars, (row - 0.4, 0.8), color=colours[name])
    _name_rows(ax, rows)
    since = "the trace" if within == "total" else repr(within)
    ax.set(xlim=(0, shown.seconds * 1e3), xlabel=f"milliseconds since {since} began")
    return ax


def _end(phase: Phase | TracedPhase) -> float:
    return phase.start + phase.seconds


def _milliseconds(phases: Iterable[Phase]) -> float:
    return sum(phase.seconds for phase in phases) * 1e3


def _phase_colours(names: Iterable[str]) -> dict[str, str]:
    """The parts of a load have their own colours; other phases follow."""
    return {name: PALETTE[number % len(PALETTE)] for number, name in enumerate(dict.fromkeys([*PARTS, *names]))}


def plot_lives(lives: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Where an adapter is, moment by moment and strategy by strategy: on the GPU upwards, on the host downwards.

    `lives` are `Life.to_dict()` of each strategy. Slots are left out, which are the same in all.
    """
    import numpy as np

    ax, held = _axes(ax), ("registered", "staged")
    moments = [_after_baseline(life) for life in lives]
    names = _names([moment["name"] for moment in life] for life in moments)
    unit, scale = _unit(sum(sum(one["holders"][name].values()) for name in held) for life in moments for one in life)
    for number, life in enumerate(moments):
        places = [_beside(names.index(moment["name"]), number, len(lives)) for moment in life]
        up = down = np.zeros(len(life))
        for holder in held:
            look: dict[str, Any] = {"width": 0.72 / len(lives), "color": HOLDERS[holder]}
            host = np.array([one["holders"][holder].get("cpu", 0) / scale for one in life])
            gpu = np.array([sum(one["holders"][holder].values()) / scale for one in life]) - host
            # One legend for all lives.
            ax.bar(places, gpu, bottom=up, label="" if number else f"{holder}, on the GPU", **look)
            ax.bar(places, -host, bottom=-down, label="" if number else f"{holder}, on the host", alpha=0.45, **look)
            up, down = up + gpu, down + host
        for at in zip(places, up, strict=True):
            ax.annotate(lives[number]["strategy"], at, ha="center", va="bottom", rotation=90, fontsize="x-small")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(names)), names)
    ax.use_sticky_edges = False  # else the axis ends where the bars begin, and the names lie outside
    ax.margins(y=0.2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    ax.set_ylabel(f"{unit}: on the host below, on the GPU above")
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    return ax


def plot_life_seconds(lives: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """How long each moment of an adapter's life is in coming, of the lives that `plot_lives` takes; milliseconds."""
    values = {life["strategy"]: {m["name"]: m["milliseconds"] for m in _after_baseline(life)} for life in lives}
    return _logarithmic(plot_bars(values, "milliseconds", ax))


def _after_baseline(life: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What follows the first moment, the baseline; older reports call moments phases."""
    return list(life.get("moments", life.get("phases"))[1:])


def plot_bars(values: Mapping[str, Mapping[str, float]], unit: str, ax: Axes | None = None) -> Axes:
    """Grouped bars of values by series, then by group, with the figure above each."""
    ax, width = _axes(ax), 0.72 / len(values)
    groups = _names(values.values())
    for number, (label, series) in enumerate(values.items()):
        places = [_beside(groups.index(group), number, len(values)) for group in series]
        bars = ax.bar(places, list(series.values()), width, label=label, color=PALETTE[number])
        ax.bar_label(bars, fmt=lambda v: f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}", fontsize="x-small")
    ax.margins(y=0.1)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(unit)
    if len(values) > 1:
        ax.legend(fontsize="small")
    return ax


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    # A figure of its own, outside pyplot: nothing is kept alive and nothing is shown by accident.
    axes: Axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    return axes


def _stacked(
    values: Mapping[str, Sequence[float]],
    places: Iterable[str],
    colours: Mapping[str, str],
    ax: Axes | None,
    *,
    across: bool = False,
    scale: int = 1,
) -> Axes:
    """Bars upon one another, or `across` one after the other: a value of each name in each place."""
    import pandas as pd

    frame = pd.DataFrame(values, index=list(places)) / scale
    kind = "barh" if across else "bar"
    axes: Axes = frame.plot(kind=kind, stacked=True, ax=_axes(ax), color=dict(colours), width=0.8, rot=0)
    return axes


def _names(lists: Iterable[Iterable[str]]) -> list[str]:
    """Every name once, in the order of the longest list."""
    return list(dict.fromkeys(name for names in sorted(map(list, lists), key=len, reverse=True) for name in names))


def _beside(group: int, number: int, count: int) -> float:
    """The middle of one of several bars that make up a group."""
    return group + (number - (count - 1) / 2) * 0.8 / count


def _name_rows(ax: Axes, names: Iterable[str]) -> None:
    ax.set_yticks(range(len(names := list(names))), names)
    ax.invert_yaxis()


def _logarithmic(ax: Axes) -> Axes:
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    return ax


def _unit(sizes: Iterable[float]) -> tuple[str, int]:
    """GiB or MiB, by the largest."""
    return ("GiB", 2**30) if max(sizes, default=0) >= 2**30 else ("MiB", 2**20)
