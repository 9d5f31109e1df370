"""Plots of benches show what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

pytest.importorskip("matplotlib")

from a_bench import GIB, bench
from lora_mem.observe.plots import draw, plot_bytes_by_rank, plot_seconds_by_rank, plot_sync
from lora_mem.observe.results import Bench


def sweep():
    predicted = {"packed_bytes": GIB, "staged_bytes": GIB, "shared_bytes": 0, "slot_bytes": 3 * GIB}
    benches = [bench(rank, predicted=predicted, skipped={}) for rank in (8, 64)]
    kept = [replace(sync, strategy="keep", seconds=2.5, retained=2 * GIB, pinned=0) for sync in benches[1].syncs]
    return [benches[0], replace(benches[1], syncs=(*benches[1].syncs, *kept))]


def lines(ax):
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in ax.get_lines()}


def test_seconds_by_rank():
    drawn = lines(plot_seconds_by_rank(sweep()))
    assert drawn["stage: sync"] == [(8, 1.25), (64, 1.25)]
    assert drawn["stage: rebuild"] == [(8, 0.0625), (64, 0.0625)]
    assert drawn["keep: sync"] == [(64, 2.5)]  # not run at rank 8


def test_bytes_by_rank_beside_the_calculated():
    ax = plot_bytes_by_rank(sweep())
    drawn = lines(ax)
    assert drawn["keep: on the GPU"] == [(64, 2.0)]
    assert drawn["stage: on the GPU"] == [(8, 0.0), (64, 0.0)]
    assert drawn["stage: pinned"] == [(8, 2.0), (64, 2.0)]
    assert drawn["calculated: packed and staged"] == [(8, 2.0), (64, 2.0)]
    assert "GiB" in ax.get_ylabel()


def test_one_sync_by_strategy():
    one = sweep()[1]
    slow, *others = one.syncs
    ax = plot_sync(replace(one, syncs=(replace(slow, seconds=5.0), *others)))
    assert [patch.get_height() for patch in ax.patches] == [5.0, 2.5, 1.25, 2.5, 0.0625, 0.0625]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["stage", "keep"]


def test_a_result_draws_itself_by_its_type():
    one = sweep()[1]
    assert one.plot().get_title() == plot_sync(one).get_title()
    with pytest.raises(TypeError, match="no plot of a dict; there are plots of Footprint, Profile, Bench"):
        draw({})


def test_what_was_recorded_under_older_names_is_read():
    one = sweep()[1]
    values = json.loads(json.dumps(one.to_dict()))
    for sync in values["syncs"]:
        sync["left"], sync["left_reserved"] = sync.pop("retained"), sync.pop("retained_reserved")
    assert Bench.from_dict(values) == one
