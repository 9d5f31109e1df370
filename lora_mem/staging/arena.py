"""The blocks that adapters lie in: they come and go with the versions, and are used again."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from lora_mem.staging.pinned import HostBlock

Entry = tuple[HostBlock, weakref.WeakSet[Any]]
"""A block and its users: it is free once none of them is alive."""


class Arena:
    """The blocks that adapters lie in, and those that are kept for the next version.

    Pinning 6 GiB takes a good part of a second, so the block of one that is gone is used again for one of its size.
    """

    def __init__(self) -> None:
        self.blocks: list[Entry] = []
        self._reserving: list[tuple[int, Future[HostBlock]]] = []

    def reserve(self, nbytes: int, count: int, *, pin: bool, device: torch.device, wait: bool) -> None:
        """See to it that `count` free blocks of this size are there, or on their way in a thread.

        Args:
            nbytes: of each.
            count: how many.
            pin: ask for pinned memory.
            device: the GPU whose process this is; a thread starts with the first one.
            wait: return only when they are there.

        Raises:
            MemoryError: with `wait`, the system has not that much.
        """
        self._settle(wait=False)
        missing = count - len(self._free(nbytes)) - sum(size == nbytes for size, _ in self._reserving)
        if missing > 0:
            # Threads of their own, not a pool's: none outlives its work.
            threads = ThreadPoolExecutor(missing, thread_name_prefix="lora_mem-reserve")
            self._reserving += [(nbytes, threads.submit(_new_block, nbytes, pin, device)) for _ in range(missing)]
            threads.shutdown(wait=False)
        if wait:
            for future in self._settle(wait=True):
                future.result()

    def take(self, nbytes: int, *, pin: bool) -> HostBlock:
        """A free block of this size, one that is on its way, or a new one.

        Raises:
            MemoryError: the system has not that much.
        """
        self._settle(wait=False)
        if not self._free(nbytes) and any(size == nbytes for size, _ in self._reserving):
            self._settle(wait=True)
        for entry in self._free(nbytes):
            self.blocks.remove(entry)
            entry[0].clear()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # vLLM's last slot copy out of it is asynchronous
            return entry[0]
        return _new_block(nbytes, pin)

    def keep(self, block: HostBlock, users: weakref.WeakSet[Any], *, spare: int) -> None:
        """Remember a block, and of the free ones the last `spare`."""
        self.blocks.append((block, users))
        self._drop(self._free(), spare)

    def trim(self, nbytes: int | None = None, *, spare: int = 0) -> int:
        """Give free blocks back to the system, all but `spare` of them, of this size or of any; returns their bytes."""
        self._settle(wait=True)
        return self._drop(self._free(nbytes), spare)

    @property
    def free_bytes(self) -> int:
        """Bytes of the free blocks, without those on their way."""
        self._settle(wait=False)
        return sum(block.nbytes for block, _ in self._free())

    def clear(self) -> None:
        """Forget every block; each is given back when its last tensor is gone."""
        self.blocks.clear()
        self._reserving.clear()

    def _free(self, nbytes: int | None = None) -> list[Entry]:
        return [entry for entry in self.blocks if not entry[1] and nbytes in (None, entry[0].nbytes)]

    def _drop(self, free: list[Entry], spare: int) -> int:
        """Forget all but the last `spare` of these; returns their bytes."""
        unneeded = free[: max(0, len(free) - spare)]
        for entry in unneeded:
            self.blocks.remove(entry)
        return sum(block.nbytes for block, _ in unneeded)

    def _settle(self, *, wait: bool) -> list[Future[HostBlock]]:
        """Take in the blocks that have come; returns what failed."""
        come = [entry for entry in self._reserving if wait or entry[1].done()]
        self._reserving = [entry for entry in self._reserving if entry not in come]
        failed = [future for _, future in come if future.exception() is not None]
        self.blocks += [(future.result(), weakref.WeakSet()) for _, future in come if future not in failed]
        return failed


def _new_block(nbytes: int, pin: bool, device: torch.device | None = None) -> HostBlock:
    if device is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    try:
        return HostBlock(nbytes, pin=pin)
    except (OSError, OverflowError, MemoryError) as error:
        raise MemoryError(f"cannot reserve {nbytes} bytes of host memory for the adapter: {error}") from None
