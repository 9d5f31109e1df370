"""The calculator against vLLM's own classes: its LoRA layers as each rank sees them, and its packing.

No engine and no GPU: layers are built on torch's meta device (shapes) or tiny on the CPU (values), each with the view
of one rank of a tensor- or expert-parallel group.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import LoRAConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.lora import utils as lora_utils  # noqa: E402
from vllm.lora.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA, LogitsProcessorWithLoRA  # noqa: E402
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights  # noqa: E402
from vllm.model_executor.layers import linear, vocab_parallel_embedding  # noqa: E402

from lora_mem.sizing.footprints import footprint  # noqa: E402
from lora_mem.sizing.modules import Experts, Linear, Module  # noqa: E402
from lora_mem.sizing.shapes import ModelShape  # noqa: E402
from lora_mem.sizing.slots import slot_tensors  # noqa: E402
from lora_mem.sizing.tensors import adapter_modules, packed_tensors, staged_tensors  # noqa: E402

MODELS = [
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-30B-A3B",
    "Qwen/Qwen3.5-35B-A3B",
    "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "deepseek-ai/DeepSeek-V3",
    "deepseek-ai/DeepSeek-V2-Lite",
    "google/gemma-4-26B-A4B",
    "meta-llama/Meta-Llama-3.1-70B",
    "microsoft/Phi-3-mini-4k-instruct",
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "openai/gpt-oss-20b",
]


@pytest.fixture(autouse=True)
def vllm_config() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


@pytest.fixture
def as_rank(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Give vLLM's layers the view of one rank."""

    def view(size: int, rank: int) -> None:
        monkeypatch.setattr(parallel_state, "_TP", SimpleNamespace(world_size=size, rank_in_group=rank))

    return view


def base_layer(module: Linear, tp: int) -> Any:
    """The layer that vLLM's model code would build."""
    outputs = list(module.slices)
    if module.kind == "qkv":
        heads, kv_heads, _ = module.heads
        size = module.slices[0] // heads
        return linear.QKVParallelLinear(module.input_size, size, heads, kv_heads, bias=False)
    if module.kind in ("merged", "mamba"):
        disable = not module.tensor_parallel
        return linear.MergedColumnParallelLinear(module.input_size, outputs, bias=False, disable_tp=disable)
    if module.kind == "column":
        return linear.ColumnParallelLinear(module.input_size, outputs[0], bias=False)
    if module.kind == "row":
        return linear.RowParallelLinear(module.input_size, outputs[0], bias=False)
    if module.kind == "replicated":
        return linear.ReplicatedLinear(module.input_size, outputs[0], bias=False)
    return vocab_parallel_embedding.VocabParallelEmbedding(module.input_size, outputs[0])


def wrap(module: Module, options: Any, rank: int) -> Any:
    """vLLM's LoRA layer for one module, or None where vLLM has no class for it."""
    config = LoRAConfig(
        max_lora_rank=options.max_lora_rank,
        max_loras=options.max_loras,
        fully_sharded_loras=options.fully_sharded_loras,
        lora_dtype=torch.bfloat16,
        enable_moe_shared_loras=options.enable_moe_shared_loras,
    )
    if isinstance(module, Experts):
        return wrap_experts(module, options, rank, config)
    if module.kind == "logits":
        processor = SimpleNamespace(vocab_size=module.slices[0])
        layer = LogitsProcessorWithLoRA(processor, module.input_size, torch.bfloat16, torch.device("meta"), None)
        layer.create_lora_weights(options.max_loras, config)
        return layer
    # vLLM packs by the model's mapping: the children of a fused module.
    packed = [child.name for child in module.children] if module.kind in ("merged", "qkv") else []
    layer = lora_utils.from_layer(base_layer(module, options.tensor_parallel_size), options.max_loras, config, packed)
    return layer if hasattr(layer, "lora_a_stacked") else None


def wrap_experts(module: Experts, options: Any, rank: int, config: Any) -> Any:
    """FusedMoEWithLoRA without its kernel: only what sizes and slices depend on."""
    fused = module.layout == "fused" and not options.enable_moe_shared_loras
    cls = FusedMoE3DWithLoRA if fused else FusedMoEWithLoRA
    layer = cls.__new__(cls)
    torch.nn.Module.__init__(layer)
    tp, ep = options.expert_tensor_parallel_size, options.expert_parallel_size
    size = module.intermediate_size // tp
    layer.moe_config = SimpleNamespace(
        hidden_dim=module.hidden_size,
        num_experts=module.num_experts,
        num_local_experts=module.num_experts // ep,
        intermediate_size_per_partition=size,
        intermediate_size_per_partition_unpadded=size,
        moe_parallel_config=SimpleNamespace(use_ep=ep > 1, ep_rank=rank if ep > 1 else 0),
    )
    layer.tp_size, layer.tp_rank = tp, rank if tp > 1 else 0
    layer.device = torch.get_default_device()
    layer._w13_slices = 1 if fused or module.layout == "non_gated" else 2
    layer.enable_moe_shared_loras = False
    layer.create_lora_weights(options.max_loras, config, SimpleNamespace(architectures=["Any"]))
    return layer


def buffers(layer: Any) -> list[tuple[int, ...]]:
    """Shapes of the A and B buffers, in the calculator's order: all A, then all B (w13 before w2)."""
    if isinstance(layer, FusedMoEWithLoRA):
        names = ("w13_lora_a_stacked", "w2_lora_a_stacked", "w13_lora_b_stacked", "w2_lora_b_stacked")
    else:
        names = ("lora_a_stacked", "lora_b_stacked")
    found = []
    for name in names:
        value = getattr(layer, name)
        found += [tuple(tensor.shape) for tensor in ((value,) if torch.is_tensor(value) else value)]
    return found


