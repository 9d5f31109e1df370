"""Footprints: published figures, and properties against brute force."""

import itertools
import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_mem.errors import SizingError
from lora_mem.sizing.footprints import FIGURES, Footprint, footprint
from lora_mem.sizing.options import MAX_LORA_RANKS, OPTIONS, STRATEGIES
from lora_mem.sizing.shapes import ModelShape
from tiny_config import config

GIB = 1024**3


QWEN = "Qwen/Qwen3-30B-A3B"


def expert_slots(result: Footprint) -> int:
    return sum(row["bytes"] for row in result.rows("slots") if row["module"].endswith(".experts"))


def test_the_packed_experts_of_qwen3_30b_at_rank_64() -> None:
    result = footprint(QWEN, rank=64, target_modules="experts", strategy="offload")
    assert result.packed_bytes == 6_643_777_536 == 48 * 128 * 3 * 64 * (2048 + 768) * 2
    assert result.staged_bytes == result.packed_bytes
    assert result.packed_bytes / GIB == 6.1875


def test_fully_sharded_saves_27_gib_on_qwen3_coder_30b() -> None:
    common: dict[str, Any] = {"rank": 32, "max_loras": 16, "max_lora_rank": 32, "tensor_parallel_size": 4}
    plain = footprint("Qwen/Qwen3-Coder-30B-A3B-Instruct", **common)
    sharded = footprint("Qwen/Qwen3-Coder-30B-A3B-Instruct", fully_sharded_loras=True, **common)
    assert expert_slots(plain) / GIB == 39.375
    assert expert_slots(sharded) / GIB == 12.375


@given(rank=st.integers(1, 512))
def test_max_lora_rank_is_the_smallest_allowed(rank: int) -> None:
    chosen = footprint(config(), rank=rank).options.max_lora_rank
    assert chosen in MAX_LORA_RANKS
    assert chosen >= rank
    assert not [allowed for allowed in MAX_LORA_RANKS if rank <= allowed < chosen]


def test_strategies() -> None:
    common: dict[str, Any] = {"rank": 8, "max_loras": 2, "max_cpu_loras": 5}
    keep, offload, stage = (footprint(config(), strategy=name, **common) for name in ("keep", "offload", "stage"))
    packed, slots = offload.packed_bytes, offload.slot_bytes
    both = packed + offload.staged_bytes - offload.shared_bytes
    assert (keep.host_bytes, keep.gpu_resident_bytes) == (0, slots + 5 * both)
    assert keep.gpu_sync_peak_bytes == keep.gpu_resident_bytes
    assert (offload.host_bytes, offload.gpu_resident_bytes) == (5 * both, slots)
    assert offload.gpu_sync_peak_bytes == slots + both
    assert (stage.host_bytes, stage.gpu_resident_bytes) == (5 * packed, slots)
    assert stage.gpu_sync_peak_bytes == slots + packed  # less than what may be under way


def test_routed_experts_share_nothing_with_their_stage() -> None:
    result = footprint(QWEN, rank=64, target_modules="experts", scaling=1, strategy="offload")
    assert result.shared_bytes == 0
    assert result.gpu_sync_peak_bytes == result.slot_bytes + 2 * 6_643_777_536


def test_dense_modules_keep_the_staged_tensors() -> None:
    half = 8 * 32 * 2  # A of q_proj: rank * hidden_size in bf16
    only: dict[str, Any] = {"rank": 8, "target_modules": "q_proj", "strategy": "offload"}
    assert footprint(config(num_hidden_layers=1), **only).shared_bytes == half
    same = footprint(config(num_hidden_layers=1), scaling=1, **only)
    assert same.shared_bytes == same.packed_bytes == same.staged_bytes == same.host_bytes
    assert footprint(config(), scaling=1, lora_dtype="float16", **only).shared_bytes == 0


