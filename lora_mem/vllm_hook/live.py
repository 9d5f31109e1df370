"""What is alive in a worker: slots, registered models, staged adapters, and where their tensors are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lora_mem.staging import offload
from lora_mem.staging.tensors import memory
from lora_mem.vllm_hook import compat
from lora_mem.vllm_hook.served import peft_helper, read_names, rename_mapper, served_model
from lora_mem.vllm_hook.state import StagedAdapter, process

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel


def holders(manager: Any) -> dict[str, dict[str, int]]:
    """Bytes by holder (slots, registered, staged) and device in one worker, read from the live tensors.

    Memory that two tensors or two holders share is counted once, for the first holder in the order slots, registered,
    staged.
    """
    seen: set[tuple[str, int]] = set()
    result = {}
    adapter_manager = manager._adapter_manager
    slots = [tensor for module in adapter_manager.modules.values() for tensor in slot_buffers(module).values()]
    result["slots"] = bytes_by_device(slots, seen)
    registered = [
        offload.read_place(place) for model in adapter_manager.list_adapters().values() for place in places(model)
    ]
    result["registered"] = bytes_by_device(registered, seen)
    result["staged"] = bytes_by_device([tensor for stage in process.staged.values() for tensor in stage.held()], seen)
    return result


def lora_layers(manager: Any) -> dict[str, Any]:
    """The LoRA layers of one worker, by module name."""
    layers: dict[str, Any] = manager._adapter_manager.modules
    return layers


def slot_buffers(module: Any) -> dict[str, torch.Tensor]:
    """The slot buffers of one LoRA layer of vLLM, by name: A and B, for all slots, without views of one another."""
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    # FusedMoEWithLoRA also has lora_a_stacked, a list of views into its w13 and w2 buffers.
    names = [n for n in vars(module) if n.endswith("_stacked")]
    for name in sorted(names, key=lambda n: not n.startswith("w")):
        value = vars(module)[name]
        for index, tensor in enumerate(value if isinstance(value, (list, tuple)) else [value]):
            storage = tensor.untyped_storage().data_ptr()
            if storage not in seen:
                seen.add(storage)
                buffers[f"{name}[{index}]"] = tensor
    return buffers


@dataclass(frozen=True)
class LiveAdapter:
    """The tensors of one adapter that are alive in a worker.

    Attributes:
        rank: `r` of its config.
        packed: those of the registered model, by vLLM's module.
        staged: those that are kept to build it again, by vLLM's module.
        block_bytes: what the block takes that the staged tensors lie in; 0 where they do not lie in one.
    """

    rank: int
    packed: dict[str, list[torch.Tensor]]
    staged: dict[str, list[torch.Tensor]]
    block_bytes: int


def live_adapters(manager: Any) -> dict[int, LiveAdapter]:
    """The adapters that a worker has registered, or that are staged in this process, by `lora_int_id`."""
    registered = manager._adapter_manager.list_adapters()
    found = {}
    for lora_int_id in sorted({*registered, *process.staged}):
        model, stage = registered.get(lora_int_id), process.staged.get(lora_int_id)
        packed: dict[str, list[torch.Tensor]] = {}
        for name, lora in {**getattr(model, "loras", {}), **getattr(model, "modules_to_save", {})}.items():
            packed[name] = [offload.read_place(place) for place in lora_places(lora)]
        staged = {} if stage is None else _staged_by_module(manager, stage)
        rank = int(stage.config["r"]) if stage is not None else registered[lora_int_id].rank
        block = stage.block.nbytes if stage is not None and stage.block is not None else 0
        found[lora_int_id] = LiveAdapter(rank, packed, staged, block)
    return found


def _staged_by_module(manager: Any, stage: StagedAdapter) -> dict[str, list[torch.Tensor]]:
    """A stage's tensors by the module of vLLM that they are packed in."""
    packed_in = {
        child: name for name, children in manager._adapter_manager.packed_modules.items() for child in children
    }
    packed_in |= {name: takes.packed_in for name, takes in served_model(manager).modules.items() if takes.packed_in}
    found: dict[str, list[torch.Tensor]] = {}
    for part, tensor in stage.parts.items():
        found.setdefault(packed_in.get(part.module, part.module), []).append(tensor)
    names = read_names(stage.tensors, peft_helper(stage.config), rename_mapper(manager._adapter_manager.model), ())
    for key, tensor in stage.tensors.items():
        module = names[key].module if key in names else key
        found.setdefault(packed_in.get(module, module), []).append(tensor)
    return found


