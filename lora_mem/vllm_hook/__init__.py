"""The hook: in-memory adapters in vLLM, and off the GPU once vLLM's LoRA slots hold them.

This package is all that knows vLLM. `served` reads what an engine serves, `live` what is alive in it, `slots` makes
vLLM's models of laid-out parts and fills a slot while they arrive; here adapters are staged, loads wrapped and served.

It wraps `_load_adapter` and `add_adapter` of vLLM's two worker LoRA managers, which are separate definitions:
`LRUCacheWorkerLoRAManager.add_adapter` does not call `super()`. vLLM itself is imported when it is first needed, so
that vLLM's plugin loader can import this module for nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import importlib
import json
import logging
import os
import re
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.overrides import TorchFunctionMode

from lora_mem.errors import AdapterError
from lora_mem.sizing import rules
from lora_mem.sizing.peft_config import plain_config
from lora_mem.sizing.targets import targeted
from lora_mem.sizing.wording import compact
from lora_mem.staging import offload
from lora_mem.staging.arena import Arena
from lora_mem.staging.counters import copied
from lora_mem.staging.layout import Announced, Layout, Part, shared_parts
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.receiving import Receiver
from lora_mem.staging.tensors import check_tensors
from lora_mem.staging.views import view_key
from lora_mem.vllm_hook.live import LiveAdapter as LiveAdapter
from lora_mem.vllm_hook.live import LiveWorker as LiveWorker
from lora_mem.vllm_hook.live import bytes_by_device as bytes_by_device
from lora_mem.vllm_hook.live import holders as holders
from lora_mem.vllm_hook.live import live_adapters as live_adapters
from lora_mem.vllm_hook.live import live_managers as live_managers
from lora_mem.vllm_hook.live import live_worker as live_worker
from lora_mem.vllm_hook.live import lora_layers as lora_layers
from lora_mem.vllm_hook.live import places as places
from lora_mem.vllm_hook.live import registered_ids as registered_ids
from lora_mem.vllm_hook.live import registered_model as registered_model
from lora_mem.vllm_hook.live import slot_buffers as slot_buffers
from lora_mem.vllm_hook.served import check_config, peft_helper, read_names, rename_mapper
from lora_mem.vllm_hook.served import served_model as served_model
from lora_mem.vllm_hook.slots import NoSlot, SlotFill, activate, let_it_sleep, model_of_parts, narrowed
from lora_mem.vllm_hook.staged import StagedAdapter
from lora_mem.vllm_hook.state import laid_out as _laid_out
from lora_mem.vllm_hook.state import managers as _managers
from lora_mem.vllm_hook.state import served as _served
from lora_mem.vllm_hook.state import staged as _staged
from lora_mem.vllm_hook.trial import build_model as build_model
from lora_mem.vllm_hook.trial import lively_weights as lively_weights
from lora_mem.vllm_hook.trial import pack_without_engine as pack_without_engine

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

logger = logging.getLogger(__name__)

TESTED_VLLM = ("0.32.0", "0.33.0")
"""The first and the last vLLM release that the tests ran against."""

SCHEME = "lora-mem://"
"""A request of ours has this in place of a directory: `lora-mem://<lora_int_id>/<version>`.

