"""A worker with one real MoE layer of vLLM's and no engine, adapters for it, and the slots that vLLM makes of them."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from vllm.config.lora import LoRAConfig
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA
from vllm.lora.lora_model import LoRAModel, MoEEPLoadSpec, _is_remote_expert_key
from vllm.lora.model_manager import AdapterLRUCache, LoRAModelManager

from lora_mem import vllm_hook
from lora_mem.staging.layout import Layout
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.receiving import Receiver
from lora_mem.vllm_hook import served, slots
from lora_mem.vllm_hook.models import model_of_parts

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