@dataclass(frozen=True)
class LiveWorker:
    """What a worker says of itself: its device, LoRA's rank limit, the model's name, workers on this host."""

    device: torch.device
    max_lora_rank: int
    model: str
    workers_per_node: int


def live_worker(manager: Any) -> LiveWorker:
    """Facts of the worker that a LoRA manager belongs to."""
    from vllm.distributed import parallel_state

    config = manager._adapter_manager.model.config
    name = getattr(config, "architectures", None) or [type(manager._adapter_manager.model).__name__]
    size = parallel_state.get_world_group().world_size // parallel_state.get_node_count()
    return LiveWorker(torch.device(manager.device), manager.lora_config.max_lora_rank, str(name[0]), size)


def live_managers() -> list[Any]:
    """The worker LoRA managers of this process that the hook has seen and that are alive."""
    return list(process.managers)


def manager_of(engine: Any = None) -> Any:
    """The worker LoRA manager of an engine.

    Args:
        engine: an `LLM` or `LLMEngine` whose worker is in this process, a worker, a worker LoRA manager, or None for
            the only one of this process.

    Raises:
        LookupError: there is none, there are several, or its workers live in other processes.
    """
    if engine is None:
        managers = live_managers() or compat.managers_alive()
        if len(managers) != 1:
            raise LookupError(f"this process has {len(managers)} vLLM engines with LoRA; say which one is meant")
        return managers[0]
    if isinstance(engine, compat.manager_classes()):
        return engine
    core = getattr(getattr(engine, "llm_engine", engine), "engine_core", None)
    executor = getattr(getattr(core, "engine_core", None), "model_executor", None)
    worker = engine if hasattr(engine, "model_runner") else getattr(executor, "driver_worker", None)
    if worker is None:
        raise LookupError(
            f"{type(engine).__name__} has no worker in this process; measure in each worker, by"
            ' collective_rpc("lora_mem_measure") with worker_extension_cls="lora_mem.WorkerExtension"'
        )
    manager = getattr(worker.model_runner, "lora_manager", None)
    if manager is None:
        raise LookupError("the engine was started without enable_lora=True: it has no adapters")
    return manager


def places(model: LoRAModel) -> Iterator[offload.Place]:
    """Where a registered model holds its tensors: factors, single or per slice, and full modules."""
    for module in (*model.loras.values(), *getattr(model, "modules_to_save", {}).values()):
        yield from lora_places(module)


def lora_places(module: Any) -> Iterator[offload.Place]:
    """Where one module of a registered model holds its tensors."""
    if hasattr(module, "weight"):
        yield module, "weight"
        if module.bias is not None:
            yield module, "bias"
        return
    for factor in ("lora_a", "lora_b"):
        value = getattr(module, factor)
        if isinstance(value, (list, tuple)):
            if isinstance(value, tuple):
                value = list(value)
                setattr(module, factor, value)
            # By index: a _Spread puts its factors on the device when it is iterated over.
            yield from ((value, index) for index in range(len(value)) if value[index] is not None)
        elif value is not None:
            yield module, factor


def registered_model(manager: Any, lora_int_id: int) -> Any:
    """The model that vLLM has registered under an id, without touching its place in the cache."""
    return manager._adapter_manager.list_adapters().get(lora_int_id)


def registered_ids(manager: Any) -> set[int]:
    """The ids of the adapters that a worker has registered."""
    return set(manager._adapter_manager.list_adapters())


def bytes_by_device(tensors: Iterable[torch.Tensor], seen: set[tuple[str, int]] | None = None) -> dict[str, int]:
    """Bytes on each device; views of memory that was counted already (same device, same storage) are left out."""
    seen = set() if seen is None else seen
    result: dict[str, int] = {}
    for key, nbytes in memory(tensors).items():
        if key not in seen:
            seen.add(key)
            result[key[0]] = result.get(key[0], 0) + nbytes
    return result