vLLM hashes a request's name and path into its prefix cache, so a new version never meets the old one's KV blocks; an
old request, used again, would run the new weights on the old blocks.
"""

_MANAGERS = ("WorkerLoRAManager", "LRUCacheWorkerLoRAManager")
_METHODS = ("_load_adapter", "add_adapter", "create_lora_manager")
_PACKING, _ACTIVATING = "_create_merged_loras_inplace", "activate_adapter"

# Fields of a PEFT config that decide where an adapter's tensors go, and how many such layouts are remembered: each
# holds what was read from every tensor's name.
_SHAPING = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "modules_to_save"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),
)
_MOST_LAYOUTS = 16

Strategy = Literal["stage", "offload", "keep"]

_strategy: Strategy = "stage"
_originals: dict[tuple[str, str], Callable[..., Any]] = {}
_inactive_because = "install() was not called in this process"
_offloads: dict[int, offload.Moved] = {}
_layouts: weakref.WeakKeyDictionary[Any, dict[str, Layout]] = weakref.WeakKeyDictionary()
# Weak: a stage that its owner has lost must not block its id.
_open: weakref.WeakValueDictionary[int, Stage] = weakref.WeakValueDictionary()
# Every model that was made here and is alive: vLLM tells adapters apart by id only, and an id can change hands.
_models: weakref.WeakSet[Any] = weakref.WeakSet()

_arena = Arena()

# Loads whose adapter has yet to leave the GPU: (id of the manager, adapter id). Empty but for the time of a load,
# which is what makes a repeated add_adapter of a loaded adapter cost one look at it.
_armed: set[tuple[int, int]] = set()

observers: list[Callable[[str, int], None]] = []
"""Called with ("loaded" | "added" | "offloaded", lora_int_id) once per load, never for one that is there already."""

Recorder = Callable[[str], AbstractContextManager[Any]]
_recorders: list[Recorder] = []


# -------------------------------------------------------------------------------------------------- install, uninstall


def install(strategy: Strategy = "stage") -> None:
    """Wrap vLLM's worker LoRA managers in this process. Calling it again changes the strategy and nothing else.

    Args:
        strategy: what becomes of an in-memory adapter. "stage" lays it out in page-locked host memory as vLLM packs it,
            so that vLLM packs nothing and the GPU holds its slots only; "offload" lets vLLM pack it on the GPU and
            moves everything to the host once the slots hold it; "keep" leaves it on the GPU, as other loaders do. What
            another loader built on the GPU is moved to the host under "stage" and "offload".

    Raises:
        ValueError: an unknown strategy.
        RuntimeError: this vLLM lacks what the hook needs. Nothing was changed.
    """
    global _strategy, _inactive_because
    if strategy not in ("stage", "offload", "keep"):
        raise ValueError(f"strategy is {strategy!r}; allowed are 'stage', 'offload' and 'keep'")
    classes = _manager_classes()
    for method in ("_load_adapter", "add_adapter"):
        if not any(method in vars(cls) for cls in classes):
            _inactive_because = f"vLLM {_vllm_version()} has no {method} on {' or '.join(_MANAGERS)}"
            raise RuntimeError(
                f"{_inactive_because}; tested are {TESTED_VLLM[0]} to {TESTED_VLLM[1]}. Install one of these"
            )
    _strategy = strategy
    _inactive_because = ""
    for cls, method in _wrappable():
        # A later vLLM may define a method on one class only; the other then inherits the wrapped one.
        original = vars(cls).get(method)
        if original is not None and not _is_ours(original):
            _originals[cls.__name__, method] = original
            setattr(cls, method, _WRAPPERS[method](original))
    _managers.update(_started_before(classes))


def uninstall() -> None:
    """Put vLLM's own methods back and forget every staged adapter. Adapters that vLLM has registered stay.

    Do not use requests of ours any more: one with `load_inplace` makes vLLM look for a directory, and that error leaves
    its engine unable to go on.

    A method that someone else has wrapped since is left as it is, and our wrapper inside it does nothing any more;
    `status()` says so.
    """
    global _inactive_because
    for cls, method in _wrappable():
        original = _originals.get((cls.__name__, method))
        if original is not None and _is_ours(vars(cls).get(method)):
            setattr(cls, method, original)
            del _originals[cls.__name__, method]
    _inactive_because = "uninstall() was called"
    for stage in list(_open.values()):
        stage.abort()
    let_it_sleep()
    _staged.clear()
    _armed.clear()
    _offloads.clear()
    _served.clear()
    _layouts.clear()
    _arena.clear()


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
    """One staged adapter.

    Attributes:
        laid_out: whether it lies in host memory as vLLM packs it; else vLLM packs it at each load.
        why_not_laid_out: the reason, or "".
        tensors: how many are kept: as received, or parts where it is laid out.
        staged_bytes: their bytes, by device.
        pinned: whether all of them are page-locked.
        unpinned_because: why not, where they lie in a block; else "".
        predicted: bytes that the calculator said it takes laid out, before it came; None where it did not.
        not_predicted_because: why not: whole adapters are sized by their tensors, and not every model is known.
        filled: modules that were in vLLM's slot before its activation (`fill_slot`).
        why_not_filled: why the activation had to copy, or "".
        loaded: whether vLLM has this version registered.
        offload: what the last offload did, or None.
    """

    lora_int_id: int
    name: str
    version: int
    laid_out: bool
    why_not_laid_out: str
    tensors: int
    staged_bytes: dict[str, int]
    pinned: bool
    unpinned_because: str
    predicted: int | None
    not_predicted_because: str
    filled: int
    why_not_filled: str
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
        free_block_bytes: host memory that no adapter uses now, kept for next versions; `trim` gives it back.
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
    free_block_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def status() -> HookStatus:
    """Whether the hook is active in this process, on what, and if not why. Changes nothing and imports vLLM at most."""
    version = _vllm_version()
    wrapped: dict[str, dict[str, str]] = {}
    if version is not None:
        for cls, method in _wrappable():
            wrapped.setdefault(cls.__name__, {})[method] = _wrap_state(cls, method)
    because = _inactive_because if version is not None else "vllm is not installed: pip install 'lora-mem[vllm]'"
    return HookStatus(
        active=not because,
        inactive_because=because,
        strategy=_strategy,
        vllm_version=version,
        in_tested_range=version is not None
        and _release(TESTED_VLLM[0]) <= _release(version) <= _release(TESTED_VLLM[1]),
        tested_vllm=TESTED_VLLM,
        wrapped=wrapped,
        engines=len(_managers),
        adapters=tuple(
            AdapterStatus(
                lora_int_id=stage.lora_int_id,
                name=stage.name,
                version=stage.version,
                laid_out=bool(stage.parts),
                why_not_laid_out=stage.why_not_laid_out,
                tensors=len(stage.held()),
                staged_bytes=bytes_by_device(stage.held()),
                pinned=all(tensor.is_pinned() for tensor in stage.held()),
                unpinned_because=(stage.block.unpinned_because or "") if stage.block is not None else "",
                predicted=stage.announced.predicted if stage.announced is not None else None,
                not_predicted_because=stage.announced.not_predicted_because if stage.announced is not None else "",
                filled=0 if stage.fill is None or stage.fill.given_up_because else len(stage.fill.filled),
                why_not_filled=stage.why_not_filled if stage.fill is None else stage.fill.given_up_because,
                loaded=any(registered_model(manager, stage.lora_int_id) in stage.models for manager in stage.loaded_in),
                offload=_offloads.get(stage.lora_int_id),
            )
            for stage in _staged.values()
        ),
        free_block_bytes=_arena.free_bytes,
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
    fill_slot: bool = False,
) -> LoRARequest:
    """Stage an adapter from memory; give the returned request to `LLM.generate` or `add_lora`.

    To be called in the process of vLLM's worker: in your own with `VLLM_ENABLE_V1_MULTIPROCESSING=0` and one GPU, else
    through `collective_rpc` and a worker extension (`lora_mem.WorkerExtension`), in every worker.

    Args:
        lora_int_id: 1 or more; must not be in use, unless `load_inplace`.
        tensors: by PEFT's names, `base_model.model.<module>.lora_A.weight`; A `[r, in]`, B `[out, r]`; floating point;
            on a GPU or the host. Copied at once by "stage"; kept, not copied, by "offload" and "keep": do not write to
            them until the adapter is dropped. There, on a host with a GPU, ordinary host memory is copied into
            page-locked memory at once; page-locked tensors are taken as they are.
        adapter_config: PEFT's `adapter_config.json` as a dict, or an object such as `peft.LoraConfig`.
        name: vLLM's `lora_name`; unique among staged adapters. Default: `lora_mem-<id>`.
        load_inplace: replace the adapter that has this id; vLLM loads it once, when the returned request is first used.
            Until then requests that run go on with the version that is loaded.
        check_finite: refuse NaN and Inf, and what the cast to the slots' dtype would make Inf; reads every value.
        fill_slot: as for `open_stage`; of no effect where vLLM has to pack the adapter.

    Raises:
        AdapterError: the adapter is refused and nothing has changed, neither vLLM's state nor what was staged. Tells
            which names, values or shapes are wrong and what is allowed.
        RuntimeError: the hook is not installed.
    """
    _check_active()
    lora_int_id = _integer_id(lora_int_id)
    name = _check_id_and_name(lora_int_id, name, load_inplace=load_inplace)
    _check_fill_slot(fill_slot)
    config = plain_config(adapter_config)
    dtypes = {manager.lora_config.lora_dtype for manager in _engines()} if check_finite else set()
    check_tensors(tensors, check_finite=check_finite, cast_to=dtypes)
    own = {key: tensor.detach() for key, tensor in tensors.items()}
    engines = _engines()
    manager, why_not = engines[0] if len(engines) == 1 else None, ""
    if manager is not None:
        check_config(manager, config)
    # What was found complete in the last sync needs no second look at its names; shapes are checked on arrival.
    if manager is None or not _layout(manager, config).knows(own):
        manager, why_not = _check_for_engines(own, config)
    if _strategy != "stage":
        why_not = f"the strategy is {_strategy!r}"
    if not why_not and manager is not None:
        try:
            layout = _layout(manager, config)
            nbytes = layout.exact_nbytes(own)
        except AdapterError as error:
            why_not = str(error)
        else:
            how: dict[str, Any] = {"load_inplace": load_inplace}
            if fill_slot:
                how |= {"fill_slot": True, "parts": layout.parts_of(own)}
            with Stage(lora_int_id, name, config, manager, nbytes, **how) as stage:
                stage.add_all(own)
                return stage.commit()
    _check_not_less(lora_int_id, config, frozenset(own), laid_out=False)
    # "stage" has read everything when this returns. Otherwise GPU tensors stay the caller's, since a copy of them would
    # be a second adapter on the GPU, and what is copied to page-locked memory is ordinary host memory.
    everything = _strategy == "stage"
    if everything or _pin_memory():
        copies = offload.HostCopies()
        keys = [key for key, tensor in own.items() if everything or tensor.device.type == "cpu"]
        own.update(zip(keys, copies.of([own[key] for key in keys], pin=_pin_memory(), own=everything), strict=True))
        copies.close()
    fused = any(".experts.base_layer." in key for key in own)
    adapter = StagedAdapter(config, own, frozenset(own), why_not_laid_out=why_not, lora_int_id=lora_int_id, name=name)
    if fill_slot:
        adapter.why_not_filled = f"vLLM has to pack it: {why_not}"
    return _enter(adapter, load_inplace, fused=fused)


def open_stage(
    lora_int_id: int,
    adapter_config: Any,
    name: str | None = None,
    *,
    nbytes: int | None = None,
    load_inplace: bool = False,
    generations: int = 2,
    fill_slot: bool = False,
) -> Stage:
    """Receive an adapter tensor by tensor or chunk by chunk, straight into host memory laid out as vLLM packs it.

        with lora_mem.open_stage(1, config) as stage:
            for chunk in transport:
                stage.add_all(chunk)          # a dict; the chunk's memory is free when this returns
            request = stage.commit()

    Leaving the block by an exception aborts: what was received is dropped, and what was staged, registered and active
    under this id before still is. To be called in the process of vLLM's worker, as `stage_adapter`.

    Args:
        lora_int_id: 1 or more; must not be in use, unless `load_inplace`.
        adapter_config: PEFT's, as for `stage_adapter`; says which modules will come (`target_modules`), at which rank.
        name: vLLM's `lora_name`. Default: `lora_mem-<id>`.
        nbytes: bytes of the laid-out adapter, where `target_modules` does not tell. More than that is refused when it
            arrives, less at `commit`.
        load_inplace: replace the adapter that has this id, at the request's next step.
        generations: 2 receives the new version while the old one is registered, in a second block of host memory. 1
            takes one block only: the old version is dropped first, here and in vLLM, so that until `commit` there is no
            adapter of this id, and none if the stage is aborted.
        fill_slot: put each module into vLLM's slot as soon as all of it has come, so that the activation, which
            else copies the whole adapter back over the link, has nothing left to copy. Into a free slot, or else into
            that of the adapter's last version, which leaves it meanwhile and stays registered: a step that asks for it
            finds it put back, as does whoever aborts, and the activation copies as ever. For an engine that runs no
            step in another thread while chunks arrive. What waits for the rest of its module takes as much
            of the GPU as that module at most, or 136 MiB where that is more; modules whose tensors do not come close
            together are left to the activation. `status()` says what became of it.

    Raises:
        AdapterError: the id, the name or the config is refused, another stage of this id is open, or no engine of this
            process can receive it.
        RuntimeError: the hook is not installed.
    """
    _check_active()
    lora_int_id = _integer_id(lora_int_id)
    name = _check_id_and_name(lora_int_id, name, load_inplace=load_inplace)
    config = plain_config(adapter_config)
    manager, why_not = _only_engine(config)
    if manager is None:
        raise AdapterError(f"cannot receive an adapter in parts: {why_not}")
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1):
        raise AdapterError(f"nbytes is {nbytes!r}; it must be a positive integer, or None to go by target_modules")
    if generations not in (1, 2) or isinstance(generations, bool):
        raise AdapterError(f"generations is {generations!r}; it must be 1 or 2")
    _check_fill_slot(fill_slot)
    how: dict[str, Any] = {"load_inplace": load_inplace, "generations": generations, "fill_slot": fill_slot}
    return Stage(lora_int_id, name, config, manager, nbytes, **how)


def _check_fill_slot(fill_slot: Any) -> None:
    if not isinstance(fill_slot, bool):
        raise AdapterError(f"fill_slot is {fill_slot!r}; it must be True or False")


def reserve(adapter_config: Any, *, generations: int = 2, wait: bool = False) -> int:
    """Page-lock the memory for adapters of this config ahead of the first sync; returns the bytes of one.

    It is done in a thread, while the engine goes on; a stage that is opened meanwhile waits for it.

    Args:
        adapter_config: PEFT's, as for `open_stage`.
        generations: blocks to have free: 2 where a new version is received while the old one is registered, 1 where the
            old one is dropped first.
        wait: return only when it is done.

    Raises:
        AdapterError: as `open_stage`; with `wait`, also where the system has not that much memory.
    """
    _check_active()
    if isinstance(generations, bool) or not isinstance(generations, int) or generations < 1:
        raise AdapterError(f"generations is {generations!r}; it must be 1 or more")
    config = plain_config(adapter_config)
    manager, why_not = _only_engine(config)
    if manager is None:
        raise AdapterError(f"cannot tell the size: {why_not}")
    layout = _layout(manager, config)
    nbytes = layout.bytes_of(_announced(manager, config).parts, layout.shared)
    try:
        _arena.reserve(nbytes, generations, pin=_pin_memory(), device=torch.device(manager.device), wait=wait)
    except MemoryError as error:
        raise AdapterError(str(error)) from None
    return nbytes


def trim() -> int:
    """Give page-locked blocks that no adapter uses back to the system; returns their bytes."""
    return _arena.trim()


class Stage:
    """An adapter under way; made by `open_stage`."""

    def __init__(
        self,
        lora_int_id: int,
        name: str,
        config: dict[str, Any],
        manager: Any,
        nbytes: int | None,
        *,
        load_inplace: bool,
        generations: int = 2,
        fill_slot: bool = False,
        parts: frozenset[Part] = frozenset(),
    ) -> None:
        if lora_int_id in _open:
            raise AdapterError(f"a stage of adapter {lora_int_id} is open already; commit or leave it first")
        for other_id, other in _open.items():
            if other.name == name:
                raise AdapterError(f"name {name!r} is in use by the open stage of adapter {other_id}")
        self.lora_int_id: int = lora_int_id
        self.name: str = name
        self._adapter = StagedAdapter(config, lora_int_id=lora_int_id, name=name)
        self._load_inplace = load_inplace
        self._manager = manager
        self._layout = _layout(manager, config)
        # By bytes only where the caller gives them, else by the modules that the config names.
        if nbytes is None:
            announced = self._adapter.announced = _announced(manager, config)
            self._announced: int = announced.nbytes
            # As the last version's experts did, this one's will share what they shared.
            nbytes = self._layout.bytes_of(announced.parts, self._layout.shared)
            parts = parts or announced.parts
        else:
            self._announced = nbytes
        old = _staged.get(lora_int_id) if generations == 1 else None
        # The old version's own block, or one that is there before the old version goes.
        if old is not None and old.block is not None and old.block.nbytes == nbytes:
            old = None
            _forget(lora_int_id)
        try:
            self._block = _arena.take(nbytes, pin=_pin_memory())
        except MemoryError as error:
            raise AdapterError(str(error)) from None
        if old is not None:
            del old
            _forget(lora_int_id)
        self._fill = self._open_fill(parts) if fill_slot else None
        self._receiver: Receiver | None = Receiver(self._layout, self._block, self._announced, self._fill)
        self._failed = ""
        _open[lora_int_id] = self

    def _open_fill(self, parts: frozenset[Part]) -> SlotFill | None:
        if not parts:
            self._adapter.why_not_filled = "by nbytes alone nobody knows which parts will come"
            return None
        try:
            return SlotFill(self._manager, self.lora_int_id, int(self._adapter.config["r"]), parts)
        except NoSlot as error:
            self._adapter.why_not_filled = str(error)
            return None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor, by its PEFT name; see `add_all`, which is faster for many."""
        self.add_all({name: tensor})

    def add_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A chunk: any of the adapter's tensors, in any order, on a GPU or the host, views and aliases too.

        When this returns the tensors have been read, or will be before any work that the current stream is given from
        now on: their memory may be written to on that stream, or freed. Experts of one projection that come in one
        chunk cross the link together; a factor that all experts share crosses it once.

        Raises:
            AdapterError: see `Receiver.add_all`. What had been taken of the chunk by then cannot be told any more, so
                that the stage can only be left.
        """
        receiver = self._receiving()
        if not isinstance(tensors, Mapping):
            raise AdapterError(f"tensors is a {type(tensors).__name__}; it must be a dict of PEFT names to tensors")
        try:
            receiver.add_all(tensors)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            raise

    @property
    def waited(self) -> float:
        """Seconds so far that adding was held up by copies to the host."""
        return self._receiving().waited

    def finish(self) -> None:
        """Wait for the copies and check that nothing is missing, as `commit` does first."""
        self._receiving().finish()

    def commit(self) -> LoRARequest:
        """Wait for the copies, check that nothing is missing, and stage the adapter; returns the request to use.

        Raises:
            AdapterError: a factor or an expert is missing, or less arrived than was announced. The stage stays open.
        """
        receiver = self._receiving()
        # Since the stage was opened vLLM may have got another adapter under this id or name.
        _check_id_and_name(self.lora_int_id, self.name, load_inplace=self._load_inplace)
        receiver.finish()
        shared = shared_parts(receiver.parts)
        arrived, taken = (self._layout.bytes_of(receiver.parts, without) for without in (frozenset(), shared))
        expected = self._adapter.announced.parts if self._adapter.announced is not None else None
        if receiver.parts.keys() != expected if expected is not None else self._announced not in (arrived, taken):
            missing = sorted({part.module for part in (expected or frozenset()) - receiver.parts.keys()})
            which = f" (nothing for {', '.join(compact(missing))})" if missing else ""
            raise AdapterError(
                f"{self._announced} bytes were announced (by nbytes, or target_modules "
                f"{self._adapter.config['target_modules']!r}), but {arrived} arrived{which}; add what is missing, "
                f"correct the adapter_config, or pass nbytes={arrived} to open_stage"
            )
        _check_not_less(self.lora_int_id, self._adapter.config, self._layout.checked, laid_out=True)
        if self._block.used < self._block.nbytes:
            self._block.shrink()  # experts that share a factor need less than was announced
        self._layout.shared = shared
        adapter = self._adapter
        adapter.names = self._layout.checked
        adapter.fits.add(self._manager)
        adapter.parts = receiver.parts
        adapter.block = self._block
        adapter.from_device = receiver.from_device
        self._close_fill(receiver.parts.keys())
        _keep(self._block, adapter.models)
        adapter.models.add(adapter)
        self._receiver = None
        del _open[adapter.lora_int_id], self._adapter, self._block
        return _enter(adapter, self._load_inplace, fused=receiver.fused)

    def abort(self) -> None:
        """Drop what was received; what was staged under this id before stays. Does nothing after `commit`."""
        if self._receiver is None:
            return
        self._receiver.abort()
        self._receiver = None
        _keep(self._block, weakref.WeakSet())
        del _open[self.lora_int_id], self._adapter, self._block
        if self._fill is not None:
            self._fill.abort()
            self._fill = None

    def _close_fill(self, parts: Collection[Part]) -> None:
        """Leave the filled slot to the adapter's activation."""
        fill, self._fill = self._fill, None
        if fill is None:
            return
        fill.wait()
        if fill.parts != parts:
            fill.give_up("other parts came than were announced")
        elif not fill.filled:
            fill.give_up("no module came whole and close together (experts in several chunks or scalings do not)")
        self._adapter.fill = fill

    def __enter__(self) -> Stage:
        """The stage."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Abort, unless committed."""
        committed = self._receiver is None
        self.abort()
        if kind is None and not committed:
            raise AdapterError(f"the stage of adapter {self.lora_int_id} was left without commit(); aborted")

    def _receiving(self) -> Receiver:
        if self._receiver is None:
            raise AdapterError(f"the stage of adapter {self.lora_int_id} is closed; open another one")
        if self._failed:
            raise AdapterError(
                f"the stage of adapter {self.lora_int_id} is of no use after an add that failed ({self._failed}); "
                "leave it and open another one"
            )
        return self._receiver


