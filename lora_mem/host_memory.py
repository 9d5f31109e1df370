"""Page-locked host memory of exact size.

`torch.empty(pin_memory=True)` rounds every block up to a power of two, takes seconds to pin gigabytes, and keeps freed
blocks in its own cache. A `HostBlock` is one anonymous mapping, backed by huge pages where the kernel allows it,
touched by several threads and then registered with CUDA: exact in size, and given back to the system when its last
view is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from lora_mem.footprints import BLOCK_ALIGNMENT
from lora_mem.footprints import aligned as aligned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

ALIGNMENT = BLOCK_ALIGNMENT
"""Bytes. Every view handed out starts at a multiple of this, which the copy engines like and every dtype accepts."""

_TOUCH_THREADS = 16
_TOUCH_CHUNK = 64 * 2**20
_MADV_POPULATE_WRITE = 23  # not in Python's mmap
_LIBC = ctypes.CDLL(None)


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

    def __del__(self) -> None:
        if self.registered_at and not sys.is_finalizing():
            torch.cuda.synchronize()  # a copy from or to it may still be under way
            torch.cuda.cudart().cudaHostUnregister(self.registered_at)
            _pinned(self.registered_at, -len(self))


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
        self.unpinned_because: str | None = None if pin else "not asked for"
        # Private: the kernel gives shared anonymous memory huge pages only where an administrator allowed it.
        mapping = _Mapping(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if nbytes >= 2 * 2**20 and hasattr(mmap, "MADV_HUGEPAGE"):
            with contextlib.suppress(OSError):  # a kernel without transparent huge pages: slower, nothing else
                mapping.madvise(mmap.MADV_HUGEPAGE)
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
        elements = 1
        for size in shape:
            elements *= size
        nbytes = elements * dtype.itemsize
        if self.used + nbytes > self.nbytes:
            raise MemoryError(
                f"{nbytes} bytes asked for, but only {self.nbytes - self.used} of the block's {self.nbytes} are unused"
            )
        start = self.used // dtype.itemsize
        self.used = min(self.nbytes, self.used + aligned(nbytes))
        if dtype not in self._typed:
            self._typed[dtype] = self._bytes[: self.nbytes // dtype.itemsize * dtype.itemsize].view(dtype)
        if stride is None:
            return self._typed[dtype][start : start + elements].view(tuple(shape))
        return self._typed[dtype].as_strided(tuple(shape), tuple(stride), start)

    def clear(self) -> None:
        """Hand out the memory from the front again; earlier views still show it."""
        self.used = 0

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
        error = int(torch.cuda.cudart().cudaHostRegister(address, self.nbytes, 0))
        if error:
            return f"cudaHostRegister of {self.nbytes} bytes failed with CUDA error {error} (see `ulimit -l`)"
        mapping.registered_at = address
        _pinned(address, len(mapping))
        return None


def pinned_by_torch() -> int | None:
    """Bytes that torch's own cache of page-locked memory holds, in use or not; None without a GPU in this process."""
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


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
        where, size = address + start, min(_TOUCH_CHUNK, nbytes - start)
        if _LIBC.madvise(ctypes.c_void_p(where), ctypes.c_size_t(size), _MADV_POPULATE_WRITE):
            ctypes.memset(where, 0, size)  # before Linux 5.14: the same, and every byte written once more

    starts = range(0, nbytes, _TOUCH_CHUNK)
    with ThreadPoolExecutor(min(_TOUCH_THREADS, os.cpu_count() or 1)) as threads:
        list(threads.map(fault_in, starts))
