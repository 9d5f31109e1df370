"""The hook: in-memory adapters in vLLM, and off the GPU once vLLM's LoRA slots hold them.

The only module that knows vLLM. It wraps `_load_adapter` and `add_adapter` of vLLM's two worker LoRA managers, which
are separate definitions: `LRUCacheWorkerLoRAManager.add_adapter` does not call `super()`. vLLM itself is imported when
it is first needed, so that vLLM's plugin loader can import this module for nothing.
"""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch

from lora_mem import offload, staging
from lora_mem.staging import AdapterError, ServedModel, ServedModule, StagedAdapter, TensorName

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

TESTED_VLLM = ("0.32.0", "0.33.0")
"""The first and the last vLLM release that the tests ran against."""

SCHEME = "lora-mem://"
"""A request of ours has this in place of a directory: `lora-mem://<lora_int_id>/<version>`.

vLLM hashes a request's name and path into its prefix cache, so a new version never meets the old one's KV blocks.
"""

_MANAGERS = ("WorkerLoRAManager", "LRUCacheWorkerLoRAManager")
_METHODS = ("_load_adapter", "add_adapter", "create_lora_manager")

Strategy = Literal["offload", "keep"]

_strategy: Strategy = "offload"
_originals: dict[tuple[str, str], Callable[..., Any]] = {}
_inactive_because = "install() was not called in this process"
_staged: dict[int, StagedAdapter] = {}
_managers: weakref.WeakSet[Any] = weakref.WeakSet()
_served: weakref.WeakKeyDictionary[Any, ServedModel] = weakref.WeakKeyDictionary()
_offloads: dict[int, offload.Moved] = {}

# Loads whose adapter has yet to leave the GPU: (id of the manager, adapter id). Empty but for the time of a load,
# which is what makes a repeated add_adapter of a loaded adapter cost one look at it.
_armed: set[tuple[int, int]] = set()

observers: list[Callable[[str, int], None]] = []
"""Called with ("loaded" | "added" | "offloaded", lora_int_id) once per load, never for one that is there already."""


# -------------------------------------------------------------------------------------------------- install, uninstall


def install(strategy: Strategy = "offload") -> None:
    """Wrap vLLM's worker LoRA managers in this process. Calling it again changes the strategy and nothing else.

    Args:
        strategy: "offload" moves an in-memory adapter to page-locked host memory once vLLM's slots hold it; "keep"
            leaves it on the GPU, as a loader without this package would.

    Raises:
        ValueError: an unknown strategy.
        RuntimeError: this vLLM lacks what the hook needs. Nothing was changed.
    """
    global _strategy, _inactive_because
    if strategy not in ("offload", "keep"):
        raise ValueError(f"strategy is {strategy!r}; allowed are 'offload' and 'keep'")
    classes = _manager_classes()
    for method in ("_load_adapter", "add_adapter"):
        if not any(method in vars(cls) for cls in classes):
            _inactive_because = f"vLLM {_vllm_version()} has no {method} on {' or '.join(_MANAGERS)}"
            raise RuntimeError(
                f"{_inactive_because}; tested are {TESTED_VLLM[0]} to {TESTED_VLLM[1]}. Install one of these"
            )
    _strategy = strategy
    _inactive_because = ""
    for cls in classes:
        for method in _METHODS:
            # A later vLLM may define a method on one class only; the other then inherits the wrapped one.
            original = vars(cls).get(method)
            if original is not None and not _is_ours(original):
                _originals[cls.__name__, method] = original
                setattr(cls, method, _WRAPPERS[method](original))
    _managers.update(_started_before(classes))


def uninstall() -> None:
    """Put vLLM's own methods back and forget every staged adapter. Adapters that vLLM has registered stay.

    A method that someone else has wrapped since is left as it is, and our wrapper inside it does nothing any more;
    `status()` says so.
    """
    global _inactive_because
    for cls in _manager_classes():
        for method in _METHODS:
            original = _originals.get((cls.__name__, method))
            if original is not None and _is_ours(vars(cls).get(method)):
                setattr(cls, method, original)
                del _originals[cls.__name__, method]
    _inactive_because = "uninstall() was called"
    _staged.clear()
    _armed.clear()
    _offloads.clear()
    _served.clear()