def test_what_is_folded_goes_by_the_scaling_of_each_module() -> None:
    common: dict[str, Any] = {"rank": 8, "target_modules": ["q_proj", "o_proj"], "strategy": "offload"}
    known = footprint(config(), lora_alpha=8, **common)
    assert known.shared_bytes == known.packed_bytes == footprint(config(), scaling=1, **common).shared_bytes
    b_of_one_layer = 64 * 8 * 2  # q_proj maps 32 to 64
    one = footprint(config(), lora_alpha=8, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 16}, **common)
    assert one.shared_bytes == one.packed_bytes - b_of_one_layer
    assert "alpha_pattern={" in one.why("shared")
    assert json.loads(json.dumps(one.to_dict()))["options"]["alpha_pattern"]
    by_rank = footprint(config(), lora_alpha=8, rank_pattern={"q_proj": 4}, **common)
    assert by_rank.shared_bytes == by_rank.packed_bytes - 2 * 64 * 4 * 2
    assert footprint(config(), scaling=1, rank_pattern={"q_proj": 4}, **common).shared_bytes == by_rank.shared_bytes
    rooted = footprint(config(), lora_alpha=4, rank_pattern={"q_proj": 16}, use_rslora=True, **common)
    assert rooted.shared_bytes == 2 * (16 * 32 + 64 * 16 + 8 * 64) * 2  # 4 / sqrt(16) for q_proj; o_proj is folded


@pytest.mark.parametrize("strategy", ["keep", "offload", "stage"])
def test_phases_agree_with_the_figures(strategy: Any) -> None:
    result = footprint(config(), rank=8, max_cpu_loras=3, strategy=strategy)
    phases = result.phases()
    assert sum(phases["baseline"].values()) == result.slot_bytes
    assert sum(phases["sync"].values()) == result.gpu_sync_peak_bytes
    assert sum(phases["generation"].values()) == result.gpu_resident_bytes
    assert phases["training"]["slots"] == 0
    assert sum(phases["training"].values()) == result.gpu_resident_bytes - result.slot_bytes
    assert result.phases(sleep_mode=False)["training"] == phases["generation"]


def test_padding_is_what_a_smaller_rank_leaves_empty() -> None:
    result = footprint(config(), rank=20, max_lora_rank=64, max_loras=3)
    filled = footprint(config(), rank=20, max_lora_rank=32, max_loras=3).slot_bytes * 20 // 32
    assert result.slot_padding_bytes == result.slot_bytes - filled
    assert footprint(config(), rank=64).slot_padding_bytes == 0


def test_pinned_memory_is_rounded_tensor_by_tensor() -> None:
    # q_proj of one layer: staged A 3*32*2 -> 256 and B 64*3*2 -> 512, packed B again (A is the staged one).
    result = footprint(config(num_hidden_layers=1), rank=3, target_modules="q_proj", strategy="offload")
    assert (result.host_bytes, result.host_pinned_bytes) == (192 + 384 + 384, 256 + 512 + 512)
    powers = footprint(config(), rank=8, target_modules="experts", scaling=2, strategy="offload")
    assert powers.host_pinned_bytes == powers.host_bytes


def test_each_worker_of_a_node_has_a_copy_of_its_own() -> None:
    common: dict[str, Any] = {"rank": 8, "tensor_parallel_size": 8, "target_modules": "experts"}
    offload, stage = (footprint(config(), strategy=name, **common) for name in ("offload", "stage"))
    assert offload.node_host_bytes == 8 * offload.host_bytes
    assert stage.node_host_bytes == 8 * stage.host_bytes
    assert offload.node_host_pinned_bytes == 8 * offload.host_pinned_bytes
    split = footprint(config(), strategy="stage", enable_expert_parallel=True, **common)
    assert split.node_host_bytes == stage.host_bytes
    four = footprint(config(), workers_per_node=4, strategy="offload", **common)
    assert four.node_host_bytes == 4 * offload.host_bytes


def test_what_stage_keeps_is_what_is_packed() -> None:
    offload, stage = (footprint(QWEN, rank=64, strategy=name) for name in ("offload", "stage"))
    assert stage.staged_bytes == stage.shared_bytes == stage.packed_bytes == offload.packed_bytes
    assert [row["bytes"] for row in stage.rows("staged")] == [row["bytes"] for row in stage.rows("packed")]
    # shared_expert_gate-like tensors of a few bytes each start at a multiple of 256 in the block.
    tiny = footprint(config(num_hidden_layers=1), rank=3, target_modules="q_proj", strategy="stage")
    assert (tiny.host_bytes, tiny.host_pinned_bytes) == (192 + 384, 256 + 512)


