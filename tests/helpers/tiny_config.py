"""The config.json of a tiny Qwen3-MoE model."""

from typing import Any


def config(**change: Any) -> dict[str, Any]:
    fields = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": 8,
        "vocab_size": 128,
    }
    return {**fields, **change}
