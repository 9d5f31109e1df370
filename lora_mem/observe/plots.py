"""Figures of footprints and plans. Each function takes Axes (or makes them) and returns them; nothing is shown."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_mem.sizing.footprints import Footprint
from lora_mem.sizing.planning import sweep
from lora_mem.sizing.units import GIB

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from lora_mem.observe.profiles import Memory, Phase, Profile
    from lora_mem.observe.results import Bench, Sync

PHASE_COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
PARTS = ("activate", "pack", "build", "offload", "stage", "load", "rebuild")  # one colour each in all figures

STRATEGY_COLOURS = {"keep": "#ee6677", "offload": "#ccbb44", "stage": "#4477aa", "fill": "#228833"}
COLOURS = {"slots": "#4477aa", "packed": "#ee6677", "registered": "#ee6677", "staged": "#ccbb44", "adapters": "#ee6677"}


def _axes(ax: Axes | None) -> Axes:
    if ax is not None:
        return ax
    from matplotlib.figure import Figure

    # A figure of its own, outside pyplot: nothing is kept alive and nothing is shown by accident.
    axes: Axes = Figure(figsize=(7, 4), layout="constrained").add_subplot()
    return axes


def draw(result: Any, ax: Axes | None = None) -> Axes:
    """Draw a result by its type, as its `plot` does; returns matplotlib's Axes.

    Raises:
        TypeError: nothing is known to draw of this type.
    """
    plots: dict[str, Callable[[Any, Axes | None], Axes]] = {"Footprint": plot_phases, "Profile": plot_profile}
    kind = type(result).__name__
    if kind not in plots:
        raise TypeError(f"there is no plot of a {kind}; there are plots of {', '.join(plots)}")
    return plots[kind](result, ax)


def plot_holders(footprints: Mapping[str, Footprint] | Sequence[Footprint], ax: Axes | None = None) -> Axes:
    """Stacked bars, one for each footprint: slots, packed and staged once a sync is over, in GiB; hatched on the host.

    Memory that packed and staged share is drawn once, as packed.
    """
    from matplotlib.patches import Patch

    ax = _axes(ax)
    named = footprints if isinstance(footprints, Mapping) else {f"{f.model} {f.strategy}": f for f in footprints}
    for place, result in enumerate(named.values()):
        bottom = 0.0
        adapters = result.registered_adapters
        sizes = {
            "slots": result.slot_bytes,
            "packed": adapters * result.packed_bytes,
            "staged": adapters * (result.staged_bytes - result.shared_bytes),
        }
        for holder, size in sizes.items():
            hatch = "" if holder == "slots" or result.strategy == "keep" else "///"
            ax.bar(place, size / GIB, bottom=bottom, color=COLOURS[holder], hatch=hatch, edgecolor="white")
            bottom += size / GIB
    ax.set_xticks(range(len(named)), list(named))
    if max(map(len, named), default=0) > 16:
        ax.tick_params("x", rotation=25)
        for label in ax.get_xticklabels():
            label.set_horizontalalignment("right")
    ax.set_ylabel("GiB per worker")
    ax.margins(y=0.35)  # room for the legend
    handles = [Patch(color=COLOURS[holder], label=holder) for holder in ("slots", "packed", "staged")]
    ax.legend(handles=[*handles, Patch(facecolor="#bbbbbb", hatch="///", edgecolor="white", label="on the host")])
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

    ax = _axes(ax)
    frame = sweep(model, rank=list(ranks), tensor_parallel_size=list(tensor_parallel_sizes), **options)
    grid = frame.pivot(index="rank", columns="tensor_parallel_size", values=figure) / GIB
    grid = grid.reindex(index=list(ranks), columns=list(tensor_parallel_sizes))
    values = grid.to_numpy(dtype=float)
    ax.imshow(values, aspect="auto", cmap="viridis")
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    ax.set_xticks(range(len(grid.columns)), [str(value) for value in grid.columns])
    ax.set_yticks(range(len(grid.index)), [str(value) for value in grid.index])
    for (row, column), value in np.ndenumerate(values):
        if not np.isnan(value):
            colour = "black" if value - low > 0.6 * (high - low) else "white"
            ax.text(column, row, f"{value:.2f}", ha="center", va="center", color=colour)
    ax.set_xlabel("tensor_parallel_size")
    ax.set_ylabel("rank")
    ax.set_title(f"{figure}, GiB per worker")
    return ax


def plot_seconds_by_rank(benches: Sequence[Bench], ax: Axes | None = None) -> Axes:
    """Seconds over rank, a line for each strategy: the last sync, transport included, and the rebuild (dashed)."""
    ax = _axes(ax)
    for strategy, syncs in _last_syncs(benches).items():
        ranks = [rank for rank, _ in syncs]
        colour = STRATEGY_COLOURS[strategy]
        ax.plot(ranks, [sync.seconds for _, sync in syncs], "o-", color=colour, label=f"{strategy}: sync")
        ax.plot(ranks, [sync.rebuilding for _, sync in syncs], "o--", color=colour, label=f"{strategy}: rebuild")
    _rank_axis(ax, benches)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_ylabel("seconds")
    ax.legend()
    return ax


def plot_bytes_by_rank(benches: Sequence[Bench], ax: Axes | None = None) -> Axes:
    """What a sync leaves over rank, in GiB, a line for each strategy: on the GPU, and page-locked by us (dashed).

    Crosses are the calculator's: one packed adapter, and packed with staged.
    """
    ax = _axes(ax)
    largest = max(bench.packed_bytes for bench in benches)
    for strategy, syncs in _last_syncs(benches).items():
        figures = {"on the GPU": [sync.left for _, sync in syncs], "page-locked": [sync.pinned for _, sync in syncs]}
        for where, sizes in figures.items():
            # A small adapter that evicts the large one is page-locked under each strategy.
            if where == "page-locked" and max(sizes) < largest / 100:
                continue
            # Wide under narrow: two generations on the host are as large as packed and staged on the GPU.
            style = {"linestyle": "-", "linewidth": 5, "alpha": 0.6} if where == "on the GPU" else {"linestyle": "--"}
            ax.plot(
                [rank for rank, _ in syncs],
                [size / GIB for size in sizes],
                marker="o",
                color=STRATEGY_COLOURS[strategy],
                label=f"{strategy}: {where}",
                zorder=2 if where == "on the GPU" else 3,
                **style,
            )
    known = [bench for bench in benches if bench.predicted]
    packed = [bench.predicted["packed_bytes"] for bench in known]
    both = [
        size + b.predicted["staged_bytes"] - b.predicted["shared_bytes"] for size, b in zip(packed, known, strict=True)
    ]
    for name, sizes, marker in (("packed", packed, "x"), ("packed and staged", both, "+")):
        ranks = [bench.rank for bench in known]
        ax.plot(
            ranks, [size / GIB for size in sizes], marker, color="black", ms=10, zorder=4, label=f"calculated: {name}"
        )
    _rank_axis(ax, benches)
    ax.set_ylabel("GiB in one worker")
    ax.legend()
    return ax


def plot_sync(bench: Bench, ax: Axes | None = None) -> Axes:
    """Bars of one rank by strategy, in seconds: first and last sync, transport included, and the rebuild."""
    last = {sync.strategy: sync.seconds for sync in bench.syncs}
    first = {**last, **{sync.strategy: sync.seconds for sync in reversed(bench.syncs)}}
    rebuild = {sync.strategy: sync.rebuilding for sync in bench.syncs}
    ax = plot_bars({"first sync": first, "sync": last, "rebuild": rebuild}, "seconds", ax)
    ax.set_title(f"{bench.model}, {bench.layers} layers, rank {bench.rank}", fontsize="medium")
    return ax


def _last_syncs(benches: Sequence[Bench]) -> dict[str, list[tuple[int, Sync]]]:
    """For each strategy the rank and the last sync of each bench that ran it."""
    found: dict[str, dict[int, Sync]] = {}
    for bench in benches:
        for sync in bench.syncs:
            found.setdefault(sync.strategy, {})[bench.rank] = sync
    return {strategy: sorted(syncs.items()) for strategy, syncs in found.items()}


def _rank_axis(ax: Axes, benches: Sequence[Bench]) -> None:
    ranks = [bench.rank for bench in benches]
    ax.set_xscale("log", base=2)
    ax.set_xticks(ranks, [str(rank) for rank in ranks])
    ax.set_xlabel("rank")
    ax.set_title(f"{benches[0].model}, {benches[0].layers} layers, {benches[0].device}", fontsize="medium")


def plot_bars(values: Mapping[str, Mapping[str, float]], unit: str, ax: Axes | None = None) -> Axes:
    """Grouped bars: for each series its value in each group, with the figure above it.

    Args:
        values: by series, then by group.
        unit: of the values, for the axis.
        ax: where to draw.
    """
    ax = _axes(ax)
    longest_first = sorted(values.values(), key=len, reverse=True)
    groups = list(dict.fromkeys(group for series in longest_first for group in series))
    width = 0.8 / len(values)
    for number, (label, series) in enumerate(values.items()):
        places = [groups.index(group) + (number - (len(values) - 1) / 2) * width for group in series]
        bars = ax.bar(places, list(series.values()), width * 0.9, label=label, color=PHASE_COLOURS[number])
        ax.bar_label(bars, fmt=lambda v: f"{v:,.0f}" if abs(v) >= 1000 else f"{v:.3g}", fontsize="x-small")
    ax.margins(y=0.1)
    ax.set_xticks(range(len(groups)), groups)
    ax.set_ylabel(unit)
    if len(values) > 1:
        ax.legend(fontsize="small")
    return ax


def _phase_colours(names: Iterable[str]) -> dict[str, str]:
    """The parts of a load have their own colours; other phases follow."""
    order = [*PARTS, *(name for name in dict.fromkeys(names) if name not in PARTS)]
    return {name: PHASE_COLOURS[number % len(PHASE_COLOURS)] for number, name in enumerate(order)}


def plot_profile(profile: Profile, ax: Axes | None = None) -> Axes:
    """Bars of phases over time, in milliseconds: a row for each name and depth (dots), summed up at its end."""
    ax = _axes(ax)
    colours = _phase_colours(phase.name for phase in profile.phases)
    rows = list(dict.fromkeys((phase.depth, phase.name) for phase in profile.phases))
    for phase in profile.phases:
        row = rows.index((phase.depth, phase.name))
        ax.barh(row, phase.seconds * 1e3, left=phase.start * 1e3, color=colours[phase.name])
    for row, key in enumerate(rows):
        same = [phase for phase in profile.phases if (phase.depth, phase.name) == key]
        text = f" {sum(phase.seconds for phase in same) * 1e3:.1f} ms" + (f" in {len(same)}" if len(same) > 1 else "")
        end = max(phase.start + phase.seconds for phase in same) * 1e3
        ax.annotate(text, (end, row), va="center", fontsize="small")
    ax.set_yticks(range(len(rows)), ["· " * depth + name for depth, name in rows])
    ax.invert_yaxis()
    ax.set_xlim(0, (profile.total.start + profile.total.seconds) * 1.2e3)  # room for the text
    ax.set_xlabel("milliseconds since the profile began")
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
    from lora_mem.observe.traces import read_device, read_trace

    ax = _axes(ax)
    phases, device = read_trace(path), read_device(path)
    shown = next((phase for phase in phases if phase.name == within), None)
    if shown is None:
        names = ", ".join(dict.fromkeys(phase.name for phase in phases)) or "none"
        raise ValueError(f"within is {within!r}; the trace's phases are {names}")
    begin, end = shown.start, shown.start + shown.seconds
    rows: dict[str, list[tuple[float, float]]] = {}
    for phase in phases:
        if phase is not shown and begin <= phase.start and phase.start + phase.seconds <= end:
            rows.setdefault(phase.name, []).append((phase.start, phase.start + phase.seconds))
    colours = {name: PHASE_COLOURS[number % 3] for number, name in enumerate(rows)}
    for kind, colour in {"kernels": "#bbbbbb", "to host": "#aa3377", "to device": "#66ccee"}.items():
        found = [(max(first, begin), min(last, end)) for first, last in device[kind] if first < end and last > begin]
        if found:
            rows[f"device: {kind}"] = found
            colours[f"device: {kind}"] = colour
    for row, (name, spans) in enumerate(rows.items()):
        bars = [((first - begin) * 1e3, (last - first) * 1e3) for first, last in spans]
        ax.broken_barh(bars, (row - 0.4, 0.8), color=colours[name])
    ax.set_yticks(range(len(rows)), list(rows))
    ax.invert_yaxis()
    ax.set_xlim(0, shown.seconds * 1e3)
    ax.set_xlabel(f"milliseconds since {'the trace' if within == 'total' else repr(within)} began")
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


def plot_parts(phases: Mapping[str, Iterable[Phase]], ax: Axes | None = None) -> Axes:
    """One bar for each label, of phases that follow one another; milliseconds."""
    ax = _axes(ax)
    rows = {label: list(parts) for label, parts in phases.items()}
    longest_first = sorted(rows.values(), key=len, reverse=True)
    names = list(dict.fromkeys(phase.name for parts in longest_first for phase in parts))
    colours = _phase_colours(names)
    for number, name in enumerate(names):
        values = [sum(phase.seconds for phase in parts if phase.name == name) * 1e3 for parts in rows.values()]
        before = [
            sum(phase.seconds for phase in parts if names.index(phase.name) < number) * 1e3 for parts in rows.values()
        ]
        ax.barh(list(rows), values, left=before, label=name, color=colours[name])
    for row, parts in enumerate(rows.values()):
        total = sum(phase.seconds for phase in parts) * 1e3
        ax.annotate(f" {total:.1f} ms", (total, row), va="center", fontsize="small")
    ax.set_xlim(0, max(sum(phase.seconds for phase in parts) for parts in rows.values()) * 1.15e3)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds")
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=len(names))
    return ax


def plot_lives(lives: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Where an adapter is, phase by phase and strategy by strategy: on the GPU upwards, on the host downwards.

    Args:
        lives: `Life.to_dict()` of each strategy; slots are left out, which are the same in all.
        ax: where to draw.
    """
    ax = _axes(ax)
    phases = [name for name in _life_phases(lives) if name != "baseline"]
    most = max(
        sum(sum(phase["holders"][holder].values()) for holder in ("registered", "staged"))
        for life in lives
        for phase in _moments(life)
    )
    unit, scale = ("GiB", 2**30) if most >= 2**30 else ("MiB", 2**20)
    width = 0.8 / len(lives)
    for number, life in enumerate(lives):
        for phase in _moments(life):
            if phase["name"] not in phases:
                continue
            x = phases.index(phase["name"]) + (number - (len(lives) - 1) / 2) * width
            up = down = 0.0
            for holder in ("registered", "staged"):
                sizes = phase["holders"][holder]
                host = sizes.get("cpu", 0) / scale
                gpu = sum(sizes.values()) / scale - host
                colour = COLOURS[holder]
                ax.bar(x, gpu, width * 0.9, bottom=up, color=colour)
                ax.bar(x, -host, width * 0.9, bottom=-down, color=colour, alpha=0.45)
                up, down = up + gpu, down + host
            ax.annotate(life["strategy"], (x, up), ha="center", va="bottom", rotation=90, fontsize="x-small")
    for holder in ("registered", "staged"):
        ax.bar(0, 0, color=COLOURS[holder], label=f"{holder}, on the GPU")
        ax.bar(0, 0, color=COLOURS[holder], alpha=0.45, label=f"{holder}, on the host")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(phases)), phases)
    ax.use_sticky_edges = False  # else the axis ends where the bars begin, and the names lie outside
    ax.margins(y=0.2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    ax.set_ylabel(f"{unit}: on the host below, on the GPU above")
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    return ax


def plot_life_seconds(lives: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """How long each phase of an adapter's life takes, strategy by strategy; milliseconds, logarithmic.

    Arguments as for `plot_lives`.
    """
    values = {
        life["strategy"]: {p["name"]: p["milliseconds"] for p in _moments(life) if p["name"] != "baseline"}
        for life in lives
    }
    ax = plot_bars(values, "milliseconds", ax)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter("{x:g}")
    ax.yaxis.set_minor_formatter("")
    return ax


def _life_phases(lives: Sequence[Mapping[str, Any]]) -> list[str]:
    """Names of the phases of all lives, in order."""
    return [moment["name"] for moment in max((_moments(life) for life in lives), key=len)]


def _moments(life: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of a life as it is written now, or as reports have it."""
    recorded = life.get("phases", ())
    return [*life.get("moments", ()), *({**one, "name": one["name"].replace("rest", "baseline")} for one in recorded)]
