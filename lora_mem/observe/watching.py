"""Memory of this process now and the most since: torch's peak counters, read and reset in this one place."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lora_mem.observe.profiles import Memory
from lora_mem.staging.counters import pinned_by_torch, resident
from lora_mem.staging.pinned import HostBlock


class Watch:
    """A block under way: memory as it began, the most since and, once it is over, memory as it ended."""

    def __init__(self, before: Memory) -> None:
        self.before = self.peak = self.after = before


# The blocks under way, phases among them: torch's peak counters are one for all of them.
_open: list[Watch] = []


@contextmanager
def watched(device: int | None = None) -> Iterator[Watch]:
    """The most memory in a block, as `peak` once it is over; phases in it and profiles around it lose nothing by it."""
    watch = Watch(memory_and_peak(device)[0])
    _open.append(watch)
    try:
        yield watch
    finally:
        watch.after, _ = memory_and_peak(device)
        _open.remove(watch)


def memory_and_peak(device: int | None = None) -> tuple[Memory, Memory]:
    """Memory now, and with torch's peaks since the last call; every open phase and watch learns of them.

    Use it in place of `torch.cuda.reset_peak_memory_stats` in code that is profiled: the counters are one for all.
    """
    now, peak = _read(device)
    for watch in _open:
        watch.peak = most([watch.peak, peak])
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
    return now, peak


def memory(device: int | None = None) -> Memory:
    """Memory now; torch's peak counters go on."""
    return _read(device)[0]


def most(memories: Iterable[Memory]) -> Memory:
    """The largest of each figure."""
    figures: dict[str, Any] = {}
    for found in memories:
        for name, value in vars(found).items():
            before = figures.get(name)
            figures[name] = value if before is None or (value is not None and value > before) else before
    return Memory(**figures)


def _read(device: int | None) -> tuple[Memory, Memory]:
    """Memory now, and the same with the peaks that torch has counted."""
    initialized = torch.cuda.is_initialized()
    gpu = initialized or torch.cuda.is_available()
    stats = torch.cuda.memory_stats(device) if initialized else {}
    used = None
    if initialized:
        free, total = torch.cuda.mem_get_info(device)
        used = total - free

    def counted(figure: str) -> int | None:
        return int(stats.get(figure, 0)) if gpu else None

    now = Memory(
        allocated=counted("allocated_bytes.all.current"),
        reserved=counted("reserved_bytes.all.current"),
        device_used=used,
        pinned=HostBlock.pinned_bytes,
        pinned_by_torch=pinned_by_torch(),
        host_resident=resident(),
    )
    peaks = counted("allocated_bytes.all.peak"), counted("reserved_bytes.all.peak")
    return now, dataclasses.replace(now, allocated=peaks[0], reserved=peaks[1])
