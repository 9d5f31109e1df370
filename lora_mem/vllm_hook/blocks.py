"""The host memory of adapters: reserved ahead of the first sync, kept for next versions, given back when dropped."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from lora_mem.errors import AdapterError
from lora_mem.sizing.peft_config import plain_config
from lora_mem.staging.pinned import HostBlock
from lora_mem.vllm_hook import compat
from lora_mem.vllm_hook.admission import announced, check_active, integer_id, layout_of, only_engine
from lora_mem.vllm_hook.live import registered_model
from lora_mem.vllm_hook.state import process


def reserve(adapter_config: Any, *, generations: int = 2, wait: bool = False) -> int:
    """Pin the memory for adapters of this config ahead of the first sync; returns the bytes of one.

    It is done in a thread, while the engine goes on; a stage that is opened meanwhile waits for it.

    Args:
        adapter_config: PEFT's, as for `open_stage`.
        generations: blocks to have free: 2 where a new version is received while the old one is registered, 1 where the
            old one is dropped first.
        wait: return only when it is done.

    Raises:
        AdapterError: as `open_stage`; with `wait`, also where the system has not that much memory.
    """
    check_active()
    if isinstance(generations, bool) or not isinstance(generations, int) or generations < 1:
        raise AdapterError(f"generations is {generations!r}; it must be 1 or more")
    config = plain_config(adapter_config)
    manager, why_not = only_engine(config)
    if manager is None:
        raise AdapterError(f"cannot tell the size: {why_not}")
    layout = layout_of(manager, config)
    nbytes = layout.bytes_of(announced(manager, config).parts, layout.shared)
    device = torch.device(manager.device)
    try:
        process.arena.reserve(nbytes, generations, pin=compat.pins_memory(), device=device, wait=wait)
    except MemoryError as error:
        raise AdapterError(str(error)) from None
    return nbytes


def trim() -> int:
    """Give pinned blocks that no adapter uses back to the system; returns their bytes."""
    return process.arena.trim()


def drop_adapter(lora_int_id: int) -> bool:
    """Forget a staged adapter, and take it out of the vLLM workers of this process that loaded it.

    No request that uses it may be running. Returns whether it was staged; an unknown id is not an error.
    """
    lora_int_id = integer_id(lora_int_id)
    stage = process.staged.get(lora_int_id)
    block = stage.block if stage is not None else None
    forgotten = forget(lora_int_id)
    del stage
    if block is not None:
        # Each adapter of this size that is left will want a free block for its next version.
        sizes = [other.block.nbytes for other in process.staged.values() if other.block is not None]
        process.arena.trim(block.nbytes, spare=sizes.count(block.nbytes))
    return forgotten


def forget(lora_int_id: int) -> bool:
    """Drop an adapter here and in vLLM; its block may be used again."""
    stage = process.staged.pop(lora_int_id, None)
    process.offloads.pop(lora_int_id, None)
    if stage is None:
        return False
    for manager in list(stage.registered_in):
        if registered_model(manager, lora_int_id) in process.models:
            manager.remove_adapter(lora_int_id)
    return True


def keep(block: HostBlock, users: weakref.WeakSet[Any]) -> None:
    """Remember a block, and of those that no adapter uses two, or as many as adapters are staged: the last ones."""
    process.arena.keep(block, users, spare=max(2, len(process.staged)))
