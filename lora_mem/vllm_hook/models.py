"""vLLM's own models of what is staged: made of laid-out parts as they are, or by vLLM of tensors in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lora_mem.staging import offload
from lora_mem.staging.layout import Part, shared_parts
from lora_mem.staging.tensors import view_key
from lora_mem.vllm_hook import compat
from lora_mem.vllm_hook.served import served_model
from lora_mem.vllm_hook.state import StagedAdapter, process

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.peft_helper import PEFTHelper


def model_of_parts(
    manager: Any, parts: Mapping[Part, torch.Tensor], lora_int_id: int, rank: int, *, is_3d: bool
) -> LoRAModel:
    """A model of vLLM's own classes whose tensors are the parts: scaled, and the experts already packed."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    served = served_model(manager)
    modules: dict[str, dict[tuple[int, bool], torch.Tensor]] = {}
    for part, tensor in parts.items():
        modules.setdefault(part.module, {})[part.projection, part.is_a] = tensor
    spread = {part.module for part in shared_parts(parts)}
    loras: dict[str, LoRALayerWeights] = {}
    for module, factors in modules.items():
        if module not in served.experts:
            a, b = factors[0, True], factors[0, False]
            loras[module] = LoRALayerWeights(module, a.shape[0], a.shape[0], a, b, scaling=1)
            continue
        count = served.experts[module].projections
        repeated = {2: 0} if served.experts[module].non_gated else {}
        a_list, b_list = [], []
        for projection in range(count):
            own = repeated.get(projection, projection)
            b_list.append(factors[own, False])
            # In the fused layout gate and up share one A.
            a_list.append(factors.get((own, True), factors[0, True]))
        own_rank = a_list[0].shape[-2]
        if module in spread:
            experts = served.experts[module].local_experts
            a_list = _Spread(a_list, [experts] * count, manager.device)
            b_list = _Spread(b_list, [experts] * count, manager.device)
        ranks: list[int | None] = [own_rank] * count
        loras[module] = PackedLoRALayerWeights(module, own_rank, ranks, a_list, b_list, [1.0] * count)
    return LoRAModel(lora_int_id, rank, loras, is_3d_lora_weight=is_3d)


class _Spread(list[torch.Tensor]):
    """Factors of which some are one tensor for all experts, on the host. vLLM's `set_lora` unpacks the list: then, and
    only then, these cross the link once and are spread over the experts on the device.
    """

    def __init__(self, tensors: list[torch.Tensor], experts: list[int], device: torch.device) -> None:
        super().__init__(tensors)
        self.experts = experts
        self.device = device

    def __iter__(self) -> Iterator[torch.Tensor]:
        for index, experts in enumerate(self.experts):
            tensor = self[index]
            if tensor.shape[0] == experts:
                yield tensor
            else:
                yield tensor.to(self.device, non_blocking=True).expand(experts, -1, -1)


@dataclass(frozen=True)
class StageReader:
    """Stands in for vLLM's `LoRAModel` class during one load: reads a stage instead of a file.

    An object, not a class made for the occasion: a class is a reference cycle, and would hold the tensors until a
    garbage collection.
    """

    stage: StagedAdapter
    adapter_manager: Any
    model_cls: Any

    def from_local_checkpoint(
        self,
        lora_dir: str,
        expected_lora_modules: set[str],
        peft_helper: PEFTHelper,
        *,
        device: str = "cpu",
        moe_ep_spec: Any = None,
        **kwargs: Any,
    ) -> LoRAModel:
        """The arguments of vLLM's method; the tensors are built into a model where they are."""
        tensors = self.stage.tensors
        if moe_ep_spec is not None:
            from vllm.lora.lora_model import _is_remote_expert_key

            tensors = {key: t for key, t in tensors.items() if not _is_remote_expert_key(key, moe_ep_spec)}
        devices = {tensor.device for tensor in tensors.values()}
        if len(devices) > 1:
            # pack_moe stacks the experts of a layer, so they must be in one place; the host costs no GPU memory.
            copies = offload.HostCopies()
            tensors = dict(zip(tensors, copies.of(list(tensors.values()), pin=compat.pins_memory()), strict=True))
            copies.close()
            devices = {torch.device("cpu")}
        model: LoRAModel = self.model_cls.from_lora_tensors(
            tensors=tensors, peft_helper=peft_helper, device=str(next(iter(devices), "cpu")), **kwargs
        )
        fold_scaling(model, self.adapter_manager, peft_helper)
        return model


def fold_scaling(model: LoRAModel, adapter_manager: Any, peft_helper: PEFTHelper) -> None:
    """Multiply B by the scaling out of place: vLLM's `optimize()` does it in place, on tensors that alias the stage.

    The same product in the same dtype, so the same bits. Left to vLLM are experts that `pack_moe` copies first: 2D
    experts that all have one scaling.
    """
    copied: set[str] = set()
    if not (peft_helper.rank_pattern or peft_helper.alpha_pattern or adapter_manager._enable_moe_shared_loras):
        for runtime_module, children in adapter_manager.packed_modules.items():
            if runtime_module.endswith(".experts"):
                copied.update(children)
    folded: dict[tuple[Any, ...], torch.Tensor] = {}
    for module, lora in model.loras.items():
        if lora.scaling == 1 or lora.lora_b is None or module in copied:
            continue
        key = (*view_key(lora.lora_b), lora.scaling)  # aliases stay aliases
        if key not in folded:
            folded[key] = lora.lora_b * lora.scaling
        lora.lora_b = folded[key]
        lora.scaling = 1


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