def drop_adapter(lora_int_id: int) -> bool:
    """Forget a staged adapter, and take it out of the vLLM workers of this process that loaded it.

    No request that uses it may be running. Returns whether it was staged; an unknown id is no error.
    """
    lora_int_id = _integer_id(lora_int_id)
    stage = _staged.get(lora_int_id)
    block = stage.block if stage is not None else None
    forgotten = _forget(lora_int_id)
    del stage
    if block is not None:
        # Each adapter of this size that is left will want a free block for its next version.
        sizes = [other.block.nbytes for other in _staged.values() if other.block is not None]
        _arena.trim(block.nbytes, spare=sizes.count(block.nbytes))
    return forgotten


def _forget(lora_int_id: int) -> bool:
    """Drop an adapter here and in vLLM; its block may be used again."""
    stage = _staged.pop(lora_int_id, None)
    _offloads.pop(lora_int_id, None)
    if stage is None:
        return False
    for manager in list(stage.registered_in):
        if registered_model(manager, lora_int_id) in _models:
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
    (`modules_to_save`), and the adapter's staged tensors; of an adapter that a stage laid out, nothing is left to move.
    A view that several of these share is copied once. Strides are kept where they are dense. Afterwards allocated and
    reserved GPU memory no longer count the adapter.

    Raises:
        KeyError: neither registered nor staged under this id.
    """
    from vllm.utils.gpu_sync_debug import gpu_sync_allowed

    registered = manager._adapter_manager.get_adapter(lora_int_id)
    stage = _staged.get(lora_int_id)
    if registered is None and stage is None:
        raise KeyError(f"adapter {lora_int_id} is neither registered with vLLM nor staged in this process")
    groups: list[list[offload.Place]] = []
    # What a stage laid out is on the host, and is not copied once more where it could not be page-locked.
    laid_out = stage is not None and bool(stage.parts) and (registered is None or registered in stage.models)
    # Staged first: it outlives the registered model, so a view that both share must lie in the stage's block.
    if stage is not None and not laid_out:
        groups.append([(stage.tensors, key) for key in stage.tensors])
    if registered is not None and not laid_out:
        groups.append(list(places(registered)))
    # vLLM reports device synchronisation inside a step unless it is announced.
    with gpu_sync_allowed():
        moved = offload.move_to_host(groups, pin=_pin_memory() if pin is None else pin)
        if stage is not None and stage.from_device:
            # Laid out on the host by the stage; what carried it there is unused, but still reserved.
            offload.release_device_memory()
            stage.from_device = False
    _offloads[lora_int_id] = moved
    return moved


def manager_of(engine: Any = None) -> Any:
    """The worker LoRA manager of an engine.

    Args:
        engine: an `LLM` or `LLMEngine` whose worker is in this process, a worker, a worker LoRA manager, or None for
            the only one of this process.

    Raises:
        LookupError: there is none, there are several, or its workers live in other processes.
    """
    if engine is None:
        managers = live_managers() or _started_before(_manager_classes())
        if len(managers) != 1:
            raise LookupError(f"this process has {len(managers)} vLLM engines with LoRA; say which one is meant")
        return managers[0]
    if isinstance(engine, _manager_classes()):
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


release_device_memory = offload.release_device_memory


# -------------------------------------------------------------------------------------------------------- the wrappers


def _wrap_load_adapter(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _load_adapter(manager: Any, *args: Any, **kwargs: Any) -> Any:
        request = args[0] if args else next(iter(kwargs.values()))
        if _inactive_because or not request.lora_path.startswith(SCHEME):
            with _recorded("build"):
                model = original(manager, request)
            # A directory's adapter is built on the host. One that is not came from another in-memory loader.
            on_device = not _inactive_because and any(offload.read_place(p).device.type != "cpu" for p in places(model))
        else:
            with _recorded("build"):
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
        if not _recorders or not _will_load(manager, request):
            return add(manager, request)
        stage = _staged.get(request.lora_int_id)
        with _recorded("rebuild" if stage is not None and manager in stage.loaded_in else "load"):
            return add(manager, request)

    def add(manager: Any, request: LoRARequest) -> bool:
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


def _wrap_packing(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def _create_merged_loras_inplace(adapter_manager: Any, lora_model: LoRAModel) -> None:
        if lora_model not in _models:
            with _recorded("pack"):
                return original(adapter_manager, lora_model)
        # vLLM looks for each factor of each expert by name, 18,432 of them in Qwen3-30B-A3B, which takes 13 ms of every
        # rebuild; a module that is packed already has none.
        every = adapter_manager.packed_modules
        unpacked = {name: every[name] for name in every if name not in lora_model.loras}
        with narrowed(adapter_manager, packed_modules=unpacked), _recorded("pack"):
            return original(adapter_manager, lora_model)

    return _mark(_create_merged_loras_inplace)


def _wrap_activate(original: Callable[..., bool]) -> Callable[..., bool]:
    @functools.wraps(original)
    def activate_adapter(adapter_manager: Any, lora_id: int) -> bool:
        if _inactive_because or lora_id in adapter_manager._active_adapters:
            return original(adapter_manager, lora_id)
        if not _recorders:
            return activate(original, adapter_manager, lora_id)
        with _recorded("activate"), _CopiesToDevice():
            return activate(original, adapter_manager, lora_id)

    return _mark(activate_adapter)


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    _PACKING: _wrap_packing,
    _ACTIVATING: _wrap_activate,
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
    """The request without `load_inplace`, except for the first load of the version that it stands for.

    vLLM hands a running request over at each step, and would reload each time. One that stands for an older version
    goes on with what is loaded: the new version comes with its own request.
    """
    stage = _staged.get(request.lora_int_id)
    if stage is None or not request.lora_path.startswith(SCHEME):
        return request
    if manager not in stage.loaded_in and request.lora_path == stage.path:
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
        if _strategy != "keep":
            with _recorded("offload"):
                offload_in_memory_adapter(manager, lora_int_id)
            for observer in observers:
                observer("offloaded", lora_int_id)


def _undo(manager: Any, lora_int_id: int) -> None:
    """After a load that failed past our checks: leave no half-activated adapter that vLLM takes for a loaded one."""
    if (id(manager), lora_int_id) in _armed:
        _armed.discard((id(manager), lora_int_id))
        manager.remove_adapter(lora_int_id)


def _check_active() -> None:
    if _inactive_because:
        raise RuntimeError(
            f"the hook is not active in this process: {_inactive_because}; call lora_mem.install() first"
        )


def _enter(stage: StagedAdapter, load_inplace: bool, *, fused: bool) -> LoRARequest:
    """Make a complete adapter the staged one of its id; `fused` where one tensor holds the factors of all experts."""
    from vllm.lora.request import LoRARequest

    before = _staged.get(stage.lora_int_id)
    if before is not None:
        stage.registered_in |= before.registered_in
        before.models.discard(before)
    stage.path = f"{SCHEME}{stage.lora_int_id}/{stage.version}"
    _staged[stage.lora_int_id] = stage
    _offloads.pop(stage.lora_int_id, None)
    return LoRARequest(
        lora_name=stage.name,
        lora_int_id=stage.lora_int_id,
        lora_path=stage.path,
        load_inplace=load_inplace,
        is_3d_lora_weight=fused,
    )


def _keep(block: HostBlock, users: weakref.WeakSet[Any]) -> None:
    """Remember a block, and of those that no adapter uses two, or as many as adapters are staged: the last ones."""
    _arena.keep(block, users, spare=max(2, len(_staged)))


def _layout(manager: Any, config: dict[str, Any]) -> Layout:
    """Where tensors of adapters of this config go in this worker; remembered, names are read once."""
    layouts = _layouts.setdefault(manager, {})
    key = json.dumps([config.get(name) for name in _SHAPING], sort_keys=True)
    if key not in layouts:
        while len(layouts) >= _MOST_LAYOUTS:
            del layouts[next(iter(layouts))]
        helper = peft_helper(config)
        model = manager._adapter_manager.model
        layouts[key] = Layout(
            served_model(manager),
            lambda names: read_names(names, helper, rename_mapper(model), getattr(model, "lora_skip_prefixes", None)),
            helper.get_rank_and_scaling,
        )
    return layouts[key]


def _announced(manager: Any, config: dict[str, Any]) -> Announced:
    """The parts of an adapter, by the modules that its config targets.

    Raises:
        AdapterError: none is named, or the calculator knows the model and says otherwise.
    """
    layout = _layout(manager, config)
    if layout.announced is not None:
        return layout.announced
    served = served_model(manager)
    wanted = targeted(config)
    modules = [module for module in served.modules if wanted(module) and module not in served.aliases]
    if not modules:
        raise AdapterError(
            f"adapter_config['target_modules'] is {config['target_modules']!r}, which names no module that this model "
            "serves with LoRA; correct it, or pass nbytes"
        )
    # Where a layer's experts may come in two layouts, one is meant: PEFT writes the fused one for target_parameters.
    for layouts in (layer.complete for layer in served.experts.values()):
        if len(layouts) > 1:
            other = layouts[0] if config.get("target_parameters") else layouts[1]
            modules = [module for module in modules if module not in other]
    names = [f"base_model.model.{module}.lora_{factor}.weight" for module in modules for factor in "AB"]
    parts = layout.parts_of(names)
    nbytes = layout.bytes_of(parts)
    predicted, why_not = _predicted_bytes(manager, config)
    if predicted not in (None, nbytes):
        raise AdapterError(
            f"lora_mem.footprint predicts {predicted} bytes for target_modules {config['target_modules']!r} at "
            f"rank {config['r']}, but by its layers this engine will hold {nbytes}: the calculator is wrong about "
            f"this model, please report it; nbytes={nbytes} to open_stage goes by the engine"
        )
    layout.announced = Announced(parts, nbytes, why_not)
    with contextlib.suppress(AdapterError):  # what is announced may still be completed by what is not
        layout.check_complete(set(names))
    return layout.announced


def _predicted_bytes(manager: Any, config: dict[str, Any]) -> tuple[int | None, str]:
    """What the calculator says of the block of an adapter of this config, or why it says nothing."""
    from vllm.distributed import parallel_state

    from lora_mem.errors import SizingError
    from lora_mem.sizing.footprints import footprint

    adapters, lora_config = manager._adapter_manager, manager.lora_config
    targets = config["target_modules"]
    if isinstance(targets, str) and targets != "all-linear":
        return None, "target_modules is a regular expression"
    for name in ("exclude_modules", "layers_to_transform", "modules_to_save"):
        if config.get(name) not in (None, []):
            return None, f"the adapter_config has {name}, which the calculator does not know"
    if not hasattr(adapters.model.config, "to_dict"):
        return None, "the model has no config of transformers"
    try:
        if parallel_state.get_pp_group().world_size > 1:
            return None, "with pipeline parallelism a stage is sent its own layers only"
        fused = bool(config.get("target_parameters"))
        result = footprint(
            adapters.model.config.to_dict(),
            rank=config["r"],
            rank_pattern=config.get("rank_pattern") or None,
            target_modules=targets if isinstance(targets, str) else [*targets, *(["experts"] if fused else [])],
            max_lora_rank=lora_config.max_lora_rank,
            max_loras=lora_config.max_loras,
            max_cpu_loras=lora_config.max_loras,
            tensor_parallel_size=parallel_state.get_tp_group().world_size,
            data_parallel_size=parallel_state.get_dp_group().world_size,
            enable_expert_parallel=adapters._use_ep,
            fully_sharded_loras=lora_config.fully_sharded_loras,
            enable_mixed_moe_lora_format=adapters._enable_mixed_moe_lora_format,
            enable_moe_shared_loras=adapters._enable_moe_shared_loras,
            is_3d_lora_weight=fused if adapters._enable_mixed_moe_lora_format else None,
            lora_dtype=str(lora_config.lora_dtype).removeprefix("torch."),
            strategy="stage",
        )
    except SizingError as error:
        return None, f"the calculator does not size it: {error}"
    return result.host_pinned_bytes // lora_config.max_loras, ""


def _load_staged(original: Callable[..., Any], manager: Any, request: LoRARequest) -> LoRAModel:
    """A model of the staged parts, or vLLM's own `_load_adapter` with the staged tensors in place of a file's."""
    stage = _staged.get(request.lora_int_id)
    if stage is None:
        raise AdapterError(
            f"adapter {request.lora_int_id} ({request.lora_name}) is not staged in process {os.getpid()}, where this "
            "vLLM worker runs: it was dropped, or stage_adapter was called in another process; with several processes "
            "call it in each worker through collective_rpc"
        )
    if stage.parts:
        if manager not in stage.fits:
            _check_fits(manager, stage)
        rank = peft_helper(stage.config).r
        is_3d = request.is_3d_lora_weight
        made = model_of_parts(manager, stage.parts, stage.lora_int_id, rank, is_3d=is_3d)
        _laid_out.add(made)
        return _made_here(made, stage)
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
    return _made_here(model, stage)


def _check_fits(manager: Any, stage: StagedAdapter) -> None:
    """Refuse an adapter that was laid out for another engine, unless this one would have laid it out the same way."""
    check_config(manager, stage.config)
    layout = _layout(manager, stage.config)
    wanted = {dataclasses.astuple(part) for part in layout.parts_of(stage.names)}
    layout.check_complete(stage.names)
    parts = {dataclasses.astuple(part) for part in stage.parts}
    dtype = next(iter(stage.parts.values())).dtype
    if wanted != parts or dtype != layout.dtype or (shared_parts(stage.parts) and not layout.served.share):
        raise AdapterError(
            f"adapter {stage.lora_int_id} ({stage.name}) was laid out in {dtype} for another engine of this process, "
            f"and this one takes it otherwise (in {layout.dtype}); stage it again"
        )
    stage.fits.add(manager)


def _made_here(model: LoRAModel, stage: StagedAdapter) -> LoRAModel:
    _models.add(model)
    stage.models.add(model)
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
        key = (*view_key(lora.lora_b), lora.scaling)  # aliases stay aliases
        if key not in folded:
            folded[key] = lora.lora_b * lora.scaling
        lora.lora_b = folded[key]
        lora.scaling = 1


def _changed(request: LoRARequest, **changes: Any) -> LoRARequest:
    import msgspec

    changed: LoRARequest = msgspec.structs.replace(request, **changes)
    return changed


# ----------------------------------------------------------------------------------------------- what an engine serves


def _check_id_and_name(lora_int_id: int, name: str | None, *, load_inplace: bool) -> str:
    _check_id(lora_int_id, load_inplace=load_inplace)
    if name is not None and not isinstance(name, str):
        raise AdapterError(f"name is {name!r}; it must be a string, or None")
    name = name or f"lora_mem-{lora_int_id}"
    same_name = [other.lora_int_id for other in _staged.values() if other.name == name]
    if same_name and same_name != [lora_int_id]:
        raise AdapterError(f"name {name!r} is in use by adapter {same_name[0]}; vLLM tells requests apart by name")
    return name


def _check_not_less(lora_int_id: int, config: dict[str, Any], names: frozenset[str], *, laid_out: bool) -> None:
    """Refuse a version that lacks what the one before had, by the same config: half a sync, as far as we can know."""
    before = _staged.get(lora_int_id)
    if before is None or before.names is names or before.config != config or bool(before.parts) != laid_out:
        return
    missing = sorted(before.names - names)
    if missing:
        raise AdapterError(
            f"{len(missing)} tensors that the version before had are missing, {missing[0]} the first; send all of "
            f"them, correct the adapter_config, or drop_adapter({lora_int_id}) before"
        )


def _integer_id(lora_int_id: Any) -> int:
    if not isinstance(lora_int_id, Integral) or isinstance(lora_int_id, bool) or not 1 <= int(lora_int_id) < 2**63:
        raise AdapterError(f"lora_int_id is {lora_int_id!r}; it must be an integer of 1 or more, below 2**63")
    return int(lora_int_id)


def _check_id(lora_int_id: int, *, load_inplace: bool) -> None:
    if load_inplace:
        return
    how = "or pass load_inplace=True to replace it"
    if lora_int_id in _staged:
        raise AdapterError(f"lora_int_id {lora_int_id} is in use by {_staged[lora_int_id].name!r}: drop_adapter, {how}")
    for manager in _engines():
        if registered_model(manager, lora_int_id) is not None:
            raise AdapterError(
                f"lora_int_id {lora_int_id} is in use: vLLM has an adapter registered that is not staged here; take it "
                f"out with LLM.llm_engine.remove_lora({lora_int_id}), {how}"
            )


def _engines() -> list[Any]:
    return [manager for manager in _managers if hasattr(manager, "_adapter_manager")]


def _check_for_engines(tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> tuple[Any, str]:
    """Refuse an adapter that no engine of this process could serve.

    Returns the one engine that can, or None and why there is no such one.
    """
    refusals: list[AdapterError] = []
    managers = _engines()
    able = []
    for manager in managers:
        try:
            _check_for_manager(manager, tensors, config)
            able.append(manager)
        except AdapterError as error:
            refusals.append(error)
    if managers and not able:
        raise refusals[-1]
    if not managers:
        helper = peft_helper(config)
        names = read_names(tensors, helper, None, ())
        shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
        rules.check(shapes, names, None, lambda module: int(helper.get_rank_and_scaling(module)[0])).require()
        return None, "no vLLM engine with LoRA in this process yet"
    if config.get("modules_to_save"):
        return None, "it has full modules (modules_to_save), which only vLLM itself loads"
    if len(able) > 1:
        return None, f"{len(able)} engines of this process could serve it"
    return able[0], ""


def _only_engine(config: dict[str, Any]) -> tuple[Any, str]:
    """The one engine of this process, or None and why there is no such one."""
    managers = _engines()
    if len(managers) != 1:
        return None, f"this process has {len(managers)} vLLM engines with LoRA, and it must have one"
    check_config(managers[0], config)
    if config.get("modules_to_save"):
        return None, "it has full modules (modules_to_save), which only vLLM itself loads; use stage_adapter"
    return managers[0], ""


def _check_for_manager(manager: Any, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Refuse an adapter that this worker cannot serve in full, before vLLM touches anything."""
    helper = check_config(manager, config)
    model = manager._adapter_manager.model
    names = read_names(tensors, helper, rename_mapper(model), getattr(model, "lora_skip_prefixes", None))
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    served = served_model(manager)
    rules.check(shapes, names, served, lambda module: int(helper.get_rank_and_scaling(module)[0])).require()


