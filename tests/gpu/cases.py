"""GPU cases, one a process: `python tests/gpu/cases.py NAME` prints one line of JSON."""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import lora_mem
from lora_mem import bench, testing, vllm_hook
from lora_mem.observe.profiler import phase

TINY_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

TINY_NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "hybrid_override_pattern": "ME*E",
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "ssm_state_size": 64,
    "conv_kernel": 4,
    "chunk_size": 128,
    "expand": 2,
    "mlp_hidden_act": "relu2",
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "moe_shared_expert_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


def is_split(module: str) -> bool:
    return not testing.is_expert(module) or (".experts." in module and not module.endswith(".base_layer"))


def is_fused(module: str) -> bool:
    return not testing.is_expert(module) or module.endswith((".experts", ".experts.base_layer"))


def against_directory(
    config: dict[str, Any], wanted: list[Callable[[str], bool]], extra: dict[str, Any] | None = None, **engine: Any
) -> dict[str, Any]:
    """Two adapters in turn, three times each; `wanted` for each of the two."""
    with tempfile.TemporaryDirectory() as directory:
        # Little of the GPU for each, and no look at what is free: these cases run side by side.
        model = testing.write_model(f"{directory}/model", config)
        llm = testing.start_engine(model, gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28, **engine)
        vllm_hook.install()
        manager = vllm_hook.manager_of()
        adapters = [
            testing.random_adapter(manager, rank=8, seed=seed, device="cuda", wanted=one, **(extra or {}))
            for seed, one in enumerate(wanted)
        ]
        expert_tensors = sum(testing.is_expert(name.split(".lora_")[0]) for name in adapters[0][0])
        layers = sorted({type(layer).__name__ for layer in manager._adapter_manager.modules.values()})
        rounds = {}
        for name, how in WAYS.items():
            copies = [(dict(tensors), config) for tensors, config in adapters]
            found = testing.memory_against_directory(llm, f"{directory}/{name}", copies, **how)
            rounds[name] = [asdict(one) for one in found]
            copies.clear()
    return {
        "rounds": rounds,
        "expert_tensors": expert_tensors,
        "layers": layers,
        "max_allocated": torch.cuda.max_memory_allocated(),
    }


WAYS: dict[str, dict[str, Any]] = {
    "stage": {"strategy": "stage"},
    "offload": {"strategy": "offload"},
    "fill": {"strategy": "stage", "fill_slot": True, "rounds": 1},
}


def bench_30b() -> dict[str, Any]:
    """All strategies side by side at full size, and 50 more syncs."""
    config, name = testing.QWEN3_30B_A3B, "Qwen/Qwen3-30B-A3B"
    llm = bench.start(config, max_rank=64, gpu_memory_utilization=0.62)
    return bench.run(llm, config, model=name, rank=64, syncs=3, repeats=50).to_dict()


def qwen3_30b_a3b() -> dict[str, Any]:
    """The whole geometry at rank 64: kept on the GPU, offloaded, staged."""
    with tempfile.TemporaryDirectory() as directory:
        began = time.perf_counter()
        llm = testing.start_engine(
            testing.write_model(directory, testing.QWEN3_30B_A3B),
            max_lora_rank=64,
            gpu_memory_utilization=0.62,
        )
        started = time.perf_counter() - began
        lives = [
            testing.adapter_life(llm, strategy, rank=64, wanted=testing.modules_named("experts"))
            for strategy in ("keep", "offload", "stage")
        ]
    return {"engine_seconds": started, "lives": [life.to_dict() for life in lives]}


