"""Bytes that are counted for this process: copied, pinned by torch, resident."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass
class Copied:
    """Bytes copied between GPUs and the host so far, each way; only ever grows. A profile takes differences of it.

    Counted by the code that copies: an offload, a stage, and vLLM's copies into slots while a profile is open.
    """

    to_host: int = 0
    to_device: int = 0


copied = Copied()


def pinned_by_torch() -> int | None:
    """Bytes that torch's own cache of pinned memory holds, in use or not; None without a GPU in this process."""
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def resident() -> int:
    """Bytes of host memory that this process has resident."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
