"""Plans, sweeps, figures and the interactive planner."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from command_line import lora_mem
from lora_mem.errors import SizingError
from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.planning import GPUS, QUESTIONS, by_model, plan, savings, sweep
from lora_mem.sizing.shapes import known_models

GIB = 1024**3


QWEN = "Qwen/Qwen3-30B-A3B"


ROOM: dict[str, Any] = {"gpu_bytes": 140 * GIB, "weights_bytes": 57 * GIB, "kv_cache_bytes": 40 * GIB}


def fits(**change: Any) -> bool:
    options = {"rank": 64, "max_loras": 2, "strategy": "offload", **change}
    return footprint(QWEN, **options).gpu_sync_peak_bytes <= 43 * GIB


def test_answers_are_the_last_that_fit() -> None:
    result = plan(QWEN, rank=64, max_loras=2, strategy="offload", **ROOM)
    assert result.fits is fits()
    rank, slots = result["largest_rank"], result["most_slots"]
    assert rank
    assert fits(rank=rank)
    assert not fits(rank=rank + 1)
    assert slots
    assert fits(max_loras=slots)
    assert not fits(max_loras=slots + 1)
    assert result["headroom"] == result.headroom_bytes == 43 * GIB - result.footprint.gpu_sync_peak_bytes


def test_the_rank_that_needs_no_folding_fits_where_a_smaller_one_does_not() -> None:
    common: dict[str, Any] = {"max_lora_rank": 64, "strategy": "keep", "lora_alpha": 64, "target_modules": "q_proj"}
    room = footprint(QWEN, rank=64, **common).gpu_sync_peak_bytes
    assert footprint(QWEN, rank=63, **common).gpu_sync_peak_bytes > room
    assert plan(QWEN, rank=8, gpu_bytes=room + 1, weights_bytes=1, **common)["largest_rank"] == 64


@settings(max_examples=25, deadline=None)
@given(room=st.integers(1, 120), rank=st.integers(1, 128))
def test_fits_means_that_nothing_is_over(room: int, rank: int) -> None:
    result = plan(QWEN, rank=rank, gpu_bytes=(60 + room) * GIB, weights_bytes=60 * GIB)
    assert result.fits == (result.footprint.gpu_sync_peak_bytes <= room * GIB) == (result.headroom_bytes >= 0)
    largest = result["largest_rank"]
    assert result.fits == (largest is not None and largest >= rank)


def test_the_smallest_tp_shares_the_weights() -> None:
    result = plan("meta-llama/Llama-3.3-70B-Instruct", rank=64, gpu_bytes=80 * GIB, weights_bytes=132 * GIB)
    assert result.fits is False
    assert result["smallest_tp"] == 2


def test_adapters_per_host() -> None:
    room: dict[str, Any] = {**ROOM, "host_memory_bytes": 1000 * GIB}
    for strategy in ("offload", "stage"):
        on_host = plan(QWEN, rank=64, max_cpu_loras=3, strategy=strategy, **room)
        each = on_host.footprint.node_host_bytes // 3
        assert on_host["most_adapters_per_host"] == 1000 * GIB // each
    keep = plan(QWEN, rank=64, strategy="keep", **room)
    assert keep["most_adapters_per_host"] is None
    assert "holds no adapter on the host" in keep.why("most_adapters_per_host")


def test_what_each_change_saves() -> None:
    common: dict[str, Any] = {"rank": 16, "max_lora_rank": 64, "max_loras": 4, "tensor_parallel_size": 4}
    found = {answer.question: answer.value for answer in savings(QWEN, **common)}
    slots = footprint(QWEN, **common).slot_bytes
    assert found["saved_by_fully_sharded"] == slots - footprint(QWEN, fully_sharded_loras=True, **common).slot_bytes
    assert found["saved_by_ep"] == slots - footprint(QWEN, enable_expert_parallel=True, **common).slot_bytes
    assert found["saved_by_lower_max_lora_rank"] == slots * 3 // 4
    one = footprint(QWEN, strategy="offload", **common)
    assert found["saved_by_offload"] == 4 * (one.packed_bytes + one.staged_bytes - one.shared_bytes)
    dense = {answer.question: answer for answer in savings("Qwen/Qwen3-8B", rank=16)}
    assert dense["saved_by_ep"].value is None
    assert "routed experts" in dense["saved_by_ep"].reason


def test_a_plan_shows_itself() -> None:
    result = plan(QWEN, rank=64, **ROOM)
    assert repr(result) == repr(plan(QWEN, rank=64, **ROOM))
    assert result._repr_html_() == plan(QWEN, rank=64, **ROOM)._repr_html_()
    assert json.loads(json.dumps(result.to_dict()))["fits"] is True
    assert "gpu=" in result.why("headroom")
    with pytest.raises(SizingError, match="must be one of headroom"):
        result.why("nothing")
    with pytest.raises(SizingError, match="must be one of headroom"):
        result["nothing"]


@pytest.mark.parametrize("name", ["gpu_bytes", "weights_bytes", "kv_cache_bytes"])
def test_bad_room_is_named(name: str) -> None:
    with pytest.raises(SizingError, match=f"{name}=-1"):
        plan(QWEN, rank=64, **{**ROOM, name: -1})


def test_exit_codes() -> None:
    arguments = ("plan", QWEN, "--rank", "64", "--weights", "57", "--kv-cache", "40")
    good = lora_mem(*arguments, "--gpu", "H200", "--json")
    assert (good.returncode, good.stderr) == (0, "")
    data = json.loads(good.stdout)
    assert data["fits"] is True
    assert data["answers"]["headroom"]["inputs"]["gpu"] == GPUS["H200"]
    bad = lora_mem(*arguments, "--gpu", "80")
    assert bad.returncode == 1
    assert "does not fit" in bad.stdout
    for wrong in (("--gpu", "abacus"), ("--gpu", "80", "--tp", "3"), ("--gpu", "nan"), ("--gpu", "-1")):
        done = lora_mem(*arguments, *wrong)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_a_sweep_is_a_frame_of_footprints() -> None:
    pandas = pytest.importorskip("pandas")
    frame = sweep(QWEN, rank=[16, 64], tensor_parallel_size=[1, 3, 4], max_loras=2)
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 6
    refused = frame[frame.tensor_parallel_size == 3]
    assert refused.slot_bytes.isna().all()
    assert refused.error.str.contains("tensor_parallel_size=3").all()
    row = frame[(frame["rank"] == 64) & (frame.tensor_parallel_size == 4)].iloc[0]
    assert row.slot_bytes == footprint(QWEN, rank=64, tensor_parallel_size=4, max_loras=2).slot_bytes


def test_models_side_by_side() -> None:
    pytest.importorskip("pandas")
    frame = by_model([QWEN, "Qwen/Qwen2.5-7B-Instruct"], rank=16, tensor_parallel_size=8)
    assert list(frame.index) == [QWEN, "Qwen/Qwen2.5-7B-Instruct"]
    row = frame.loc[QWEN]
    assert row.slot_bytes == footprint(QWEN, rank=16, tensor_parallel_size=8).slot_bytes
    for answer in savings(QWEN, rank=16, tensor_parallel_size=8):
        assert row[answer.question] == answer.value
    assert "which is 28" in frame.error["Qwen/Qwen2.5-7B-Instruct"]
    assert frame.slot_bytes.isna()["Qwen/Qwen2.5-7B-Instruct"]
    assert len(by_model(rank=8)) == len(known_models())


def test_a_plan_is_printed_in_words_and_kept_by_keys() -> None:
    result = plan(QWEN, rank=64, **ROOM)
    command = ("plan", QWEN, "--rank", "64", "--gpu", "H200", "--weights", "57")
    for shown in (repr(result), result._repr_html_(), lora_mem(*command).stdout):
        assert "largest rank that fits" in shown
        assert not [key for key in QUESTIONS if "_" in key and key in shown]
    assert list(result.to_dict()["answers"]) == list(QUESTIONS) == [answer.question for answer in result.answers]
    assert result.why("largest_rank").startswith("largest rank that fits = ")
    assert list(by_model([QWEN], rank=8).columns)[-4:] == [key for key in QUESTIONS if key.startswith("saved_by")]
