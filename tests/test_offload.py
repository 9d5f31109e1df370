"""Moving tensors to host memory: sharing, strides, places. Where only logic counts, meta tensors stand for a GPU's."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lora_mem.sizing.units import BLOCK_ALIGNMENT, aligned  # noqa: E402
from lora_mem.staging import offload, pinned  # noqa: E402
from lora_mem.staging.offload import HostCopies, move_to_host  # noqa: E402
from lora_mem.staging.pinned import Arena, HostBlock  # noqa: E402
from lora_mem.staging.tensors import is_dense, resident  # noqa: E402

MIB = 2**20
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.fixture
def no_data(monkeypatch):
    """Copies from meta tensors, which have no values, leave the target as it is."""
    monkeypatch.setattr(offload, "_copy", lambda target, source: None)


def view_of(base, kind):
    """Views that differ in address, shape or stride; the last ones are not dense."""
    return {
        "whole": lambda: base,
        "again": lambda: base.view(base.shape),
        "transposed": lambda: base.t(),
        "head": lambda: base[:2],
        "tail": lambda: base[2:],
        "gapped": lambda: base[:, ::2],
        "expanded": lambda: base[:1].expand(5, base.shape[1]),
        "empty": lambda: base[:0],
        "scalar": lambda: base[0, 0],
        "reinterpreted": lambda: base.view(torch.int32),
    }[kind]()


KINDS = ["whole", "again", "transposed", "head", "tail", "gapped", "expanded", "empty", "scalar", "reinterpreted"]


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(KINDS)), min_size=1, max_size=12))
@settings(max_examples=200)
def test_values_strides_and_sharing_survive(picks):
    # Pinned memory is asked for, so ordinary host memory is copied: the same code as for a GPU, with values to compare.
    bases = [torch.arange(24, dtype=torch.float32).view(4, 6) + 100 * number for number in range(3)]
    tensors = [view_of(bases[number], kind) for number, kind in picks]
    copies = HostCopies()
    hosts = copies.of(tensors, pin=True)
    moved = copies.close()
    for tensor, host in zip(tensors, hosts, strict=True):
        assert torch.equal(tensor, host)
        assert host.dtype == tensor.dtype
        if is_dense(tensor) or 0 in tensor.stride():
            assert host.stride() == tensor.stride() or tensor.numel() <= 1
        else:
            assert host.is_contiguous()
    # Brute force: same memory shown in the same way, same copy; else another one.
    for i, first in enumerate(tensors):
        for j, second in enumerate(tensors):
            same = (first.data_ptr(), first.dtype, first.shape, first.stride()) == (
                second.data_ptr(),
                second.dtype,
                second.shape,
                second.stride(),
            )
            if first.numel():
                assert (hosts[i].data_ptr() == hosts[j].data_ptr()) == same
    assert moved.tensors == len(tensors)
    assert all(
        host.data_ptr() != tensor.data_ptr() or not tensor.numel() for host, tensor in zip(hosts, tensors, strict=True)
    )


def test_an_expanded_tensor_costs_one_copy_of_what_was_expanded():
    factor = torch.randn(1, 64, 32).expand(128, 64, 32)
    copies = HostCopies()
    (host,) = copies.of([factor], pin=True)
    assert copies.close().nbytes == 64 * 32 * 4
    assert host.shape == factor.shape
    assert torch.equal(host, factor)


def test_sharing_lasts_across_groups_and_ends_with_close(no_data):
    tensor = torch.empty(8, 4, device="meta")
    registered = {"w": tensor}
    staged = {"one": tensor, "two": tensor.view(8, 4), "other": torch.empty(8, 4, device="meta")}
    moved = move_to_host([[(staged, key) for key in staged], [(registered, "w")]], pin=False)
    assert moved.tensors == 4
    assert moved.copies == 2
    assert registered["w"] is staged["one"]
    assert staged["one"].data_ptr() == staged["two"].data_ptr() != staged["other"].data_ptr()
    assert {t.device.type for t in [*registered.values(), *staged.values()]} == {"cpu"}


def test_w1_used_for_w3_stays_shared(no_data):
    # vLLM's non-gated MoE puts w1's tensor in w3's place.
    w1, w2 = torch.empty(4, 2, 8, device="meta"), torch.empty(4, 2, 8, device="meta")
    lora_a = [w1, w2, w1]
    assert move_to_host([[(lora_a, 0), (lora_a, 1), (lora_a, 2)]], pin=False).copies == 2
    assert lora_a[0] is lora_a[2]
    assert lora_a[1] is not lora_a[0]


def test_what_is_on_the_host_stays_and_costs_nothing():
    tensor = torch.randn(3)
    holder = {"t": tensor}
    assert move_to_host([[(holder, "t")]], pin=False) == offload.Moved()
    assert holder["t"] is tensor


def test_attributes_are_places_too(no_data):
    class Layer:
        pass

    layer = Layer()
    layer.lora_a = torch.empty(2, 2, device="meta")
    move_to_host([[(layer, "lora_a")]], pin=False)
    assert layer.lora_a.device.type == "cpu"


def test_the_sources_are_let_go(no_data):
    import weakref

    holder = {"t": torch.empty(4, device="meta")}
    source = weakref.ref(holder["t"])
    move_to_host([[(holder, "t")]], pin=False)
    assert source() is None


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