def profiles() -> dict[str, Any]:
    """Each strategy's sync under torch's profiler: four layers of Qwen3-30B-A3B at rank 64, received by layer."""
    rank = 64
    with tempfile.TemporaryDirectory() as directory:
        config = testing.QWEN3_30B_A3B | {"num_hidden_layers": 4}
        llm = testing.start_engine(testing.write_model(directory, config), max_lora_rank=rank)
        vllm_hook.install()
        transport = bench.Transport(vllm_hook.manager_of(), rank, torch.device("cuda"))
        found: dict[str, Any] = {"packed_bytes": vllm_hook.reserve(transport.adapter_config)}
        for strategy in ("keep", "offload", "stage"):
            vllm_hook.install(strategy)
            for number in range(2):  # the first one warms up
                vllm_hook.drop_adapter(1)
                vllm_hook.release_device_memory()
                trace = Path(directory, f"{strategy}-{number}.json.gz")
                with lora_mem.profile(trace=trace, trace_ops=False) as profiler:
                    with phase("stage"):
                        if strategy == "stage":
                            request, _ = bench.stream(transport, number)
                        else:
                            request = vllm_hook.stage_adapter(1, transport.all_of(number), transport.adapter_config)
                    llm.llm_engine.add_lora(request)
            found[strategy] = profiler.result.to_dict() | {"trace_bytes": trace.stat().st_size}
            vllm_hook.drop_adapter(1)
    return found


def overlap() -> dict[str, Any]:
    """What `record_report.py` traces: a streamed sync of eight layers, each brought after work of the device."""
    sys.path.append(str(Path(__file__).parents[2] / "scripts"))
    import record_report

    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory, contextlib.chdir(directory):
        record_report.trace(found.update, tiny=False)
    return {"stage": found["trace"], "fill": found["trace_fill"]}


def measured(config: dict[str, Any] = testing.TINY_MOE, device: str = "cuda") -> dict[str, Any]:
    """What is measured less what is predicted, for each strategy: an adapter received on the GPU, experts included."""
    differences = {}
    with tempfile.TemporaryDirectory() as directory:
        model = testing.write_model(f"{directory}/model", config)
        llm = testing.start_engine(model, gpu_memory_utilization=0.05, kv_cache_memory_bytes=2**28)
        vllm_hook.install()
        manager = vllm_hook.manager_of()
        for strategy in ("keep", "offload", "stage"):
            vllm_hook.install(strategy)
            tensors, adapter_config = testing.random_adapter(
                manager, rank=8, seed=1, device=device, wanted=lambda name: name.endswith("_proj") or ".gate" in name
            )
            llm.llm_engine.add_lora(lora_mem.stage_adapter(1, tensors, adapter_config))
            del tensors
            predicted = lora_mem.footprint(config, rank=8, max_lora_rank=16, scaling=2, strategy=strategy)
            differences[strategy] = predicted.compare(lora_mem.measure(llm)).difference
            lora_mem.drop_adapter(1)
    return {"differences": differences}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "measured": measured,
    "gated_2d": lambda: against_directory(testing.TINY_MOE, [testing.everything] * 2),
    "gated_2d_patterns": lambda: against_directory(
        testing.TINY_MOE,
        [testing.modules_named("experts", "q_proj", "o_proj")] * 2,
        {"alpha_pattern": {r"experts\.3\.gate_proj": 64, "o_proj": 4}, "use_rslora": True},
    ),
    "non_gated_2d": lambda: against_directory(TINY_NEMOTRON, [testing.everything] * 2),
    "fused_3d_interleaved": lambda: against_directory(TINY_GPT_OSS, [testing.everything] * 2),
    "mixed_format": lambda: against_directory(TINY_GPT_OSS, [is_split, is_fused], enable_mixed_moe_lora_format=True),
    "shared_outer": lambda: against_directory(testing.TINY_MOE, [testing.everything] * 2, enable_moe_shared_loras=True),
    "qwen3_30b_a3b": qwen3_30b_a3b,
    "bench_30b": bench_30b,
    "profiles": profiles,
    "overlap": overlap,
}


if __name__ == "__main__":
    result = CASES[sys.argv[1]]()
    print(
        json.dumps(
            {
                "case": sys.argv[1],
                "device": torch.cuda.get_device_name(),
                "torch": torch.__version__,
                "vllm": vllm_hook.status().vllm_version,
                **result,
            }
        )
    )
