"""Figures of profiles and of adapters' lives: what is drawn, where, and in which unit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("matplotlib", reason="needs matplotlib")
pytest.importorskip("torch", reason="needs torch")

from lora_mem.observe import plots
from lora_mem.observe.results import Memory, Phase, Profile, Sample
from lora_mem.observe.traces import RANGE, read_device, read_trace

MIB = 2**20
RECORDED = Path(__file__).parents[2] / "reports" / "2026-12-01-h200" / "raw"


def memory(mib):
    return Memory(mib * MIB, mib * MIB, mib * MIB, 0, 0, 2 * mib * MIB)


def phase(name, start, seconds, depth=0):
    return Phase(name, depth, start, seconds, seconds, memory(1), memory(3), memory(2), 0, 0)


@pytest.fixture
def profile():
    phases = (phase("load", 0, 4), phase("pack", 1, 1, depth=1), phase("activate", 2, 1, depth=1), phase("pack", 5, 2))
    return Profile("a GPU", {}, phase("total", 0, 8), phases, samples=(Sample(0, memory(1)), Sample(1, memory(5))))


def bars(ax):
    return [(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in ax.patches]


def test_a_profile_s_phases_over_time(profile):
    ax = profile.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == ["load", "· pack", "· activate", "pack"]
    assert [(x, width) for x, _, width, _ in bars(ax)] == [(0, 4000), (1000, 1000), (2000, 1000), (5000, 2000)]
    assert ax.get_xlim() == (0, 9600)
    assert plots.plot_profile(profile, ax=ax) is ax


def test_memory_over_time_by_samples_and_by_borders(profile):
    ax = profile.plot_memory()
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}
    assert lines["GPU allocated"] == ([0, 1000], [0, 4])
    assert lines["host resident"] == ([0, 1000], [0, 8])
    assert lines["host pinned"] == ([0, 1000], [0, 0])
    assert ax.get_ylabel() == "MiB above the beginning"
    without = Profile("cpu", {}, profile.total, profile.phases)
    (line,) = [line for line in without.plot_memory().lines if line.get_label() == "GPU allocated"]
    assert set(line.get_ydata()) == {0, 1}


def test_parts_follow_one_another_in_their_own_colours():
    ax = plots.plot_parts({"one": [phase("activate", 0, 1)], "two": [phase("build", 0, 2), phase("activate", 2, 3)]})
    drawn = {(y, width): (x, bar.get_facecolor()) for bar, (x, y, width, _) in zip(ax.patches, bars(ax), strict=True)}
    found = {width: x for (_, width), (x, _) in drawn.items()}
    assert found[2000] == 0  # build comes first, though only one bar has it
    assert found[3000] == 2000
    assert found[1000] == 0
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["build", "activate"]
    assert ax.get_xlim()[1] > 5000


def test_grouped_bars():
    ax = plots.plot_bars({"a": {"x": 1.0}, "b": {"x": 2.0, "y": 3.0}}, "GiB")
    assert [label.get_text() for label in ax.get_xticklabels()] == ["x", "y"]
    assert sorted(height for _, _, _, height in bars(ax)) == [1, 2, 3]
    assert ax.get_ylabel() == "GiB"


def test_recorded_lives_the_gpu_above_and_the_host_below():
    lives = json.loads((RECORDED / "both-paths" / "qwen3_30b_a3b.json").read_text())["lives"]
    ax = plots.plot_lives(lives)
    heights = [height for _, _, _, height in bars(ax)]
    assert max(heights) == pytest.approx(6.1875)
    assert min(heights) == pytest.approx(-6.1875, rel=1e-3)
    assert [label.get_text() for label in ax.get_xticklabels()] == [
        "staged",
        "added",
        "offloaded",
        "evicted",
        "rebuilt",
    ]
    assert ax.get_ylabel().startswith("GiB")
    seconds = plots.plot_life_seconds(lives)
    assert seconds.get_yscale() == "log"
    assert [text.get_text() for text in seconds.get_legend().get_texts()] == ["keep", "offload", "stage"]


TRACE = Path(__file__).parents[2] / "reports" / "2026-12-01-h200-fill" / "raw" / "trace.json.gz"


def test_in_the_recorded_trace_copies_run_under_the_next_chunk_s_work():
    phases = read_trace(TRACE)
    layers = [phase for phase in phases if phase.name == "receive"]
    assert len(layers) == 8
    assert sum(phase.name == "transport" for phase in phases) == 9
    for layer in layers[1:]:
        # All of one layer's bytes, while the work for this one goes on.
        assert layer.traced.to_host == 3 * 64 * (2048 + 768) * 128 * 2
        assert layer.traced.overlapped > 0.95 * layer.traced.to_host_seconds
    spans = read_device(TRACE)
    assert sum(end - begin for begin, end in spans["to host"]) == pytest.approx(phases[0].traced.to_host_seconds)
    assert sum(end - begin for begin, end in spans["kernels"]) == pytest.approx(phases[0].traced.kernels)
    assert all(begin < end for kind in spans.values() for begin, end in kind)


def test_a_trace_over_time():
    ax = plots.plot_trace(TRACE, within="stage")
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["transport", "receive", "wait", "device: kernels", "device: to host"]
    stage = next(phase for phase in read_trace(TRACE) if phase.name == "stage")
    assert ax.get_xlim() == (0, pytest.approx(stage.seconds * 1e3))
    receive = ax.collections[1].get_paths()
    assert len(receive) == 8
    layer = next(phase for phase in read_trace(TRACE) if phase.name == "receive")
    assert receive[0].get_extents().x0 == pytest.approx((layer.start - stage.start) * 1e3)
    assert receive[0].get_extents().width == pytest.approx(layer.seconds * 1e3)
    assert "device: to device" in [label.get_text() for label in plots.plot_trace(TRACE).get_yticklabels()]
    with pytest.raises(ValueError, match="within is 'sync'; the trace's phases are total, stage, transport"):
        plots.plot_trace(TRACE, within="sync")


def test_what_the_device_does_across_a_phase_s_border_is_drawn(tmp_path):
    def event(category, name, begin, micros):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": micros, "args": {"bytes": 8}}

    trace = tmp_path / "trace.json"
    phases = [event("user_annotation", f"{RANGE}{name}", *when) for name, when in PHASES.items()]
    device = [event("kernel", "one", 400, 300), event("gpu_memcpy", "Memcpy DtoH", 990, 100)]
    trace.write_text(json.dumps({"traceEvents": phases + device}))
    ax = plots.plot_trace(trace, within="load")
    rows = [label.get_text() for label in ax.get_yticklabels()]
    assert rows == ["pack", "device: kernels", "device: to host"]
    spans = [(path.get_extents().x0, path.get_extents().x1) for one in ax.collections for path in one.get_paths()]
    assert [tuple(round(end, 6) for end in span) for span in spans] == [(0.1, 0.2), (0, 0.2), (0.49, 0.5)]


PHASES = {"total": (500, 600), "load": (500, 500), "pack": (600, 100)}
