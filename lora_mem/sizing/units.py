"""Units, and the sizes that memory is handed out in."""

from __future__ import annotations

GIB = 1024**3

BLOCK_ALIGNMENT = 256
"""Bytes. Each tensor in a block of `stage` starts at a multiple of it."""
MOST_UNDER_WAY = 136 * 1024**2
"""Bytes of GPU memory in which `stage` lets finished parts wait for their copy to the host.

A layer of Qwen3-30B-A3B at rank 64 has 132 MiB, and so does not wait for its own copies.
"""


def gib(size: int) -> str:
    """A size for printing, in GiB with four digits."""
    return f"{size / GIB:.4f} GiB"


def allowed_under_way(largest: int) -> int:
    """Bytes of GPU memory in which parts may wait for their copy to the host where the largest has so many.

    Of larger parts than `MOST_UNDER_WAY` foresees two may: one is made while the other is copied.
    """
    return max(MOST_UNDER_WAY, 2 * largest)


def most_under_way(packed: int, largest: int) -> int:
    """Bytes that `stage` can have on the GPU at once of an adapter, given its largest packed tensor."""
    return min(packed, allowed_under_way(largest))


def aligned(size: int) -> int:
    return -(-size // BLOCK_ALIGNMENT) * BLOCK_ALIGNMENT


def power_of_two(size: int) -> int:
    """The block that torch's pinned cache takes for `size` bytes."""
    return 1 << (size - 1).bit_length() if size else 0
