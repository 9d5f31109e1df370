"""The slot buffers that a real vLLM engine allocates, beside what is predicted: one JSON line for each case.

    python scripts/measure_slots.py --list
    python scripts/measure_slots.py --output slots.jsonl [--gpus 1] [--case NAME ...]

Each case is a model of lora_mem's table with its layers cut, and LoRA options; it runs in a process of its own, with
dummy weights, so that no checkpoint is needed. A line holds every buffer of every module with its shape and bytes, the
prediction, and whether the two are equal. Exit code 0: all equal; 1: a difference or a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

MARK = "MEASURED "


@dataclass(frozen=True)
class Case:
    """One engine: a known model with its layers cut, and vLLM's LoRA options."""

    name: str
    model: str
    layers: int
    lora: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # fields that transformers wants and that size nothing

    @property
    def parallel(self) -> dict[str, Any]:
        """The part of the engine's options that sizes depend on."""
        return {name: value for name, value in self.engine.items() if "parallel" in name}

    @property
    def gpus(self) -> int:
        """GPUs that the engine takes."""
        sizes = (value for name, value in self.parallel.items() if name.endswith("_size"))
        return prod(sizes)


MLA = {"attention_backend": "TRITON_MLA"}
CASES = [
    Case("qwen3-0.6b-tied", "Qwen/Qwen3-0.6B", 4, {"max_loras": 3, "max_lora_rank": 8}),
    Case("llama-3.1-8b-r256", "meta-llama/Meta-Llama-3.1-8B", 2, {"max_loras": 2, "max_lora_rank": 256}),
    Case("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", 3, {"max_loras": 4, "max_lora_rank": 32}),
    Case("qwen3-235b", "Qwen/Qwen3-235B-A22B", 2, {"max_loras": 1, "max_lora_rank": 64}),
    Case("qwen3-coder-480b", "Qwen/Qwen3-Coder-480B-A35B-Instruct", 2, {"max_loras": 1, "max_lora_rank": 16}),
    Case("qwen3-30b-fully-sharded", "Qwen/Qwen3-30B-A3B", 2, {"max_lora_rank": 32, "fully_sharded_loras": True}),
    Case("qwen3-30b-shared-outer", "Qwen/Qwen3-30B-A3B", 2, {"max_lora_rank": 32, "enable_moe_shared_loras": True}),
    Case("qwen3-30b-r320", "Qwen/Qwen3-30B-A3B", 2, {"max_loras": 1, "max_lora_rank": 320}),
    Case(
        "qwen3-30b-targets",
        "Qwen/Qwen3-30B-A3B",
        2,
        {"max_lora_rank": 16, "lora_target_modules": ["q_proj", "o_proj", "experts"]},
    ),
    Case("qwen3-30b-fp16", "Qwen/Qwen3-30B-A3B", 2, {"max_lora_rank": 16, "lora_dtype": "float16"}),
    Case("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", 2, {"max_loras": 2, "max_lora_rank": 16}),
    Case("gpt-oss-120b", "openai/gpt-oss-120b", 2, {"max_loras": 1, "max_lora_rank": 32}),
    Case("gpt-oss-20b-mixed", "openai/gpt-oss-20b", 2, {"max_lora_rank": 16, "enable_mixed_moe_lora_format": True}),
    Case("qwen3.5-397b", "Qwen/Qwen3.5-397B-A17B", 4, {"max_loras": 1, "max_lora_rank": 8}),
    Case("qwen3-next", "Qwen/Qwen3-Next-80B-A3B-Instruct", 4, {"max_loras": 1, "max_lora_rank": 16}),
    Case("kimi-k2", "moonshotai/Kimi-K2-Instruct", 2, {"max_loras": 1, "max_lora_rank": 8}, MLA),
    Case("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 3, {"max_loras": 2, "max_lora_rank": 64}, MLA),
    Case(
        "minimax-m2.5",
        "MiniMaxAI/MiniMax-M2.5",
        2,
        {"max_loras": 1, "max_lora_rank": 16},
        {},
        {"rotary_dim": 64, "scoring_func": "sigmoid"},
    ),
    Case(
        "nemotron-3-nano-fully-sharded",
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        8,
        {"max_lora_rank": 16, "fully_sharded_loras": True},
    ),
    Case("glm-4.5-air", "zai-org/GLM-4.5-Air", 3, {"max_loras": 1, "max_lora_rank": 16}),
    Case("phi-4", "microsoft/phi-4", 2, {"max_loras": 2, "max_lora_rank": 16}),
    Case("tp2-qwen3-8b", "Qwen/Qwen3-8B", 2, {"max_loras": 2}, {"tensor_parallel_size": 2}),
    Case("tp2-qwen3-30b", "Qwen/Qwen3-30B-A3B", 2, {"max_loras": 2}, {"tensor_parallel_size": 2}),
    Case(
        "tp2-qwen3-30b-fully-sharded",
        "Qwen/Qwen3-30B-A3B",
        2,
        {"max_loras": 2, "fully_sharded_loras": True},
        {"tensor_parallel_size": 2},
    ),
    Case(
        "tp2-qwen3-30b-ep",
        "Qwen/Qwen3-30B-A3B",
        2,
        {"max_loras": 2},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True},
    ),
    Case("tp2-qwen3.5-35b", "Qwen/Qwen3.5-35B-A3B", 4, {"max_loras": 1}, {"tensor_parallel_size": 2}),
    Case("gemma-2-9b", "google/gemma-2-9b", 2, {"max_loras": 2, "max_lora_rank": 16}),
]

