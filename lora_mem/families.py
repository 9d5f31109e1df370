"""How vLLM builds each model family: its runtime modules, from the fields of a config.json.

Read from vLLM 0.33.0, `vllm/model_executor/models/*.py`. One function for each family; families that vLLM derives from
one another share one here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lora_mem.layers import Child, Config, Experts, Group, Linear, Module


def _column(
    name: str, input_size: int, output_size: int, *, linear: bool = True, tensor_parallel: bool = True
) -> Linear:
    child = Child(name.rpartition(".")[2], output_size, linear)
    return Linear(name, "column", input_size, (output_size,), (child,), tensor_parallel=tensor_parallel)


def _row(name: str, input_size: int, output_size: int) -> Linear:
    return Linear(name, "row", input_size, (output_size,), (Child(name.rpartition(".")[2], output_size),))


def _replicated(name: str, input_size: int, output_size: int, *, linear: bool = True) -> Linear:
    child = Child(name.rpartition(".")[2], output_size, linear)
    return Linear(name, "replicated", input_size, (output_size,), (child,))


def _gate_up(name: str, input_size: int, output_size: int) -> Linear:
    children = (Child("gate_proj", output_size), Child("up_proj", output_size))
    return Linear(name, "merged", input_size, (output_size, output_size), children)


def _qkv(name: str, hidden: int, heads: int, kv_heads: int, head_dim: int) -> Linear:
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    children = tuple(Child(child, size) for child, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True))
    return Linear(name, "qkv", hidden, sizes, children, heads=(heads, kv_heads, kv_heads))


def _mlp(path: str, hidden: int, intermediate: int) -> tuple[Linear, ...]:
    return _gate_up(f"{path}.gate_up_proj", hidden, intermediate), _row(f"{path}.down_proj", intermediate, hidden)


def _attention(path: str, config: Config) -> tuple[Linear, ...]:
    """Grouped-query attention: qkv_proj and o_proj."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads={heads}")
    if "head_dim" not in config and hidden % heads:
        raise config.error("num_attention_heads", f"must divide hidden_size={hidden} where head_dim is not given")
    head_dim = config.number("head_dim", default=hidden // heads)
    return (
        _qkv(f"{path}.qkv_proj", hidden, heads, kv_heads, head_dim),
        _row(f"{path}.o_proj", heads * head_dim, hidden),
    )


def _vocabulary(config: Config, prefix: str = "") -> tuple[Group, ...]:
    """embed_tokens and lm_head, for the models that list them in `embedding_modules`."""
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    embedding = Linear("embed_tokens", "embedding", vocab, (hidden,), (Child("embed_tokens", hidden, linear=False),))
    logits = Linear("lm_head", "logits", hidden, (vocab,), (Child("lm_head", vocab, linear=False),))
    return (
        Group(f"{prefix}model", (), (embedding,), "first"),
        Group(prefix.rstrip("."), (), (logits,), "last"),
    )


def _layers(kinds: Iterable[tuple[Module, ...]], prefix: str = "model.layers.{}") -> tuple[Group, ...]:
    """Group the layers that have equal modules, in the order of their first layer."""
    groups: dict[tuple[Module, ...], list[int]] = {}
    for index, modules in enumerate(kinds):
        groups.setdefault(modules, []).append(index)
    return tuple(Group(prefix, tuple(indices), modules) for modules, indices in groups.items())


def _llama(config: Config) -> tuple[Group, ...]:
    """Llama, Qwen3 and their kin: attention and a gated MLP in each layer."""
    attention = _attention("self_attn", config)
    mlp = _mlp("mlp", config.number("hidden_size"), config.number("intermediate_size"))
    return _layers([(*attention, *mlp)] * config.number("num_hidden_layers")) + _vocabulary(config)


def _llama_without_vocabulary(config: Config) -> tuple[Group, ...]:
    """Mistral and Qwen2: as Llama, but vLLM gives embed_tokens and lm_head no slots."""
    return tuple(group for group in _llama(config) if group.stage == "layers")


def _mixtral(config: Config) -> tuple[Group, ...]:
    hidden, experts = config.number("hidden_size"), config.number("num_local_experts")
    layer: tuple[Module, ...] = (
        *_attention("self_attn", config),
        _replicated("block_sparse_moe.gate", hidden, experts),
        Experts(
            "block_sparse_moe.experts", experts, hidden, config.number("intermediate_size"), "gated", ("w1", "w2", "w3")
        ),
    )
    return _layers([layer] * config.number("num_hidden_layers")) + _vocabulary(config)


GATED = ("gate_proj", "down_proj", "up_proj")


def _qwen3_moe(config: Config) -> tuple[Group, ...]:
    hidden, experts = config.number("hidden_size"), config.number("num_experts")
    attention = _attention("self_attn", config)
    sparse: tuple[Module, ...] = (
        *attention,
        _replicated("mlp.gate", hidden, experts),
        Experts("mlp.experts", experts, hidden, config.number("moe_intermediate_size"), "gated", GATED),
    )
    step, dense_layers = config.number("decoder_sparse_step", default=1), set(config.items("mlp_only_layers"))
    kinds: list[tuple[Module, ...]] = []
    for index in range(config.number("num_hidden_layers")):
        if index in dense_layers or (index + 1) % step:
            kinds.append(attention + _mlp("mlp", hidden, config.number("intermediate_size")))
        else:
            kinds.append(sparse)
    return _layers(kinds) + _vocabulary(config)


Builder = Callable[[Config], tuple[Group, ...]]

# By architecture, as vLLM's registry names them.
FAMILIES: dict[str, Builder] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama_without_vocabulary,
    "MixtralForCausalLM": _mixtral,
    "Qwen2ForCausalLM": _llama_without_vocabulary,
    "Qwen3ForCausalLM": _llama,
    "Qwen3MoeForCausalLM": _qwen3_moe,
}

# For a config.json without `architectures`.
ARCHITECTURE_OF: dict[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