def test_the_peak_of_a_stage_is_bounded() -> None:
    # 128 experts at rank 64: the largest packed tensor is A of a projection, 32 MiB.
    largest = 128 * 64 * 2048 * 2
    common: dict[str, Any] = {"rank": 64, "target_modules": "experts", "strategy": "stage"}
    result = footprint(QWEN, **common)
    assert result.gpu_sync_peak_bytes == result.slot_bytes + 136 * 1024**2
    # Of larger ones two: one is made while the other is copied.
    high = footprint(QWEN, **(common | {"rank": 512}))
    assert high.gpu_sync_peak_bytes == high.slot_bytes + 2 * 8 * largest
    received_in_float32 = footprint(QWEN, dtype="float32", lora_dtype="bfloat16", **common)
    assert received_in_float32.gpu_sync_peak_bytes == result.gpu_sync_peak_bytes + 2 * largest


def test_slots_do_not_depend_on_the_adapter() -> None:
    sizes = {
        footprint(config(), rank=rank, max_lora_rank=64, target_modules=targets).slot_bytes
        for rank in (1, 7, 64)
        for targets in ("all-linear", "experts", ["q_proj", "o_proj"], "self_attn.q_proj", "lm_head")
    }
    assert len(sizes) == 1


def test_target_modules_add_up() -> None:
    def packed(*targets: str) -> int:
        return footprint(config(), rank=8, target_modules=targets).packed_bytes

    assert packed("q_proj") == 2 * 8 * (32 + 64) * 2
    assert packed("q_proj", "self_attn.q_proj") == packed("q_proj")
    assert packed("embed_tokens") == packed("lm_head") == 8 * (128 + 32) * 2
    everything = packed("q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts")
    assert everything == footprint(config(), rank=8).packed_bytes
    assert packed("gate_proj", "up_proj", "down_proj") == packed("experts")


