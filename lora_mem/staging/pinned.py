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
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, ClassVar

import torch

from lora_mem.sizing.units import aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_TOUCH_THREADS = 16
_TOUCH_CHUNK = 64 * 2**20


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
