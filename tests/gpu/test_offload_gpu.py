"""What an offload does to real GPU tensors: values, strides, sharing, pinned memory, and not one GPU byte kept."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from lora_mem.staging.offload import move_to_host  # noqa: E402
from lora_mem.staging.pinned import HostBlock  # noqa: E402
from lora_mem.staging.tensors import resident  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20


def test_values_strides_and_sharing_are_kept_and_no_gpu_memory_is_retained():
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    base = torch.randn(64, 128, device="cuda")
    registered = {
        "plain": base,
        "transposed": base.t(),
        "other view": base[:32],
        "gapped": base[:, ::2],
        "expanded": torch.randn(1, 16, 8, device="cuda").expand(128, 16, 8),
        "empty": torch.empty(0, 4, device="cuda"),
        "scalar": torch.tensor(3.0, device="cuda"),
        "bf16": torch.randn(3, 5, device="cuda").bfloat16(),
        "large": torch.randn(40 * MIB // 4, device="cuda"),
    }
    staged = {"alias": base.view(64, 128), "alias of a view": base[:32].clone(), "host": torch.randn(4)}
    staged["alias of a view"] = registered["other view"]
    expected = {name: tensor.cpu().clone() for name, tensor in (registered | staged).items()}
    strides = {name: tensor.stride() for name, tensor in (registered | staged).items()}
    host = staged["host"]
    del base

    moved = move_to_host([[(staged, name) for name in staged], [(registered, name) for name in registered]], pin=True)

    after = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    assert after[0] == before[0]
    assert after[1] <= before[1]
    for name, tensor in (registered | staged).items():
        assert tensor.device.type == "cpu", name
        assert torch.equal(tensor, expected[name]), name
        assert tensor.is_pinned() or tensor.numel() == 0, name
        if name != "gapped":
            assert tensor.stride() == strides[name], name
    assert registered["gapped"].is_contiguous()
    assert registered["plain"].data_ptr() == staged["alias"].data_ptr()
    assert registered["other view"].data_ptr() == staged["alias of a view"].data_ptr()
    assert registered["other view"].data_ptr() != registered["plain"].data_ptr()
    assert registered["expanded"].untyped_storage().nbytes() < 128 * 16 * 8 * 4 + 50 * MIB
    assert staged["host"] is not host  # it was pageable
    assert moved.unpinned_because is None
    assert moved.tensors == 12
    assert moved.copies == 10


def test_a_block_is_exact_pinned_and_given_back():
    before = resident()
    block = HostBlock(512 * MIB)
    assert block.pinned
    tensor = block.take((256 * MIB,), torch.bfloat16)
    assert tensor.is_pinned()
    assert resident() - before < 520 * MIB
    source = torch.randn(256 * MIB, device="cuda", dtype=torch.bfloat16)
    tensor.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(tensor, source.cpu())
    del block, tensor
    assert resident() - before < 8 * MIB + 512 * MIB  # source.cpu() may be cached by the C library
    with pytest.raises(MemoryError, match="16 bytes asked for"):
        HostBlock(8).take((4,), torch.float32)


def test_a_block_that_is_shrunk_stays_pinned_as_far_as_it_is_used():
    pinned = HostBlock.pinned_bytes
    block = HostBlock(512 * MIB)
    tensor = block.take((16 * MIB,), torch.bfloat16)
    source = torch.randn(16 * MIB, device="cuda", dtype=torch.bfloat16)
    tensor.copy_(source)
    before = resident()
    block.shrink()
    assert before - resident() > 470 * MIB
    assert HostBlock.pinned_bytes - pinned == block.nbytes == 32 * MIB
    assert tensor.is_pinned()
    assert torch.equal(tensor.cuda(), source)
    del block, tensor
    assert HostBlock.pinned_bytes == pinned


def test_a_pinned_host_tensor_stays_as_it_is():
    pinned = torch.randn(8).pin_memory()
    holder = {"pinned": pinned}
    moved = move_to_host([[(holder, "pinned")]], pin=True)
    assert holder["pinned"] is pinned
    assert moved.copies == 0
