"""Pinned host memory of exact size.

`torch.empty(pin_memory=True)` rounds every block up to a power of two, takes seconds to pin gigabytes, and keeps freed
blocks in its own cache. A `HostBlock` is one anonymous mapping, backed by huge pages where the kernel allows it,
touched by several threads and then registered with CUDA: exact in size, and given back to the system when its last
view is gone. An `Arena` keeps blocks from version to version.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ClassVar

import torch

from lora_mem.sizing.units import aligned

_TOUCH_THREADS = 16
_TOUCH_CHUNK = 64 * 2**20


class HostBlock:
    """`nbytes` of host memory, pinned where that is possible, handed out front to back.

    Args:
        nbytes: the size, in bytes; exactly this much is mapped (in whole pages), nothing is rounded to a power of two.
        pin: ask for pinned memory. Without a CUDA device, or where the system refuses to pin that much, the block is
            ordinary memory and `unpinned_because` says why.

    Attributes:
        used: bytes handed out so far, with alignment.
        unpinned_because: why `is_pinned()` of its views is False, or None where it is True.

    Raises:
        ValueError: `nbytes` is negative.
        OSError, OverflowError: the system has not that much.
    """

    pinned_bytes: ClassVar[int] = 0
    """Bytes that all blocks of this process have pinned now."""

    watchers: ClassVar[list[Callable[[int, int], None]]] = []
    """Called with (address, bytes) when a block has been pinned, and with minus the bytes when it is let go."""

    def __init__(self, nbytes: int, *, pin: bool = True) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes must be 0 or more, got {nbytes}")
        self.nbytes = nbytes
        self.used = 0
        self._pin = pin
        # Private: the kernel gives shared anonymous memory huge pages only where an administrator allowed it.
        self._mapping = _Mapping(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= 2 * 2**20 and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower, nothing else
                self._mapping.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self.unpinned_because = self._register() if pin else "not asked for"

    @property
    def pinned(self) -> bool:
        """Whether the memory is pinned."""
        return self.unpinned_because is None

    def take(self, shape: Sequence[int], dtype: torch.dtype, stride: Sequence[int] | None = None) -> torch.Tensor:
        """The next unused bytes of the block, as an uninitialised tensor.

        Args:
            shape: of the tensor.
            dtype: of the tensor.
            stride: in elements; must be dense (a permutation of a contiguous layout). None means contiguous.

        Raises:
            MemoryError: the block is used up; the message names both figures.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        if self.used + nbytes > self.nbytes:
            raise MemoryError(
                f"{nbytes} bytes asked for, but only {self.nbytes - self.used} of the block's {self.nbytes} are unused"
            )
        # A view that is made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            flat = self._bytes[self.used : self.used + nbytes].view(dtype)
            self.used = min(self.nbytes, self.used + aligned(nbytes))
            return flat.view(tuple(shape)) if stride is None else flat.as_strided(tuple(shape), tuple(stride))

    def clear(self) -> None:
        """Hand out the memory from the front again; earlier views still show it."""
        self.used = 0

    def extra(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor beside the block, pinned where the block was to be."""
        return HostBlock(math.prod(shape) * dtype.itemsize, pin=self._pin).take(shape, dtype)

    def shrink(self) -> None:
        """Give the system back what was not handed out, in whole pages; `nbytes` is what was, then."""
        self.nbytes = self.used
        keep = _whole_pages(self.used)
        if keep < len(self._mapping):
            pinned = self._mapping.registered is not None
            self._mapping.unregister()
            self._mapping.madvise(mmap.MADV_DONTNEED, keep, len(self._mapping) - keep)
            if pinned and keep:
                self.unpinned_because = self._mapping.register(self._bytes.data_ptr(), keep)

    def _register(self) -> str | None:
        """Pin the mapping; returns why that failed, or None."""
        if self.nbytes == 0:
            return None
        if not torch.cuda.is_available():
            return "no CUDA device in this process"
        # A forked child would make the pages copy-on-write, and the GPU would go on with those that we gave up.
        self._mapping.madvise(mmap.MADV_DONTFORK)
        _touch(self._bytes.data_ptr(), self.nbytes)
        torch.cuda.init()
        return self._mapping.register(self._bytes.data_ptr(), self.nbytes)


class _Mapping(mmap.mmap):
    """An anonymous mapping that unregisters itself from CUDA before it is unmapped.

    A tensor made by `torch.frombuffer` holds a reference to the mapping, so it lives as long as its last view.
    """

    registered: tuple[int, int] | None = None  # address and bytes, where it is pinned

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin the first `nbytes`; returns why that failed, or None."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if error:
            return f"cudaHostRegister of {nbytes} bytes failed with CUDA error {error} (see `ulimit -l`)"
        self.registered = address, _whole_pages(nbytes)
        _count(*self.registered)
        return None

    def unregister(self) -> None:
        """Unpin what is pinned."""
        if self.registered is not None:
            address, nbytes = self.registered
            torch.cuda.synchronize()  # a copy from or to it may still be under way
            torch.cuda.cudart().cudaHostUnregister(address)
            self.registered = None
            _count(address, -nbytes)

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.unregister()


def _whole_pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _count(address: int, nbytes: int) -> None:
    HostBlock.pinned_bytes += nbytes
    for watcher in HostBlock.watchers:
        watcher(address, nbytes)


def _touch(address: int, nbytes: int) -> None:
    """Fault every page in, in parallel: `cudaHostRegister` would do it page by page on one thread."""

    def fault_in(start: int) -> None:
        # madvise(MADV_POPULATE_WRITE) spares a write of each byte, and yet took twice as long on an H200 host.
        ctypes.memset(address + start, 0, min(_TOUCH_CHUNK, nbytes - start))

    with ThreadPoolExecutor(min(_TOUCH_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(fault_in, range(0, nbytes, _TOUCH_CHUNK)))


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
