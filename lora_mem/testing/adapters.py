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
from lora_mem.testing.engine import synchronize

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel


def random_adapter(
    engine: Any = None,
    *,
    rank: int,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    alpha: float | None = None,
    wanted: Callable[[str], bool] = lambda module: True,
    **config: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
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
    served = vllm_hook.served_model(vllm_hook.manager_of(engine))
    factor = _factors(seed, device, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for module, takes in served.modules.items():
        if not wanted(module) or takes.in_features is None or takes.out_features is None:
            continue
        a, b = factor_shapes(takes, rank)
        embedding = module.rpartition(".")[2] == "embed_tokens"
        prefix = f"base_model.model.{module}."
        tensors[prefix + ("lora_embedding_A" if embedding else "lora_A.weight")] = factor(a)
        tensors[prefix + ("lora_embedding_B" if embedding else "lora_B.weight")] = factor(b)
    return tensors, _adapter_config(tensors, rank, alpha, config)


def experts_adapter(
    shape: ModelShape,
    *,
    rank: int,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    alpha: float | None = None,
    **config: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Random factors for a model's routed experts, by PEFT's names, and the adapter's config: without an engine.

    Arguments as for `random_adapter`.

    Raises:
        ValueError: an expert layer that is not gated.
    """
    factor = _factors(seed, device, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in shape.modules():
        if not isinstance(module, Experts):
            continue
        if module.layout != "gated":
            raise ValueError(f"the experts of {path} are {module.layout}; here they must be gated")
        for expert in range(module.num_experts):
            for index, child in enumerate(module.children):  # w1, w2, w3
                sizes = (module.hidden_size, module.intermediate_size)
                inputs, outputs = reversed(sizes) if index == 1 else sizes
                name = f"base_model.model.{path}.{expert}.{child}"
                tensors[f"{name}.lora_A.weight"] = factor((rank, inputs))
                tensors[f"{name}.lora_B.weight"] = factor((outputs, rank))
    return tensors, _adapter_config(tensors, rank, alpha, config)


def _factors(seed: int, device: str | torch.device, dtype: torch.dtype) -> Callable[[tuple[int, ...]], torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)

    def factor(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(0.05).to(dtype)

    return factor


def _adapter_config(
    tensors: dict[str, torch.Tensor], rank: int, alpha: float | None, more: dict[str, Any]
) -> dict[str, Any]:
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank if alpha is None else alpha, "bias": "none"}
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    return {**plain, "target_modules": targets, **more}


def factor_shapes(takes: ServedModule, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B for a module that says what it takes."""
    assert takes.in_features is not None
    assert takes.out_features is not None
    a, b = (takes.experts * rank, takes.in_features), (takes.out_features, takes.experts * rank)
    if takes.stacked is None:
        return a, b
    return (takes.stacked[0][0], *a), (takes.stacked[1][0], *b)


def save_adapter(directory: str | Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    """Write an adapter as PEFT does, for vLLM's own loader."""
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    # clone: safetensors refuses tensors that share memory
    save_file({name: t.cpu().clone().contiguous() for name, t in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def modules_named(*suffixes: str) -> Callable[[str], bool]:
    """For `wanted`: modules whose last name is one of these; `experts` means all of the routed experts."""
    chosen = set(suffixes)

    def wanted(module: str) -> bool:
        return module.rpartition(".")[2] in chosen or ("experts" in chosen and is_expert(module))

    return wanted


def everything(module: str) -> bool:
    """For `wanted`: all modules."""
    return True


def is_expert(module: str) -> bool:
    """Whether a module belongs to the routed experts of a layer."""
    return ".experts." in module or module.endswith(".experts")


build_with_vllm = vllm_hook.build_model


def pack_with_vllm(shape: ModelShape, model: LoRAModel) -> LoRAModel:
    """Pack an adapter as vLLM does when it registers it, in place and by vLLM's own code, but without an engine.

    Args:
        shape: of the model that would serve it.
        model: as `LoRAModel.from_lora_tensors` returns it.
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
    """Host copies as a loader makes them that moves one tensor at a time: each in memory of its own, pinned by
    torch where there is a GPU.
    """
    pin = torch.cuda.is_available()
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    synchronize()
    return copies
