"""Blocks of host memory: exact in size, handed out without overlap, given back, and used again."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lora_mem.sizing.units import BLOCK_ALIGNMENT, aligned  # noqa: E402
from lora_mem.staging import pinned  # noqa: E402
from lora_mem.staging.pinned import Arena, HostBlock  # noqa: E402
from lora_mem.staging.tensors import resident  # noqa: E402

MIB = 2**20


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@given(st.lists(st.integers(0, 2000), max_size=20))
@settings(max_examples=50)
def test_a_block_hands_out_disjoint_aligned_memory_and_no_more(sizes):
    block = HostBlock(sum(aligned(size) for size in sizes), pin=False)
    taken = [block.take((size,), torch.uint8) for size in sizes]
    for number, tensor in enumerate(taken):
        assert tensor.numel() == 0 or (tensor.data_ptr() - block._bytes.data_ptr()) % BLOCK_ALIGNMENT == 0
        tensor.fill_(number % 251)
    for number, tensor in enumerate(taken):
        assert bool((tensor == number % 251).all())
    with pytest.raises(MemoryError, match=r"asked for, but only 0 of the block's \d+ are unused"):
        block.take((1,), torch.uint8)


def test_a_block_outlives_itself_through_its_views():
    tensor = HostBlock(1 << 20, pin=False).take((1 << 18,), torch.float32)
    tensor.fill_(2.5)
    assert float(tensor.sum()) == 2.5 * (1 << 18)


def test_without_a_gpu_a_block_says_why_it_is_not_pinned():
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    block = HostBlock(4096)
    assert not block.pinned
    assert block.unpinned_because == "no CUDA device in this process"
    with pytest.raises(ValueError, match="nbytes must be 0 or more, got -1"):
        HostBlock(-1)


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="no transparent huge pages here")
def test_a_block_is_in_huge_pages():
    nbytes = 64 << 20
    block = HostBlock(nbytes, pin=False)
    address = block.take((nbytes,), torch.uint8).data_ptr()
    pinned._touch(address, nbytes)
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(word, 16) for word in first.split("-"))
            inside = start <= address < end
        elif inside and first == "AnonHugePages:":
            found += int(rest[0]) * 1024
    assert found >= nbytes - (4 << 20)  # all but the ends, which may not be aligned


def test_what_a_block_did_not_hand_out_is_given_back():
    block = HostBlock(64 * MIB, pin=False)
    tensor = block.take((4 * MIB,), torch.bfloat16)
    tensor.fill_(1.5)
    block._bytes.fill_(block._bytes[0].item())  # all of it is resident now
    tensor.fill_(1.5)
    before = resident()
    block.shrink()
    assert before - resident() > 55 * MIB
    assert block.nbytes == block.used == 8 * MIB
    assert torch.all(tensor == 1.5)
    with pytest.raises(MemoryError, match="only 0 of the block's 8388608 are unused"):
        block.take((1,), torch.bfloat16)
    block.clear()
    assert block.take((4 * MIB,), torch.bfloat16).data_ptr() == tensor.data_ptr()
    block.shrink()
    assert block.nbytes == 8 * MIB


def test_free_blocks_are_kept_as_spares_and_used_again():
    class User:
        pass

    arena, users, used = Arena(), [User() for _ in range(3)], weakref.WeakSet()
    blocks = [arena.take(4096, pin=False) for _ in users]
    for block, user in zip(blocks, users, strict=True):
        arena.keep(block, weakref.WeakSet([user]), spare=3)
    assert arena.free_bytes == 0
    del users[:2], user
    arena.keep(arena.take(8192, pin=False), used, spare=4)  # more spares are wanted than there are
    assert arena.free_bytes == 2 * 4096 + 8192
    assert arena.take(4096, pin=False) is blocks[0]
    arena.keep(blocks[0], used, spare=2)
    assert [block for block, _ in arena.blocks if block in blocks] == [
        blocks[2],
        blocks[0],
    ]  # the last two that are free
    assert (arena.trim(4096, spare=1), arena.trim()) == (0, 4096 + 8192)
    assert [block for block, _ in arena.blocks] == [blocks[2]]
