"""Figures of one adapter's life under each strategy: where it is, and how long each moment is in coming."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lora_mem.observe.plots.axes import HOLDERS, axes_or_new, bar_width, beside, logarithmic, plot_bars, unit_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_lives(lives: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """Where an adapter is, moment by moment and strategy by strategy: on the GPU upwards, on the host downwards.

    Args:
        lives: `Life.to_dict()` of each strategy; slots are left out, which are the same in all.
        ax: where to draw.
    """
    ax = axes_or_new(ax)
    held = ("registered", "staged")
    moments = [moment["name"] for moment in max(map(_after_baseline, lives), key=len)]
    every = [moment for life in lives for moment in _after_baseline(life)]
    unit, scale = unit_of(sum(sum(moment["holders"][holder].values()) for holder in held) for moment in every)
    for number, life in enumerate(lives):
        for moment in _after_baseline(life):
            x, width = beside(moments.index(moment["name"]), number, len(lives)), bar_width(len(lives))
            up = down = 0.0
            for holder in held:
                sizes = moment["holders"][holder]
                host = sizes.get("cpu", 0) / scale
                gpu = sum(sizes.values()) / scale - host
                ax.bar(x, gpu, width, bottom=up, color=HOLDERS[holder])
                ax.bar(x, -host, width, bottom=-down, color=HOLDERS[holder], alpha=0.45)
                up, down = up + gpu, down + host
            ax.annotate(life["strategy"], (x, up), ha="center", va="bottom", rotation=90, fontsize="x-small")
    for holder in held:
        ax.bar(0, 0, color=HOLDERS[holder], label=f"{holder}, on the GPU")
        ax.bar(0, 0, color=HOLDERS[holder], alpha=0.45, label=f"{holder}, on the host")
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xticks(range(len(moments)), moments)
    ax.use_sticky_edges = False  # else the axis ends where the bars begin, and the names lie outside
    ax.margins(y=0.2)
    ax.yaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    ax.set_ylabel(f"{unit}: on the host below, on the GPU above")
    ax.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.08), ncols=2)
    return ax


def plot_life_seconds(lives: Sequence[Mapping[str, Any]], ax: Axes | None = None) -> Axes:
    """How long each moment of an adapter's life is in coming, strategy by strategy; milliseconds, logarithmic.

    Arguments as for `plot_lives`.
    """
    values = {life["strategy"]: {p["name"]: p["milliseconds"] for p in _after_baseline(life)} for life in lives}
    return logarithmic(plot_bars(values, "milliseconds", ax))


def _after_baseline(life: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What follows the first moment, the baseline; older reports call moments phases."""
    return list(life.get("moments", life.get("phases"))[1:])