def brute_force(fields: dict[str, Any], rank: int, loras: int, lora_rank: int, tp: int, ep: bool, fs: bool) -> int:
    """Slot bytes of a Qwen3-MoE worker, written out by hand."""
    hidden, heads, kv, dim = (
        fields[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    experts, inter, vocab = fields["num_experts"], fields["moe_intermediate_size"], fields["vocab_size"]
    kv_local = max(1, kv // tp)
    a_rank = lora_rank // tp if fs else lora_rank
    row_out = hidden // tp if fs else hidden
    qkv = 3 * a_rank * hidden + (heads // tp + 2 * kv_local) * dim * lora_rank
    o_proj = lora_rank * (heads // tp) * dim + row_out * lora_rank
    gate = lora_rank * (hidden + experts)
    local, mtp = (experts // tp, 1) if ep else (experts, tp)
    expert = 2 * a_rank * hidden + 3 * lora_rank * (inter // mtp) + row_out * lora_rank
    layer = qkv + o_proj + gate + local * expert
    return 2 * loras * (fields["num_hidden_layers"] * layer + 2 * lora_rank * (vocab + hidden))


@settings(max_examples=150, deadline=None)
@given(
    layers=st.integers(1, 3),
    hidden=st.sampled_from([32, 64]),
    inter=st.sampled_from([16, 48]),
    experts=st.sampled_from([8, 24]),
    kv=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 2, 4, 8]),
    lora_rank=st.sampled_from([8, 16, 320]),
    loras=st.integers(1, 4),
    mode=st.sampled_from(["plain", "ep", "fs"]),
)
def test_slots_equal_brute_force(
    layers: int, hidden: int, inter: int, experts: int, kv: int, tp: int, lora_rank: int, loras: int, mode: str
) -> None:
    fields = config(
        num_hidden_layers=layers,
        hidden_size=hidden,
        moe_intermediate_size=inter,
        num_experts=experts,
        num_key_value_heads=kv,
    )
    ep, fs = mode == "ep", mode == "fs"
    result = footprint(
        fields,
        rank=lora_rank,
        max_lora_rank=lora_rank,
        max_loras=loras,
        tensor_parallel_size=tp,
        enable_expert_parallel=ep,
        fully_sharded_loras=fs,
    )
    assert result.slot_bytes == brute_force(fields, 1, loras, lora_rank, tp, ep, fs)


@settings(max_examples=60, deadline=None)
@given(rank=st.integers(1, 64), tp=st.sampled_from([1, 2, 4, 8]))
def test_expert_parallel_ranks_add_up_to_the_whole(rank: int, tp: int) -> None:
    def experts(**options: Any) -> Footprint:
        return footprint(config(), rank=rank, target_modules="experts", strategy="offload", **options)

    whole = experts()
    split = experts(tensor_parallel_size=tp, enable_expert_parallel=True)
    assert split.packed_bytes * tp == whole.packed_bytes
    assert split.staged_bytes * tp == whole.staged_bytes
    assert expert_slots(split) * tp == expert_slots(whole)
    # Tensor parallelism slices slots only.
    sliced = experts(tensor_parallel_size=tp)
    assert (sliced.packed_bytes, sliced.staged_bytes) == (whole.packed_bytes, whole.staged_bytes)


@settings(max_examples=60, deadline=None)
@given(rank=st.integers(1, 511), loras=st.integers(1, 5), layers=st.integers(1, 4))
def test_more_of_anything_never_costs_less(rank: int, loras: int, layers: int) -> None:
    for strategy in STRATEGIES:
        base = footprint(config(num_hidden_layers=layers), rank=rank, max_loras=loras, strategy=strategy)
        more = (
            footprint(config(num_hidden_layers=layers), rank=rank + 1, max_loras=loras, strategy=strategy),
            footprint(config(num_hidden_layers=layers), rank=rank, max_loras=loras + 1, strategy=strategy),
            footprint(config(num_hidden_layers=layers + 1), rank=rank, max_loras=loras, strategy=strategy),
        )
        for larger, name in itertools.product(more, [name for name in FIGURES if name != "slot_padding_bytes"]):
            assert getattr(larger, name) >= getattr(base, name)


@given(rank=st.integers(1, 512))
def test_distinct_factors_are_staged_as_they_are_packed(rank: int) -> None:
    result = footprint(config(mlp_only_layers=[0]), rank=rank, strategy="offload")
    assert result.staged_bytes == result.packed_bytes


def test_dtypes() -> None:
    common: dict[str, Any] = {"rank": 8, "strategy": "offload"}
    half, full = footprint(QWEN, **common), footprint(QWEN, dtype="float32", **common)
    mixed = footprint(QWEN, dtype="float32", lora_dtype="bfloat16", **common)
    assert full.slot_bytes == 2 * half.slot_bytes
    assert (mixed.slot_bytes, mixed.packed_bytes) == (half.slot_bytes, half.packed_bytes)
    assert mixed.staged_bytes == full.staged_bytes


def test_a_moe_backend_that_rounds_sizes_up() -> None:
    # vLLM's own sizes for gpt-oss-20b in MXFP4 with Marlin: hidden 3072, intermediate 2944 (720 -> 768 at TP 4).
    common: dict[str, Any] = {"rank": 16, "moe_backend": "mxfp4_marlin"}
    for tp, inter in ((1, 2944), (4, 768)):
        result = footprint("openai/gpt-oss-20b", tensor_parallel_size=tp, **common)
        assert expert_slots(result) == 24 * 32 * 16 * (3072 + inter + 2 * inter + 3072) * 2
        assert result.packed_bytes == footprint("openai/gpt-oss-20b", rank=16, moe_backend="triton").packed_bytes


def test_the_result_shows_itself() -> None:
    result = footprint(QWEN, rank=64, target_modules="experts")
    assert repr(result) == repr(footprint(QWEN, rank=64, target_modules="experts"))
    assert result._repr_html_() == footprint(QWEN, rank=64, target_modules="experts")._repr_html_()
    assert "6,643,777,536" in repr(result)
    assert "GB" not in repr(result) + result._repr_html_()
    assert "128" in result.why("packed")
    with pytest.raises(SizingError, match="must be one of packed_bytes"):
        result.why("nothing")


@pytest.mark.parametrize(("strategy", "sums"), [("keep", 4), ("offload", 5), ("stage", 3)])
def test_each_line_evaluates_to_its_figure(strategy: Any, sums: int) -> None:
    result = footprint(QWEN, rank=64, max_loras=2, max_cpu_loras=3, tensor_parallel_size=2, strategy=strategy)
    evaluated = [line for line in result.lines if "sum" not in line.formula]
    assert len(evaluated) == len(FIGURES) - sums
    for line in evaluated:
        assert eval(line.formula, {}, dict(line.inputs)) == line.bytes
    for holder, name in (("packed", "packed_bytes"), ("staged", "staged_bytes"), ("slots", "slot_bytes")):
        rows = list(result.rows(holder))
        assert sum(row["bytes"] for row in rows) == getattr(result, name)
        for row in rows:
            assert eval(row["formula"].replace("x", "*")) == row["bytes"]


def test_to_dict_is_json_and_to_frame_adds_up() -> None:
    pytest.importorskip("pandas")
    result = footprint(QWEN, rank=64, target_modules=["experts", "q_proj"])
    data = json.loads(json.dumps(result.to_dict()))
    assert all(type(data[name]) is int and data[name] == getattr(result, name) for name in FIGURES)
    frame = result.to_frame()
    assert frame[frame.holder == "slots"].bytes.sum() == result.slot_bytes


def test_asking_again_of_one_shape_is_asking_of_a_fresh_one() -> None:
    changes: list[dict[str, Any]] = [
        *({"rank": 4}, {"max_lora_rank": 64}, {"max_loras": 2}, {"max_cpu_loras": 2}, {"strategy": "offload"}),
        *({"tensor_parallel_size": 2}, {"data_parallel_size": 2}, {"pipeline_parallel_size": 2}),
        *({"enable_expert_parallel": True, "tensor_parallel_size": 2}, {"enable_mixed_moe_lora_format": True}),
        *({"fully_sharded_loras": True, "tensor_parallel_size": 2}, {"enable_moe_shared_loras": True}),
        *({"pipeline_parallel_size": 2, "pipeline_rank": 0}, {"lora_target_modules": ["o_proj"]}),
        *({"moe_backend": "fp8_per_block"}, {"dtype": "float32"}, {"lora_dtype": "float16"}, {"scaling": 1}),
        *({"rank_pattern": {"q_proj": 2}}, {"lora_alpha": 8}, {"lora_alpha": 8, "alpha_pattern": {"q_proj": 2}}),
        *({"lora_alpha": 8, "use_rslora": True}, {"target_modules": "q_proj"}, {"workers_per_node": 1}),
        {"enable_mixed_moe_lora_format": True, "is_3d_lora_weight": True},
    ]
    assert {name for change in changes for name in change} == set(OPTIONS)
    shape = ModelShape.from_config(config())
    common: dict[str, Any] = {"rank": 8, "strategy": "keep"}
    for change in changes + changes[::-1]:
        again, fresh = footprint(shape, **common | change), footprint(config(), **common | change)
        assert [getattr(again, name) for name in FIGURES] == [getattr(fresh, name) for name in FIGURES], change


def test_ten_thousand_configurations_in_two_seconds() -> None:
    shape = ModelShape.from_config(QWEN)
    start = time.perf_counter()
    for index in range(10_000):
        footprint(shape, rank=1 + index % 64, max_loras=1 + index % 8, tensor_parallel_size=1 << index % 3)
    assert time.perf_counter() - start < 2


def test_a_comparison_is_json_and_a_frame() -> None:
    one, two = (footprint("Qwen/Qwen3-0.6B", rank=rank, max_lora_rank=64) for rank in (8, 16))
    comparison = one.compare(two)
    assert json.loads(json.dumps(comparison.to_dict()))["equal"] is False
    assert dict(comparison.to_frame()[["figure", "difference"]].to_numpy()) == comparison.difference
    assert comparison.difference["packed_bytes"] == one.packed_bytes > 0
