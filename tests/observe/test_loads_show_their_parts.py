"""A load shows its parts in a profile by itself, and vLLM is as it was afterwards."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="needs torch")


import lora_mem
from lora_mem import testing
from phases import names


def evict(llm, hook, manager):
    hook.drop_adapter(2)
    llm.llm_engine.add_lora(hook.stage_adapter(2, *testing.random_adapter(manager, rank=2, seed=2)))
    hook.drop_adapter(2)


@pytest.mark.parametrize("strategy", ["keep", "offload", "stage"])
def test_the_parts_of_a_load_show_by_themselves(llm, hook, manager, strategy):
    hook.install(strategy)
    offload = [] if strategy == "keep" else [(1, "offload")]
    parts = [(1, "build"), (1, "pack"), (1, "activate"), *offload]
    with lora_mem.profile() as profiler:
        with profiler.phase("stage"):
            request = hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1))
        llm.llm_engine.add_lora(request)
        llm.llm_engine.add_lora(request)  # is there already
        testing.generate(llm, request)
    assert names(profiler.result) == [(0, "stage"), (0, "load"), *parts]
    assert profiler.result.versions["vllm"] == hook.status().vllm_version
    load = profiler.result.phase("load")
    inside = [profiler.result.phase(name) for _, name in parts]
    assert sum(phase.seconds for phase in inside) <= load.seconds
    evict(llm, hook, manager)
    with lora_mem.profile() as profiler:
        llm.llm_engine.add_lora(request)
    assert names(profiler.result) == [(0, "rebuild"), *parts]


def test_a_new_version_is_loaded_not_rebuilt_and_a_directory_is_loaded_too(llm, hook, manager, tmp_path):
    from vllm.lora.request import LoRARequest

    tensors, config = testing.random_adapter(manager, rank=4, seed=1)
    llm.llm_engine.add_lora(hook.stage_adapter(1, tensors, config))
    path = testing.save_adapter(tmp_path, tensors, config)
    with lora_mem.profile() as profiler:
        llm.llm_engine.add_lora(hook.stage_adapter(1, tensors, config, load_inplace=True))
        llm.llm_engine.add_lora(LoRARequest("directory", 5, path))
    parts = [(1, "build"), (1, "pack"), (1, "activate")]
    assert names(profiler.result) == [(0, "load"), *parts, (1, "offload"), (0, "load"), *parts]


def test_vllm_is_as_it_was_afterwards(llm, hook, manager):
    from vllm.lora.model_manager import LoRAModelManager

    hook.uninstall()
    before = dict(vars(LoRAModelManager))
    with lora_mem.profile() as outer:
        assert dict(vars(LoRAModelManager)) == before
        hook.install()  # in the block
        assert dict(vars(LoRAModelManager)) != before
        with lora_mem.profile() as inner:
            request = hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1))
            llm.llm_engine.add_lora(request)
        assert dict(vars(LoRAModelManager)) != before
    hook.uninstall()
    assert dict(vars(LoRAModelManager)) == before
    assert names(inner.result) == names(outer.result) != []


def test_a_load_that_fails_is_a_phase_with_an_error(llm, hook, manager):
    request = hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1))
    hook.drop_adapter(1)
    with lora_mem.profile() as profiler, pytest.raises(Exception, match="is not staged in process"):
        llm.llm_engine.add_lora(request)
    assert names(profiler.result) == [(0, "load"), (1, "build")]
    assert "is not staged" in profiler.result.phase("load").error
    assert profiler.result.total.error == ""
