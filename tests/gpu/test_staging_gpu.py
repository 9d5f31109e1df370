"""Receiving from a GPU: any order, any chunks, memory reused at once, nothing retained, and vLLM's own slots."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm", reason="needs vllm")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lora_mem.staging.offload import release_device_memory  # noqa: E402
from one_layer import LAYOUTS, RANK, adapter, layout_for, receiver_for, staged_slots, vllm_slots, worker  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@given(
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    alpha=st.sampled_from([RANK, 2 * RANK, 3, 7]),
    rslora=st.booleans(),
    alias=st.booleans(),
    on_host=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 2**32 - 1),
    cuts=st.integers(1, 5),
)
@settings(max_examples=150)
def test_from_the_gpu_in_any_order(layout, dtype, alpha, rslora, alias, on_host, seed, cuts):
    manager, layer = worker(layout)
    config = {"r": RANK, "lora_alpha": alpha, "use_rslora": rslora, "target_modules": []}
    fused = "fused" in layout or "interleaved" in layout
    tensors = adapter(layout, seed, dtype, alias)
    expected = vllm_slots(manager, layer, tensors, config, fused, None)
    chance = random.Random(seed)
    names = list(tensors)
    chance.shuffle(names)
    where = layout_for(manager, config)
    receiver = receiver_for(where, tensors, pin=True)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
    for start in range(cuts):
        with torch.cuda.stream(chance.choice(streams)):
            on_device: dict[int, torch.Tensor] = {}  # what is one tensor stays one
            chunk = {
                name: tensors[name].clone()
                if chance.random() < on_host
                else on_device.setdefault(id(tensors[name]), tensors[name].cuda())
                for name in names[start::cuts]
            }
            receiver.add_all(chunk)
            for tensor in chunk.values():
                tensor.fill_(float("nan"))  # on the current stream, at once
    receiver.finish()
    slots = staged_slots(manager, layer, receiver, fused)
    for name in expected:
        assert torch.equal(slots[name].cpu(), expected[name]), name
    assert all(tensor.is_pinned() for tensor in receiver.parts.values())


def test_views_of_one_large_buffer_are_let_go():
    release_device_memory()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    manager, layer = worker("gated")
    tensors = adapter("gated")
    expected = vllm_slots(manager, layer, tensors)
    bucket = torch.cat([tensor.flatten() for tensor in tensors.values()]).cuda()
    views, start = {}, 0
    for name, tensor in tensors.items():
        views[name] = bucket[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    where = layout_for(manager)
    receiver = receiver_for(where, tensors, pin=True)
    receiver.add_all(views)
    del bucket, views
    receiver.finish()
    release_device_memory()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    slots = staged_slots(manager, layer, receiver)
    assert all(torch.equal(slots[name], expected[name]) for name in expected)
