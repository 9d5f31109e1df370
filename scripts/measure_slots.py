"""The slot buffers that a real vLLM engine allocates, beside what is predicted: one JSON line for each case.

    python scripts/measure_slots.py --list
    python scripts/measure_slots.py --output slots.jsonl [--only NAME ...] [--done EARLIER.jsonl] [--jobs 4] [--gpus 1]

Each case is a model of lora_mem's table with its layers cut, or a config of its own, and LoRA options; it runs in a
process of its own, with dummy weights, so that no checkpoint is needed. A line holds every buffer of every module with
its shape and bytes, the prediction, and whether the two are equal. vLLM allocates slots before its first forward pass;
where that pass fails here (a kernel is not installed), the buffers are measured all the same and `stopped` says why.
`--done` leaves out the cases that an earlier output has as equal. Exit code 0: all equal; 1: a difference or a failure.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import traceback
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

MARK = "MEASURED "
SECONDS = 240  # for one case: the largest loads 34 GiB of dummy weights


@dataclass(frozen=True)
class Case:
    """One engine: a known model with its layers cut (or a config of no published model), and vLLM's LoRA options."""

    name: str
    model: str
    layers: int
    lora: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)  # more fields of the text model's config
    moe_backend: str = "triton"  # as `footprint` takes it
    quantization_config: dict[str, Any] = field(default_factory=dict)

    @property
    def parallel(self) -> dict[str, Any]:
        """The part of the engine's options that sizes depend on."""
        return {name: value for name, value in self.engine.items() if "parallel" in name}

    @property
    def gpus(self) -> int:
        """GPUs that the engine takes."""
        return prod(value for name, value in self.parallel.items() if name.endswith("_size"))


QWEN3_30B = "Qwen/Qwen3-30B-A3B"
FULLY_SHARDED = {"fully_sharded_loras": True}
SHARED_OUTER = {"enable_moe_shared_loras": True}
MIXED = {"enable_mixed_moe_lora_format": True}
TP2 = {"tensor_parallel_size": 2}
MLA = {"attention_backend": "TRITON_MLA"}
SPARSE_MLA = {"attention_backend": "FLASHMLA_SPARSE"}

# Hybrid models of no published size: geometry that covers Mamba 1 and 2 beside attention, dense MLPs and experts.
HYBRID = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "mamba_d_conv": 4,
    "vocab_size": 65536,
}
FALCON_H1: dict[str, Any] = {
    **HYBRID,
    "model_type": "falcon_h1",
    "intermediate_size": 6144,
    "num_hidden_layers": 2,
    "head_dim": 128,
    "mamba_d_ssm": 3072,
    "mamba_n_heads": 48,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
}
GRANITE_HYBRID: dict[str, Any] = {
    **HYBRID,
    "model_type": "granitemoehybrid",
    "intermediate_size": 768,
    "shared_intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
    "mamba_n_heads": 64,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "position_embedding_type": "nope",
}
JAMBA: dict[str, Any] = {
    **HYBRID,
    "model_type": "jamba",
    "intermediate_size": 4096,
    "num_hidden_layers": 6,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "attn_layer_period": 4,
    "attn_layer_offset": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "mamba_d_state": 16,
    "mamba_expand": 2,
    "mamba_dt_rank": 128,
    "use_mamba_kernels": False,
}

