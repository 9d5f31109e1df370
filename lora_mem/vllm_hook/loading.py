"""What vLLM's own functions do differently while the hook is installed, from a request to the slot and off the GPU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lora_mem.errors import AdapterError
from lora_mem.staging import offload
from lora_mem.vllm_hook import compat
from lora_mem.vllm_hook.admission import check_fits, check_for_manager
from lora_mem.vllm_hook.events import span
from lora_mem.vllm_hook.live import places
from lora_mem.vllm_hook.models import StageReader, model_of_parts
from lora_mem.vllm_hook.patches import replaced
from lora_mem.vllm_hook.served import peft_helper
from lora_mem.vllm_hook.slots import activate
from lora_mem.vllm_hook.stage import SCHEME
from lora_mem.vllm_hook.state import StagedAdapter, process

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.request import LoRARequest


def load_adapter(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """In front of vLLM's `_load_adapter`: a request of ours gets a model made of what is staged."""
    request = args[0] if args else next(iter(kwargs.values()))
    ours = request.lora_path.startswith(SCHEME)
    with span("build", request.lora_int_id):
        model = load_staged(original, manager, request) if ours else original(manager, request)
    # A directory's adapter is built on the host. One that is not came from another in-memory loader.
    if ours or any(offload.read_place(place).device.type != "cpu" for place in places(model)):
        process.armed.add((id(manager), request.lora_int_id))
    return model


def add_adapter(original: Callable[..., bool], manager: Any, request: Any = None, **named: Any) -> bool:
    """In front of vLLM's `add_adapter`: once the slots hold what was loaded, everything else leaves the GPU."""
    request = request or next(iter(named.values()))
    if request.load_inplace:
        request = _loaded_once(manager, request)
    try:
        if not process.recorders or not _will_load(manager, request):
            added = original(manager, request)
        else:
            stage = process.staged.get(request.lora_int_id)
            again = stage is not None and manager in stage.loaded_in
            with span("rebuild" if again else "load", request.lora_int_id):
                added = original(manager, request)
                _offload_armed(manager)
    except BaseException:
        if process.armed:
            _undo(manager, request.lora_int_id)
        raise
    if process.armed:
        _offload_armed(manager)
    return added


def create_lora_manager(original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any) -> Any:
    """In front of vLLM's `create_lora_manager`: the manager is remembered."""
    model = original(manager, *args, **kwargs)
    process.managers.add(manager)
    return model


def pack(original: Callable[..., None], adapters: Any, model: LoRAModel) -> None:
    """In front of vLLM's packing, to save time only.

    vLLM looks for each factor of each expert by name, 18,432 of them in Qwen3-30B-A3B, which takes 13 ms of every
    rebuild; a module that is packed already has none.
    """
    narrowed: dict[str, Any] = {}
    if model in process.models:
        every = adapters.packed_modules
        narrowed = {"packed_modules": {name: every[name] for name in every if name not in model.loras}}
    with replaced(adapters, **narrowed), span("pack", model.id):
        original(adapters, model)


def activate_adapter(original: Callable[..., bool], adapters: Any, lora_id: int) -> bool:
    """In front of vLLM's activation; `LRUCacheLoRAModelManager.activate_adapter` calls `super()`, and so comes here."""
    if lora_id in adapters._active_adapters:
        return original(adapters, lora_id)
    with span("activate", lora_id):
        return activate(original, adapters, lora_id)


OF_MANAGERS: dict[str, Callable[..., Any]] = {
    "_load_adapter": load_adapter,
    "add_adapter": add_adapter,
    "create_lora_manager": create_lora_manager,
}
"""What comes in front of the worker LoRA managers' functions, on whichever class defines them."""

OF_ADAPTER_MANAGERS: dict[str, Callable[..., Any]] = {
    "_create_merged_loras_inplace": pack,
    "activate_adapter": activate_adapter,
}
"""What comes in front of the functions of what holds a worker's adapters and slots."""


def _will_load(manager: Any, request: LoRARequest) -> bool:
    return request.load_inplace or request.lora_int_id not in manager.list_adapters()


def _loaded_once(manager: Any, request: LoRARequest) -> LoRARequest:
    """The request without `load_inplace`, except for the first load of the version that it stands for.

    vLLM hands a running request over at each step, and would reload each time. One that stands for an older version
    goes on with what is loaded: the new version comes with its own request.
    """
    stage = process.staged.get(request.lora_int_id)
    if stage is None or not request.lora_path.startswith(SCHEME):
        return request
    if manager not in stage.loaded_in and request.lora_path == stage.path:
        return request
    return _changed(request, load_inplace=False)


