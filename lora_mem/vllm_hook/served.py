"""What an engine's worker serves with LoRA, read from its live layers, and what vLLM reads from an adapter's names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lora_mem.errors import AdapterError, compact, some
from lora_mem.sizing.rules import NOT_PEFTS
from lora_mem.sizing.serving import ExpertLayer, ServedModel, ServedModule, TensorName
from lora_mem.vllm_hook.state import process

if TYPE_CHECKING:
    from vllm.lora.peft_helper import PEFTHelper


def served_model(manager: Any) -> ServedModel:
    """What a worker's LoRA modules take, read once from its live layers."""
    if manager not in process.served:
        process.served[manager] = _read_served_model(manager)
    return process.served[manager]


def _read_served_model(manager: Any) -> ServedModel:
    from vllm.lora import layers
    from vllm.lora.utils import is_supported_lora_module
    from vllm.model_executor.models.utils import PPMissingLayer

    adapters = manager._adapter_manager
    modules: dict[str, ServedModule] = {}
    experts: dict[str, ExpertLayer] = {}
    for name, layer in adapters.modules.items():
        if isinstance(layer, layers.FusedMoEWithLoRA):
            experts[name] = _expert_layer(adapters, name, layer)
            for layout in experts[name].layouts:
                modules.update(layout)
        else:
            modules.update(_linear_modules(adapters, name, layer))

    # Names by which vLLM also finds a module: a text-only adapter of a multimodal model, a pooling model's without
    # "model.".
    aliases = {}
    for name, module in modules.items():
        for other in getattr(adapters, "_get_text_lora_names", lambda _: [])(name):
            aliases[other] = module
        if adapters.is_pooling_model:
            aliases[name.removeprefix("model.")] = module
    modules = aliases | modules

    not_here = tuple(f"{name}." for name, layer in adapters.model.named_modules() if isinstance(layer, PPMissingLayer))
    # The deployment's target_modules leaves these without slots, by the operator's choice.
    untargeted: set[str] = set()
    if manager.lora_config.target_modules is not None:
        for name, layer in adapters.model.named_modules():
            if name not in adapters.modules and is_supported_lora_module(name, layer, adapters.supported_lora_modules):
                prefix, _, last = name.rpartition(".")
                untargeted.add(name)
                untargeted.update(f"{prefix}.{child}" for child in adapters.packed_modules_mapping.get(last, ()))

    return ServedModel(
        modules=modules,
        experts=experts,
        ignored=lambda module: module in untargeted or (bool(not_here) and f"{module}.".startswith(not_here)),
        max_lora_rank=manager.lora_config.max_lora_rank,
        dtype=str(manager.lora_config.lora_dtype).removeprefix("torch."),
        share=not adapters._use_ep,  # vLLM would unpack the factors once more to slice them
        aliases=frozenset(aliases),
    )


def _expert_layer(adapters: Any, name: str, layer: Any) -> ExpertLayer:
    moe = layer.moe_config
    # Sizes of the checkpoint: a backend may pad both, and vLLM copies into a corner of the padded slot.
    per_rank = moe.intermediate_size_per_partition_unpadded or moe.intermediate_size_per_partition
    return ExpertLayer(
        name,
        experts=layer.global_num_experts,
        hidden=moe.hidden_dim_unpadded or moe.hidden_dim,
        intermediate=per_rank * layer.tp_size,
        children=adapters.packed_modules.get(name, []),
        non_gated=adapters._is_non_gated_moe,
        mixed=adapters._enable_mixed_moe_lora_format,
        shared=adapters._enable_moe_shared_loras,
        interleaved=adapters.model.config.architectures[0] == "GptOssForCausalLM",
        rank_multiple=layer.tp_size if layer.fully_sharded else 1,
        first=layer.ep_rank * layer.local_num_experts if layer.use_ep else 0,
        count=layer.local_num_experts,
    )


