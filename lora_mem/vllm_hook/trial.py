"""vLLM's own code for notebooks, tests and benchmarks: adapters without an engine, dummy weights worth a comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lora_mem.vllm_hook.state import process

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel


def build_model(tensors: dict[str, torch.Tensor], config: Mapping[str, Any]) -> LoRAModel:
    """What vLLM's loader makes of tensors in memory, without an engine: not packed yet.

    Args:
        tensors: by PEFT's names, all on one device; the model aliases them where vLLM's does.
        config: PEFT's `adapter_config.json` as a dict.
    """
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    device = str(next(iter(tensors.values())).device)
    return LoRAModel.from_lora_tensors(1, tensors, PEFTHelper.from_dict(dict(config)), device=device)


def pack_without_engine(model: LoRAModel, packed_modules: dict[str, list[str]]) -> None:
    """Pack a gated or dense adapter in place, as vLLM does when it registers one.

    Args:
        model: as `build_model` returns it.
        packed_modules: for each packed module, the modules it is made of, in vLLM's order.
    """
    from vllm.lora.model_manager import LoRAModelManager

    manager = object.__new__(LoRAModelManager)  # its constructor needs the model; packing reads no more than this
    manager.modules = {}
    manager.is_pooling_model = manager._is_non_gated_moe = manager._enable_moe_shared_loras = False
    manager.packed_modules = packed_modules
    manager._create_merged_loras_inplace(model)


@contextmanager
def lively_weights() -> Iterator[None]:
    """Dummy weights as large as a trained model's, in engines that this process starts inside the `with` block.

    vLLM's own are so small, norms included, that hardly an adapter would change a token, and equal tokens would prove
    little. Changed as they are loaded: afterwards the CPU engine keeps them in a form of its own.
    """
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    def load_weights(original: Callable[..., None], loader: Any, model: Any, *args: Any, **kwargs: Any) -> None:
        original(loader, model, *args, **kwargs)
        for name, weight in model.named_parameters():
            if "norm" in name and weight.dim() == 1:
                weight.data.fill_(1)
            elif weight.dim() > 1 and weight.dtype in (torch.bfloat16, torch.float16, torch.float32):
                weight.data.mul_(50)

    with process.patches.during(DummyModelLoader, "load_weights", load_weights):
        yield