# Large and small models in turns, so that few large ones are on the GPU at once. Slots of rank 16 unless one is given.
CASES = [
    Case("qwen3-0.6b-tied", "Qwen/Qwen3-0.6B", 4, {"max_loras": 3, "max_lora_rank": 8}),
    Case("llama-3.1-8b-r256", "meta-llama/Meta-Llama-3.1-8B", 2, {"max_loras": 2, "max_lora_rank": 256}),
    Case("qwen2.5-7b", "Qwen/Qwen2.5-7B-Instruct", 3, {"max_loras": 4, "max_lora_rank": 32}),
    Case("qwen3-235b", "Qwen/Qwen3-235B-A22B", 2, {"max_loras": 1, "max_lora_rank": 64}),
    Case("qwen3-coder-480b", "Qwen/Qwen3-Coder-480B-A35B-Instruct", 2, {"max_loras": 1}),
    Case("qwen3-30b-fully-sharded", QWEN3_30B, 2, {"max_lora_rank": 32} | FULLY_SHARDED),
    Case("qwen3-30b-shared-outer", QWEN3_30B, 2, {"max_lora_rank": 32} | SHARED_OUTER),
    Case("qwen3-30b-r320", QWEN3_30B, 2, {"max_loras": 1, "max_lora_rank": 320}),
    Case("qwen3-30b-targets", QWEN3_30B, 2, {"lora_target_modules": ["q_proj", "o_proj", "experts"]}),
    # float16 for the slots alone is refused: vLLM's kernels want them in the model's dtype.
    Case("qwen3-30b-float16", QWEN3_30B, 2, engine={"dtype": "float16"}),
    Case("mixtral-8x22b", "mistralai/Mixtral-8x22B-v0.1", 2, {"max_loras": 2}),
    Case("gpt-oss-120b", "openai/gpt-oss-120b", 2, {"max_loras": 1, "max_lora_rank": 32}),
    Case("gpt-oss-20b-mixed", "openai/gpt-oss-20b", 2, MIXED),
    Case("qwen3.5-397b", "Qwen/Qwen3.5-397B-A17B", 4, {"max_loras": 1, "max_lora_rank": 8}),
    Case("qwen3-next", "Qwen/Qwen3-Next-80B-A3B-Instruct", 4, {"max_loras": 1}),
    Case("kimi-k2", "moonshotai/Kimi-K2-Instruct", 2, {"max_loras": 1, "max_lora_rank": 8}, MLA),
    Case("deepseek-v2-lite", "deepseek-ai/DeepSeek-V2-Lite", 3, {"max_loras": 2, "max_lora_rank": 64}, MLA),
    Case(
        "minimax-m2.5",
        "MiniMaxAI/MiniMax-M2.5",
        2,
        {"max_loras": 1},
        extra={"rotary_dim": 64, "scoring_func": "sigmoid"},
    ),
    Case("nemotron-3-nano-fully-sharded", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8, FULLY_SHARDED),
    Case("glm-4.5-air", "zai-org/GLM-4.5-Air", 3, {"max_loras": 1}),
    Case("phi-4", "microsoft/phi-4", 2, {"max_loras": 2}),
    Case("llama-4-maverick", "meta-llama/Llama-4-Maverick-17B-128E-Instruct", 2),
    Case("qwen3-vl-30b", "Qwen/Qwen3-VL-30B-A3B-Instruct", 2, {"max_loras": 2, "max_lora_rank": 32}),
    Case("qwen3-vl-30b-mixed", "Qwen/Qwen3-VL-30B-A3B-Instruct", 2, MIXED),
    Case("deepseek-v3", "deepseek-ai/DeepSeek-V3", 4, {"max_loras": 2, "max_lora_rank": 32}, MLA),
    Case("gemma-4-26b", "google/gemma-4-26B-A4B", 6, {"max_loras": 2}),
    Case("falcon-h1", "", 2, {"max_loras": 2}, extra=FALCON_H1),
    Case("deepseek-v3.2", "deepseek-ai/DeepSeek-V3.2", 4, engine=SPARSE_MLA),
    Case("nemotron-3-nano-r64", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 8, {"max_lora_rank": 64}),
    Case("jamba", "", 6, extra=JAMBA),
    Case("llama-4-scout", "meta-llama/Llama-4-Scout-17B-16E-Instruct", 2, {"max_loras": 2}),
    Case("qwen3-30b-r512", QWEN3_30B, 2, {"max_loras": 1, "max_lora_rank": 512}),
    Case("glm-5", "zai-org/GLM-5", 4, engine=SPARSE_MLA),
    Case("granite-hybrid", "", 4, {"max_loras": 2}, extra=GRANITE_HYBRID),
    Case("qwen3-30b-r1", QWEN3_30B, 2, {"max_loras": 16, "max_lora_rank": 1}),
    Case("qwen1.5-moe", "Qwen/Qwen1.5-MoE-A2.7B", 2, {"max_loras": 2}),
    Case("kimi-k2-shared-outer", "moonshotai/Kimi-K2-Instruct", 2, SHARED_OUTER, MLA),
    Case("gpt-oss-20b-shared-outer", "openai/gpt-oss-20b", 2, SHARED_OUTER),
    Case("qwen3.5-35b-fully-sharded", "Qwen/Qwen3.5-35B-A3B", 4, {"max_loras": 2} | FULLY_SHARDED),
    Case(
        "gpt-oss-20b-mxfp4-marlin",
        "openai/gpt-oss-20b",
        2,
        engine={"moe_backend": "marlin"},
        moe_backend="mxfp4_marlin",
        quantization_config={"quant_method": "mxfp4"},
    ),
    Case("qwen3-30b-fp8", QWEN3_30B, 2, engine={"quantization": "fp8"}),
    Case(
        "qwen3-30b-fp8-per-block",
        QWEN3_30B,
        2,
        engine={"quantization": "fp8_per_block"},
        extra={"moe_intermediate_size": 704},
        moe_backend="fp8_per_block",
    ),
    Case(
        "qwen3-30b-gptq-marlin",
        QWEN3_30B,
        2,
        engine={"moe_backend": "auto", "dtype": "float16"},
        quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True},
    ),
    Case("mistral-small-24b", "mistralai/Mistral-Small-24B-Instruct-2501", 2, {"max_loras": 4, "max_lora_rank": 64}),
    Case("tp2-qwen3-8b", "Qwen/Qwen3-8B", 2, {"max_loras": 2}, TP2),
    Case("tp2-qwen3-30b", QWEN3_30B, 2, {"max_loras": 2}, TP2),
    Case("tp2-qwen3-30b-fully-sharded", QWEN3_30B, 2, {"max_loras": 2} | FULLY_SHARDED, TP2),
    Case("tp2-qwen3-30b-ep", QWEN3_30B, 2, {"max_loras": 2}, TP2 | {"enable_expert_parallel": True}),
    Case("tp2-qwen3.5-35b", "Qwen/Qwen3.5-35B-A3B", 4, {"max_loras": 1}, TP2),
    Case("gemma-2-9b", "google/gemma-2-9b", 2, {"max_loras": 2}),
]