def _linear_modules(adapters: Any, name: str, layer: Any) -> dict[str, ServedModule]:
    """One runtime module that is not an expert layer: the adapter's modules it is made of, and what each takes."""
    from vllm.lora import layers

    base = layer.base_layer
    if isinstance(layer, layers.VocabParallelEmbeddingWithLoRA):
        return {name: ServedModule(base.org_vocab_size, base.embedding_dim)}
    if isinstance(layer, layers.LogitsProcessorWithLoRA):
        return {name: ServedModule(layer.hidden_size, base.org_vocab_size)}
    if not hasattr(base, "input_size"):
        return {name: ServedModule(None, None)}  # classification heads: vLLM checks these itself
    sizes = list(getattr(base, "output_sizes", ()) or [base.output_size])
    if hasattr(base, "total_num_kv_heads"):
        # output_sizes repeats K and V where ranks outnumber KV heads; an adapter holds each head once.
        v_head_size = getattr(base, "v_head_size", base.head_size)
        sizes = [
            base.total_num_heads * base.head_size,
            base.total_num_kv_heads * base.head_size,
            base.total_num_kv_heads * v_head_size,
        ]
    children = adapters.packed_modules.get(name)
    if not children:
        return {name: ServedModule(base.input_size, sum(sizes))}
    # Where there are more slices than names, the first name covers several (in_proj_qkv of in_proj_qkvz).
    lead = len(sizes) - len(children) + 1
    sizes = [sum(sizes[:lead]), *sizes[lead:]]
    return {child: ServedModule(base.input_size, size) for child, size in zip(children, sizes, strict=False)}


def check_config(manager: Any, config: dict[str, Any]) -> PEFTHelper:
    """vLLM's reading of an adapter's config; an `AdapterError` where this worker cannot serve it."""
    helper = peft_helper(config)
    try:
        helper.validate_legal(manager.lora_config)
    except ValueError as error:
        raise AdapterError(f"vLLM refuses the adapter_config: {error}") from None
    return helper


def peft_helper(config: dict[str, Any]) -> PEFTHelper:
    """vLLM's reading of an adapter's config; an `AdapterError` where it refuses it."""
    from vllm.lora.peft_helper import PEFTHelper

    try:
        return PEFTHelper.from_dict(config)
    except (ValueError, TypeError, AttributeError) as error:
        raise AdapterError(f"vLLM refuses the adapter_config: {error}") from None


def rename_mapper(model: Any) -> Any:
    """What translates names of a checkpoint into the model's own, or None."""
    mapper: Any = getattr(model, "hf_to_vllm_mapper", None)
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper


def names_for(model: Any, tensors: Iterable[str], helper: PEFTHelper) -> dict[str, TensorName]:
    """`read_names` as a model of vLLM's has them read."""
    return read_names(tensors, helper, rename_mapper(model), getattr(model, "lora_skip_prefixes", None))


def read_names(tensors: Iterable[str], helper: PEFTHelper, mapper: Any, skip_prefixes: Any) -> dict[str, TensorName]:
    """What each tensor's name says, read by vLLM's own parser; without those that vLLM skips."""
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.utils import is_base_embedding_weights, parse_fine_tuned_lora_name

    full = set(helper.modules_to_save or ())
    names: dict[str, TensorName] = {}
    unreadable: list[str] = []
    for key in tensors:
        if is_base_embedding_weights(key) or (skip_prefixes and LoRAModel._should_skip_module(key, skip_prefixes)):
            continue
        try:
            module, is_a = parse_fine_tuned_lora_name(key, mapper)
            peft_module = parse_fine_tuned_lora_name(key)[0] if mapper is not None else module
        except ValueError:
            unreadable.append(key)
            continue
        names[key] = TensorName(module, peft_module, is_a, is_full=module in full)
    if unreadable:
        raise AdapterError(NOT_PEFTS.format(some(compact(unreadable))))
    return names
