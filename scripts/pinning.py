"""How fast host memory is pinned, setting by setting: the case `reserving` of `record_report.py`."""

from __future__ import annotations

import ctypes
import mmap
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lora_mem.observe.progress import say
from lora_mem.staging.pinned import HostBlock

MAPPINGS = {"shared": mmap.MAP_SHARED, "private": mmap.MAP_PRIVATE}
MADV_POPULATE_WRITE = 23  # Linux 5.14; not in Python's mmap
CHUNK = 64 * 2**20
LIBC = ctypes.CDLL(None, use_errno=True)


def reserving(save: Callable[[dict[str, Any]], None], tiny: bool) -> None:
    """Seconds to pin the memory of one adapter, by mapping, huge pages, what touches the pages, and threads.

    Each setting runs twice, and the first one comes again at the end: a virtual machine gets its memory from the host
    as it first touches it. `HostBlock` itself follows.
    """
    nbytes = 8 * 2**20 if tiny else 3 * 64 * (2048 + 768) * 128 * 48 * 2
    first = ("shared", True, "memset", 16)
    settings = [first, ("private", True, "memset", 16)]
    settings += [("private", True, touch, threads) for touch in ("memset", "populate") for threads in (4, 8, 32)]
    settings += [("private", huge, touch, 16) for huge, touch in ((True, "populate"), (False, "memset"))]
    settings += [("private", False, "populate", 16), ("shared", True, "populate", 16), first]
    if torch.cuda.is_available():
        torch.cuda.init()
        torch.cuda.synchronize()
    rows: list[dict[str, Any]] = []
    for setting in settings:
        for nth in (1, 2):
            rows.append({"nth": nth, **_once(nbytes, *setting)})
            save({"nbytes": nbytes, "runs": rows})
            say(f"{rows[-1]}")
    blocks: list[dict[str, Any]] = []
    for _ in range(2):
        began = time.perf_counter()
        block = HostBlock(nbytes)
        reserved = time.perf_counter()
        unpinned_because = block.unpinned_because
        del block
        seconds = {"reserve": reserved - began, "give_back": time.perf_counter() - reserved}
        blocks.append({"seconds": seconds, "unpinned_because": unpinned_because})
    save({"nbytes": nbytes, "runs": rows, "host_block": blocks})


def _once(nbytes: int, mapping: str, huge: bool, touch: str, threads: int) -> dict[str, Any]:
    """One mapping made, touched, registered and given back: seconds of each, page faults, bytes in huge pages."""
    seconds: dict[str, float] = {}

    @contextmanager
    def lap(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] = time.perf_counter() - began

    with lap("map"):
        memory = mmap.mmap(-1, nbytes, flags=MAPPINGS[mapping] | mmap.MAP_ANONYMOUS)
        if huge:
            memory.madvise(mmap.MADV_HUGEPAGE)
        view = (ctypes.c_char * nbytes).from_buffer(memory)
        address = ctypes.addressof(view)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    starts = range(0, nbytes, CHUNK)
    with lap("touch"), ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda start: _touch(touch, address + start, min(CHUNK, nbytes - start)), starts))
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
    huge_bytes = _huge_bytes(address)
    error = None
    if torch.cuda.is_available():
        with lap("register"):
            error = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
        if not error:
            with lap("unregister"):
                torch.cuda.cudart().cudaHostUnregister(address)
    with lap("unmap"):
        del view
        memory.close()
    return {
        "mapping": mapping,
        "madv_hugepage": huge,
        "touch": touch,
        "threads": threads,
        "seconds": seconds,
        "minor_faults": faults,
        "huge_bytes": huge_bytes,
        "cuda_error": error,
    }


def _touch(how: str, address: int, nbytes: int) -> None:
    """Fault pages in; both calls let other threads run."""
    if how == "memset":
        ctypes.memset(address, 0, nbytes)
    elif LIBC.madvise(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), MADV_POPULATE_WRITE):
        raise OSError(ctypes.get_errno(), f"madvise(MADV_POPULATE_WRITE) of {nbytes} bytes failed")


def _huge_bytes(address: int) -> int:
    """Bytes of the mapping at an address that are in huge pages, as the kernel says."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, _, end = first.partition("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and first in ("AnonHugePages:", "ShmemPmdMapped:"):
            found += int(rest[0]) * 1024
    return found


def plot_reserving(found: dict[str, Any], ax: Any) -> None:
    """Stacked bars: seconds to touch every page, and to register, by setting, its first and its second time."""
    labels = []
    for place, run in enumerate(found["runs"]):
        seconds = run["seconds"]
        register = seconds.get("register", 0.0)
        both = seconds["touch"] + register
        ax.barh(place, seconds["touch"], color="#4477aa", label="" if place else "touch every page")
        ax.barh(place, register, left=seconds["touch"], color="#ee6677", label="" if place else "cudaHostRegister")
        ax.text(both, place, f" {both:.2f}", va="center", fontsize="x-small")
        pages = "huge pages" if run["huge_bytes"] else "4 KiB pages"
        labels.append(f"{run['mapping']}, {pages}, {run['touch']}, {run['threads']} threads, time {run['nth']}")
    ax.set_yticks(range(len(labels)), labels, fontsize="x-small")
    ax.invert_yaxis()
    ax.set_xlabel(f"seconds for {found['nbytes'] / 2**30:.4f} GiB")
    ax.margins(x=0.12)
    ax.legend()