# ------------------------------------------------------------------------------------------------------------- helpers


def _pin_memory() -> bool:
    """Whether vLLM page-locks host memory here (not without a GPU, and not under WSL)."""
    from vllm.utils import torch_utils

    return bool(torch_utils.PIN_MEMORY)


@functools.cache
def _manager_classes() -> tuple[type, ...]:
    module = importlib.import_module("vllm.lora.worker_manager")
    return tuple(getattr(module, name) for name in _MANAGERS)


def _wrappable() -> list[tuple[type, str]]:
    """Classes and their methods that are wrapped where they define them.

    The packing is wrapped to save time only. `LRUCacheLoRAModelManager.activate_adapter` calls `super()`.
    """
    adapters = importlib.import_module("vllm.lora.model_manager").LoRAModelManager
    wrapped = [(cls, method) for cls in _manager_classes() for method in _METHODS]
    return [*wrapped, (adapters, _PACKING), (adapters, _ACTIVATING)]


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison; 0.33.1 counts as 0.33: the hook depends on no patch release."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:2])


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


# ----------------------------------------------------------------------------------------------- the parts of a load


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Enter `recorder(phase)` around each load inside the `with` block, and around each part of it.

    Phases: "load", or "rebuild" where this version of a staged adapter had been loaded before; in it "build" (vLLM's
    `_load_adapter`), "pack" (what registering does to it: stack, scale, page-lock), "activate" (into a slot; by itself
    where only the slot had been taken) and "offload". Nothing is recorded while the hook is not installed.
    """
    _recorders.append(recorder)
    try:
        yield
    finally:
        _recorders.remove(recorder)


class _CopiesToDevice(TorchFunctionMode):
    """Counts what crosses the link on its way into slots: vLLM slices and copies by itself, so it is seen there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_:
            target, source = args[:2]
            if target.is_cuda and not source.is_cuda:
                copied.to_device += target.numel() * source.element_size()
        elif func is torch.Tensor.to and result.is_cuda and not args[0].is_cuda:
            copied.to_device += args[0].nbytes
        return result


def _recorded(phase: str) -> AbstractContextManager[Any]:
    if not _recorders:
        return nullcontext()
    stack = ExitStack()
    for recorder in _recorders:
        stack.enter_context(recorder(phase))
    return stack


def _will_load(manager: Any, request: LoRARequest) -> bool:
    return request.load_inplace or request.lora_int_id not in manager.list_adapters()
