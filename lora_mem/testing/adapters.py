"""Random adapters by PEFT's names, saved, and built and packed by vLLM's own code without an engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_mem import vllm_hook
from lora_mem.sizing.modules import Experts
from lora_mem.sizing.serving import ServedModule
from lora_mem.sizing.shapes import ModelShape
from lora_mem.testing.engines import synchronize

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel

PREFIX = "base_model.model."
Adapter = tuple[dict[str, torch.Tensor], dict[str, Any]]
"""Tensors by PEFT's names, and the adapter's config."""


def everything(module: str) -> bool:
    """For `wanted`: all modules."""
    return True


def is_expert(module: str) -> bool:
    """Whether a module belongs to the routed experts of a layer."""
    return ".experts." in module or module.endswith(".experts")


def modules_named(*suffixes: str) -> Callable[[str], bool]:
    """For `wanted`: modules whose last name is one of these; `experts` means all of the routed experts."""
    return lambda module: module.rpartition(".")[2] in suffixes or ("experts" in suffixes and is_expert(module))


def random_adapter(
    engine: Any = None,
    *,
    rank: int,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    alpha: float | None = None,
    wanted: Callable[[str], bool] = everything,
    **config: Any,
) -> Adapter:
    """Random factors, by PEFT's names, for the modules that an engine serves with LoRA, and the adapter's config.

    Args:
        engine: as for `vllm_hook.manager_of`; None for the only one of this process.
        rank: of every module.
        seed: of the values.
        device: where to make them.
        dtype: of the factors.
        alpha: `lora_alpha`; default 2 * rank, so that the scaling is not 1.
        wanted: which modules, by their name in the model.
        config: more fields of PEFT's config.
    """
    served = vllm_hook.served_model(vllm_hook.manager_of(engine)).modules
    names: dict[str, tuple[int, ...]] = {}
    for module, takes in served.items():
        if wanted(module) and takes.in_features is not None and takes.out_features is not None:
            names |= factor_shapes(module, takes, rank)
    tensors, plain = _random(names, rank, seed, device, dtype)
    return tensors, plain | ({} if alpha is None else {"lora_alpha": alpha}) | config


def experts_adapter(shape: ModelShape, *, rank: int, seed: int, device: str | torch.device = "cpu") -> Adapter:
    """Random factors for a model's routed experts, which must be gated: as `random_adapter`, but without an engine."""
    names: dict[str, tuple[int, ...]] = {}
    for path, module in shape.modules():
        if not isinstance(module, Experts):
            continue
        if module.layout != "gated":
            raise ValueError(f"the experts of {path} are {module.layout}; here they must be gated")
        hidden, inner = module.hidden_size, module.intermediate_size
        for expert in range(module.num_experts):
            # w1, w2, w3
            for child, ins, outs in zip(module.children, (hidden, inner, hidden), (inner, hidden, inner), strict=True):
                name = f"{PREFIX}{path}.{expert}.{child}"
                names |= {f"{name}.lora_A.weight": (rank, ins), f"{name}.lora_B.weight": (outs, rank)}
    return _random(names, rank, seed, device, torch.bfloat16)


def factor_shapes(module: str, takes: ServedModule, rank: int) -> dict[str, tuple[int, ...]]:
    """Shapes of A and B, by PEFT's names, for a module that says what it takes."""
    assert takes.in_features is not None
    assert takes.out_features is not None
    a: tuple[int, ...] = (takes.experts * rank, takes.in_features)
    b: tuple[int, ...] = (takes.out_features, takes.experts * rank)
    if takes.stacked is not None:
        a, b = (takes.stacked[0][0], *a), (takes.stacked[1][0], *b)
    names = ("embedding_A", "embedding_B") if module.endswith("embed_tokens") else ("A.weight", "B.weight")
    return {f"{PREFIX}{module}.lora_{name}": shape for name, shape in zip(names, (a, b), strict=True)}


def _random(
    shapes: dict[str, tuple[int, ...]], rank: int, seed: int, device: str | torch.device, dtype: torch.dtype
) -> Adapter:
    generator = torch.Generator(device=device).manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator, device=device).mul_(0.05).to(dtype)
        for name, shape in shapes.items()
    }
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": targets}
    return tensors, config


def save_adapter(directory: str | Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    """Write an adapter as PEFT does, for vLLM's own loader."""
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    # clone: safetensors refuses tensors that share memory
    save_file({name: t.cpu().clone().contiguous() for name, t in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


build_with_vllm = vllm_hook.build_model


def pack_with_vllm(shape: ModelShape, model: LoRAModel) -> LoRAModel:
    """Pack an adapter of a model of this shape as vLLM does when it registers it: in place, by vLLM's own code, without
    an engine.
    """
    packed_modules: dict[str, list[str]] = {}
    for path, module in shape.modules():
        if isinstance(module, Experts):
            names = [f"{path}.{expert}.{child}" for expert in range(module.num_experts) for child in module.children]
            packed_modules[path] = names
        elif len(module.children) > 1:
            parent = path.rpartition(".")[0]
            packed_modules[path] = [f"{parent}.{child.name}" for child in module.children]
    vllm_hook.pack_without_engine(model, packed_modules)
    return model


def factors(model: LoRAModel) -> dict[str, torch.Tensor]:
    """The tensors of a `LoRAModel`, packed or not, by module and factor."""
    found: dict[str, torch.Tensor] = {}
    for module, lora in model.loras.items():
        for factor in ("lora_a", "lora_b"):
            value = getattr(lora, factor)
            for index, tensor in enumerate(value if isinstance(value, list) else [value]):
                found[f"{module}.{factor}[{index}]" if isinstance(value, list) else f"{module}.{factor}"] = tensor
    return found


def copy_one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Host copies as a loader makes them that moves one tensor at a time, each in memory that torch pins for it."""
    pin = torch.cuda.is_available()
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    synchronize()
    return copies