def config_of(case: Case) -> dict[str, Any]:
    """The config.json of a case."""
    from lora_mem.testing import engine_config

    config = engine_config(case.model or case.extra, case.layers, case.extra)
    if case.quantization_config:
        config["quantization_config"] = case.quantization_config
    return config


def measure(case: Case) -> dict[str, Any]:
    """Start the engine of a case and list its slot buffers; runs in a process of its own."""
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    from lora_mem import testing, vllm_hook

    vllm_hook.install("keep")
    config = config_of(case)
    on_gpu = torch.cuda.is_available()
    # A small share, and a given cache: vLLM then does not measure free memory, which changes as other cases end.
    engine: dict[str, Any] = {"gpu_memory_utilization": 0.08, "kv_cache_memory_bytes": 2**29, "max_cpu_loras": None}
    if "text_config" in config:
        engine |= {"limit_mm_per_prompt": {"image": 0, "video": 0}}
    engine |= {**case.lora, **(case.engine if on_gpu else case.parallel)}
    stopped = ""
    with tempfile.TemporaryDirectory() as directory:
        model = testing.write_model(directory, config)
        try:
            llm = testing.start_engine(model, tokenizer=model, **engine)
            modules = llm.collective_rpc(_buffers)[0]
        except Exception as error:
            # The error's traceback keeps the worker alive; without a worker there is nothing to measure.
            managers = vllm_hook.live_managers()
            if len(managers) != 1:
                raise
            stopped = f"{type(error).__name__}: {error}"[:500]
            modules = _listing(managers[0])
    result = {**asdict(case), "vllm": vllm_hook.status().vllm_version, "torch": torch.__version__, "modules": modules}
    result["device"] = torch.cuda.get_device_name() if on_gpu else "cpu"
    return result | {"stopped": stopped}


