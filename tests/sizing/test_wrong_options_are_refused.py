"""Options that are wrong, or that the model cannot have, are named with what is allowed."""

from typing import Any

import pytest

from lora_mem.errors import SizingError
from lora_mem.sizing.footprints import Footprint, footprint
from lora_mem.sizing.shapes import known_config
from tiny_config import config


def expert_slots(result: Footprint) -> int:
    return sum(row["bytes"] for row in result.rows("slots") if row["module"].endswith(".experts"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scaling": float("nan")}, "scaling=nan: must be a finite number above 0"),
        ({"scaling": float("inf")}, "scaling=inf: must be"),
        ({"scaling": True}, "scaling=True: must be"),
        ({"lora_alpha": 0}, "lora_alpha=0: must be"),
        ({"lora_alpha": 10**400}, "must be a finite number"),
        ({"scaling": 1, "lora_alpha": 8}, "scaling=1: must be left out where lora_alpha=8"),
        ({"alpha_pattern": {"q_proj": 8}}, "needs lora_alpha"),
        ({"use_rslora": True}, "use_rslora=True: needs lora_alpha"),
        ({"lora_alpha": 8, "alpha_pattern": {"zz": 8}}, "alpha_pattern='zz': matches no module"),
        ({"lora_alpha": 8, "alpha_pattern": {"q_proj": float("nan")}}, r"alpha_pattern\['q_proj'\]=nan: must be"),
        ({"rank_pattern": {"[": 4}}, r"rank_pattern key='\[': must be a name or a regular expression \(unterminated"),
        ({"rank_pattern": {1: 4}}, "rank_pattern key=1: must be a name or a regular expression"),
        ({"rank_pattern": [1]}, r"rank_pattern=\[1\]: must be a dict"),
    ],
)
def test_scalings_and_patterns_that_are_none(options: Any, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        footprint(config(), rank=8, **options)


def test_quantized_experts_whose_slots_depend_on_the_backend() -> None:
    mxfp4 = config(quantization_config={"quant_method": "mxfp4"})
    plain = footprint(config(), rank=8)
    assumed = footprint(mxfp4, rank=8)
    assert "config has them in mxfp4" in assumed.assumes
    assert assumed.assumes in repr(assumed)
    assert "assumed: moe_backend=triton" in assumed._repr_html_()
    assert assumed.to_dict()["options"]["assumes"] == assumed.assumes
    named = footprint(mxfp4, rank=8, moe_backend="triton")
    assert assumed.slot_bytes == named.slot_bytes == plain.slot_bytes
    assert named.assumes == plain.assumes == ""
    assert (
        "has them in a_new_one" in footprint(config(quantization_config={"quant_method": "a_new_one"}), rank=8).assumes
    )
    # What keeps sizes, and what has no experts, needs no name.
    assert footprint(config(quantization_config={"quant_method": "fp8"}), rank=8)
    dense = known_config("Qwen/Qwen3-8B") | {"quantization_config": {"quant_method": "mxfp4"}}
    assert footprint(dense, rank=8)
    # Online fp8 by blocks rounds up to 128, MXFP4's emulation to 32.
    for backend, multiple in (("fp8_per_block", 128), ("mxfp4_emulation", 32)):
        odd = footprint(config(hidden_size=48, moe_intermediate_size=20), rank=8, moe_backend=backend)
        hidden, inter = -(-48 // multiple) * multiple, -(-20 // multiple) * multiple
        assert expert_slots(odd) == 2 * 8 * 8 * 3 * (hidden + inter) * 2


def test_ranks_that_fully_sharded_experts_cannot_be_sliced_by() -> None:
    common: dict[str, Any] = {"max_lora_rank": 16, "tensor_parallel_size": 4, "fully_sharded_loras": True}
    with pytest.raises(
        SizingError, match=r"rank=6: must be a multiple of 4 .*slices the rank of model\.layers\.\*\.mlp"
    ):
        footprint(config(), rank=6, **common)
    with pytest.raises(SizingError, match="rank=2: must be a multiple of 4"):
        footprint(config(), rank=4, rank_pattern={r".*experts\..*": 2}, **common)
    # vLLM leaves the last workers' part of a dense module empty.
    assert footprint(config(), rank=6, target_modules="q_proj", **common)
    assert footprint(config(), rank=6, **common | {"fully_sharded_loras": False})


def test_a_rank_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(
        SizingError, match="rank_pattern='x_proj': matches no module of config that the adapter targets"
    ):
        footprint(config(), rank=8, rank_pattern={"q_proj": 4, "x_proj": 2})
    with pytest.raises(SizingError, match="rank_pattern='down_proj': matches no module"):
        footprint(config(), rank=8, target_modules="q_proj", rank_pattern={"down_proj": 4})
    last_expert = footprint(config(), rank=8, rank_pattern={r".*layers\.1\..*q_proj": 4})
    assert last_expert.packed_bytes < footprint(config(), rank=8).packed_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank=0: must be a whole number >= 1"),
        ({"rank": -3}, "rank=-3: must be"),
        ({"rank": 8.0}, "rank=8.0: must be a whole number"),
        ({"rank": True}, "rank=True: must be a whole number"),
        ({"target_modules": None}, "target_modules=None: must be all-linear, or one or more names"),
        ({"target_modules": 3}, "target_modules=3: must be all-linear"),
        ({"rank": 513}, "rank=513: must be at most 512"),
        ({"max_lora_rank": 12}, "max_lora_rank=12: must be one of 1, 8, 16, 32, 64, 128, 256, 320, 512"),
        ({"max_lora_rank": 8}, "max_lora_rank=8: must be at least the adapter's rank, which is 16"),
        ({"max_loras": 0}, "max_loras=0"),
        ({"max_loras": 3, "max_cpu_loras": 2}, "max_cpu_loras=2: must be at least max_loras=3"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3: must divide the num_attention_heads.*which is 8"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size=0"),
        ({"tensor_parallel_size": 2, "enable_expert_parallel": 1}, "enable_expert_parallel=1: must be True or False"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True, "fully_sharded_loras": True},
            "fully_sharded_loras=True: cannot go together with enable_expert_parallel",
        ),
        (
            {"rank": 1, "max_lora_rank": 1, "tensor_parallel_size": 2, "fully_sharded_loras": True},
            "the max_lora_rank of",
        ),
        ({"moe_backend": "abacus"}, "moe_backend='abacus': must be one of triton, "),
        ({"dtype": "int8"}, "dtype='int8': must be one of bfloat16, float16, float32"),
        ({"lora_dtype": "float32"}, "lora_dtype='float32'"),
        ({"target_modules": []}, "target_modules=.*one or more names"),
        ({"target_modules": ["nope"]}, "target_modules='nope'.*it has: .*q_proj"),
        ({"target_modules": ["all-linear", "q_proj"]}, "must stand alone"),
        ({"target_modules": ["up_proj"]}, "part of each routed expert.*gate_proj, down_proj"),
        ({"strategy": "hope"}, "strategy='hope': must be one of keep, offload, stage"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SizingError, match=message):
        footprint(config(), **{"rank": 16, **options})


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"num_key_value_heads": 4, "num_attention_heads": 12}, 6, "must be a multiple of num_key_value_heads=4"),
        ({"moe_intermediate_size": 18}, 4, "intermediate size of mlp.experts, which is 18"),
        ({"mlp_only_layers": [0], "intermediate_size": 49}, 2, "output size of mlp.gate_up_proj, which is 49"),
    ],
)
def test_tensor_parallelism_that_does_not_divide(change: dict[str, Any], tp: int, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        footprint(config(**change), rank=8, tensor_parallel_size=tp)


def test_experts_that_do_not_divide() -> None:
    with pytest.raises(SizingError, match=r"splits the 6 num_experts of mlp\.experts over 4 workers"):
        footprint(config(num_experts=6), rank=8, tensor_parallel_size=4, enable_expert_parallel=True)


def test_expert_parallelism_needs_experts() -> None:
    with pytest.raises(SizingError, match="needs a model with routed experts"):
        footprint("Qwen/Qwen3-8B", rank=8, tensor_parallel_size=2, enable_expert_parallel=True)