def load_staged(original: Callable[..., Any], manager: Any, request: LoRARequest) -> LoRAModel:
    """A model of the staged parts, or vLLM's own `_load_adapter` with the staged tensors in place of a file's."""
    stage = process.staged.get(request.lora_int_id)
    if stage is None:
        raise AdapterError(
            f"adapter {request.lora_int_id} ({request.lora_name}) is not staged in process {os.getpid()}, where this "
            "vLLM worker runs: it was dropped, or stage_adapter was called in another process; with several processes "
            "call it in each worker through collective_rpc"
        )
    if stage.parts:
        if manager not in stage.fits:
            check_fits(manager, stage)
        rank = peft_helper(stage.config).r
        is_3d = request.is_3d_lora_weight
        made = model_of_parts(manager, stage.parts, stage.lora_int_id, rank, is_3d=is_3d)
        process.laid_out.add(made)
        return made_here(made, stage)
    check_for_manager(manager, stage.tensors, stage.config)
    # vLLM reads the config from a file and the tensors through this class: both are replaced for one call.
    reader = StageReader(stage, manager._adapter_manager, manager._lora_model_cls)
    with replaced(manager, _lora_model_cls=reader):
        model: LoRAModel = original(manager, _changed(request, lora_path=stage.config_directory()))
    return made_here(model, stage)


def made_here(model: LoRAModel, stage: StagedAdapter) -> LoRAModel:
    """Remember whose a model is: while it is alive, its adapter's block is in use."""
    process.models.add(model)
    stage.models.add(model)
    return model


def _changed(request: LoRARequest, **changes: Any) -> LoRARequest:
    import msgspec

    changed: LoRARequest = msgspec.structs.replace(request, **changes)
    return changed


def _offload_armed(manager: Any) -> None:
    mine = [key for key in process.armed if key[0] == id(manager)]
    for key in mine:
        process.armed.discard(key)
        lora_int_id = key[1]
        stage = process.staged.get(lora_int_id)
        if stage is not None:
            stage.loaded_in.add(manager)
            stage.registered_in.add(manager)
        if process.strategy != "keep":
            with span("offload", lora_int_id):
                offload_in_memory_adapter(manager, lora_int_id)


def _undo(manager: Any, lora_int_id: int) -> None:
    """After a load that failed past our checks: leave no half-activated adapter that vLLM takes for a loaded one."""
    if (id(manager), lora_int_id) in process.armed:
        process.armed.discard((id(manager), lora_int_id))
        manager.remove_adapter(lora_int_id)


def offload_in_memory_adapter(manager: Any, lora_int_id: int, *, pin: bool | None = None) -> offload.Moved:
    """Move everything of one adapter that is on the GPU to the host, except vLLM's slots.

    The hook calls it after each load. Call it yourself for an adapter that another loader built on the GPU, after
    vLLM's `add_adapter` has returned.

    Args:
        manager: the worker's LoRA manager (`model_runner.lora_manager`) that registered the adapter.
        lora_int_id: of the adapter.
        pin: into pinned memory; None: where vLLM pins too.

    What is moved: `lora_a` and `lora_b` of each registered module (single or per slice), weights of full modules
    (`modules_to_save`), and the adapter's staged tensors; of an adapter that a stage laid out, nothing is left to move.
    A view that several of these share is copied once. Strides are kept where they are dense. Afterwards allocated and
    reserved GPU memory no longer count the adapter.

    Raises:
        KeyError: neither registered nor staged under this id.
    """
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    registered = manager._adapter_manager.get_adapter(lora_int_id)
    stage = process.staged.get(lora_int_id)
    if registered is None and stage is None:
        raise KeyError(f"adapter {lora_int_id} is neither registered with vLLM nor staged in this process")
    groups: list[list[offload.Place]] = []
    # What a stage laid out is on the host, and is not copied once more where it could not be pinned.
    laid_out = stage is not None and bool(stage.parts) and (registered is None or registered in stage.models)
    # Staged first: it outlives the registered model, so a view that both share must lie in the stage's block.
    if stage is not None and not laid_out:
        groups.append([(stage.tensors, key) for key in stage.tensors])
    if registered is not None and not laid_out:
        groups.append(list(places(registered)))
    # vLLM reports device synchronisation inside a step unless it is announced.
    with gpu_sync_allowed():
        moved = offload.move_to_host(groups, pin=compat.pins_memory() if pin is None else pin)
        if stage is not None and stage.from_device:
            # Laid out on the host by the stage; what carried it there is unused, but still reserved.
            offload.release_device_memory()
            stage.from_device = False
    process.offloads[lora_int_id] = moved
    return moved
