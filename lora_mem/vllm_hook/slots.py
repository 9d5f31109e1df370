"""A slot of vLLM: filled while an adapter arrives, or by vLLM's activation of what the slot does not hold yet."""

from __future__ import annotations

import bisect
import logging
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from lora_mem.staging.layout import Part
from lora_mem.staging.receiving import Filler
from lora_mem.vllm_hook.live import slot_buffers
from lora_mem.vllm_hook.models import model_of_parts
from lora_mem.vllm_hook.patches import replaced
from lora_mem.vllm_hook.served import served_model
from lora_mem.vllm_hook.state import process

logger = logging.getLogger(__name__)

_UNWRITTEN = -1  # no flag of vLLM's, which are 0 and 1


class NoSlot(Exception):
    """Why an adapter's slot is not filled while it arrives."""


class SlotFill(Filler):
    """One of vLLM's slots, filled while an adapter arrives: its activation then has nothing left to copy.

    The slot is nobody's meanwhile. Where vLLM puts an adapter into it, perhaps the last version back because a step
    asked for it, the filling is given up, and the activation copies from host memory as ever.

    Args:
        manager: the worker's.
        lora_int_id: of the adapter.
        rank: of its config.
        parts: those that it is to have.

    Attributes:
        slot: its index.
        taken_from_last: whether the last version had to leave it.
        given_up_because: why the slot does not hold what was filled in, or "".

    Raises:
        NoSlot: there is none to be had.
    """

    def __init__(self, manager: Any, lora_int_id: int, rank: int, parts: frozenset[Part]) -> None:
        adapters = manager._adapter_manager
        super().__init__(_layers_of(manager, parts))
        self.lora_int_id = lora_int_id
        self.parts = parts
        self.given_up_because = ""
        self._rank = rank
        self._manager = weakref.ref(manager)
        self._streams: set[Any] = set()
        self._memory = allocations(adapters)
        if self._memory:
            give_up_when_it_sleeps()
        if self._asleep():
            raise NoSlot("vLLM is asleep, and so are its slots")
        fills = process.fills_of.setdefault(adapters, weakref.WeakValueDictionary())
        last = fills.pop(lora_int_id, None)
        if last is not None:
            last.give_up("another stage of this adapter was opened")
        claimed = {fill.slot for fill in fills.values() if not fill.given_up_because}
        free = [slot for slot, other in enumerate(adapters.lora_index_to_id) if other is None and slot not in claimed]
        self.taken_from_last = not free
        if self.taken_from_last:
            if lora_int_id not in adapters._active_adapters:
                raise NoSlot("no slot is free, and no version of this adapter is in one")
            if lora_int_id in adapters._active_adapters.pinned_items:
                raise NoSlot("no slot is free, and the last version of this adapter is pinned to its own")
            free = [adapters.lora_index_to_id.index(lora_int_id)]
            adapters.deactivate_adapter(lora_int_id)
        self.slot: int = free[0]
        fills[lora_int_id] = self
        if manager.device.type == "cuda":
            torch.cuda.synchronize(manager.device)  # a step that reads the slot may be under way on another stream

    def fill(self, module: str, parts: dict[Part, torch.Tensor]) -> bool:
        """Have vLLM pack a module and put it into the slot, as it does at a load."""
        from vllm.lora.lora_weights import PackedLoRALayerWeights
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed

        manager = self._manager()
        if manager is None or self.given_up_because:
            return False
        adapters = manager._adapter_manager
        if self._asleep():
            self.give_up("vLLM went to sleep")
            return False
        if adapters.lora_index_to_id[self.slot] is not None:
            self.give_up(f"adapter {adapters.lora_index_to_id[self.slot]} is in the slot")
            return False
        loras = model_of_parts(manager, parts, self.lora_int_id, self._rank, is_3d=False).loras
        lora = loras.get(module)
        if lora is None:  # q, k and v, or gate and up, which vLLM registers together
            lora = PackedLoRALayerWeights.pack([loras.get(child) for child in adapters.packed_modules[module]])
        if manager.device.type == "cuda":
            stream = torch.cuda.current_stream(manager.device)
            self._streams.add(stream)
            for tensor in parts.values():
                if tensor.is_cuda:
                    tensor.record_stream(stream)  # it may have been made on another, to which its memory goes back
        with gpu_sync_allowed(), _flags_beside([adapters.modules[module]], lambda: self.slot):
            adapters.modules[module].set_lora(self.slot, lora.lora_a, lora.lora_b)
        return True

    def wait(self) -> None:
        """Until what was filled in is in the slot."""
        for stream in self._streams:
            stream.synchronize()
        self._streams.clear()

    def give_up(self, because: str) -> None:
        """The slot does not hold the adapter, or not any more."""
        self.given_up_because = self.given_up_because or because
        self.wait()

    def abort(self) -> None:
        """The adapter does not come: give the slot back to the last version, where it had it."""
        from vllm.utils.gpu_sync_debug import gpu_sync_allowed

        self.give_up("aborted")
        manager = self._manager()
        if manager is None or not self.taken_from_last or self._asleep():
            return
        adapters = manager._adapter_manager
        registered = self.lora_int_id in adapters.list_adapters()
        if registered and self.lora_int_id not in adapters._active_adapters and None in adapters.lora_index_to_id:
            try:
                with gpu_sync_allowed():
                    adapters.activate_adapter(self.lora_int_id)
            except Exception as error:  # must not hide why the stage was left; vLLM will try again when it is asked for
                logger.warning("adapter %d could not be put back into its slot: %s", self.lora_int_id, error)

    def _asleep(self) -> bool:
        return any(one.is_asleep for one in self._memory)