def _buffers(worker: Any) -> dict[str, Any]:
    """In the worker: its listing."""
    return _listing(worker.model_runner.lora_manager)


def _listing(manager: Any) -> dict[str, Any]:
    """Every A and B buffer of every wrapped module, with its class, shapes and bytes."""
    from lora_mem.vllm_hook import lora_layers, slot_buffers

    found: dict[str, Any] = {}
    for path, module in lora_layers(manager).items():
        buffers: dict[str, Any] = {}
        for name, tensor in slot_buffers(module).items():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            buffers[name] = {"shape": list(tensor.shape), "bytes": tensor.nbytes}
        found[path] = {"class": type(module).__name__, "buffers": buffers}
    return found


def predict(case: Case) -> tuple[dict[str, dict[str, list[int]]], int]:
    """The same listing by calculation: shapes by module and buffer, and the bytes of all."""
    from lora_mem.sizing.footprints import footprint
    from lora_mem.sizing.slots import worker_slots

    rank = case.lora.get("max_lora_rank", 16)
    options = {**case.lora, **case.parallel, "rank": rank, "max_lora_rank": rank}
    options |= {"moe_backend": case.moe_backend, "dtype": case.engine.get("dtype", "bfloat16")}
    result = footprint(config_of(case), **options)
    assert result.shape
    assert result.options
    slots = worker_slots(result.shape, result.options)
    return {path: {t.name: list(t.shape) for t in tensors} for path, tensors in slots}, result.slot_bytes


def run(case: Case) -> dict[str, Any]:
    """Measure a case in a child process and set the prediction beside it, or what went wrong as `error`."""
    try:
        command = [sys.executable, __file__, "--child", case.name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if not lines:
            raise RuntimeError((done.stderr or done.stdout)[-3000:])
        result: dict[str, Any] = json.loads(lines[-1].removeprefix(MARK))
        predicted, predicted_bytes = predict(case)
    except Exception:
        return {**asdict(case), "equal": False, "error": traceback.format_exc()}
    buffers = {path: module["buffers"] for path, module in result["modules"].items()}
    measured = {path: {name: one["shape"] for name, one in found.items()} for path, found in buffers.items()}
    allocated = sum(one["bytes"] for found in buffers.values() for one in found.values())
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
    parser.add_argument("--only", nargs="*", help="names of cases; all of them by default")
    parser.add_argument("--done", type=Path, help="an earlier output: what is equal there is left out")
    parser.add_argument("--jobs", type=int, default=4, help="cases side by side (4)")
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
    unknown = set(arguments.only or ()) - set(by_name)
    if unknown or arguments.output is None:
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}" if unknown else "--output is needed")
    names = arguments.only or [case.name for case in CASES if case.gpus <= arguments.gpus]
    if arguments.done:
        earlier = [json.loads(line) for line in arguments.done.read_text(encoding="utf-8").splitlines()]
        names = [name for name in names if name not in {line["name"] for line in earlier if line["equal"]}]
    good = True
    with arguments.output.open("w", encoding="utf-8") as file, ThreadPoolExecutor(arguments.jobs) as pool:
        for future in as_completed([pool.submit(run, by_name[name]) for name in names]):
            result = future.result()
            file.write(json.dumps(result) + "\n")
            file.flush()
            good &= result["equal"]
            verdict = "equal" if result["equal"] else "DIFFERENT" if "differing" in result else "FAILED"
            note = "  (stopped after its slots were allocated)" if result.get("stopped") else ""
            print(f"{result['name']:<34} {verdict:<10} {result.get('allocated_bytes', 0):>16,} bytes{note}", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
