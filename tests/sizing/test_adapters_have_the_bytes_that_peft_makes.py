"""PEFT as an independent witness: adapters that it creates on transformers models have the predicted bytes.

Models are built on torch's meta device from configs, so that they have their real sizes and take no memory.
"""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

from lora_mem.sizing.adapters import read_adapter  # noqa: E402
from lora_mem.sizing.footprints import footprint  # noqa: E402

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]


def config_of(kind: str, **fields: Any) -> Any:
    return transformers.CONFIG_MAPPING[kind](**fields)


def adapter_tensors(config: Any, **lora: Any) -> dict[str, Any]:
    """The tensors that PEFT would save for an adapter on a model of this config; PEFT makes them float32."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **lora))
        return dict(peft.get_peft_model_state_dict(model))


def nbytes(tensors: dict[str, Any]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


DENSE: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64},
    "qwen2": {"hidden_size": 896, "num_attention_heads": 14, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "gemma2": {"hidden_size": 2304, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "phi3": {"hidden_size": 3072, "num_attention_heads": 32, "num_key_value_heads": 32, "pad_token_id": 0},
}


@pytest.mark.parametrize("kind", DENSE)
@pytest.mark.parametrize("rank", [1, 13, 64])
def test_all_linear_on_dense_models(kind: str, rank: int) -> None:
    config = config_of(kind, num_hidden_layers=3, intermediate_size=2816, **DENSE[kind])
    tensors = adapter_tensors(config, r=rank, target_modules="all-linear")
    assert footprint(config.to_dict(), rank=rank, dtype="float32", strategy="offload").staged_bytes == nbytes(tensors)


def test_targets_and_rank_pattern() -> None:
    config = config_of("qwen3", num_hidden_layers=4, intermediate_size=2816, **DENSE["qwen3"])
    pattern = {"layers.1.self_attn.q_proj": 32, "down_proj": 2}
    targets = ["q_proj", "v_proj", "down_proj"]
    tensors = adapter_tensors(config, r=8, target_modules=targets, rank_pattern=pattern)
    common: dict[str, Any] = {"target_modules": targets, "dtype": "float32", "strategy": "offload"}
    predicted = footprint(config.to_dict(), rank=8, rank_pattern=pattern, **common)
    assert predicted.staged_bytes == nbytes(tensors)
    assert predicted.options
    assert predicted.options.max_lora_rank == 32


def test_embeddings_and_lm_head() -> None:
    config = config_of(
        "qwen3", num_hidden_layers=2, intermediate_size=2816, tie_word_embeddings=False, **DENSE["qwen3"]
    )
    targets = ["embed_tokens", "lm_head"]
    tensors = adapter_tensors(config, r=8, target_modules=targets)
    # PEFT saves a copy of the base embeddings beside the factors; vLLM skips it.
    factors = {name: tensor for name, tensor in tensors.items() if "base_layer" not in name}
    predicted = footprint(config.to_dict(), rank=8, target_modules=targets, dtype="float32", strategy="offload")
    assert predicted.staged_bytes == nbytes(factors)


MOE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "moe_intermediate_size": 192,
        "num_experts": 16,
    },
    "gpt_oss": {
        "hidden_size": 576,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 320,
        "num_local_experts": 8,
    },
}


@pytest.mark.parametrize("kind", MOE)
def test_fused_experts(kind: str) -> None:
    """transformers 5 holds routed experts as parameters; PEFT reaches them by `target_parameters`."""
    config = config_of(kind, num_hidden_layers=2, **MOE[kind])
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    tensors = adapter_tensors(config, r=4, target_modules=ATTENTION, target_parameters=parameters)
    fields = config.to_dict()
    # The model holds its experts in one tensor each: for Qwen3-MoE that is the adapter's format, not the model's.
    options = {} if kind == "gpt_oss" else {"enable_mixed_moe_lora_format": True, "is_3d_lora_weight": True}
    fields["architectures"] = ["GptOssForCausalLM" if kind == "gpt_oss" else "Qwen3MoeForCausalLM"]
    common: dict[str, Any] = {"target_modules": [*ATTENTION, "experts"], "dtype": "float32", "strategy": "offload"}
    predicted = footprint(fields, rank=4, **common, **options)
    assert predicted.staged_bytes == nbytes(tensors)


def save(directory: Path, tensors: dict[str, Any], config: dict[str, Any]) -> None:
    """An adapter's directory whose weights file has a true header and a hole for the data."""
    names = {torch.bfloat16: "BF16", torch.float32: "F32"}
    header: dict[str, Any] = {}
    offset = 0
    for name, tensor in tensors.items():
        entry = {"dtype": names[tensor.dtype], "shape": list(tensor.shape)}
        header[name] = {**entry, "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)
    (directory / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_adapter_of_pefts_is_read_and_sized(kind: str, tmp_path: Path) -> None:
    config = config_of(kind, num_hidden_layers=3, intermediate_size=2816, **DENSE[kind])
    pattern = {"layers.0.mlp.up_proj": 24}
    tensors = adapter_tensors(config, r=8, target_modules="all-linear", rank_pattern=pattern)
    save(tmp_path, tensors, {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", "rank_pattern": pattern})
    adapter = read_adapter(tmp_path)
    assert adapter.staged_bytes == nbytes(tensors)
    check = adapter.check(config.to_dict())
    assert check.ok, check
    of_adapter = adapter.footprint(config.to_dict(), strategy="offload")
    common: dict[str, Any] = {
        "rank": 8,
        "scaling": 2,
        "max_lora_rank": 32,
        "dtype": "float32",
        "lora_dtype": "bfloat16",
        "strategy": "offload",
    }
    by_rule = footprint(config.to_dict(), rank_pattern=pattern, **common)
    assert of_adapter.packed_bytes == by_rule.packed_bytes > footprint(config.to_dict(), **common).packed_bytes
    assert of_adapter.staged_bytes == by_rule.staged_bytes == nbytes(tensors)
    assert of_adapter.slot_bytes == by_rule.slot_bytes
    assert of_adapter.host_pinned_bytes == by_rule.host_pinned_bytes


def test_a_dict_of_tensors_counts_aliases_once() -> None:
    a, b = torch.zeros(4, 32), torch.zeros(32, 4)
    prefix = "base_model.model.model.layers"
    tensors = {
        f"{prefix}.0.self_attn.q_proj.lora_A.weight": a,
        f"{prefix}.0.self_attn.q_proj.lora_B.weight": b,
        f"{prefix}.0.self_attn.k_proj.lora_A.weight": a,  # the same memory
        f"{prefix}.0.self_attn.k_proj.lora_B.weight": b.clone(),
    }
    adapter = read_adapter(tensors, {"r": 4, "lora_alpha": 8})
    assert adapter.staged_bytes == a.nbytes + 2 * b.nbytes
