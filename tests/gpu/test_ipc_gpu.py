"""Tensors that another process lent through CUDA IPC: after the load their owner can have the memory back.

A trainer beside vLLM's worker sends views of one large bucket. As long as the worker holds one of them, or an import
that nobody has closed, the trainer's allocator cannot free the bucket.
"""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="needs vllm")

from lora_mem.staging.offload import move_to_host, release_device_memory  # noqa: E402
from one_layer import adapter, layout_for, receiver_for, same, staged_slots, vllm_slots, worker  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BUCKET = 256 * 2**20  # bytes, most of them never read: what counts is that all of it can be freed


def lend(tensors):
    """The tensors as views of one bucket in GPU memory."""
    bucket = torch.zeros(BUCKET // 2, dtype=torch.bfloat16, device="cuda")
    views, start = {}, 0
    for name, tensor in tensors.items():
        views[name] = bucket[start : start + tensor.numel()].view(tensor.shape)
        views[name].copy_(tensor)
        start += tensor.numel()
    torch.cuda.synchronize()
    return views


def borrow(way, inbox, outbox):
    """The worker's process: takes what is lent, and goes on living."""
    torch.cuda.init()
    torch.ones(1, device="cuda").sum().item()  # what a first kernel takes is not the adapter's
    outbox.put("ready")
    tensors = inbox.get(timeout=120)
    used = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    if way == "offload":
        move_to_host([[(tensors, name) for name in tensors]], pin=True)
        held = tensors
    elif way == "stage":
        manager, _ = worker("gated")
        where = layout_for(manager)
        receiver = receiver_for(where, tensors, pin=True)
        receiver.add_all(tensors)
        receiver.finish()
        held = {str(number): tensor for number, tensor in enumerate(receiver.parts.values())}
    del tensors
    release_device_memory()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) <= used
    assert all(tensor.is_pinned() for tensor in held.values())
    # numpy arrays, so that the answer does not lend anything itself
    values = [(tensor.view(torch.int16).numpy().copy(), tuple(tensor.shape)) for tensor in held.values()]
    outbox.put((list(held), values))
    inbox.get(timeout=120)  # holds what it has until the owner has looked


@pytest.mark.parametrize("way", ["offload", "stage"])
def test_the_owner_of_borrowed_tensors_gets_their_memory_back(way):
    manager, layer = worker("gated")
    tensors = adapter("gated")
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    other = context.Process(target=borrow, args=(way, inbox, outbox), daemon=True)
    other.start()
    try:
        assert outbox.get(timeout=120) == "ready"
        release_device_memory()
        before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        free_before = torch.cuda.mem_get_info()[0]
        views = lend(tensors)
        inbox.put(views)
        names, values = outbox.get(timeout=120)
        assert torch.cuda.memory_allocated() - before[0] >= BUCKET
        del views
        release_device_memory()  # the owner closes what it lent; the other process is alive and holds the adapter
        assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
        # The other process takes some for itself: its kernels are loaded as they are first used.
        assert torch.cuda.mem_get_info()[0] >= free_before - BUCKET // 2
        assert other.is_alive()
    finally:
        inbox.put("done")
        other.join(30)
    assert other.exitcode == 0
    held = [torch.from_numpy(bits).view(torch.bfloat16).view(shape) for bits, shape in values]
    if way == "offload":
        assert names == list(tensors)
        assert all(torch.equal(copy, tensors[name]) for name, copy in zip(names, held, strict=True))
        return
    where = layout_for(manager)
    receiver = receiver_for(where, tensors)
    receiver.add_all(tensors)
    receiver.finish()
    assert all(torch.equal(copy, part) for copy, part in zip(held, receiver.parts.values(), strict=True))
    slots = staged_slots(manager, layer, receiver)
    expected = vllm_slots(manager, layer, tensors)
    assert same(slots, expected)
