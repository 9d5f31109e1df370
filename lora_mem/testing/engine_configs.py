"""The config.json of a published model, complete enough for a real vLLM engine with dummy weights.

The built-in table holds what sizes depend on. vLLM also asks for fields that size nothing; they are added here, so that
an engine of any model of the table starts without a checkpoint, cut to a few layers if wanted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_mem.sizing.families import ARCHITECTURE_OF
from lora_mem.sizing.shapes import known_config

# Fields that size nothing but are asked for, by type of model.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "num_experts_per_tok": 6,
        "scoring_func": "softmax",
    },
    "deepseek_v3": {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
    "deepseek_v32": {
        "n_group": 8,
        "topk_group": 4,
        "num_experts_per_tok": 8,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "index_topk": 2048,
    },
    "gemma4": {"top_k_experts": 8, "sliding_window": 1024, "model_type": "gemma4_text"},
    "glm_moe_dsa": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "index_topk": 2048},
    "kimi_k2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True},
    "llama4": {"num_experts_per_tok": 1, "model_type": "llama4_text"},
    "qwen3_vl_moe": {"num_experts_per_tok": 8, "norm_topk_prob": True, "model_type": "qwen3_vl_moe_text"},
}

# vLLM looks at the tower's config although its modules get no slots.
TOWERS: dict[str, dict[str, Any]] = {"gemma4": {"vision_config": {"model_type": "gemma4_vision", "hidden_size": 1152}}}


def engine_config(
    model: str | Mapping[str, Any], layers: int | None = None, extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A config.json that vLLM starts with dummy weights.

    Args:
        model: a name of the built-in table, or the facts of another model as in its config.json.
        layers: keep so many of its layers at most; fields that list something for each layer are cut too.
        extra: more fields of the text model.

    Raises:
        SizingError: the table does not have the model.
    """
    config = known_config(model) if isinstance(model, str) else dict(model)
    kind = config["model_type"]
    config |= {"architectures": [ARCHITECTURE_OF[kind]], "torch_dtype": "bfloat16", **TOWERS.get(kind, {})}
    text = config.get("text_config", config)
    text |= {**NEEDED.get(kind, {}), **(extra or {})}
    if layers is not None:
        cut(text, layers)
    # vLLM maps the type kimi_k2 to DeepSeek's classes by the remote code's config class.
    if kind == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    return config


def cut(text: dict[str, Any], layers: int) -> None:
    """Keep the first `layers` of a text model's config, in place, also in fields that list something for each layer."""
    before = text["num_hidden_layers"]
    text["num_hidden_layers"] = min(layers, before)
    for name, value in text.items():
        by_layer = isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern"))
        if by_layer and len(value) == before:
            text[name] = value[:layers]


def engine_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options for vLLM that a model of this config needs on a GPU beside `scenarios.start_engine`'s."""
    text = config.get("text_config", config)
    return {"attention_backend": "TRITON_MLA"} if "kv_lora_rank" in text else {}
