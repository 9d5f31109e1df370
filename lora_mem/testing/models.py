"""Models for engines with dummy weights: tiny ones, and any of the built-in table.

The table holds what sizes depend on. vLLM asks for more fields, which size nothing; `engine_config` adds them, so that
an engine of any model of the table starts without a checkpoint, cut to a few layers if wanted.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lora_mem.errors import SizingError
from lora_mem.sizing.families import known
from lora_mem.sizing.shapes import known_config, known_models

TINY_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""A dense model of 3 million parameters: vLLM's CPU engine serves it with LoRA."""

TINY_MOE: dict[str, Any] = {
    **TINY_DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""The same with 16 routed experts a layer: LoRA on experts needs a GPU."""

QWEN3_30B_A3B: dict[str, Any] = {
    **TINY_MOE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
"""The geometry of Qwen/Qwen3-30B-A3B."""

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
        model: "tiny", a name of the built-in table, a path to a config.json or its directory, or the facts of another
            model as in its config.json.
        layers: keep so many of its layers; fields that list something for each layer are cut too.
        extra: more fields of the text model.

    Raises:
        SizingError: there is no such model, or it has fewer layers.
    """
    if model in ("tiny", "Qwen/Qwen3-30B-A3B"):
        config = dict(QWEN3_30B_A3B if model != "tiny" else TINY_MOE if torch.cuda.is_available() else TINY_DENSE)
    elif not isinstance(model, str) or model in known_models():
        config = _completed(known_config(model) if isinstance(model, str) else copy.deepcopy(dict(model)))
    else:
        path = Path(model)
        try:
            config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        except (OSError, ValueError):
            allowed = (
                "must be 'tiny', a name of the built-in table, such as Qwen/Qwen3-30B-A3B, or a path to a config.json"
            )
            raise SizingError("model", model, allowed) from None
    text = config.get("text_config", config)
    text |= extra or {}
    if layers is not None:
        if not 1 <= layers <= text["num_hidden_layers"]:
            raise SizingError("layers", layers, f"must be 1 to {text['num_hidden_layers']}, which the model has")
        _cut(text, layers)
    return config


def _completed(config: dict[str, Any]) -> dict[str, Any]:
    """The facts of a model with the fields that vLLM asks for besides."""
    kind = config["model_type"]
    config |= {"architectures": [known().model_types[kind]], "torch_dtype": "bfloat16", **TOWERS.get(kind, {})}
    text = config.get("text_config", config)
    text |= NEEDED.get(kind, {})
    # vLLM maps the type kimi_k2 to DeepSeek's classes by the remote code's config class.
    if kind == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    return config


def _cut(text: dict[str, Any], layers: int) -> None:
    before, text["num_hidden_layers"] = text["num_hidden_layers"], layers
    for name, value in text.items():
        by_layer = isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern"))
        if by_layer and len(value) == before:
            text[name] = value[:layers]


def engine_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Options for vLLM that a model of this config needs on a GPU beside `start_engine`'s."""
    text = config.get("text_config", config)
    return {"attention_backend": "TRITON_MLA"} if "kv_lora_rank" in text else {}


def experts_at_hand() -> dict[str, Any]:
    """What notebooks pack and move: Qwen3-30B-A3B's geometry, whole on a GPU, else cut to 2 layers of 16 experts."""
    return (
        dict(QWEN3_30B_A3B)
        if torch.cuda.is_available()
        else QWEN3_30B_A3B | {"num_hidden_layers": 2, "num_experts": 16}
    )


def engine_at_hand() -> dict[str, Any]:
    """What notebooks serve: Qwen3-30B-A3B's geometry on a GPU, else a tiny dense model, as vLLM's CPU engine takes."""
    return dict(QWEN3_30B_A3B if torch.cuda.is_available() else TINY_DENSE)


def device_at_hand() -> str:
    """Where adapters arrive: "cuda", or "cpu" without a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def write_model(directory: str | Path, config: dict[str, Any]) -> str:
    """A model directory that holds a config.json only: vLLM makes the weights (`load_format="dummy"`)."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)