def plugin() -> None:
    """vLLM's plugin entry point: installs the hook where `LORA_MEM=1`, else does nothing.

    vLLM calls it in each of its processes, possibly more than once. A vLLM that the hook does not fit keeps running
    without it; `status()` and one log line say why.
    """
    if os.environ.get("LORA_MEM") != "1":
        return
    try:
        install()
    except Exception as error:
        logger.error("lora_mem is inactive: %s", error)


@dataclass(frozen=True)
class AdapterStatus:
    """One staged adapter: where its bytes are, and what the last offload did."""

    lora_int_id: int
    name: str
    version: int
    tensors: int
    staged_bytes: dict[str, int]
    loaded: bool
    offload: offload.Moved | None


@dataclass(frozen=True)
class HookStatus:
    """What `status()` found.

    Attributes:
        active: whether the hook handles requests in this process.
        inactive_because: why not, or "".
        strategy: what `install` was asked for.
        vllm_version: found in this process, or None where vLLM is not installed.
        in_tested_range: whether the tests ran against a release between `tested_vllm`'s two.
        wrapped: for each class, each method: "wrapped", "inherits the wrapped one", "inherits the unwrapped one", "not
            wrapped", "absent", or "wrapped, then replaced by <who>".
        engines: worker LoRA managers alive in this process.
        adapters: staged in this process.
    """

    active: bool
    inactive_because: str
    strategy: str
    vllm_version: str | None
    in_tested_range: bool
    tested_vllm: tuple[str, str]
    wrapped: dict[str, dict[str, str]] = field(default_factory=dict)
    engines: int = 0
    adapters: tuple[AdapterStatus, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def status() -> HookStatus:
    """Whether the hook is active in this process, on what, and if not why. Changes nothing and imports vLLM at most."""
    version = _vllm_version()
    wrapped: dict[str, dict[str, str]] = {}
    if version is not None:
        for cls in _manager_classes():
            wrapped[cls.__name__] = {method: _wrap_state(cls, method) for method in _METHODS}
    because = _inactive_because if version is not None else "vllm is not installed: pip install 'lora-mem[vllm]'"
    return HookStatus(
        active=not because,
        inactive_because=because,
        strategy=_strategy,
        vllm_version=version,
        in_tested_range=version is not None and TESTED_VLLM[0] <= version.split("+")[0] <= TESTED_VLLM[1],
        tested_vllm=TESTED_VLLM,
        wrapped=wrapped,
        engines=len(_managers),
        adapters=tuple(
            AdapterStatus(
                lora_int_id=stage.lora_int_id,
                name=stage.name,
                version=stage.version,
                tensors=len(stage.tensors),
                staged_bytes=_bytes_by_device(stage.tensors.values()),
                loaded=any(stage.lora_int_id in manager.list_adapters() for manager in stage.loaded_in),
                offload=_offloads.get(stage.lora_int_id),
            )
            for stage in _staged.values()
        ),
    )


# ------------------------------------------------------------------------------------------------------ stage and drop


def stage_adapter(
    lora_int_id: int,
    tensors: Mapping[str, torch.Tensor],
    adapter_config: Any,
    name: str | None = None,
    *,
    load_inplace: bool = False,
    check_finite: bool = False,
) -> LoRARequest:
    """Stage an adapter from memory; give the returned request to `LLM.generate` or `add_lora`.

    To be called in the process of vLLM's worker: in your own with `VLLM_ENABLE_V1_MULTIPROCESSING=0` and one GPU, else
    through `collective_rpc` and a worker extension (see `WorkerExtension`), in every worker.

    Args:
        lora_int_id: 1 or more; must not be in use, unless `load_inplace`.
        tensors: by PEFT's names, `base_model.model.<module>.lora_A.weight`; A `[r, in]`, B `[out, r]`; floating point;
            on a GPU or the host. They are kept, not copied, until vLLM has loaded the adapter and it was moved to the
            host: do not write to them. Ordinary host memory is copied into page-locked memory at once where there is a
            GPU; page-locked tensors are taken as they are.
        adapter_config: PEFT's `adapter_config.json` as a dict, or an object such as `peft.LoraConfig`.
        name: vLLM's `lora_name`; unique among staged adapters. Default: `lora_mem-<id>`.
        load_inplace: replace the adapter that has this id; vLLM loads it once, at the request's next step.
        check_finite: refuse NaN and Inf; reads every value.

    Raises:
        AdapterError: the adapter is refused and nothing has changed, neither vLLM's state nor what was staged. Tells
            which names, values or shapes are wrong and what is allowed.
        RuntimeError: the hook is not installed.
    """
    from vllm.lora.request import LoRARequest

    if _inactive_because:
        raise RuntimeError(
            f"the hook is not active in this process: {_inactive_because}; call lora_mem.install() first"
        )
    _check_id(lora_int_id, load_inplace=load_inplace)
    name = name or f"lora_mem-{lora_int_id}"
    same_name = [other.lora_int_id for other in _staged.values() if other.name == name]
    if same_name and same_name != [lora_int_id]:
        raise AdapterError(f"name {name!r} is in use by adapter {same_name[0]}; vLLM tells requests apart by name")
    config = staging.plain_config(adapter_config)
    staging.check_tensors(tensors, check_finite=check_finite)
    own = {key: tensor.detach() for key, tensor in tensors.items()}
    for_3d = _check_for_engines(own, config)
    # Values that the caller may overwrite must not be ours; on the GPU that would cost a copy of everything.
    if _pin_memory():
        copies = offload.HostCopies()
        on_host = [key for key, tensor in own.items() if tensor.device.type == "cpu"]
        own.update(zip(on_host, copies.of([own[key] for key in on_host], pin=True), strict=True))
        copies.close()
    stage = StagedAdapter(lora_int_id, name, config, own)
    if lora_int_id in _staged:
        stage.registered_in |= _staged[lora_int_id].registered_in
    _staged[lora_int_id] = stage
    _offloads.pop(lora_int_id, None)
    return LoRARequest(
        lora_name=name,
        lora_int_id=lora_int_id,
        lora_path=f"{SCHEME}{lora_int_id}/{stage.version}",
        load_inplace=load_inplace,
        is_3d_lora_weight=for_3d,
    )


def drop_adapter(lora_int_id: int) -> bool:
    """Forget a staged adapter, and take it out of the vLLM workers of this process that loaded it.

    No request that uses it may be running. Returns whether it was staged; an unknown id is no error.
    """
    stage = _staged.pop(lora_int_id, None)
    _offloads.pop(lora_int_id, None)
    if stage is None:
        return False
    for manager in list(stage.registered_in):
        manager.remove_adapter(lora_int_id)
    return True


def offload_in_memory_adapter(manager: Any, lora_int_id: int, *, pin: bool | None = None) -> offload.Moved:
    """Move everything of one adapter that is on the GPU to the host, except vLLM's slots.

    The hook calls it after each load. Call it yourself for an adapter that another loader built on the GPU, after
    vLLM's `add_adapter` has returned.

    Args:
        manager: the worker's LoRA manager (`model_runner.lora_manager`) that registered the adapter.
        lora_int_id: of the adapter.
        pin: into page-locked memory; None: where vLLM pins too.

    What is moved: `lora_a` and `lora_b` of each registered module (single or per slice), weights of full modules
    (`modules_to_save`), and the adapter's staged tensors. A view that several of these share is copied once. Strides
    are kept where they are dense. Afterwards allocated and reserved GPU memory no longer count the adapter.

    Raises:
        KeyError: neither registered nor staged under this id.
    """
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    registered = manager._adapter_manager.get_adapter(lora_int_id)
    stage = _staged.get(lora_int_id)
    if registered is None and stage is None:
        raise KeyError(f"adapter {lora_int_id} is neither registered with vLLM nor staged in this process")
    # Staged first: it outlives the registered model, so a view that both share must lie in the stage's block.
    groups: list[list[offload.Place]] = []
    if stage is not None:
        groups.append([(stage.tensors, key) for key in stage.tensors])
    if registered is not None:
        groups.append(list(_places(registered)))
    # vLLM reports device synchronisation inside a step unless it is announced.
    with gpu_sync_allowed():
        moved = offload.move_to_host(groups, pin=_pin_memory() if pin is None else pin)
    _offloads[lora_int_id] = moved
    return moved


def holders(manager: Any) -> dict[str, dict[str, int]]:
    """Bytes by holder (slots, registered, staged) and device in one worker, read from the live tensors.

    Memory that two tensors or two holders share is counted once, for the first holder in the order slots, registered,
    staged.
    """
    seen: set[tuple[str, int]] = set()
    result = {}
    adapter_manager = manager._adapter_manager
    slots = [tensor for module in adapter_manager.modules.values() for tensor in slot_buffers(module).values()]
    result["slots"] = _bytes_by_device(slots, seen)
    registered = [
        offload._read(place) for model in adapter_manager.list_adapters().values() for place in _places(model)
    ]
    result["registered"] = _bytes_by_device(registered, seen)
    result["staged"] = _bytes_by_device([t for stage in _staged.values() for t in stage.tensors.values()], seen)
    return result


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


release_device_memory = offload.release_device_memory


def live_managers() -> list[Any]:
    """The worker LoRA managers of this process that the hook has seen and that are alive."""
    return list(_managers)


class WorkerExtension:
    """For `worker_extension_cls="lora_mem.vllm_hook.WorkerExtension"`: the hook's functions in each worker.

    The slot can hold one class only. A host that has its own calls `lora_mem.stage_adapter` and the others from there.
    """

    def lora_mem_stage_adapter(
        self,
        lora_int_id: int,
        tensors: Mapping[str, torch.Tensor],
        adapter_config: Any,
        name: str | None = None,
        load_inplace: bool = False,
    ) -> LoRARequest:
        """`stage_adapter` in this worker; the hook is installed if it is not."""
        if _inactive_because:
            install()
        return stage_adapter(lora_int_id, tensors, adapter_config, name, load_inplace=load_inplace)

    def lora_mem_drop_adapter(self, lora_int_id: int) -> bool:
        """`drop_adapter` in this worker."""
        return drop_adapter(lora_int_id)

    def lora_mem_status(self) -> dict[str, Any]:
        """`status` of this worker, as plain values."""
        return status().to_dict()

    def lora_mem_holders(self) -> list[dict[str, dict[str, int]]]:
        """`holders` of each LoRA manager in this worker."""
        return [holders(manager) for manager in live_managers()]


# -------------------------------------------------------------------------------------------------------- the wrappers


def _wrap_load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _load_adapter(manager: Any, *args: Any, **kwargs: Any) -> Any:
        request = args[0] if args else next(iter(kwargs.values()))
        if _inactive_because or not request.lora_path.startswith(SCHEME):
            model = original(manager, request)
            # A directory's adapter is built on the host. One that is not came from another in-memory loader.
            on_device = not _inactive_because and any(offload._read(p).device.type != "cpu" for p in _places(model))
        else:
            model = _load_staged(original, manager, request)
            on_device = True
        if on_device:
            _armed.add((id(manager), request.lora_int_id))
        for observer in observers:
            observer("loaded", request.lora_int_id)
        return model

    return _mark(_load_adapter)


def _wrap_add_adapter(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def add_adapter(manager: Any, *args: Any, **kwargs: Any) -> bool:
        request = args[0] if args else next(iter(kwargs.values()))
        if request.load_inplace and not _inactive_because:
            request = _loaded_once(manager, request)
        try:
            added = original(manager, request)
        except BaseException:
            if _armed:
                _undo(manager, request.lora_int_id)
            raise
        if _armed:
            _offload_armed(manager)
        return added

    return _mark(add_adapter)


def _wrap_create_lora_manager(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def create_lora_manager(manager: Any, *args: Any, **kwargs: Any) -> Any:
        model = original(manager, *args, **kwargs)
        _managers.add(manager)
        return model

    return _mark(create_lora_manager)


_WRAPPERS = {
    "_load_adapter": _wrap_load_adapter,
    "add_adapter": _wrap_add_adapter,
    "create_lora_manager": _wrap_create_lora_manager,
}


def _mark(wrapper: Callable[..., Any]) -> Callable[..., Any]:
    wrapper.__lora_mem__ = wrapper  # type: ignore[attr-defined]
    return wrapper


def _is_ours(method: Any) -> bool:
    # By identity: someone else's functools.wraps copies our mark onto a wrapper of theirs.
    return method is not None and getattr(method, "__lora_mem__", None) is method


def _wrap_state(cls: type, method: str) -> str:
    own = vars(cls).get(method)
    ours = (cls.__name__, method) in _originals
    if own is None:
        inherited = getattr(cls, method, None)
        return "absent" if inherited is None else f"inherits the {'' if _is_ours(inherited) else 'un'}wrapped one"
    if _is_ours(own):
        return "wrapped"
    return f"wrapped, then replaced by {own.__module__}.{own.__qualname__}" if ours else "not wrapped"


def _started_before(classes: tuple[type, ...]) -> list[Any]:
    """Managers of engines that were started before `install`, and so went past the wrapped `create_lora_manager`."""
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()  # vLLM freezes what is alive after start-up, which also hides it from get_objects
    try:
        return [found for found in gc.get_objects() if issubclass(type(found), classes)]
    finally:
        if frozen:
            gc.freeze()


def _loaded_once(manager: Any, request: LoRARequest) -> LoRARequest:
    """The request without `load_inplace` where this version is loaded: vLLM keeps it, and would reload each step."""
    stage = _staged.get(request.lora_int_id)
    if stage is None or manager not in stage.loaded_in or not request.lora_path.startswith(SCHEME):
        return request
    return _changed(request, load_inplace=False)


def _offload_armed(manager: Any) -> None:
    mine = [key for key in _armed if key[0] == id(manager)]
    for key in mine:
        _armed.discard(key)
        lora_int_id = key[1]
        stage = _staged.get(lora_int_id)
        if stage is not None:
            stage.loaded_in.add(manager)
            stage.registered_in.add(manager)
        for observer in observers:
            observer("added", lora_int_id)
        if _strategy == "offload":
            offload_in_memory_adapter(manager, lora_int_id)
            for observer in observers:
                observer("offloaded", lora_int_id)


def _undo(manager: Any, lora_int_id: int) -> None:
    """After a load that failed past our checks: leave no half-activated adapter that vLLM takes for a loaded one."""
    if (id(manager), lora_int_id) in _armed:
        _armed.discard((id(manager), lora_int_id))
        manager.remove_adapter(lora_int_id)


def _load_staged(original: Callable[..., Any], manager: Any, request: LoRARequest) -> LoRAModel:
    """vLLM's own `_load_adapter`, with the staged tensors in place of a file's."""
    stage = _staged.get(request.lora_int_id)
    if stage is None:
        raise AdapterError(
            f"adapter {request.lora_int_id} ({request.lora_name}) is not staged in process {os.getpid()}, where this "
            "vLLM worker runs: it was dropped, or stage_adapter was called in another process; with several processes "
            "call it in each worker through collective_rpc"
        )
    _check_for_manager(manager, stage.tensors, stage.config)
    # vLLM reads the config from a file and the tensors through this class: both are replaced for one call.
    had_own = "_lora_model_cls" in vars(manager)
    before = manager._lora_model_cls
    manager._lora_model_cls = _StageReader(stage, manager._adapter_manager, before)
    try:
        model: LoRAModel = original(manager, _changed(request, lora_path=stage.config_directory()))
    finally:
        if had_own:
            manager._lora_model_cls = before
        else:
            del manager._lora_model_cls
    return model


@dataclass(frozen=True)
class _StageReader:
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
            tensors = dict(zip(tensors, copies.of(list(tensors.values()), pin=_pin_memory()), strict=True))
            copies.close()
            devices = {torch.device("cpu")}
        model: LoRAModel = self.model_cls.from_lora_tensors(
            tensors=tensors, peft_helper=peft_helper, device=str(next(iter(devices), "cpu")), **kwargs
        )
        _fold_scaling(model, self.adapter_manager, peft_helper)
        return model


def _fold_scaling(model: LoRAModel, adapter_manager: Any, peft_helper: PEFTHelper) -> None:
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
        key = (*offload.view_key(lora.lora_b), lora.scaling)  # aliases stay aliases
        if key not in folded:
            folded[key] = lora.lora_b * lora.scaling
        lora.lora_b = folded[key]
        lora.scaling = 1


def _changed(request: LoRARequest, **changes: Any) -> LoRARequest:
    import msgspec

    changed: LoRARequest = msgspec.structs.replace(request, **changes)
    return changed


# ----------------------------------------------------------------------------------------------- what an engine serves


def _check_id(lora_int_id: int, *, load_inplace: bool) -> None:
    if isinstance(lora_int_id, bool) or not isinstance(lora_int_id, int) or lora_int_id < 1:
        raise AdapterError(f"lora_int_id is {lora_int_id!r}; it must be an integer of 1 or more")
    if load_inplace:
        return
    how = "drop_adapter first, or pass load_inplace=True to replace it"
    if lora_int_id in _staged:
        raise AdapterError(f"lora_int_id {lora_int_id} is in use by {_staged[lora_int_id].name!r}: {how}")
    for manager in _managers:
        if lora_int_id in _registered_ids(manager):
            raise AdapterError(f"lora_int_id {lora_int_id} is in use: vLLM has an adapter of its own registered; {how}")


def _check_for_engines(tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> bool:
    """Refuse an adapter that no engine of this process could serve; returns whether its experts are fused (3D)."""
    refusals: list[AdapterError] = []
    managers = [manager for manager in _managers if hasattr(manager, "_adapter_manager")]
    for manager in managers:
        try:
            _check_for_manager(manager, tensors, config)
        except AdapterError as error:
            refusals.append(error)
    if managers and len(refusals) == len(managers):
        raise refusals[-1]
    if not managers:
        helper = _peft_helper(config)
        names = _names(tensors, helper, None, ())
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        staging.check_adapter(shapes, names, lambda module: int(helper.get_rank_and_scaling(module)[0]), None)
    return any(".experts.base_layer." in key for key in tensors)


def _check_for_manager(manager: Any, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Refuse an adapter that this worker cannot serve in full, before vLLM touches anything."""
    helper = _peft_helper(config)
    try:
        helper.validate_legal(manager.lora_config)
    except ValueError as error:
        raise AdapterError(f"vLLM refuses the adapter_config: {error}") from None
    model = manager._adapter_manager.model
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is not None and hasattr(mapper, "get_rename_mapper"):
        mapper = mapper.get_rename_mapper()
    names = _names(tensors, helper, mapper, getattr(model, "lora_skip_prefixes", None) or ())
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    served = served_model(manager)
    staging.check_adapter(shapes, names, lambda module: int(helper.get_rank_and_scaling(module)[0]), served)


def _peft_helper(config: dict[str, Any]) -> PEFTHelper:
    from vllm.lora.peft_helper import PEFTHelper

    try:
        return PEFTHelper.from_dict(config)
    except (ValueError, TypeError) as error:
        raise AdapterError(f"vLLM refuses the adapter_config: {error}") from None


def _names(
    tensors: Mapping[str, torch.Tensor], helper: PEFTHelper, mapper: Any, skip_prefixes: Any
) -> dict[str, TensorName]:
    """What each tensor's name says, read by vLLM's own parser; without those that vLLM skips."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

    full = set(helper.modules_to_save or ())
    names: dict[str, TensorName] = {}
    unreadable: list[str] = []
    for key in tensors:
        if is_base_embedding_weights(key) or (skip_prefixes and LoRAModel._should_skip_module(key, skip_prefixes)):
            continue
        try:
            module, is_a = parse_fine_tuned_lora_name(key, mapper)
            peft_module = parse_fine_tuned_lora_name(key)[0] if mapper is not None else module
        except ValueError:
            unreadable.append(key)
            continue
        names[key] = TensorName(module, peft_module, is_a, is_full=module in full)
    if unreadable:
        raise AdapterError(
            f"names that are not PEFT's: {', '.join(staging.compact(unreadable))}; a factor is called "
            "'base_model.model.<module>.lora_A.weight' or '...lora_B.weight', as peft.get_peft_model_state_dict "
            "returns it (a live model's state_dict has the adapter's name in between: 'lora_A.default.weight')"
        )
    return names


def served_model(manager: Any) -> ServedModel:
    """What a worker's LoRA modules take, read once from its live layers."""
    if manager not in _served:
        _served[manager] = _read_served_model(manager)
    return _served[manager]


def _read_served_model(manager: Any) -> ServedModel:
    from vllm.lora import layers
    from vllm.lora.utils import is_supported_lora_module
    from vllm.model_executor.models.utils import PPMissingLayer

    adapters = manager._adapter_manager
    modules: dict[str, ServedModule] = {}
    complete: dict[str, tuple[frozenset[str], ...]] = {}
    for name, layer in adapters.modules.items():
        if isinstance(layer, layers.FusedMoEWithLoRA):
            layouts = _expert_layouts(adapters, name, layer)
            for layout in layouts:
                modules.update(layout)
            complete[name] = tuple(
                frozenset(adapters._restrict_to_local_experts(name, list(layout)) if len(layout) > 3 else layout)
                for layout in layouts
            )
        else:
            modules.update(_linear_modules(adapters, name, layer))

    # Names by which vLLM also finds a module: a text-only adapter of a multimodal model, a pooling model's without
    # "model.".
    aliases = {}
    for name, module in modules.items():
        for other in getattr(adapters, "_get_text_lora_names", lambda _: [])(name):
            aliases[other] = module
        if adapters.is_pooling_model:
            aliases[name.removeprefix("model.")] = module
    modules = aliases | modules

    not_here = tuple(f"{name}." for name, layer in adapters.model.named_modules() if isinstance(layer, PPMissingLayer))
    # The deployment's target_modules leaves these without slots, by the operator's choice.
    untargeted: set[str] = set()
    if manager.lora_config.target_modules is not None:
        for name, layer in adapters.model.named_modules():
            if name not in adapters.modules and is_supported_lora_module(name, layer, adapters.supported_lora_modules):
                prefix, _, last = name.rpartition(".")
                untargeted.add(name)
                untargeted.update(f"{prefix}.{child}" for child in adapters.packed_modules_mapping.get(last, ()))

    return ServedModel(
        modules=modules,
        complete=complete,
        ignored=lambda module: module in untargeted or (bool(not_here) and f"{module}.".startswith(not_here)),
        max_lora_rank=manager.lora_config.max_lora_rank,
        expert_help=_expert_help(adapters),
    )


def _expert_layouts(adapters: Any, name: str, layer: Any) -> list[dict[str, ServedModule]]:
    """The layouts in which a layer's experts may be given: for each, module name to what it takes."""
    moe = layer.moe_config
    experts = layer.global_num_experts
    # Sizes of the checkpoint: a backend may pad both, and vLLM copies into a corner of the padded slot.
    hidden = moe.hidden_dim_unpadded or moe.hidden_dim
    per_rank = moe.intermediate_size_per_partition_unpadded or moe.intermediate_size_per_partition
    intermediate = per_rank * layer.tp_size
    multiple = layer.tp_size if layer.fully_sharded else 1
    up, down = (hidden, intermediate), (intermediate, hidden)
    children = adapters.packed_modules.get(name, [])

    if adapters._enable_moe_shared_loras:
        one, all_ = (1,), (experts,)
        return [
            {
                children[0]: ServedModule(*up, stacked=(one, all_), rank_multiple=multiple),
                children[1]: ServedModule(*down, stacked=(all_, one), rank_multiple=multiple),
                children[2]: ServedModule(*up, stacked=(one, all_), rank_multiple=multiple),
            }
        ]
    fused = {
        f"{name}.base_layer": ServedModule(hidden, 2 * intermediate, experts=experts, rank_multiple=multiple),
        name: ServedModule(intermediate, hidden, experts=experts, rank_multiple=multiple),
    }
    if not children:
        return [fused]
    # vLLM lists them expert by expert: w1 (gate), w2 (down), and w3 (up) where the MoE is gated.
    kinds = [up, down] if adapters._is_non_gated_moe else [up, down, up]
    split = {
        child: ServedModule(*kinds[index % len(kinds)], rank_multiple=multiple) for index, child in enumerate(children)
    }
    return [split, fused] if adapters._enable_mixed_moe_lora_format else [split]


def _linear_modules(adapters: Any, name: str, layer: Any) -> dict[str, ServedModule]:
    """One runtime module that is no expert layer: the adapter's modules it is made of, and what each takes."""
    from vllm.lora import layers

    base = layer.base_layer
    if isinstance(layer, layers.VocabParallelEmbeddingWithLoRA):
        return {name: ServedModule(base.org_vocab_size, base.embedding_dim)}
    if isinstance(layer, layers.LogitsProcessorWithLoRA):
        return {name: ServedModule(layer.hidden_size, base.org_vocab_size)}
    if not hasattr(base, "input_size"):
        return {name: ServedModule(None, None)}  # classification heads: vLLM checks these itself
    sizes = list(getattr(base, "output_sizes", ()) or [base.output_size])
    if hasattr(base, "total_num_kv_heads"):
        # output_sizes repeats K and V where ranks outnumber KV heads; an adapter holds each head once.
        v_head_size = getattr(base, "v_head_size", base.head_size)
        sizes = [
            base.total_num_heads * base.head_size,
            base.total_num_kv_heads * base.head_size,
            base.total_num_kv_heads * v_head_size,
        ]
    children = adapters.packed_modules.get(name)
    if not children:
        return {name: ServedModule(base.input_size, sum(sizes))}
    # Where there are more slices than names, the first name covers several (in_proj_qkv of in_proj_qkvz).
    lead = len(sizes) - len(children) + 1
    sizes = [sum(sizes[:lead]), *sizes[lead:]]
    return {child: ServedModule(base.input_size, size) for child, size in zip(children, sizes, strict=False)}


def _expert_help(adapters: Any) -> str:
    if not adapters._is_moe:
        return "This model has no routed experts"
    if adapters._is_3d_moe_model:
        return (
            "This engine takes a layer's experts fused, as 'experts.base_layer' (gate_up) and 'experts' (down); to "
            "serve per-expert adapters start vLLM with enable_mixed_moe_lora_format=True"
        )
    if adapters._enable_moe_shared_loras:
        return "This engine takes experts as 'experts.w1', 'experts.w2' and 'experts.w3' (enable_moe_shared_loras=True)"
    return (
        "This engine takes experts one by one; for fused 'experts.base_layer' and 'experts' start vLLM with "
        "enable_mixed_moe_lora_format=True"
    )


# ------------------------------------------------------------------------------------------------------------- helpers


def _places(model: LoRAModel) -> Iterator[offload.Place]:
    """Where a registered model holds its tensors: factors, single or per slice, and full modules."""
    for lora in model.loras.values():
        for factor in ("lora_a", "lora_b"):
            value = getattr(lora, factor)
            if isinstance(value, (list, tuple)):
                if isinstance(value, tuple):
                    value = list(value)
                    setattr(lora, factor, value)
                yield from ((value, index) for index, tensor in enumerate(value) if tensor is not None)
            elif value is not None:
                yield lora, factor
    for full in getattr(model, "modules_to_save", {}).values():
        yield full, "weight"
        if full.bias is not None:
            yield full, "bias"


def _registered_ids(manager: Any) -> set[int]:
    ids: set[int] = manager.list_adapters() if hasattr(manager, "_adapter_manager") else set()
    return ids


def _bytes_by_device(tensors: Any, seen: set[tuple[str, int]] | None = None) -> dict[str, int]:
    """Bytes on each device; views of memory that was counted already (same device, same storage) are left out."""
    seen = set() if seen is None else seen
    result: dict[str, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        # Views of one block are told apart by where they start; a block's own total would count its padding.
        key = (str(tensor.device), tensor.data_ptr() or id(tensor))
        if key in seen or storage.nbytes() == 0:
            continue
        seen.add(key)
        elements = tensor.numel() if 0 not in tensor.stride() else tensor[_first_of_repeats(tensor)].numel()
        result[str(tensor.device)] = result.get(str(tensor.device), 0) + elements * tensor.element_size()
    return result


def _first_of_repeats(tensor: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


def _pin_memory() -> bool:
    """Whether vLLM page-locks host memory here (not without a GPU, and not under WSL)."""
    from vllm.utils import torch_utils

    return bool(torch_utils.PIN_MEMORY)


@functools.cache
def _manager_classes() -> tuple[type, ...]:
    module = importlib.import_module("vllm.lora.worker_manager")
    return tuple(getattr(module, name) for name in _MANAGERS)


@functools.cache
def _vllm_version() -> str | None:
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError:
        return None


@contextmanager
def observed(observer: Callable[[str, int], None]) -> Iterator[None]:
    """Call `observer(phase, lora_int_id)` at each load inside the `with` block."""
    observers.append(observer)
    try:
        yield
    finally:
        observers.remove(observer)
