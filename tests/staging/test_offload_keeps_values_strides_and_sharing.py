"""Moving tensors to host memory: sharing, strides, places. Where only logic counts, meta tensors stand for a GPU's."""

from __future__ import annotations

import weakref

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lora_mem.staging import offload  # noqa: E402
from lora_mem.staging.offload import HostCopies, move_to_host  # noqa: E402
from lora_mem.staging.tensors import is_dense  # noqa: E402


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

    holder = {"t": torch.empty(4, device="meta")}
    source = weakref.ref(holder["t"])
    move_to_host([[(holder, "t")]], pin=False)
    assert source() is None
