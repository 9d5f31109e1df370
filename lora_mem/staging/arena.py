"""The blocks that adapters lie in: they come and go with the versions, and are used again."""

from __future__ import annotations

import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from lora_mem.staging.pinned import HostBlock


class Arena:
    """The blocks that adapters lie in, and those that are kept for the next version.

    Page-locking 6 GiB takes a good part of a second, so a block whose adapter is gone is used again for one of the same
    size. A block is free once none of its users is alive.
    """

    def __init__(self) -> None:
        self.blocks: list[tuple[HostBlock, weakref.WeakSet[Any]]] = []
        self._reserving: list[tuple[int, Future[HostBlock]]] = []

    def reserve(self, nbytes: int, count: int, *, pin: bool, device: torch.device, wait: bool) -> None:
        """See to it that `count` free blocks of this size are there, or on their way in a thread.

        Args:
            nbytes: of each.
            count: how many.
            pin: ask for page-locked memory.
            device: the GPU whose process this is; a thread starts with the first one.
            wait: return only when they are there.

        Raises:
            MemoryError: with `wait`, the system has not that much.
        """
        self._settle(wait=False)
        free = sum(block.nbytes == nbytes and not users for block, users in self.blocks)
        coming = sum(size == nbytes for size, _ in self._reserving)
        missing = count - free - coming
        if missing > 0:
            # Threads of their own, not a pool's: nothing of it is left when it is done.
            threads = ThreadPoolExecutor(missing, thread_name_prefix="lora_mem-reserve")
            self._reserving += [(nbytes, threads.submit(_block_on, device, nbytes, pin)) for _ in range(missing)]
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
        for wait in (False, any(size == nbytes for size, _ in self._reserving)):
            if wait:
                self._settle(wait=True)
            for index, (block, users) in enumerate(self.blocks):
                if block.nbytes == nbytes and not users:
                    del self.blocks[index]
                    block.clear()
                    if torch.cuda.is_initialized():
                        torch.cuda.synchronize()  # vLLM's last slot copy out of it is asynchronous
                    return block
        return _new_block(nbytes, pin)

    def keep(self, block: HostBlock, users: weakref.WeakSet[Any], *, spare: int) -> None:
        """Remember a block, and of the free ones the last `spare`."""
        self.blocks.append((block, users))
        free = [entry for entry in self.blocks if not entry[1]]
        for entry in free[: len(free) - spare]:
            self.blocks.remove(entry)

    def trim(self, nbytes: int | None = None, *, spare: int = 0) -> int:
        """Give free blocks back to the system, all but `spare` of them, of this size or of any; returns their bytes."""
        self._settle(wait=True)
        free = [entry for entry in self.blocks if not entry[1] and nbytes in (None, entry[0].nbytes)]
        unneeded = free[: max(0, len(free) - spare)]
        for entry in unneeded:
            self.blocks.remove(entry)
        return sum(block.nbytes for block, _ in unneeded)

    @property
    def free_bytes(self) -> int:
        """Bytes of the free blocks, those on their way left out."""
        self._settle(wait=False)
        return sum(block.nbytes for block, users in self.blocks if not users)

    def clear(self) -> None:
        """Forget every block; each is given back when its last tensor is gone."""
        self.blocks.clear()
        self._reserving.clear()

    def _settle(self, *, wait: bool) -> list[Future[HostBlock]]:
        """Take in the blocks that have come; returns what failed."""
        failed = []
        for entry in list(self._reserving):
            _, future = entry
            if wait or future.done():
                self._reserving.remove(entry)
                if future.exception() is None:
                    self.blocks.append((future.result(), weakref.WeakSet()))
                else:
                    failed.append(future)
        return failed


def _new_block(nbytes: int, pin: bool) -> HostBlock:
    try:
        return HostBlock(nbytes, pin=pin)
    except (OSError, OverflowError, MemoryError) as error:
        raise MemoryError(f"cannot reserve {nbytes} bytes of host memory for the adapter: {error}") from None


def _block_on(device: torch.device, nbytes: int, pin: bool) -> HostBlock:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return _new_block(nbytes, pin)