DENSE_OPTIONS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 1},
    {"tensor_parallel_size": 2, "max_loras": 3},
    {"tensor_parallel_size": 8},
    {"tensor_parallel_size": 2, "fully_sharded_loras": True},
]
EXPERT_OPTIONS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 4, "enable_expert_parallel": True},
    {"tensor_parallel_size": 2, "enable_moe_shared_loras": True},
]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in MODELS:
        experts = [module for module in kinds(ModelShape.from_config(name)) if isinstance(module, Experts)]
        for options in DENSE_OPTIONS + (EXPERT_OPTIONS if experts else []):
            # The shared-outer format needs a gate.
            if "enable_moe_shared_loras" not in options or experts[0].layout != "non_gated":
                yield name, options


def kinds(shape: ModelShape) -> list[Module]:
    return [module for group in shape.groups for module in group.modules]


@pytest.mark.parametrize(("name", "options"), cases())
def test_slots_equal_the_buffers_of_vllms_layers(name: str, options: dict[str, Any], as_rank: Any) -> None:
    result = footprint(name, rank=16, moe_backend="triton", **options)
    assert result.shape
    assert result.options
    tp = result.options.tensor_parallel_size
    for rank in {0, tp - 1}:
        as_rank(tp, rank)
        with torch.device("meta"):
            for module in kinds(result.shape):
                layer = wrap(module, result.options, rank)
                expected = [tensor.shape for tensor in slot_tensors(module, result.options)]
                assert (buffers(layer) if layer is not None else []) == expected, (module.name, rank)


TINY = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "vocab_size": 96,
    "mlp_only_layers": [0],
}


def filled(shape: tuple[int, ...]) -> Any:
    """A tensor whose entries are all different."""
    return torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_the_slots_of_all_ranks_together_hold_each_packed_tensor(tp: int, as_rank: Any) -> None:
    """Tensors of the predicted packed shapes go into vLLM's set_lora; no entry is lost over the ranks."""
    result = footprint(TINY, rank=8, max_lora_rank=8, tensor_parallel_size=tp, dtype="float32")
    assert result.options
    assert result.shape
    for part in adapter_modules(result.shape, result.options):
        if isinstance(part.module, Linear) and part.module.kind in ("embedding", "logits"):
            continue
        packed = [filled(tensor.shape) for tensor in packed_tensors(part, result.options)]
        factors_a, factors_b = packed[0::2], packed[1::2]
        seen: dict[int, set[float]] = {index: set() for index in range(len(factors_b))}
        for rank in range(tp):
            as_rank(tp, rank)
            layer = wrap_on_cpu(part.module, result.options, rank)
            single = len(factors_a) == 1 and not isinstance(part.module, Experts)
            layer.set_lora(0, factors_a[0] if single else factors_a, factors_b[0] if single else factors_b)
            stacked = layer.w13_lora_b_stacked if isinstance(part.module, Experts) else layer.lora_b_stacked
            # w1, w3 are the two w13 buffers; w2 (index 1) is not sliced.
            order = (0, 2) if isinstance(part.module, Experts) else range(len(factors_b))
            for index, buffer in zip(order, stacked, strict=True):
                seen[index] |= set(buffer[0].flatten().tolist()) - {0.0}
        for index, values in seen.items():
            if isinstance(part.module, Experts) and index == 1:
                continue
            assert values == set(factors_b[index].flatten().tolist()), (part.path, index)


def wrap_on_cpu(module: Module, options: Any, rank: int) -> Any:
    config_dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        layer = wrap(module, options, rank)
    finally:
        torch.set_default_dtype(config_dtype)
    # The buffers hold bfloat16; small whole numbers need more, so that no two entries fall together.
    for name, value in list(vars(layer).items()):
        if name.endswith("_stacked") and isinstance(value, tuple):
            setattr(layer, name, tuple(tensor.float() for tensor in value))
    return layer


@pytest.mark.parametrize("name", ["Qwen/Qwen3-30B-A3B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16"])
def test_vllm_packs_staged_experts_into_what_is_predicted(name: str) -> None:
    """vLLM's pack_moe, on meta tensors of the predicted staged shapes, gives the predicted packed bytes."""
    result = footprint(name, rank=4, target_modules="experts", strategy="offload")
    assert result.options
    assert result.shape
    for part in adapter_modules(result.shape, result.options):
        module = part.module
        assert isinstance(module, Experts)
        staged = staged_tensors(part, result.options)
        non_gated = module.layout == "non_gated"
        loras: list[Any] = []
        for expert in range(module.num_experts):
            for projection in range(len(module.children)):
                a, b = staged[2 * projection : 2 * projection + 2]
                factors = (torch.empty(tensor.shape, device="meta", dtype=torch.bfloat16) for tensor in (a, b))
                loras.append(LoRALayerWeights(f"{expert}", 4, 4, *factors))
            loras += [None] * non_gated
        packed = PackedLoRALayerWeights.pack_moe(loras, module.name, is_non_gated_moe=non_gated)
        distinct = {id(t): t for t in [*packed.lora_a, *packed.lora_b]}.values()
        assert sum(t.nbytes for t in distinct) * part.count == result.packed_bytes
        assert sum(t.elements for t in staged) * 2 * part.count == result.staged_bytes
