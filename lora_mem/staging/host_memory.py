"""Page-locked host memory of exact size, and an arena of it for the versions of adapters that come and go.

`torch.empty(pin_memory=True)` rounds every block up to a power of two, takes seconds to pin gigabytes, and keeps freed
blocks in its own cache. A `HostBlock` is one anonymous mapping, backed by huge pages where the kernel allows it,
touched by several threads and then registered with CUDA: exact in size, and given back to the system when its last
view is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
import sys
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from lora_mem.sizing.units import BLOCK_ALIGNMENT
from lora_mem.sizing.units import aligned as aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = BLOCK_ALIGNMENT
"""Bytes. Every view handed out starts at a multiple of this, which the copy engines like and every dtype accepts."""

_TOUCH_THREADS = 16
_TOUCH_CHUNK = 64 * 2**20


@dataclass
class Copied:
    """Bytes copied between GPUs and the host so far, each way; only ever grows. A profile takes differences of it.

    Counted by the code that copies: an offload, a stage, and vLLM's copies into slots while a profile is open.
    """

    to_host: int = 0
    to_device: int = 0


copied = Copied()


class _Mapping(mmap.mmap):
    """An anonymous mapping that unregisters itself from CUDA before it is unmapped.

    A tensor made by `torch.frombuffer` holds a reference to the mapping, so it lives as long as its last view.
    """

    registered_at = 0
    registered_bytes = 0

    def register(self, address: int, nbytes: int) -> str | None:
        """Page-lock the first `nbytes`; returns why that failed, or None."""
        error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if error:
            return f"cudaHostRegister of {nbytes} bytes failed with CUDA error {error} (see `ulimit -l`)"
        self.registered_at, self.registered_bytes = address, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        _pinned(address, self.registered_bytes)
        return None

    def unregister(self) -> None:
        """Let go of the page lock, where there is one."""
        if self.registered_at:
            torch.cuda.synchronize()  # a copy from or to it may still be under way
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)
            _pinned(self.registered_at, -self.registered_bytes)
            self.registered_at = 0

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.unregister()


class HostBlock:
    """`nbytes` of host memory, page-locked where that is possible, handed out front to back.

    Args:
        nbytes: the size, in bytes; exactly this much is mapped (in whole pages), nothing is rounded to a power of two.
        pin: ask for page-locked memory. Without a CUDA device, or where the system refuses to lock that much, the block
            is ordinary memory and `unpinned_because` says why.

    Attributes:
        pinned: whether every view of this block answers `is_pinned()` with True.
        unpinned_because: the reason, or None.
    """

    pinned_bytes: ClassVar[int] = 0
    """Bytes that all blocks of this process have page-locked now."""

    watchers: ClassVar[list[Callable[[int, int], None]]] = []
    """Called with (address, bytes) when a block has been page-locked, and with minus the bytes when it is let go."""

    def __init__(self, nbytes: int, *, pin: bool = True) -> None:
        if nbytes < 0:
            raise ValueError(f"nbytes must be 0 or more, got {nbytes}")
        self.nbytes = nbytes
        self.used = 0
        self._asked_to_pin = pin
        self.unpinned_because: str | None = None if pin else "not asked for"
        # Private: the kernel gives shared anonymous memory huge pages only where an administrator allowed it.
        mapping = _Mapping(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= 2 * 2**20 and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower, nothing else
                mapping.madvise(mmap.MADV_HUGEPAGE)
        self._mapping = mapping
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(mapping, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        if pin:
            self.unpinned_because = self._page_lock(mapping)

    @property
    def pinned(self) -> bool:
        """Whether the memory is page-locked."""
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
        elements = math.prod(shape)
        nbytes = elements * dtype.itemsize
        if self.used + nbytes > self.nbytes:
            raise MemoryError(
                f"{nbytes} bytes asked for, but only {self.nbytes - self.used} of the block's {self.nbytes} are unused"
            )
        start = self.used // dtype.itemsize
        self.used = min(self.nbytes, self.used + aligned(nbytes))
        # A view that is made in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            if dtype not in self._typed:
                self._typed[dtype] = self._bytes[: self.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
            if stride is None:
                return self._typed[dtype][start : start + elements].view(tuple(shape))
            return self._typed[dtype].as_strided(tuple(shape), tuple(stride), start)

    def clear(self) -> None:
        """Hand out the memory from the front again; earlier views still show it."""
        self.used = 0

    def extra(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor beside the block, page-locked where the block was to be."""
        return HostBlock(math.prod(shape) * dtype.itemsize, pin=self._asked_to_pin).take(shape, dtype)

    def shrink(self) -> None:
        """Give the system back what was not handed out, in whole pages; the block is as large as what was, then."""
        keep = -(-self.used // mmap.PAGESIZE) * mmap.PAGESIZE
        tail = len(self._mapping) - keep
        self.nbytes = self.used
        if tail <= 0:
            return
        pinned = self._mapping.registered_at
        self._mapping.unregister()
        self._mapping.madvise(mmap.MADV_DONTNEED, keep, tail)
        if pinned and keep:
            self.unpinned_because = self._mapping.register(pinned, keep)

    def _page_lock(self, mapping: _Mapping) -> str | None:
        if self.nbytes == 0:
            return None
        if not torch.cuda.is_available():
            return "no CUDA device in this process"
        address = self._bytes.data_ptr()
        # A forked child would make the pages copy-on-write, and the GPU would go on with those that we gave up.
        mapping.madvise(mmap.MADV_DONTFORK)
        _touch(address, self.nbytes)
        torch.cuda.init()
        return mapping.register(address, self.nbytes)


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


def pinned_by_torch() -> int | None:
    """Bytes that torch's own cache of page-locked memory holds, in use or not; None without a GPU in this process."""
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that show the same memory in the same way. Valid while the tensor is alive."""
    storage = tensor.untyped_storage()
    # A meta tensor has no address; its storage object tells it apart.
    address = tensor.data_ptr() if tensor.device.type != "meta" else (storage._cdata, tensor.storage_offset())
    return tensor.device, address, tensor.dtype, tuple(tensor.shape), tensor.stride()


def resident() -> int:
    """Bytes of host memory that this process has resident."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _pinned(address: int, nbytes: int) -> None:
    HostBlock.pinned_bytes += nbytes
    for watcher in HostBlock.watchers:
        watcher(address, nbytes)


def _touch(address: int, nbytes: int) -> None:
    """Fault every page in, in parallel: `cudaHostRegister` would do it page by page on one thread."""

    def fault_in(start: int) -> None:
        # madvise(MADV_POPULATE_WRITE) spares a write of each byte, and yet took twice as long on an H200 host.
        ctypes.memset(address + start, 0, min(_TOUCH_CHUNK, nbytes - start))

    starts = range(0, nbytes, _TOUCH_CHUNK)
    with ThreadPoolExecutor(min(_TOUCH_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(fault_in, starts))
