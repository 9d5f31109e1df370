"""Real vLLM engines with dummy weights in this process, of tiny models and of any in the built-in table; their output.

The table holds what sizes depend on. vLLM asks for more fields, which size nothing; `engine_config` adds them, so that
an engine of any model of the table starts without a checkpoint, cut to a few layers if wanted.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lora_mem import vllm_hook
from lora_mem.errors import SizingError
from lora_mem.sizing.families import known
from lora_mem.sizing.shapes import known_config, known_models

PROMPT = list(range(3, 27))

_DIGEST_CHUNK = 2**24
"""Elements at a time: half a GiB of working memory."""

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
_GROUPED = {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8}
_V3 = {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "scoring_func": "sigmoid"}
_V2 = {"num_experts_per_tok": 6, "topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax"}
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": _GROUPED | _V2,
    "deepseek_v3": _V3,
    "deepseek_v32": _V3 | {"topk_method": "noaux_tc", "index_topk": 2048},
    "gemma4": {"top_k_experts": 8, "sliding_window": 1024, "model_type": "gemma4_text"},
    "glm_moe_dsa": _GROUPED | {"index_topk": 2048},
    "kimi_k2": _GROUPED | {"scoring_func": "sigmoid"},
    "glm4_moe": _GROUPED | {"norm_topk_prob": True},
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
            allowed = "must be 'tiny', a name of the built-in table, e.g. Qwen/Qwen3-8B, or a path to a config.json"
            raise SizingError("model", model, allowed) from None
    text = config.get("text_config", config)
    text |= extra or {}
    if layers is not None:
        if not 1 <= layers <= text["num_hidden_layers"]:
            raise SizingError("layers", layers, f"must be 1 to {text['num_hidden_layers']}, which the model has")
        before, text["num_hidden_layers"] = text["num_hidden_layers"], layers
        for name, value in text.items():
            by_layer = isinstance(value, list) or (isinstance(value, str) and name.endswith("pattern"))
            if by_layer and len(value) == before:
                text[name] = value[:layers]
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


def experts_at_hand() -> dict[str, Any]:
    """What notebooks pack and move: Qwen3-30B-A3B's geometry, whole on a GPU, else cut to 2 layers of 16 experts."""
    return QWEN3_30B_A3B | ({} if torch.cuda.is_available() else {"num_hidden_layers": 2, "num_experts": 16})


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


def start_engine(model: str, **options: Any) -> Any:
    """A vLLM engine in this process, on the GPU where there is one, with dummy weights and LoRA.

    `model` is a directory with a config.json; `options` are for `vllm.LLM`, over the defaults here.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker in this process, where the hook is
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        # Log-probabilities go through torch.compile, also in an eager engine: it needs a C++ compiler, and seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        torch.set_num_threads(1)  # for a model this small, several threads mostly wait for each other
    from vllm import LLM

    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 16,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "dtype": "bfloat16",
        "disable_log_stats": True,
    }
    if torch.cuda.is_available():
        # One backend on every NVIDIA GPU, so that a run can be repeated elsewhere.
        defaults |= {"attention_backend": "TRITON_ATTN", "moe_backend": "triton", "gpu_memory_utilization": 0.3}
    with vllm_hook.lively_weights():
        return LLM(model, **(defaults | options))


def generate(llm: Any, request: Any, max_tokens: int = 8) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities for a fixed prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, detokenize=False, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": PROMPT}, sampling, lora_request=request, use_tqdm=False)[0].outputs[0]
    tokens = list(output.token_ids)
    return tokens, [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]


def slot_digests(engine: Any = None) -> dict[str, int]:
    """A 64-bit digest of the bits of each slot buffer of an engine, as `vllm_hook.manager_of` takes it."""
    return {
        f"{module}.{name}": _digest(buffer)
        for module, layer in vllm_hook.lora_layers(vllm_hook.manager_of(engine)).items()
        for name, buffer in vllm_hook.slot_buffers(layer).items()
    }


def one_digest(digests: dict[str, int]) -> str:
    """One digest for all buffers, in hexadecimal."""
    return f"{sum(digests.values()) % 2**64:016x}"


def _digest(tensor: torch.Tensor) -> int:
    """A 64-bit digest of a contiguous tensor's bits and their order, computed where the tensor is."""
    bits = tensor.contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = 0
    for start in range(0, bits.numel(), _DIGEST_CHUNK):
        part = bits[start : start + _DIGEST_CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64)
        # Odd multipliers keep every bit; int64 overflow wraps.
        total += int(((part + 40503) * (places * 2654435761 + 1) * 2862933555777941757).sum())
    return total % 2**64


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def device_memory() -> tuple[int, int]:
    """Bytes of GPU memory that torch has allocated and reserved; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