# Fields that size nothing but without which vLLM or transformers does not start these models.
NEEDED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "topk_method": "greedy", "norm_topk_prob": False},
    "deepseek_v3": {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
    "kimi_k2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "scoring_func": "sigmoid"},
    "glm4_moe": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8, "norm_topk_prob": True},
}


def config_of(case: Case) -> dict[str, Any]:
    """The config.json of a case: the table's facts, layers cut, the architecture by name."""
    from lora_mem.families import ARCHITECTURE_OF
    from lora_mem.shapes import known_config

    config = known_config(case.model)
    kind = config["model_type"]
    config |= {
        "architectures": [ARCHITECTURE_OF[kind]],
        "torch_dtype": "bfloat16",
        **NEEDED.get(kind, {}),
        **case.extra,
    }
    text = config.get("text_config", config)
    before = text["num_hidden_layers"]
    text["num_hidden_layers"] = min(case.layers, before)
    for name, value in text.items():
        if isinstance(value, list | str) and len(value) == before:
            text[name] = value[: case.layers]
    # vLLM maps the type kimi_k2 to DeepSeek's classes by the remote code's config class.
    if kind == "kimi_k2":
        config["model_type"] = "deepseek_v3"
    return config


def measure(case: Case) -> dict[str, Any]:
    """Start the engine of a case and list its slot buffers; runs in a process of its own."""
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import vllm

    config = config_of(case)
    on_gpu = torch.cuda.is_available()
    engine: dict[str, Any] = {
        "load_format": "dummy",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "max_model_len": 512,
        "max_num_seqs": 4,
        "enable_lora": True,
        "dtype": "bfloat16",
    }
    if on_gpu:
        engine |= {"attention_backend": "TRITON_ATTN", "moe_backend": "triton"}
        # A small share and a small cache: only the slots matter, and several cases can run side by side.
        engine |= {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 2**29}
    if "text_config" in config:
        engine |= {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    engine |= {**case.lora, **(case.engine if on_gpu else case.parallel)}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config), encoding="utf-8")
        llm = vllm.LLM(model=directory, tokenizer=directory, **engine)
        modules = llm.collective_rpc(_buffers)[0]
    result = {**asdict(case), "vllm": vllm.__version__, "torch": torch.__version__, "modules": modules}
    result["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
    return result


def _buffers(worker: Any) -> dict[str, Any]:
    """In the worker: every A and B buffer of every wrapped module, with its class, shapes and bytes."""
    import torch

    found: dict[str, Any] = {}
    manager = worker.model_runner.lora_manager._adapter_manager
    for path, module in manager.modules.items():
        buffers: dict[str, Any] = {}
        for name, value in vars(module).items():
            # Of routed experts, lora_a_stacked and lora_b_stacked are lists of views of the w13 and w2 buffers.
            if not name.endswith(("lora_a_stacked", "lora_b_stacked")) or isinstance(value, list):
                continue
            for index, tensor in enumerate((value,) if isinstance(value, torch.Tensor) else value):
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
                buffers[f"{name}[{index}]"] = {"shape": list(tensor.shape), "bytes": tensor.nbytes}
        found[path] = {"class": type(module).__name__, "buffers": buffers}
    return found


def _sizing(case: Case) -> dict[str, Any]:
    """A case's options as `footprint` takes them."""
    return {**{name: value for name, value in case.lora.items() if name != "max_lora_rank"}, **case.parallel}


def predict(case: Case) -> tuple[dict[str, dict[str, list[int]]], int]:
    """The same listing by calculation: shapes by module and buffer, and the bytes of all."""
    from lora_mem.buffers import worker_slots
    from lora_mem.footprints import footprint

    result = footprint(config_of(case), rank=1, max_lora_rank=case.lora.get("max_lora_rank", 16), **_sizing(case))
    assert result.shape
    assert result.options
    slots = worker_slots(result.shape, result.options)
    return {path: {t.name: list(t.shape) for t in tensors} for path, tensors in slots}, result.slot_bytes


def run(case: Case) -> dict[str, Any]:
    """Measure a case in a child process and set the prediction beside it."""
    command = [sys.executable, __file__, "--child", case.name]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    if not lines:
        return {**asdict(case), "equal": False, "error": (done.stderr or done.stdout)[-3000:]}
    result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
    predicted, predicted_bytes = predict(case)
    measured = {
        path: {name: buffer["shape"] for name, buffer in module["buffers"].items()}
        for path, module in result["modules"].items()
    }
    allocated = sum(b["bytes"] for module in result["modules"].values() for b in module["buffers"].values())
    differing = [path for path in sorted({*predicted, *measured}) if predicted.get(path) != measured.get(path)]
    return {
        **result,
        "predicted": predicted,
        "predicted_bytes": predicted_bytes,
        "allocated_bytes": allocated,
        "differing": differing,
        "equal": not differing and predicted_bytes == allocated,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--case", nargs="*", help="names of cases; all of them by default")
    parser.add_argument("--gpus", type=int, default=1, help="leave out cases that take more GPUs, unless named")
    parser.add_argument("--output", type=Path, help="where the JSON lines go")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    by_name = {case.name: case for case in CASES}
    if arguments.list:
        print("\n".join(by_name))
        return 0
    if arguments.child:
        print(MARK + json.dumps(measure(by_name[arguments.child])), flush=True)
        return 0
    unknown = set(arguments.case or ()) - set(by_name)
    if unknown or arguments.output is None:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}" if unknown else "--output is needed")
    good = True
    with arguments.output.open("w", encoding="utf-8") as file:
        for name in arguments.case or [case.name for case in CASES if case.gpus <= arguments.gpus]:
            try:
                result = run(by_name[name])
            except Exception:
                result = {**asdict(by_name[name]), "equal": False, "error": traceback.format_exc()}
            file.write(json.dumps(result) + "\n")
            file.flush()
            good &= result["equal"]
            verdict = "equal" if result["equal"] else "DIFFERENT" if "differing" in result else "FAILED"
            print(f"{name:<34} {verdict:<10} {result.get('allocated_bytes', 0):>16,} bytes", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
