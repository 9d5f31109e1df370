"""A real vLLM engine with dummy weights, in this process: started, run, and its slots compared to the bit."""

from __future__ import annotations

import os
from typing import Any

import torch

from lora_mem import vllm_hook

PROMPT = list(range(3, 27))

_DIGEST_CHUNK = 2**24
"""Elements at a time: half a GiB of working memory."""


def start_engine(model: str, **options: Any) -> Any:
    """A vLLM engine in this process, on the GPU where there is one, with dummy weights and LoRA.

    Args:
        model: directory with a config.json.
        options: for `vllm.LLM`, over the defaults here.
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
    """A 64-bit digest of the bits of each slot buffer: equal digests, equal slots.

    Args:
        engine: as for `vllm_hook.manager_of`; None for the only one of this process.
    """
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