def _layers_of(manager: Any, parts: Iterable[Part]) -> dict[Part, str]:
    """For each part the LoRA layer of vLLM that it ends up in.

    Raises:
        NoSlot: a part is named otherwise than its layer, as in a text-only adapter of a multimodal model.
    """
    adapters = manager._adapter_manager
    experts = served_model(manager).experts  # whose parts have their layer's name already
    layer_of = {name: name for name in adapters.modules}
    for name, children in adapters.packed_modules.items():
        if name not in experts:
            layer_of.update(dict.fromkeys(children, name))
    try:
        return {part: layer_of[part.module] for part in parts}
    except KeyError as error:
        raise NoSlot(f"{error.args[0]} is another name of a layer, which only vLLM resolves") from None


def activate(original: Callable[..., bool], adapters: Any, lora_id: int) -> bool:
    """vLLM's activation, of what the adapter's slot does not hold yet."""
    try:
        return _activate(original, adapters, lora_id)
    except BaseException:
        # vLLM 0.32 takes it for active before it has copied anything.
        adapters.deactivate_adapter(lora_id)
        raise


def _activate(original: Callable[..., bool], adapters: Any, lora_id: int) -> bool:
    fills: MutableMapping[int, SlotFill] = process.fills_of.get(adapters, {})
    slots, left = adapters.lora_index_to_id, adapters.modules
    others: list[int] = []
    stage = process.staged.get(lora_id)
    model = adapters.list_adapters().get(lora_id)
    ours = model in process.laid_out
    if not fills and not ours:
        return original(adapters, lora_id)
    fill = fills.get(lora_id)
    if stage is None or stage.fill is not fill or model not in stage.models:
        fill = None  # of another version
    elif fill is not None:
        del fills[lora_id]
        if not fill.given_up_because and slots[fill.slot] is None:
            filled = {left[name] for name in fill.filled}
            left = {name: layer for name, layer in left.items() if layer not in filled}
            others = [slot for slot, other in enumerate(slots) if other is None and slot != fill.slot]
    for other_fill in fills.values():
        other_fill.wait()  # it may write into the slot that vLLM takes now
    flagged = left.values() if ours else ()
    try:
        for slot in others:
            slots[slot] = 0  # no adapter's id, so that vLLM takes ours for the first free one
        with replaced(adapters, modules=left), _flags_beside(flagged, lambda: int(slots.index(lora_id))):
            activated = original(adapters, lora_id)
    except BaseException:
        for one in [*fills.values(), *([fill] if fill is not None else [])]:
            one.give_up(f"the activation of adapter {lora_id} failed")
        raise
    finally:
        for slot in others:
            slots[slot] = None
    for other_fill in fills.values():
        if other_fill.slot == slots.index(lora_id):
            other_fill.give_up(f"vLLM put adapter {lora_id} into the slot meanwhile")
    return activated


@contextmanager
def _flags_beside(layers: Iterable[Any], slot: Callable[[], int]) -> Iterator[None]:
    """Let `set_lora` of expert layers write a slot's flags to host memory, and write the layers' own afterwards.

    vLLM does it by `adapter_enabled[index] = 1`, a copy from pageable memory, for which the host waits until the device
    has done all that came before: twice a layer, and the link is idle meanwhile.
    """
    flags = {layer: layer.adapter_enabled for layer in layers if _has_flags(layer)}
    for layer, own in flags.items():
        layer.adapter_enabled = torch.full(own.shape, _UNWRITTEN, dtype=own.dtype, device="cpu")
    beside: list[torch.Tensor] = []
    try:
        yield
        beside = [layer.adapter_enabled for layer in flags]
    finally:
        for layer, own in flags.items():
            layer.adapter_enabled = own
    if beside:
        index = slot()
        for own, written in zip(flags.values(), beside, strict=True):
            if written[index] != _UNWRITTEN:
                own[index].fill_(int(written[index]))


def _has_flags(layer: Any) -> bool:
    """Whether a layer has flags as vLLM's expert layers have them: an integer for each slot."""
    flags = getattr(layer, "adapter_enabled", None)
    return isinstance(flags, torch.Tensor) and flags.ndim == 1 and flags.dtype == torch.int


def allocations(adapters: Any) -> list[Any]:
    """Those of vLLM's sleep mode in which the slots lie; none where it is not in use."""
    allocator = _sleep_allocator()
    if allocator is None:
        return []
    starts = sorted(allocator.pointer_to_data)
    found = {}
    for layer in adapters.modules.values():
        for tensor in slot_buffers(layer).values():
            index = bisect.bisect_right(starts, tensor.data_ptr()) - 1
            start = starts[index] if index >= 0 else 0
            if index >= 0 and tensor.data_ptr() < start + allocator.pointer_to_data[start].handle[1]:
                found[start] = allocator.pointer_to_data[start]
    return list(found.values())


def give_up_when_it_sleeps() -> None:
    """Trust no slot that was filled before vLLM slept: vLLM 0.32 drops what lies in it at level 2."""
    allocator = _sleep_allocator()
    if allocator is not None:
        process.patches.put(allocator, "sleep", _sleep)


def _sleep(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for fills in list(process.fills_of.values()):
        for fill in fills.values():
            fill.give_up("vLLM went to sleep")
    return original(*args, **kwargs)


def _sleep_allocator() -> Any:
    cumem = sys.modules.get("vllm.device_allocator.cumem")
    return getattr(getattr(cumem, "CuMemAllocator", None), "instance", None)
