"""How vLLM builds each model family: its runtime modules, from the fields of a config.json.

Read from vLLM 0.33.0, `vllm/model_executor/models/*.py`, where every linear layer is one line here. Families that vLLM
derives from one another share a function. Modules that vLLM cannot wrap (a router that a LoRA wrapper does not take,
the convolution of a tower) are left out, since they get no slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

from lora_mem.sizing.modules import Child, Config, ExpertLayout, Experts, Group, Linear, Module

Modules = tuple[Module, ...]
Builder = Callable[[Config], tuple[Group, ...]]
Stage = Literal["first", "last", "ends", "every"]

GATED = ("gate_proj", "down_proj", "up_proj")
FUSED = ("gate_up_proj", "down_proj")


# One linear layer


def _end(name: str) -> str:
    return name.rpartition(".")[2]


def _column(name: str, inputs: int, outputs: int, *, heads: int = 0, linear: bool = True) -> Linear:
    units = (heads,) if heads else ()
    return Linear(name, "column", inputs, (outputs,), (Child(_end(name), outputs, linear),), heads=units)


def _row(name: str, inputs: int, outputs: int) -> Linear:
    return Linear(name, "row", inputs, (outputs,), (Child(_end(name), outputs),))


def _replicated(name: str, inputs: int, outputs: int, *, linear: bool = True) -> Linear:
    return Linear(name, "replicated", inputs, (outputs,), (Child(_end(name), outputs, linear),))


def _conv(name: str, kernel: int, outputs: int) -> Linear:
    # A convolution that vLLM holds as a linear layer: it gets slots, which no adapter of PEFT's form can fill.
    return Linear(name, "column", kernel, (outputs,), ())


def _gate_up(name: str, inputs: int, outputs: int, children: tuple[str, str] = ("gate_proj", "up_proj")) -> Linear:
    both = tuple(Child(child, outputs) for child in children)
    return Linear(name, "merged", inputs, (outputs, outputs), both)


def _mlp(path: str, hidden: int, intermediate: int) -> Modules:
    return _gate_up(f"{path}.gate_up_proj", hidden, intermediate), _row(f"{path}.down_proj", intermediate, hidden)


def _fused_mlp(path: str, hidden: int, intermediate: int) -> Modules:
    """A gated MLP whose gate and up are one tensor in the checkpoint, and one slot in vLLM."""
    return (
        _column(f"{path}.gate_up_proj", hidden, 2 * intermediate),
        _row(f"{path}.down_proj", intermediate, hidden),
    )


def _qkv(
    name: str, hidden: int, heads: int, kv_heads: int, head_dim: int, gate: int = 1, fused: bool = False
) -> Linear:
    """QKVParallelLinear; `gate` is 2 where q carries an output gate, `fused` where the checkpoint has one tensor."""
    sizes = (gate * heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    names = ("q_proj", "k_proj", "v_proj")
    children = tuple(Child(child, size) for child, size in zip(names, sizes, strict=True))
    if fused:
        children = (Child(_end(name), sum(sizes)),)
    return Linear(name, "qkv", hidden, sizes, children, heads=(gate * heads, kv_heads, kv_heads))


# One part of a layer


def _attention(
    config: Config,
    path: str = "self_attn",
    *,
    head_dim: int | None = None,
    out: str = "o_proj",
    gate: int = 1,
    fused: bool = False,
    qkv: str = "qkv_proj",
    kv_heads_default: bool = False,
) -> Modules:
    """Grouped-query attention.

    `head_dim` is what transformers takes where the config gives none; `kv_heads_default` says that it takes as many key
    and value heads as heads (for other models its default is a number that fits one model only, so that the field is
    needed).
    """
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    kv_heads = config.number("num_key_value_heads", default=heads if kv_heads_default else None)
    if heads % kv_heads:
        raise config.error("num_key_value_heads", f"must divide num_attention_heads={heads}")
    if "head_dim" not in config and head_dim is None and hidden % heads:
        raise config.error("num_attention_heads", f"must divide hidden_size={hidden} where head_dim is not given")
    head_dim = config.number("head_dim", default=head_dim or hidden // heads)
    prefix = f"{path}." if path else ""
    return (
        _qkv(f"{prefix}{qkv}", hidden, heads, kv_heads, head_dim, gate, fused),
        _row(f"{prefix}{out}", heads * head_dim, hidden),
    )


def _mla(config: Config, path: str = "self_attn", indexer: bool = False, fused: bool = True) -> Modules:
    """Multi-head latent attention, with the indexer of sparse attention or without.

    `fused` False is for the models where vLLM keeps the two projections into the latent space apart.
    """
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    latent, rope = config.number("kv_lora_rank"), config.number("qk_rope_head_dim", minimum=0)
    nope, value = config.number("qk_nope_head_dim"), config.number("v_head_dim")
    modules: list[Module] = []
    q_rank = config.number_or_null("q_lora_rank")
    if q_rank is not None and not fused:
        modules += [
            _replicated(f"{path}.q_a_proj", hidden, q_rank),
            _column(f"{path}.q_b_proj", q_rank, heads * (nope + rope), heads=heads),
            _replicated(f"{path}.kv_a_proj_with_mqa", hidden, latent + rope),
        ]
    elif q_rank is not None:
        children = (Child("q_a_proj", q_rank), Child("kv_a_proj_with_mqa", latent + rope))
        joined = Linear(
            f"{path}.fused_qkv_a_proj", "merged", hidden, (q_rank, latent + rope), children, tensor_parallel=False
        )
        modules += [joined, _column(f"{path}.q_b_proj", q_rank, heads * (nope + rope), heads=heads)]
        if indexer:
            index = config.number("index_n_heads") * config.number("index_head_dim")
            modules.append(_replicated(f"{path}.indexer.wq_b", q_rank, index))
    else:
        modules += [
            _replicated(f"{path}.kv_a_proj_with_mqa", hidden, latent + rope),
            _column(f"{path}.q_proj", hidden, heads * (nope + rope), heads=heads),
        ]
    return (
        *modules,
        _column(f"{path}.kv_b_proj", latent, heads * (nope + value), heads=heads),
        _row(f"{path}.o_proj", heads * value, hidden),
    )


def _gated_delta_net(config: Config, path: str = "linear_attn", interleaved: bool = False) -> Modules:
    """Linear attention of Qwen3-Next (`interleaved`: one tensor each for qkvz and ba) and Qwen3.5."""
    hidden = config.number("hidden_size")
    k_heads, v_heads = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key = k_heads * config.number("linear_key_head_dim")
    value = v_heads * config.number("linear_value_head_dim")
    conv = _conv(f"{path}.conv1d", config.number("linear_conv_kernel_dim"), 2 * key + value)
    if interleaved:
        qkvz = _column(f"{path}.in_proj_qkvz", hidden, 2 * key + 2 * value, heads=k_heads)
        ba = _column(f"{path}.in_proj_ba", hidden, 2 * v_heads)
    else:
        qkvz_children = (Child("in_proj_qkv", 2 * key + value), Child("in_proj_z", value))
        qkvz = Linear(
            f"{path}.in_proj_qkvz",
            "merged",
            hidden,
            (key, key, value, value),
            qkvz_children,
            heads=(k_heads, k_heads, v_heads, v_heads),
        )
        ba = _gate_up(f"{path}.in_proj_ba", hidden, v_heads, ("in_proj_b", "in_proj_a"))
    return conv, qkvz, ba, _row(f"{path}.out_proj", value, hidden)


def _mamba2(path: str, hidden: int, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> Modules:
    """MambaMixer2; its B and C groups are extended where tensor parallelism does not divide them."""
    inner, group = heads * head_dim, groups * state
    units = (heads, heads, groups, groups, heads)
    sizes = (inner, inner, group, group, heads)
    return (
        Linear(f"{path}.conv1d", "mamba", kernel, sizes[1:4], (), heads=units[1:4]),
        Linear(f"{path}.in_proj", "mamba", hidden, sizes, (Child("in_proj", sum(sizes)),), heads=units),
        _row(f"{path}.out_proj", inner, hidden),
    )


def _count(config: Config) -> int:
    # transformers 5 writes the second name for some models that had the first.
    return config.first_number("num_experts", "num_local_experts")


def _experts(
    path: str,
    count: int,
    hidden: int,
    intermediate: int,
    layout: ExpertLayout = "gated",
    names: tuple[str, ...] = GATED,
) -> Experts:
    return Experts(path, count, hidden, intermediate, layout, FUSED if layout == "fused" else names)


# The whole model


def _listed(config: Config, name: str, kinds: tuple[str, ...] = ()) -> list[Any]:
    """An entry for each layer, which the config must have; one of `kinds`, where they are given."""
    layers = config.number("num_hidden_layers")
    values = config.items(name, layers)
    if not values:
        raise config.error(name, f"is missing; {layers} entries are needed, one for each layer")
    for index, value in enumerate(values):
        if kinds and value not in kinds:
            raise config.error(name, f"entry {index} must be one of {', '.join(kinds)}")
    return values


def _layers(kinds: Iterable[Modules], prefix: str = "model.layers.{}") -> tuple[Group, ...]:
    """Group the layers that have equal modules, in the order of their first layer."""
    groups: dict[Modules, list[int]] = {}
    for index, modules in enumerate(kinds):
        groups.setdefault(modules, []).append(index)
    return tuple(Group(prefix, tuple(indices), modules) for modules, indices in groups.items())


def _same(config: Config, *modules: Module) -> tuple[Group, ...]:
    return _layers([modules] * config.number("num_hidden_layers"))


def _vocabulary(
    config: Config,
    embed: Stage = "first",
    head: Stage | None = "last",
    path: str = "model.embed_tokens",
    *,
    tied: bool = False,
) -> tuple[Group, ...]:
    """embed_tokens (at `path`) and lm_head (None: not), for the models that list them in `embedding_modules`.

    `embed` and `head` are the pipeline stages that vLLM builds them in; `ends` is the first one, and the last one too
    where the two share their weights (`tied` where the config does not say).
    """
    hidden, vocab = config.number("hidden_size"), config.number("vocab_size")
    if embed == "ends" and not config.flag("tie_word_embeddings", default=tied):
        embed = "first"
    prefix, _, name = path.rpartition(".")
    embedding = Linear(name, "embedding", vocab, (hidden,), (Child(name, hidden, linear=False),))
    logits = Linear("lm_head", "logits", hidden, (vocab,), (Child("lm_head", vocab, linear=False),))
    groups: tuple[Group, ...] = (Group(prefix, (), (embedding,), embed),)
    return groups if head is None else (*groups, Group("", (), (logits,), head))


def _dense(
    *,
    vocabulary: bool = True,
    head_dim: int | None = None,
    embed: Stage = "first",
    head: Stage | None = "last",
    kv_heads_default: bool = False,
    tied: bool = False,
) -> Builder:
    """Attention and a gated MLP in each layer: Llama and its kin."""

    def build(config: Config) -> tuple[Group, ...]:
        attention = _attention(config, head_dim=head_dim, kv_heads_default=kv_heads_default)
        parts = attention + _mlp("mlp", config.number("hidden_size"), config.number("intermediate_size"))
        return _same(config, *parts) + (_vocabulary(config, embed, head, tied=tied) if vocabulary else ())

    return build


def _fused(*, vocabulary: bool, fused_qkv: bool = True) -> Builder:
    """As Llama, with one gate_up_proj (and one qkv_proj) in the checkpoint."""

    def build(config: Config) -> tuple[Group, ...]:
        attention = _attention(config, fused=fused_qkv, kv_heads_default=vocabulary)
        mlp = _fused_mlp("mlp", config.number("hidden_size"), config.number("intermediate_size"))
        return _same(config, *attention, *mlp) + (_vocabulary(config, "ends") if vocabulary else ())

    return build


def _ungated(config: Config) -> tuple[Group, ...]:
    """Nemotron and Apertus: an MLP without a gate."""
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    mlp = _column("mlp.up_proj", hidden, inner), _row("mlp.down_proj", inner, hidden)
    return _same(config, *_attention(config, kv_heads_default=True), *mlp) + _vocabulary(config, "ends")


def _internlm2(config: Config) -> tuple[Group, ...]:
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    attention = _attention(config, "attention", out="wo", fused=True, qkv="wqkv", kv_heads_default=True)
    gate_up = _gate_up("feed_forward.gate_up_proj", hidden, inner, ("w1", "w3"))
    return _same(config, *attention, gate_up, _row("feed_forward.w2", inner, hidden))


def _bailing_moe(config: Config) -> tuple[Group, ...]:
    """Ling and Ring: first layers dense, the others routed experts with shared ones; embeddings get no slots."""
    hidden, count, size = (
        config.number("hidden_size"),
        config.number("num_experts"),
        config.number("moe_intermediate_size"),
    )
    attention = _attention(config, "attention", out="dense", fused=True, qkv="query_key_value")
    parts: list[Module] = [*attention, _replicated("mlp.gate", hidden, count, linear=False)]
    shared = config.number("num_shared_experts", minimum=0)
    if shared:
        inner = config.number("moe_shared_expert_intermediate_size", default=size)
        parts += _mlp("mlp.shared_experts", hidden, inner * shared)
    routed = (*parts, _experts("mlp.experts", count, hidden, size))
    first, layers = config.number("first_k_dense_replace", minimum=0), config.number("num_hidden_layers")
    dense = attention + _mlp("mlp", hidden, config.number("intermediate_size")) if first else ()
    return _layers(dense if index < first else routed for index in range(layers))


def _lfm2(config: Config) -> tuple[Group, ...]:
    inner = config.number("intermediate_size")
    if config.flag("block_auto_adjust_ff_dim", default=True):
        inner = int(2 * inner / 3)
        multiplier = config.fields.get("block_ffn_dim_multiplier", 1.0)
        if multiplier is not None:
            inner = int(multiplier * inner)
        multiple = config.number("block_multiple_of", default=256)
        inner = multiple * ((inner + multiple - 1) // multiple)
    hidden = config.number("hidden_size")
    feed = _lfm2_mlp(hidden, inner)
    attention = *_attention(config, out="out_proj"), *feed
    conv = *_short_conv(config, config.number("conv_dim", default=hidden)), *feed
    return _lfm2_layers(config, lambda index, full: attention if full else conv)


def _lfm2_moe(config: Config) -> tuple[Group, ...]:
    hidden, count = config.number("hidden_size"), config.number("num_experts")
    dense = _lfm2_mlp(hidden, config.number("intermediate_size"))
    size = config.number("moe_intermediate_size")
    sparse: Modules = (
        _replicated("feed_forward.gate", hidden, count),
        _experts("feed_forward.experts", count, hidden, size, names=("w1", "w2", "w3")),
    )
    attention, conv = _attention(config, out="out_proj"), _short_conv(config, hidden)
    first = config.number("num_dense_layers", minimum=0)
    return _lfm2_layers(
        config, lambda index, full: (attention if full else conv) + (dense if index < first else sparse)
    )


def _lfm2_mlp(hidden: int, inner: int) -> Modules:
    return _gate_up("feed_forward.w13", hidden, inner, ("w1", "w3")), _row("feed_forward.w2", inner, hidden)


def _short_conv(config: Config, width: int) -> Modules:
    parts = (width, width, width)
    return (
        _conv("short_conv.conv", config.number("conv_L_cache"), width),
        Linear("short_conv.in_proj", "merged", width, parts, (Child("in_proj", 3 * width),)),
        _row("short_conv.out_proj", width, width),
    )


def _lfm2_layers(config: Config, layer: Callable[[int, bool], Modules]) -> tuple[Group, ...]:
    kinds = _listed(config, "layer_types")
    groups = _layers(layer(index, kind == "full_attention") for index, kind in enumerate(kinds))
    return groups + _vocabulary(config, "every")


def _opt(config: Config) -> tuple[Group, ...]:
    hidden, inner = config.number("hidden_size"), config.number("ffn_dim")
    layer = (
        *_attention(config, out="out_proj", kv_heads_default=True),
        _column("fc1", hidden, inner),
        _row("fc2", inner, hidden),
    )
    return _layers([layer] * config.number("num_hidden_layers"), "model.decoder.layers.{}")


def _mixtral(
    names: tuple[str, ...] = ("w1", "w2", "w3"),
    *,
    vocabulary: bool = True,
    router: bool = True,
    kv_heads_default: bool = False,
    head_dim: int | None = None,
) -> Builder:
    """Mixtral, and what has its expert block under the same name."""

    def build(config: Config) -> tuple[Group, ...]:
        hidden, count = config.number("hidden_size"), _count(config)
        parts = (
            *_attention(config, head_dim=head_dim, kv_heads_default=kv_heads_default),
            _replicated("block_sparse_moe.gate", hidden, count, linear=router),
            _experts("block_sparse_moe.experts", count, hidden, config.number("intermediate_size"), names=names),
        )
        return _same(config, *parts) + (_vocabulary(config, "every", "every") if vocabulary else ())

    return build


def _granite_moe(default: str) -> Builder:
    """Granite's MoE with a shared MLP; `default` is the kind of every layer where the config has no `layer_types`."""

    def build(config: Config) -> tuple[Group, ...]:
        hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
        feed: list[Module] = []
        count = config.number("num_local_experts", minimum=0)
        if count:
            inner = config.number("intermediate_size")
            feed += [
                _replicated("block_sparse_moe.gate", hidden, count, linear=False),
                _experts("block_sparse_moe.experts", count, hidden, inner, names=("w1", "w2", "w3")),
            ]
        shared = config.number("shared_intermediate_size", default=None if default == "mamba" else 0, minimum=0)
        if shared:
            feed += [
                _column("shared_mlp.input_linear", hidden, 2 * shared),
                _row("shared_mlp.output_linear", shared, hidden),
            ]
        kinds = config.items("layer_types", layers) or [default] * layers
        mixers: dict[str, Modules] = {}
        if default == "mamba" and {"mamba", "linear_attention"} & set(kinds):
            groups, state = config.number("mamba_n_groups", default=1), config.number("mamba_d_state")
            heads, kernel = config.number("mamba_n_heads"), config.number("mamba_d_conv", default=4)
            mamba = _mamba2("mamba", hidden, heads, _granite_head_dim(config), groups, state, kernel)
            mixers = {"mamba": mamba, "linear_attention": mamba}  # transformers 5 has its own name
        attention = _attention(config, kv_heads_default=True)
        parts = [(*mixers.get(str(kind), attention), *feed) for kind in kinds]
        return _layers(parts) + _vocabulary(config, "every", "every")

    return build


def _granite_head_dim(config: Config) -> int:
    if "mamba_d_head" in config and config.fields["mamba_d_head"] != "auto":
        return config.number("mamba_d_head")
    inner, heads = (
        config.number("mamba_expand", default=2) * config.number("hidden_size"),
        config.number("mamba_n_heads"),
    )
    if inner % heads:
        raise config.error("mamba_n_heads", f"must divide mamba_expand * hidden_size = {inner}")
    return inner // heads


def _qwen_moe(
    config: Config, attention: Modules, layout: ExpertLayout, index: int, shared_needed: bool = True
) -> Modules:
    """One layer of the Qwen MoE models: dense where the config says so, else routed experts and a shared one."""
    hidden, count = config.number("hidden_size"), _count(config)
    step, dense = config.number("decoder_sparse_step", default=1), config.items("mlp_only_layers")
    if index in dense or (index + 1) % step:
        return attention + _mlp("mlp", hidden, config.number("intermediate_size"))
    # transformers has a default of its own for the models that have a shared expert; Qwen3-MoE has none.
    needed = None if shared_needed else 0
    shared = config.number("shared_expert_intermediate_size", default=needed, minimum=0)
    return (
        *attention,
        _replicated("mlp.gate", hidden, count),
        *_shared_expert(hidden, shared, shared_needed),
        _experts("mlp.experts", count, hidden, config.number("moe_intermediate_size"), layout),
    )


def _shared_expert(hidden: int, shared: int, always_gated: bool = True) -> Modules:
    # Most of these models have the gate even without the expert.
    gate = (_replicated("mlp.shared_expert_gate", hidden, 1),) if always_gated or shared else ()
    return (*gate, *_mlp("mlp.shared_expert", hidden, shared)) if shared else gate


def _qwen2_moe(config: Config) -> tuple[Group, ...]:
    attention = _attention(config)
    return _layers(_qwen_moe(config, attention, "gated", i) for i in range(config.number("num_hidden_layers")))


def _qwen3_moe(layout: ExpertLayout = "gated") -> Builder:
    def build(config: Config) -> tuple[Group, ...]:
        attention = _attention(config)
        layers = range(config.number("num_hidden_layers"))
        kinds = [_without_unpacked_shared(config, _qwen_moe(config, attention, layout, i, False)) for i in layers]
        return _layers(kinds) + _vocabulary(config, "every", "every")

    return build


def _without_unpacked_shared(config: Config, modules: Modules) -> Modules:
    """Qwen3-MoE packs gate_up_proj only where it has dense layers: without, vLLM cannot wrap a shared expert's."""
    if config.items("mlp_only_layers"):
        return modules
    return tuple(module for module in modules if module.name != "mlp.shared_expert.gate_up_proj")


def _qwen_hybrid(layout: ExpertLayout, *, interleaved: bool, moe: bool, vocabulary: bool) -> Builder:
    """Qwen3-Next and Qwen3.5: linear attention in most layers, attention with an output gate in the others."""

    def build(config: Config) -> tuple[Group, ...]:
        layers = config.number("num_hidden_layers")
        kinds = config.items("layer_types", layers)
        if not kinds:
            interval = config.number("full_attention_interval", default=4)
            kinds = ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)]
        full = _attention(config, head_dim=256, gate=_output_gate(config))
        linear = _gated_delta_net(config, interleaved=interleaved)
        parts: list[Modules] = []
        for index, kind in enumerate(kinds):
            if kind not in ("linear_attention", "full_attention"):
                raise config.error("layer_types", f"entry {index} must be linear_attention or full_attention")
            attention = full if kind == "full_attention" else linear
            if moe:
                parts.append(_qwen_moe(config, attention, layout, index))
            else:
                size = config.number("intermediate_size")
                parts.append(attention + _mlp("mlp", config.number("hidden_size"), size))
        return _layers(parts) + (_vocabulary(config, "every") if vocabulary else ())

    return build


def _deepseek(*, sparse: bool = False, latent: bool = True) -> Builder:
    """DeepSeek V2, V3, V3.2 and what is built like them: first layers dense, the others routed and shared experts.

    `latent` False is the first DeepSeek, with plain attention (as later ones have it whose latent sizes are 0);
    `sparse` adds the indexer.
    """

    def build(config: Config) -> tuple[Group, ...]:
        hidden, layers = config.number("hidden_size"), range(config.number("num_hidden_layers"))
        plain = not latent or not any(config.fields.get(f"qk_{part}_head_dim", 1) for part in ("nope", "rope"))
        attention = _attention(config) if plain else _mla(config, indexer=sparse)
        count = config.number_or_null("n_routed_experts")
        if count is None:
            return _layers([attention + _mlp("mlp", hidden, config.number("intermediate_size"))] * len(layers))
        size, shared = config.number("moe_intermediate_size"), config.number_or_null("n_shared_experts", minimum=0)
        parts: list[Module] = [*attention, _replicated("mlp.gate", hidden, count, linear=False)]
        if shared:
            parts += _mlp("mlp.shared_experts", hidden, size * shared)
        routed = (*parts, _experts("mlp.experts", count, hidden, size))
        first, every = config.number("first_k_dense_replace", minimum=0), config.number("moe_layer_freq", default=1)
        sparse_layers = [index >= first and index % every == 0 for index in layers]
        if all(sparse_layers):
            return _layers([routed] * len(layers))
        dense = attention + _mlp("mlp", hidden, config.number("intermediate_size"))
        return _layers(routed if flag else dense for flag in sparse_layers)

    return build


def _moe_after_dense(
    count: str,
    size: str,
    shared: str,
    shared_path: str,
    *,
    vocabulary: bool = False,
    kinds: str = "",
    head_dim: int | None = None,
) -> Builder:
    """Attention, first layers dense, the others routed experts with shared ones; the fields' names differ.

    `kinds` is the field that says `sparse` or `dense` for each layer, for the models that have one.
    """

    def build(config: Config) -> tuple[Group, ...]:
        hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
        attention = _attention(config, head_dim=head_dim)
        experts, inner = config.first_number(count, "num_local_experts"), config.number(size)
        parts: list[Module] = [*attention, _replicated("mlp.gate", hidden, experts, linear=False)]
        shared_count = config.number_or_null(shared, minimum=0)
        if shared_count:
            parts += _mlp(shared_path, hidden, inner * shared_count)
        routed = (*parts, _experts("mlp.experts", experts, hidden, inner))
        listed = config.items(kinds, layers) if kinds else []
        first = 0 if listed else config.number("first_k_dense_replace", minimum=0)
        is_dense = [kind != "sparse" for kind in listed] or [index < first for index in range(layers)]
        dense = attention + _mlp("mlp", hidden, config.number("intermediate_size")) if any(is_dense) else ()
        groups = _layers(dense if flag else routed for flag in is_dense)
        return groups + (_vocabulary(config) if vocabulary else ())

    return build


def _ernie_moe(config: Config) -> tuple[Group, ...]:
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    count, inner = config.number("moe_num_experts"), config.number("moe_intermediate_size")
    attention = _attention(config)
    parts: list[Module] = [*attention, _replicated("mlp.gate", hidden, count, linear=False)]
    shared = config.number("moe_num_shared_experts", minimum=0)
    if shared:
        parts += _mlp("mlp.shared_experts", hidden, inner * shared)
    routed = (*parts, _experts("mlp.experts", count, hidden, inner))
    dense = attention + _mlp("mlp", hidden, config.number("intermediate_size"))
    first = config.number("moe_layer_start_index", minimum=0)
    last = config.number("moe_layer_end_index", minimum=-1)
    last = layers - 1 if last == -1 else last
    interval = config.number("moe_layer_interval", default=1)
    return _layers(
        routed if first <= index <= last and (index + 1) % interval == 0 else dense for index in range(layers)
    )


def _olmoe(config: Config) -> tuple[Group, ...]:
    hidden, count = config.number("hidden_size"), _count(config)
    size = config.number("intermediate_size")
    experts = _experts("mlp.experts", count, hidden, size)
    return _same(config, *_attention(config), _replicated("mlp.gate", hidden, count), experts)


def _gpt_oss(config: Config) -> tuple[Group, ...]:
    hidden, count = config.number("hidden_size"), _count(config)
    return _same(
        config,
        *_attention(config, "attn", head_dim=64),
        _replicated("mlp.router", hidden, count, linear=False),
        _experts("mlp.experts", count, hidden, config.number("intermediate_size"), "fused"),
    )


def _llama4(config: Config) -> tuple[Group, ...]:
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    count, step = _count(config), config.number("interleave_moe_layer_step", default=1, minimum=0)
    attention = _attention(config, head_dim=128)
    routed = (
        *attention,
        _replicated("feed_forward.router", hidden, count),
        *_mlp("feed_forward.shared_expert", hidden, inner),
        _experts("feed_forward.experts", count, hidden, inner),
    )
    layers = range(config.number("num_hidden_layers"))
    sparse = [step > 0 and (index + 1) % step == 0 for index in layers]
    dense = () if all(sparse) else attention + _mlp("feed_forward", hidden, config.number("intermediate_size_mlp"))
    return _layers(routed if flag else dense for flag in sparse) + _vocabulary(config, "ends")


def _gemma4(config: Config) -> tuple[Group, ...]:
    """Sliding and full attention with heads of their own, late layers without keys and values, experts beside MLPs."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    heads, inner = config.number("num_attention_heads"), config.number("intermediate_size")
    kinds = _listed(config, "layer_types")
    shared = config.number("num_kv_shared_layers", default=0, minimum=0)
    per_layer = config.number("hidden_size_per_layer_input", default=256, minimum=0)
    tail: list[Module] = []
    if "num_experts" in config:  # vLLM asks for nothing else
        count = _count(config)
        size = config.first_number("moe_intermediate_size", "expert_intermediate_size")
        tail += [_replicated("router.proj", hidden, count), _experts("experts", count, hidden, size)]
    if per_layer:
        tail += [
            _replicated("per_layer_input_gate", hidden, per_layer),
            _replicated("per_layer_projection", per_layer, hidden),
        ]
    # As transformers 5 writes it: by layer, the numbers padded with zeros.
    own = config.sub("per_layer_config") if "per_layer_config" in config else None
    numbers = {int(name): name for name in own.fields if name.isdigit()} if own is not None else {}
    parts: list[Modules] = []
    for index, kind in enumerate(kinds):
        full = kind == "full_attention" or index == layers - 1  # transformers makes the last layer a full one
        head_dim = config.number("head_dim", default=256)
        kv_heads = config.number("num_key_value_heads")
        if own is not None and index in numbers:
            layer = own.sub(numbers[index])
            head_dim = layer.number("head_dim", default=head_dim)
            kv_heads = layer.number("num_key_value_heads", default=kv_heads)
        elif own is None and full:
            head_dim = config.number("global_head_dim", default=512)
            if config.flag("attention_k_eq_v", default=False):
                kv_heads = config.number("num_global_key_value_heads", default=kv_heads)
        without_kv = bool(shared) and index >= layers - shared
        query: Module = (
            _column("self_attn.q_proj", hidden, heads * head_dim, heads=heads)
            if without_kv
            else _qkv("self_attn.qkv_proj", hidden, heads, kv_heads, head_dim)
        )
        wide = 2 if without_kv and config.flag("use_double_wide_mlp", default=False) else 1
        output = _row("self_attn.o_proj", heads * head_dim, hidden)
        parts.append((query, output, *_mlp("mlp", hidden, wide * inner), *tail))
    groups = _layers(parts)
    if per_layer:
        projection = _column("per_layer_model_projection", hidden, per_layer * layers)
        groups += (Group("model", (), (projection,), "every"),)
    return groups


def _minicpm(config: Config) -> tuple[Group, ...]:
    """MiniCPM 1 and 2; its experts are no MoERunner to vLLM, so that only their router gets slots."""
    hidden, count = config.number("hidden_size"), config.number("num_experts", default=0, minimum=0)
    feed: Modules = (_replicated("mlp.gate", hidden, count),)
    if not count:
        feed = _mlp("mlp", hidden, config.number("intermediate_size"))
    return _same(config, *_attention(config), *feed) + _vocabulary(config, "every", "every")


def _minicpm3(config: Config) -> tuple[Group, ...]:
    mlp = _mlp("mlp", config.number("hidden_size"), config.number("intermediate_size"))
    return _same(config, *_mla(config, fused=False), *mlp) + _vocabulary(config, "every", "every")


def _exaone(config: Config) -> tuple[Group, ...]:
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    layer = (
        *_attention(config, "attn.attention", out="out_proj", kv_heads_default=True),
        _gate_up("mlp.gate_up_proj", hidden, inner, ("c_fc_0", "c_fc_1")),
        _row("mlp.c_proj", inner, hidden),
    )
    groups = _layers([layer] * config.number("num_hidden_layers"), "transformer.h.{}")
    return groups + _vocabulary(config, "ends", path="transformer.wte")


def _deci(config: Config) -> tuple[Group, ...]:
    """Nemotron NAS: each layer has key and value heads and an MLP of its own, or none."""
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    blocks = _listed(config, "block_configs")
    kinds: list[Modules] = []
    for index, fields in enumerate(blocks):
        block = Config({"block": fields}, config.where, f"block_configs[{index}].").sub("block")
        attention, ffn = block.sub("attention"), block.sub("ffn")
        parts: list[Module] = []
        if not attention.flag("no_op", default=False):
            in_group = attention.number("n_heads_in_group")
            parts += _attention(Config(config.fields | {"num_key_value_heads": heads // in_group}, config.where))
        if not ffn.flag("no_op", default=False):
            parts += _mlp("mlp", hidden, _deci_inner(ffn, hidden))
        kinds.append(tuple(parts))
    return _layers(kinds) + _vocabulary(config, "ends")


def _deci_inner(ffn: Config, hidden: int) -> int:
    multiple = ffn.fields.get("ffn_mult")
    if multiple is None:
        return ffn.number("intermediate_size")
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or multiple <= 0:
        raise ffn.error("ffn_mult", "must be a number above 0")
    return -(-int(2 * multiple * hidden / 3) // 256) * 256


def _chatglm(config: Config) -> tuple[Group, ...]:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    inner = config.number("ffn_hidden_size")
    kv_heads = heads
    if config.flag("multi_query_attention", default=False):
        kv_heads = config.number("multi_query_group_num")
    layer = (
        _qkv("self_attention.query_key_value", hidden, heads, kv_heads, hidden // heads, fused=True),
        _row("self_attention.dense", heads * (hidden // heads), hidden),
        _column("mlp.dense_h_to_4h", hidden, 2 * inner),
        _row("mlp.dense_4h_to_h", inner, hidden),
    )
    return _layers([layer] * config.number("num_hidden_layers"), "transformer.encoder.layers.{}")


def _afmoe(config: Config) -> tuple[Group, ...]:
    """Trinity: attention with an output gate, first layers dense."""
    hidden, attention = config.number("hidden_size"), _attention(config, head_dim=128)
    width = config.number("num_attention_heads") * config.number("head_dim", default=128)
    gate = _column("self_attn.gate_proj", hidden, width)
    count, inner = config.number("num_experts"), config.number("moe_intermediate_size")
    routed: list[Module] = [*attention, gate, _replicated("mlp.gate", hidden, count, linear=False)]
    shared = config.number("num_shared_experts", minimum=0)
    if shared:
        routed += _mlp("mlp.shared_experts", hidden, inner * shared)
    routed.append(_experts("mlp.experts", count, hidden, inner))
    first, layers = config.number("num_dense_layers", minimum=0), config.number("num_hidden_layers")
    dense = (*attention, gate, *_mlp("mlp", hidden, config.number("intermediate_size"))) if first else ()
    return _layers(dense if index < first else tuple(routed) for index in range(layers))


def _laguna(config: Config) -> tuple[Group, ...]:
    """Heads of their own in each layer, an output gate, and MLPs whose gate and up are not merged."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    kinds = config.items("mlp_layer_types", layers) or ["dense"] + ["sparse"] * (layers - 1)
    per_layer = config.items("num_attention_heads_per_layer", layers)
    count = config.number("num_experts", minimum=0)
    parts: list[Modules] = []
    for index, kind in enumerate(kinds):
        fields = config.fields | ({"num_attention_heads": per_layer[index]} if per_layer else {})
        own = Config(fields, config.where, config.inside)
        heads, head_dim = own.number("num_attention_heads"), own.number("head_dim", default=128)
        modules: list[Module] = [*_attention(own, head_dim=128)]
        gating = config.fields.get("gating", True)
        if gating:
            modules.append(
                _column("self_attn.g_proj", hidden, heads if gating in (True, "per-head") else heads * head_dim)
            )
        if kind == "sparse" and count:
            shared = config.number("shared_expert_intermediate_size", minimum=0)
            modules.append(_replicated("mlp.gate", hidden, count, linear=False))
            if shared:
                modules += _unmerged_mlp("mlp.shared_expert", hidden, shared)
            modules.append(_experts("mlp.experts", count, hidden, config.number("moe_intermediate_size")))
        else:
            modules += _unmerged_mlp("mlp", hidden, config.number("intermediate_size"))
        parts.append(tuple(modules))
    return _layers(parts)


def _unmerged_mlp(path: str, hidden: int, inner: int) -> Modules:
    return (
        _column(f"{path}.gate_proj", hidden, inner),
        _column(f"{path}.up_proj", hidden, inner),
        _row(f"{path}.down_proj", inner, hidden),
    )


def _sarvam_mla(config: Config) -> tuple[Group, ...]:
    size = config.number("moe_shared_expert_intermediate_size", default=config.number("moe_intermediate_size"))
    shared = size * config.number("num_shared_experts", default=1, minimum=0)
    return _indic_moe(config, _mla(config, fused=False), shared)


def _param2(config: Config) -> tuple[Group, ...]:
    query, output = _attention(config, fused=True)
    if not isinstance(query, Linear):
        raise TypeError(query)
    query = replace(query, children=(Child("query_key_value", sum(query.slices)),))
    shared = config.number("num_shared_experts", default=1, minimum=0)
    if shared:
        shared *= config.number("moe_intermediate_size")
        shared = config.number("moe_shared_expert_intermediate_size", default=shared)
    return _indic_moe(config, (query, output), shared) + _vocabulary(config, "ends")


def _indic_moe(config: Config, attention: Modules, shared: int) -> tuple[Group, ...]:
    """Sarvam and Param2: first layers dense, the others routed experts with a shared one of size `shared`."""
    hidden, count = config.number("hidden_size"), config.number("num_experts")
    routed: list[Module] = [*attention, _replicated("mlp.gate", hidden, count, linear=False)]
    if shared:
        routed += _mlp("mlp.shared_experts", hidden, shared)
    routed.append(_experts("mlp.experts", count, hidden, config.number("moe_intermediate_size")))
    first, layers = config.number("first_k_dense_replace", default=1, minimum=0), config.number("num_hidden_layers")
    step = config.number("moe_layer_freq", default=1)
    dense = (*attention, *_mlp("mlp", hidden, config.number("intermediate_size")))
    return _layers(
        tuple(routed) if index >= first and (index - first) % step == 0 else dense for index in range(layers)
    )


def _pangu(config: Config) -> tuple[Group, ...]:
    """openPangu: latent attention, attention with sinks (keys and values of unlike widths), or plain attention."""
    latent = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
    if all(name in config for name in latent):
        attention = _mla(config)
    elif config.number("param_sink_number", default=0, minimum=0):
        attention = _pangu_sink(config)
    else:
        attention = _attention(config)
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    count = config.number("n_routed_experts", default=0, minimum=0)
    first = config.number("first_k_dense_replace", minimum=0) if count else layers
    dense = (*attention, *_mlp("mlp", hidden, config.number("intermediate_size"))) if first else ()
    routed: list[Module] = []
    if count:
        inner = config.number("moe_intermediate_size")
        shared = config.number_or_null("n_shared_experts", minimum=0)
        routed = [*attention, _replicated("mlp.gate", hidden, count, linear=False)]
        if shared:
            routed += _mlp("mlp.shared_experts", hidden, inner * shared)
        routed.append(_experts("mlp.experts", count, hidden, inner))
    return _layers(dense if index < first else tuple(routed) for index in range(layers))


def _pangu_sink(config: Config) -> Modules:
    hidden, heads, kv_heads = (
        config.number(name) for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    )
    head_dim = config.number("qk_nope_dim") + config.number("qk_rope_dim")
    value = config.number("v_channels")
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * value)
    children = tuple(Child(name, size) for name, size in zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True))
    return (
        Linear("self_attn.qkv_proj", "merged", hidden, sizes, children, heads=(heads, kv_heads, kv_heads)),
        _row("self_attn.o_proj", heads * value, hidden),
    )


def _longcat(config: Config) -> tuple[Group, ...]:
    """LongCat-Flash: two attentions, two MLPs and experts in each layer; the router has outputs for zero experts too.

    vLLM packs no `fused_qkv_a_proj` here, so that it gets no slots and an adapter cannot reach it.
    """
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    count, zero = config.number("n_routed_experts"), config.number("zero_expert_num", default=0, minimum=0)
    parts: list[Module] = []
    for half in range(2):
        latent = _mla(config, f"self_attn.{half}")
        parts += [module for module in latent if not module.name.endswith("fused_qkv_a_proj")]
        parts += _mlp(f"mlps.{half}", hidden, inner)
    parts += [
        _replicated("mlp.router.classifier", hidden, count + zero),
        _experts("mlp.experts", count, hidden, config.number("moe_intermediate_size")),
    ]
    return _same(config, *parts)


def _renamed(builder: Builder, **names: str) -> Builder:
    """A model whose config has names of its own (the values of `names`) for fields that `builder` reads."""

    def build(config: Config) -> tuple[Group, ...]:
        fields = {name: config.fields[own] for name, own in names.items() if own in config}
        return builder(Config(config.fields | fields, config.where, config.inside))

    return build


def _deepseek_v4(config: Config) -> tuple[Group, ...]:
    """DeepSeek V4: grouped output projection, and keys and values compressed 128-fold or 4-fold in most layers."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    count, inner = config.number("n_routed_experts"), config.number("moe_intermediate_size")
    feed: list[Module] = [_replicated("ffn.gate", hidden, count, linear=False)]
    shared = config.number_or_null("n_shared_experts", minimum=0)
    if shared:
        feed += [
            _gate_up("ffn.shared_experts.gate_up_proj", hidden, inner * shared, ("w1", "w3")),
            _row("ffn.shared_experts.down_proj", inner * shared, hidden),
        ]
    feed.append(_experts("ffn.experts", count, hidden, inner, names=("w1", "w2", "w3")))
    return _layers((*_deepseek_v4_attention(config, ratio), *feed) for ratio in _compress_ratios(config, layers))


def _deepseek_v4_attention(config: Config, ratio: int) -> Modules:
    hidden, heads = config.number("hidden_size"), config.number("num_attention_heads")
    head_dim, rank = config.number("head_dim"), config.number("q_lora_rank")
    groups, out_rank = config.number("o_groups"), config.number("o_lora_rank")
    if heads * head_dim % groups:
        raise config.error("o_groups", f"must divide num_attention_heads * head_dim = {heads * head_dim}")
    modules: list[Module] = [
        _latent_pair("attn.fused_wqa_wkv", hidden, ("wq_a", "wkv"), (rank, head_dim)),
        _column("attn.wq_b", rank, heads * head_dim, heads=heads),
        _column("attn.wo_a", heads * head_dim // groups, groups * out_rank, heads=groups),
        _row("attn.wo_b", groups * out_rank, hidden),
    ]
    overlap = 2 if ratio == 4 else 1
    if ratio > 1:
        width = overlap * head_dim
        name = "attn.compressor.fused_wkv_wgate"
        modules.append(_latent_pair(name, hidden, ("wkv", "wgate"), (width, width)))
    if ratio == 4:
        index_heads, index_dim = config.number("index_n_heads"), config.number("index_head_dim")
        width = overlap * index_dim
        name = "attn.indexer.compressor.fused_wkv_wgate"
        modules += [
            _replicated("attn.indexer.wq_b", rank, index_heads * index_dim),
            _replicated("attn.indexer.weights_proj", hidden, index_heads),
            _latent_pair(name, hidden, ("wkv", "wgate"), (width, width)),
        ]
    return tuple(modules)


def _latent_pair(name: str, inputs: int, names: tuple[str, str], sizes: tuple[int, int]) -> Linear:
    children = tuple(Child(child, size) for child, size in zip(names, sizes, strict=True))
    return Linear(name, "merged", inputs, sizes, children, tensor_parallel=False)


def _named_slices(
    name: str, inputs: int, slices: dict[str, int], *, heads: tuple[int, ...], replicated: tuple[int, ...] = ()
) -> Linear:
    """Projections of the checkpoint that vLLM merges into one module, each in a slot of its own."""
    children = tuple(Child(child, size) for child, size in slices.items())
    return Linear(name, "merged", inputs, tuple(slices.values()), children, heads=heads, replicated=replicated)


def _compress_ratios(config: Config, layers: int) -> list[int]:
    """How many tokens share one compressed key in each layer: transformers' field, or DeepSeek's own."""
    kinds = config.items("layer_types", layers)
    if kinds:
        rates = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
        own_rates = config.sub("compress_rates").fields if "compress_rates" in config else {}
        return [max(1, (rates | own_rates).get(str(kind), 1)) for kind in kinds]
    # DeepSeek's list goes on for the layers of multi-token prediction.
    own = config.items("compress_ratios")[:layers]
    if len(own) != layers or not all(isinstance(ratio, int) for ratio in own):
        raise config.error("compress_ratios", f"must have a whole number for each of {layers} layers, or layer_types")
    return [max(1, ratio) for ratio in own]


def _hy_v4(config: Config) -> tuple[Group, ...]:
    """Hunyuan V4: gated latent attention with an indexer in some layers, and hyper-connections around each part."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    heads, channels = config.number("num_attention_heads"), config.number("hc_mult", default=4)
    attention = [*_mla(config)]
    if config.flag("gated_mla", default=True):
        width = 1 if config.fields.get("gating_type") == "headwise" else config.number("v_head_dim")
        attention.append(_column("self_attn.linear_gate", hidden, heads * width))
    connected = config.flag("enable_ihc", default=True)
    if connected:
        wide = channels * hidden
        attention += [
            _replicated(f"{part}.hc_pre.hc_fn", wide, 2 * channels) for part in ("hc_attn_layer", "hc_mlp_layer")
        ]
    index_heads, index_dim = config.number("index_n_heads"), config.number("index_head_dim")
    indexer = (
        _replicated("self_attn.indexer.wq_b", config.number("q_lora_rank"), index_heads * index_dim),
        _latent_pair("self_attn.indexer.wk_weights_proj", hidden, ("wk", "weights_proj"), (index_dim, index_heads)),
    )
    count, inner = config.number("n_routed_experts"), config.number("moe_intermediate_size")
    routed: list[Module] = [_replicated("mlp.gate", hidden, count, linear=False)]
    shared = config.number("n_shared_experts", minimum=0)
    if shared:
        routed += _mlp("mlp.shared_experts", hidden, inner * shared)
    routed.append(_experts("mlp.experts", count, hidden, inner))
    dense = _mlp("mlp", hidden, config.number("intermediate_size"))
    kinds = config.items("mlp_layer_types", layers) or ["dense"] + ["sparse"] * (layers - 1)
    groups = _layers(
        (*attention, *(indexer if full else ()), *(dense if kind == "dense" else routed))
        for kind, full in zip(kinds, _hy_v4_indexers(config), strict=True)
    )
    if connected:
        groups += (Group("model.hc_head", (), (_replicated("hc_head_fn", wide, channels),), "last"),)
    return groups


def _hy_v4_indexers(config: Config) -> list[bool]:
    """Which layers have an indexer: those of sparse attention that do not share another's."""
    sparse = ("deepseek_sparse_attention", "indexed_attention", "sparse_attention", "sparse")
    kinds, owners = _listed(config, "layer_types"), _listed(config, "indexer_types")
    return [kind in sparse and own == "full" for kind, own in zip(kinds, owners, strict=True)]


def _sparse_qwen(config: Config, attention: Modules) -> Modules:
    """One layer of the models that have Qwen3-Next's experts in every layer."""
    fields = {"mlp_only_layers": None, "decoder_sparse_step": 1}
    return _qwen_moe(Config(config.fields | fields, config.where, config.inside), attention, "gated", 0)


def _alice(config: Config) -> tuple[Group, ...]:
    """AliceAI: Kimi's linear attention, Qwen3-Next's attention and experts, and attention over earlier residuals."""
    hidden = config.number("hidden_size")
    k_heads, head_dim = config.number("linear_num_key_heads"), config.number("linear_key_head_dim")
    for name, value in {"linear_num_value_heads": k_heads, "linear_value_head_dim": head_dim}.items():
        if config.number(name) != value:
            raise config.error(name, f"must be {value}, as of the keys")
    width = k_heads * head_dim
    linear: Modules = (
        _named_slices(
            "linear_attn.in_proj_qkvgfab",
            hidden,
            {"q_proj": width, "k_proj": width, "v_proj": width, "b_proj": k_heads, "f_a_proj": head_dim},
            heads=(k_heads, k_heads, k_heads, k_heads, 1),
            replicated=(4,),
        ),
        _column("linear_attn.f_b_proj", head_dim, width),
        _conv("linear_attn.conv1d", config.number("linear_conv_kernel_dim"), 3 * width),
        _replicated("linear_attn.g_a_proj", hidden, head_dim),
        _column("linear_attn.g_b_proj", head_dim, width),
        _row("linear_attn.o_proj", width, hidden),
    )
    config.number("head_dim")  # vLLM's default for it depends on tensor parallelism
    full = _attention(config, gate=2)
    kinds = _listed(config, "layer_types", ("linear_attention", "full_attention"))
    first = (_replicated("mlp_res_proj", hidden, 1),)
    later = (*first, _replicated("attn_res_proj", hidden, 1))
    groups = _layers(
        _sparse_qwen(config, full if kind == "full_attention" else linear) + (later if index else first)
        for index, kind in enumerate(kinds)
    )
    return (*groups, Group("model.attnres_final", (), (_replicated("res_proj", hidden, 1),), "every"))


def _mobius(config: Config) -> tuple[Group, ...]:
    """Intern-S2-Mobius: Qwen3.5's attentions, a shared expert in each layer, and banks of experts that layers share."""
    hidden, count = config.number("hidden_size"), _count(config)
    full, linear = _attention(config, head_dim=256, gate=_output_gate(config)), _gated_delta_net(config)
    feed = _shared_expert(hidden, config.number("shared_expert_intermediate_size"))
    kinds = _listed(config, "layer_types", ("linear_attention", "full_attention"))
    bank: Modules = (
        _replicated("gate", hidden, count),
        _experts("experts", count, hidden, config.number("moe_intermediate_size"), "fused"),
    )
    banks = tuple(Group(f"model.meta_mlp.{index}", (), bank, "every") for index in range(config.number("num_blocks")))
    groups = _layers((full if kind == "full_attention" else linear) + feed for kind in kinds)
    return groups + banks + _vocabulary(config, "every")


def _output_gate(config: Config) -> int:
    return 2 if config.flag("attn_output_gate", default=True) else 1


def _qwen4(config: Config) -> tuple[Group, ...]:
    """Qwen4: linear and indexed attention, hyper-connections around each part, n-gram embeddings in some layers."""
    hidden, channels = config.number("hidden_size"), config.number("hc_count", default=4)
    rank, wide = config.number("hc_lowrank", default=320), channels * hidden
    heads = config.number("indexer_n_heads", default=0, minimum=0)
    full = list(_attention(config, head_dim=256, gate=2 if heads else _output_gate(config)))
    if heads:
        keys, size = config.number("indexer_kv_heads"), config.number("indexer_head_dim")
        full.append(_replicated("self_attn.indexer.index_qk_proj", hidden, (heads + keys) * size))
    # Padded to a multiple of 16 rows.
    sizes = {
        "input_mix_weight_down": rank,
        "block_inject_weight": channels,
        "_input_mix_padding": -(rank + channels) % 16,
    }
    children = tuple(Child(name, size, linear=name[0] != "_") for name, size in sizes.items())
    slices = tuple(size for size in sizes.values() if size)
    connections: list[Module] = []
    for part in ("attn_hyper_connection", "mlp_hyper_connection"):
        down = f"{part}.input_mix_weight_down_block_inject"
        connections += [
            Linear(down, "merged", wide, slices, children, tensor_parallel=False),
            _replicated(f"{part}.input_mix_weight_up", rank, wide),
        ]
    kinds = _listed(config, "layer_types", ("linear_attention", "indexed_attention", "qwen_sparse_attention"))
    linear, embedded = _gated_delta_net(config), set(config.items("ple_layer_ids"))
    per_layer = config.number("ple_embed_dim", default=2048)
    ngrams = _latent_pair("ple.kv_proj", per_layer, ("key_proj", "value_proj"), (wide, hidden))
    parts: list[Modules] = []
    for index, kind in enumerate(kinds):
        layer = _sparse_qwen(config, linear if kind == "linear_attention" else tuple(full))
        parts.append((*layer, *connections, *((ngrams,) if index + 1 in embedded else ())))
    mixer = _replicated("input_mix_weight_down", wide, rank), _replicated("input_mix_weight_up", rank, wide)
    return (*_layers(parts), Group("model.hyper_connection_mixer", (), mixer, "last"))


def _inkling(config: Config) -> tuple[Group, ...]:
    """Inkling: local layers with heads of their own, first layers dense, shared experts that vLLM calls sinks."""
    text = _text(config, "text_config")
    hidden, layers = text.number("hidden_size"), text.number("num_hidden_layers")
    heads, relative = text.number("num_attention_heads"), text.number("d_rel", default=16)
    head_dim = text.number("head_dim", default=hidden // heads)
    everywhere = (heads, text.number("num_key_value_heads"), head_dim)
    fields = ("swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim")
    locally = tuple(text.number(name, default=value) for name, value in zip(fields, everywhere, strict=True))

    def attention(heads: int, kv_heads: int, head_dim: int) -> Modules:
        q, kv = heads * head_dim, kv_heads * head_dim
        return (
            _named_slices(
                "attn.qkvr",
                hidden,
                {"wq_du": q, "wk_dv": kv, "wv_dv": kv, "wr_du": heads * relative},
                heads=(heads, kv_heads, kv_heads, heads),  # vLLM's caches want as many of them as workers
            ),
            _row("attn.wo_ud", q, hidden),
        )

    inner = text.number("intermediate_size")
    dense_inner, inner = (
        text.number("dense_intermediate_size", default=inner),
        text.number("moe_intermediate_size", default=inner),
    )
    twice = 2 * dense_inner
    dense: Modules = (
        Linear("mlp.gate_up_proj", "column", hidden, (twice,), (Child("w13_dn", twice),)),
        Linear("mlp.down_proj", "row", dense_inner, (hidden,), (Child("w2_md", hidden),)),
    )
    first = text.number("dense_mlp_idx", default=0, minimum=0)
    sinks = text.number("n_shared_experts", minimum=0) * inner if first < layers else 0
    routed: Modules = ()
    if first < layers:
        routed = (
            _experts("mlp.experts", text.number("n_routed_experts"), hidden, inner),
            _gate_up("mlp.sink_experts.w13", hidden, sinks, ("w1", "w3")),
            _row("mlp.sink_experts.w2", sinks, hidden),
        )
    local = set(text.items("local_layer_ids"))
    parts = [
        attention(*(locally if index in local else everywhere)) + (dense if index < first else routed)
        for index in range(layers)
    ]
    vocab = text.number("padded_vocab_size", default=text.number("vocab_size"))
    logits = Linear("lm_head", "logits", hidden, (vocab,), (Child("unembed", vocab, linear=False),))
    groups = tuple(replace(group, peft_prefix="model.llm.layers.{}") for group in _layers(parts))
    return (*groups, Group("", (), (logits,), "every", peft_prefix="model.llm"))


def _glm5_next(config: Config) -> tuple[Group, ...]:
    """GLM-5.3-Flash: Kimi's linear attention and latent attention with an indexer, first layers dense.

    vLLM does not say what `in_proj_qkvbfg_a`, `fused_qkv_a_proj` and the indexer's `wk_weights_proj` are made of: the
    first gets slots that no adapter can name, the other two get none.
    """
    hidden, kernel = config.number("hidden_size"), config.number("linear_conv_kernel_dim", default=4)
    heads, head_dim = config.number("linear_num_heads"), config.number("linear_head_dim")
    width = heads * head_dim
    linear: Modules = (
        Linear(
            "self_attn.in_proj_qkvbfg_a",
            "merged",
            hidden,
            (width, width, width, heads, head_dim, head_dim),
            (),
            heads=(heads, heads, heads, heads, 1, 1),
            replicated=(4, 5),
        ),
        _column("self_attn.f_b_proj", head_dim, width),
        *(_conv(f"self_attn.{name}_conv1d", kernel, width) for name in "qkv"),
        _column("self_attn.g_b_proj", head_dim, width),
        _row("self_attn.o_proj", width, hidden),
    )
    latent = tuple(module for module in _mla(config, indexer=True) if not module.name.endswith("fused_qkv_a_proj"))
    count = config.number_or_null("n_routed_experts")
    sparse: list[Module] = []
    if count is not None:
        inner = config.number("moe_intermediate_size")
        shared = config.number_or_null("n_shared_experts", minimum=0)
        sparse = [_replicated("mlp.gate", hidden, count, linear=False)]
        sparse += _mlp("mlp.shared_experts", hidden, inner * shared) if shared else ()
        sparse.append(_experts("mlp.experts", count, hidden, inner))
    dense = _mlp("mlp", hidden, config.number("intermediate_size"))
    kinds = _listed(config, "layer_types", ("linear_attention", "indexed_attention"))
    feeds = _listed(config, "mlp_layer_types", ("dense", "sparse"))
    return _layers(
        (linear if kind == "linear_attention" else latent) + (tuple(sparse) if feed == "sparse" and sparse else dense)
        for kind, feed in zip(kinds, feeds, strict=True)
    )


def _step5(config: Config) -> tuple[Group, ...]:
    """Step5: sliding and sparse attention with heads of their own, a gate for each head, experts from layer 1 on."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    sparse = config.sub("sparse_config")  # vLLM needs it, also where it is not enabled
    # The list goes on for the layers of multi-token prediction.
    kinds = config.items("layer_types")[:layers]
    if len(kinds) != layers:
        raise config.error("layer_types", f"must have an entry for each of {layers} layers")
    attentions = {kind: _step5_attention(config, sparse, str(kind)) for kind in kinds}
    count, inner = config.number("moe_num_experts"), config.number("moe_intermediate_size")
    shared = config.number("share_expert_dim", default=0) or inner * config.number("moe_top_k")
    routed: Modules = (
        _replicated("moe.gate", hidden, count),
        _experts("moe.experts", count, hidden, inner),
    )
    with_experts = _step5_experts(config, layers)
    dense = _mlp("mlp", hidden, config.number("intermediate_size")) if len(with_experts) < layers else ()
    groups = _layers(
        attentions[kind] + (routed if index in with_experts else dense) for index, kind in enumerate(kinds)
    )
    # Beside the experts in the checkpoint, and inside them in vLLM.
    path, indices = "model.layers.{}", tuple(sorted(with_experts))
    expert = _mlp("share_expert", hidden, shared)
    return (*groups, Group(f"{path}.moe", indices, expert, peft_prefix=path)) if indices else groups


def _step5_experts(config: Config, layers: int) -> set[int]:
    for name in ("moe_layers_enum", "moe_layer_list"):
        value = config.fields.get(name)
        if value is None:
            continue
        found = value.split(",") if isinstance(value, str) else config.items(name)
        if not all(str(index).strip().isdigit() for index in found):
            raise config.error(name, "must be numbers of layers, as a list or separated by commas")
        return {int(index) for index in found if int(index) < layers}
    return set(range(1, layers))


def _step5_attention(config: Config, sparse: Config, kind: str) -> Modules:
    hidden = config.number("hidden_size")
    own = config
    if "attention_other_setting" in config:
        other = config.sub("attention_other_setting")
        if other.fields.get("attention_type") == kind:
            own = other
    heads, kv_heads = own.number("num_attention_heads"), own.number("num_attention_groups")
    sliding = kind == "sliding_attention"
    if sliding and "sliding_window" in config:
        heads = config.number("swa_num_attention_heads", default=heads)
    default = config.number("head_dim", default=hidden // heads)
    head_dim = own.number("head_dim", default=default)
    sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
    gated = config.flag("use_head_wise_attn_gate", default=False)
    out = _row("self_attn.o_proj", heads * head_dim, hidden)
    if kind == "full_attention" and sparse.flag("enabled", default=True):
        if not gated:
            raise config.error("use_head_wise_attn_gate", "must be true where sparse_config is enabled")
        return (*_step5_sparse(sparse, hidden, heads, kv_heads, sizes), out)
    if not gated:
        return _qkv("self_attn.qkv_proj", hidden, heads, kv_heads, head_dim), out
    # vLLM takes the four apart where there are fewer key and value heads than workers; that is refused here.
    return _named_slices(
        "self_attn.qkvg_proj",
        hidden,
        {"q_proj": sizes[0], "k_proj": sizes[1], "v_proj": sizes[2], "g_proj": heads},
        heads=(heads, kv_heads, kv_heads, heads),
    ), out


def _step5_sparse(sparse: Config, hidden: int, heads: int, kv_heads: int, sizes: tuple[int, int, int]) -> Modules:
    groups = sparse.first_number("index_tp_size", "num_provider_groups", default=4)
    index_heads, width = sparse.number("sparse_indexer_num_heads", default=16), 256
    if groups != kv_heads:
        raise sparse.error("index_tp_size", f"must be {kv_heads}, as the heads of keys and values")
    if index_heads % groups:
        raise sparse.error("sparse_indexer_num_heads", f"must be a multiple of index_tp_size={groups}")
    names = {
        **dict(zip(("q_proj", "k_proj", "v_proj"), sizes, strict=True)),
        "sparse_indexer_q": index_heads * width,
        "sparse_indexer_k": width,
        "sparse_indexer_z": width,
        "g_proj": heads,
    }
    return (
        _named_slices(
            "self_attn.qkv_indexer_proj",
            hidden,
            names,
            heads=(heads, kv_heads, kv_heads, groups, 1, 1, heads),
            replicated=(1, 2, 3, 4, 5),
        ),
        # As `merged`: vLLM has no fully sharded wrapper for it.
        _named_slices(
            "self_attn.sparse_indexer_w", hidden, {"sparse_indexer_w": index_heads}, heads=(groups,), replicated=(0,)
        ),
    )


def _plamo3(config: Config) -> tuple[Group, ...]:
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    layer = *_attention(config, "mixer", fused=True), *_fused_mlp("mlp", hidden, inner)
    return _layers([layer] * config.number("num_hidden_layers"), "model.layers.layers.{}")


def _muse_glimmer(config: Config) -> tuple[Group, ...]:
    text = config.sub("text_config") if "text_config" in config else config
    hidden, heads = text.number("hidden_size"), text.number("num_attention_heads")
    gate = _column("self_attn.output_gate_proj", hidden, heads * text.number("head_dim"))
    return _same(text, *_attention(text), gate, *_mlp("mlp", hidden, text.number("intermediate_size")))


def _muse_spark(config: Config) -> tuple[Group, ...]:
    """Muse Spark: its merged query, key, value and gate get no slots, and vLLM refuses LoRA with its experts."""
    text = config.sub("text_config")
    if "sparse" in _listed(text, "mlp_layer_types", ("dense", "sparse")):
        raise text.error("mlp_layer_types", "has sparse layers: vLLM does not serve Muse Spark's experts with LoRA")
    hidden, width = text.number("hidden_size"), text.number("num_attention_heads") * text.number("head_dim")
    mlp = _mlp("feed_forward", hidden, text.number("intermediate_size"))
    return _same(text, _row("self_attn.o_proj", width, hidden), *mlp) + _vocabulary(text, "ends", None)


def _nemotron_h(config: Config) -> tuple[Group, ...]:
    """Mamba, attention, MLP and expert layers, in the order of `hybrid_override_pattern`."""
    # transformers 5 leaves the number of layers to the list of their kinds.
    hidden, blocks = config.number("hidden_size"), config.items("layers_block_type")
    kinds = _nemotron_pattern(config, config.number("num_hidden_layers", default=len(blocks) or None))
    parts: dict[str, Modules] = {}
    if "M" in kinds:
        parts["M"] = _mamba2(
            "mixer",
            hidden,
            config.number("mamba_num_heads"),
            config.number("mamba_head_dim"),
            config.first_number("n_groups", "mamba_n_groups"),
            config.number("ssm_state_size"),
            config.number("conv_kernel", default=4),
        )
    if "*" in kinds:
        parts["*"] = _attention(config, "mixer", head_dim=128)
    if "-" in kinds:
        inner = config.number("intermediate_size")
        parts["-"] = _column("mixer.up_proj", hidden, inner), _row("mixer.down_proj", inner, hidden)
    if "E" in kinds:
        parts["E"] = _nemotron_moe(config, hidden)
    return _layers(parts[kind] for kind in kinds) + _vocabulary(config, "every", "every")


def _nemotron_pattern(config: Config, layers: int) -> str:
    names = {"mamba": "M", "linear_attention": "M", "attention": "*", "full_attention": "*", "mlp": "-", "moe": "E"}
    blocks = config.items("layers_block_type")
    if "hybrid_override_pattern" in config or not blocks:
        pattern = config.fields.get("hybrid_override_pattern")
        field = "hybrid_override_pattern"
    else:
        pattern = "".join(names.get(str(block), "?") for block in blocks)
        field = "layers_block_type"
    if not isinstance(pattern, str) or len(pattern) != layers or set(pattern) - set("M*-E"):
        raise config.error(field, f"must have {layers} entries of M (mamba), * (attention), - (mlp) or E (experts)")
    return pattern


def _nemotron_moe(config: Config, hidden: int) -> Modules:
    # The router gets no slots: vLLM skips `mixer.gate` of non-gated experts.
    parts: list[Module] = []
    width = hidden
    shared = config.number("n_shared_experts", default=1, minimum=0)
    if shared:
        inner = config.number("moe_shared_expert_intermediate_size") * shared
        parts += [
            _column("mixer.shared_experts.up_proj", hidden, inner),
            _row("mixer.shared_experts.down_proj", inner, hidden),
        ]
    if "moe_latent_size" in config:
        width = config.number("moe_latent_size")
        parts += [
            _replicated("mixer.fc1_latent_proj", hidden, width),
            _replicated("mixer.fc2_latent_proj", width, hidden),
        ]
    count, inner = config.number("n_routed_experts"), config.number("moe_intermediate_size")
    return (*parts, _experts("mixer.experts", count, width, inner, "non_gated", ("up_proj", "down_proj")))


def _falcon_h1(config: Config) -> tuple[Group, ...]:
    hidden = config.number("hidden_size")
    heads = config.number("mamba_n_heads")
    inner = config.number_or_null("mamba_d_ssm") or config.number("mamba_expand", default=2) * hidden
    if inner % heads:
        raise config.error("mamba_n_heads", f"must divide mamba_d_ssm={inner}")
    mamba = _mamba2(
        "mamba.mamba",
        hidden,
        heads,
        inner // heads,
        config.number("mamba_n_groups", default=1),
        config.number("mamba_d_state"),
        config.number("mamba_d_conv", default=4),
    )
    mlp = _mlp("feed_forward", hidden, config.number("intermediate_size"))
    return _same(config, *_attention(config), *mamba, *mlp) + _vocabulary(config)


def _jamba(config: Config) -> tuple[Group, ...]:
    hidden, inner = config.number("hidden_size"), config.number("intermediate_size")
    state, dt_rank = config.number("mamba_d_state", default=16), config.number("mamba_dt_rank")
    width = config.number("mamba_expand", default=2) * hidden
    mamba: Modules = (
        _conv("mamba.conv1d", config.number("mamba_d_conv", default=4), width),
        Linear("mamba.in_proj", "column", hidden, (2 * width,), (Child("in_proj", 2 * width),)),
        _row("mamba.x_proj", width, dt_rank + 2 * state),
        _column("mamba.dt_proj", dt_rank, width),
        _row("mamba.out_proj", width, hidden),
    )
    attention = _attention(config, "")
    count = config.number("num_experts", default=16)
    dense = _mlp("feed_forward", hidden, inner)
    sparse: Modules = (
        _replicated("feed_forward.router", hidden, count),
        _experts("feed_forward.experts", count, hidden, inner),
    )
    attention_every = (
        config.number("attn_layer_period", default=8),
        config.number("attn_layer_offset", default=4, minimum=0),
    )
    expert_every = (
        config.number("expert_layer_period", default=2),
        config.number("expert_layer_offset", default=1, minimum=0),
    )
    parts = []
    for index in range(config.number("num_hidden_layers")):
        mixer = attention if index % attention_every[0] == attention_every[1] else mamba
        feed = sparse if count > 1 and index % expert_every[0] == expert_every[1] else dense
        parts.append(mixer + feed)
    return _layers(parts) + _vocabulary(config, "every", "every")


def _k2_horizon(config: Config) -> tuple[Group, ...]:
    """Attention with an output gate or none, first layers dense; values from experts (`mova`) are not known here."""
    if config.number("mova_num_experts", default=0, minimum=0):
        raise config.error("mova_num_experts", "is a kind of attention that is not known here yet; 0 is")
    hidden, count = config.number("hidden_size"), config.number("num_experts")
    attention = [*_attention(config)]
    if config.fields.get("attention_gate_func") is not None:
        width = config.number("num_attention_heads") * config.number("head_dim")
        attention.append(_column("self_attn.gate_proj", hidden, width))
    inner, dense = config.number("moe_intermediate_size"), config.items("mlp_only_layers")
    step, shared = config.number("decoder_sparse_step", default=1), config.number("num_shared_experts", minimum=0)
    routed: list[Module] = [*attention, _replicated("mlp.gate", hidden, count, linear=False)]
    if shared:
        mlp = _mlp("mlp.shared_experts", hidden, inner * shared)
        # As for Qwen3-MoE: gate_up_proj is packed only where some layers are dense.
        routed += mlp if dense else mlp[1:]
    routed.append(_experts("mlp.experts", count, hidden, inner))
    parts: list[Modules] = []
    for index in range(config.number("num_hidden_layers")):
        if index in dense or (index + 1) % step:
            parts.append((*attention, *_mlp("mlp", hidden, config.number("intermediate_size"))))
        else:
            parts.append(tuple(routed))
    return _layers(parts) + _vocabulary(config, "every", "every")


def _olmo_hybrid(config: Config) -> tuple[Group, ...]:
    """Linear attention, whose query, key, value and gate vLLM merges, in most layers."""
    hidden, kinds = config.number("hidden_size"), _listed(config, "layer_types")
    k_heads, v_heads = config.number("linear_num_key_heads"), config.number("linear_num_value_heads")
    key = k_heads * config.number("linear_key_head_dim")
    value = v_heads * config.number("linear_value_head_dim")
    sizes, heads = (key, key, value, value), (k_heads, k_heads, v_heads, v_heads)
    names = ("q_proj", "k_proj", "v_proj", "g_proj")
    children = tuple(Child(name, size) for name, size in zip(names, sizes, strict=True))
    linear: Modules = (
        Linear("linear_attn.in_proj_qkvg", "merged", hidden, sizes, children, heads=heads),
        _column("linear_attn.b_proj", hidden, v_heads),
        _column("linear_attn.a_proj", hidden, v_heads),
        _conv("linear_attn.conv1d", config.number("linear_conv_kernel_dim"), 2 * key + value),
        _row("linear_attn.o_proj", value, hidden),
    )
    full, mlp = _attention(config), _mlp("mlp", hidden, config.number("intermediate_size"))
    return _layers((full if kind == "full_attention" else linear) + mlp for kind in kinds)


def _molmo(config: Config) -> tuple[Group, ...]:
    """`intermediate_size` is that of gate and up together."""
    hidden, twice = config.number("hidden_size"), config.number("intermediate_size")
    if twice % 2:
        raise config.error("intermediate_size", "must be even: gate and up are its halves")
    kv_heads = {"num_key_value_heads": config.fields.get("num_key_value_heads") or config.number("num_attention_heads")}
    own = Config(config.fields | kv_heads, config.where, config.inside)
    return _same(config, *_attention(own, fused=True), *_fused_mlp("mlp", hidden, twice // 2))


def _molmo2(config: Config) -> tuple[Group, ...]:
    text = _text(config, "text_config", "llm_config")
    hidden, inner = text.number("hidden_size"), text.number("intermediate_size")
    mlp = _column("mlp.up_gate_proj", hidden, 2 * inner), _row("mlp.down_proj", inner, hidden)
    return _same(text, *_attention(text, fused=True), *mlp)


def _whisper(config: Config) -> tuple[Group, ...]:
    """An encoder and a decoder whose layers attend to it; both get slots."""
    hidden = config.number("d_model")
    if config.number("num_hidden_layers", default=config.number("encoder_layers")) != config.number("encoder_layers"):
        raise config.error("num_hidden_layers", "must be the same as encoder_layers: it is another name of it")

    def attention(side: str, path: str, *, cross: bool = False) -> Modules:
        heads = config.number(f"{side}_attention_heads")
        if hidden % heads:
            raise config.error(f"{side}_attention_heads", f"must divide d_model={hidden}")
        out = _row(f"{path}.out_proj", hidden, hidden)
        if not cross:
            return _qkv(f"{path}.qkv_proj", hidden, heads, heads, hidden // heads), out
        keys = Linear(
            f"{path}.kv_proj", "merged", hidden, (hidden, hidden), (Child("k_proj", hidden), Child("v_proj", hidden))
        )
        return _column(f"{path}.q_proj", hidden, hidden, heads=heads), keys, out

    def side_of(side: str, parts: Modules) -> tuple[Group, ...]:
        inner, count = config.number(f"{side}_ffn_dim"), config.number(f"{side}_layers")
        layer = *parts, _column("mlp.fc1", hidden, inner), _row("mlp.fc2", inner, hidden)
        return _layers([layer] * count, f"model.{side}.layers.{{}}")

    encoder = side_of("encoder", attention("encoder", "self_attn"))
    decoder = (*attention("decoder", "self_attn"), *attention("decoder", "encoder_attn", cross=True))
    return encoder + side_of("decoder", decoder)


def _minicpm_v(config: Config) -> tuple[Group, ...]:
    """MiniCPM-V and MiniCPM-o: their version says which text model is inside."""
    version = str(config.fields.get("version", "2.6" if config.fields.get("model_type") == "minicpmo" else "2.5"))
    builders = {"2.5": _LLAMA, "2.6": _BARE, "4.0": _LLAMA, "4": _LLAMA, "4.5": _QWEN3}
    if version not in builders:
        raise config.error("version", f"must be one of {', '.join(builders)}: what vLLM serves with LoRA")
    return _inside(builders[version], "llm.", "llm.model")(config)


def _bagel(config: Config) -> tuple[Group, ...]:
    """vLLM does not tell Bagel's parts apart for LoRA, so that its vision tower gets slots too."""
    groups = _inside(_BARE, peft="language_model.model")(_named(config, "llm_config"))
    if not config.flag("visual_und", default=True):
        return groups
    tower = config.sub("vit_config")
    hidden, heads, inner = (tower.number(name) for name in ("hidden_size", "num_attention_heads", "intermediate_size"))
    layer = (
        _qkv("self_attn.qkv_proj", hidden, heads, heads, hidden // heads),
        _row("self_attn.out_proj", hidden, hidden),
        _column("mlp.fc1", hidden, inner),
        _row("mlp.fc2", inner, hidden),
    )
    count = tower.number("num_hidden_layers")
    count = 26 if count == 27 else count  # vLLM's own correction of the published config
    path = "vit_model.vision_model.encoder.layers"
    layers = tuple(Group(f"{path}.{index}", (), layer, "every") for index in range(count))
    width = config.sub("llm_config").number("hidden_size")
    connector = _column("fc1", hidden, width), _row("fc2", width, width)
    return (*groups, *layers, Group("connector", (), connector, "every"))


def _nemotron_vl(config: Config) -> tuple[Group, ...]:
    return _inside(_nemotron_h, peft="language_model.backbone")(_named(config, "llm_config"))


def _ernie_vl(config: Config) -> tuple[Group, ...]:
    """Ernie 4.5 VL: experts for text and for images, which no adapter can name; the tower gets slots too."""
    hidden, layers = config.number("hidden_size"), config.number("num_hidden_layers")
    attention, dense = _attention(config), _mlp("mlp", hidden, config.number("intermediate_size"))
    fields = ("moe_num_experts", "moe_intermediate_size", "moe_layer_start_index", "moe_layer_end_index")
    kinds: list[tuple[str, Config]] = []
    for index, kind in enumerate(("text", "vision")):
        values = {name: [*config.items(name), None, None][index] for name in fields}
        kinds.append((kind, Config(values, config.where, f"{config.inside}[{index}] of ")))
    starts = [own.number("moe_layer_start_index", minimum=0) for _, own in kinds]
    ends = [own.number("moe_layer_end_index", default=layers - 1, minimum=0) for _, own in kinds]
    shared = config.number("moe_num_shared_experts", default=0, minimum=0) * kinds[0][1].number("moe_intermediate_size")
    step = config.number("moe_layer_interval", default=1)
    parts: list[Modules] = []
    for layer in range(layers):
        if not min(starts) <= layer <= max(ends) or (layer + 1) % step:
            parts.append(attention + dense)
            continue
        feed: list[Module] = [*_mlp("mlp.shared_experts", hidden, shared)] if shared else []
        for (kind, own), start, end in zip(kinds, starts, ends, strict=True):
            if start <= layer <= end:
                count = own.number("moe_num_experts")
                inner = own.number("moe_intermediate_size")
                feed.append(_replicated(f"mlp.{kind}_experts_gate", hidden, count, linear=False))
                feed.append(Experts(f"mlp.{kind}_experts", count, hidden, inner, "gated", ()))
            else:
                feed += _mlp(f"mlp.{kind}_experts", hidden, config.number("intermediate_size"))
        parts.append((*attention, *feed))
    text = _layers(parts, "language_model.model.layers.{}")
    return text + _ernie_tower(config, hidden)


def _ernie_tower(config: Config, hidden: int) -> tuple[Group, ...]:
    tower = config.sub("vision_config")
    width = tower.first_number("embed_dim", "hidden_size")
    ratio = tower.number("mlp_ratio", default=4)
    block = (
        _row("attn.proj", width, width),
        _column("mlp.fc1", width, ratio * width),
        _row("mlp.fc2", ratio * width, width),
    )
    blocks = tuple(Group(f"vision_model.blocks.{index}", (), block, "every") for index in range(tower.number("depth")))
    spatial = config.number("pixel_hidden_size") * config.number("spatial_conv_size") ** 2
    resampler = [_column("spatial_linear1", spatial, spatial), _column("spatial_linear2", spatial, spatial)]
    if config.flag("use_temporal_conv", default=True):
        temporal = spatial * config.number("temporal_conv_size")
        resampler += [_column("temporal_linear1", temporal, spatial), _column("temporal_linear2", spatial, spatial)]
    resampler.append(_column("mlp", spatial, hidden))
    return (*blocks, Group("resampler_model", (), tuple(resampler), "every"))


def _text(config: Config, *names: str) -> Config:
    """The text model's fields: the first of `names` that is there, else the config itself."""
    return next((config.sub(name) for name in names if name in config), config)


def _named(config: Config, *names: str) -> Config:
    """The config with its text model called `text_config`, as `_inside` and `_by_text_config` look for it."""
    for name in names:
        if name in config:
            fields = config.fields | {"text_config": config.fields[name]}
            return Config(fields, config.where, config.inside)
    return config


def _inside(builder: Builder, prefix: str = "language_model.", peft: str = "model.language_model") -> Builder:
    """A multimodal model around a text model: the same modules under `prefix`; the towers get no slots.

    Slots of towers and connectors are experimental in vLLM (`enable_tower_connector_lora`) and not counted.
    """

    def build(config: Config) -> tuple[Group, ...]:
        text = config.sub("text_config") if "text_config" in config else config
        groups = builder(text)
        return tuple(
            replace(
                group,
                prefix=f"{prefix}{group.prefix}".rstrip("."),
                peft_prefix=_inside_peft(group, peft),
            )
            for group in groups
        )

    return build


def _inside_peft(group: Group, peft: str) -> str | None:
    path = group.peft_prefix or group.prefix
    return path.replace("model", peft, 1) if path.startswith("model") else None


def _idefics3(config: Config) -> tuple[Group, ...]:
    groups = _BARE(config.sub("text_config"))
    return tuple(replace(group, prefix=group.prefix.replace("model.", "model.text_model.", 1)) for group in groups)


def _thinker(builder: Builder) -> Builder:
    """The omni models: only the thinker is served, and its text model gets slots."""

    def build(config: Config) -> tuple[Group, ...]:
        return _inside(builder)(config.sub("thinker_config") if "thinker_config" in config else config)

    return build


def _by(name: str, peft: str = "language_model.model") -> Builder:
    """A multimodal model of the hub's own code around whatever text model the config calls `name`, or text_config."""

    def build(config: Config) -> tuple[Group, ...]:
        return _by_text_config(_named(config, name), peft)

    return build


def _by_text_config(config: Config, peft: str = "model.language_model") -> tuple[Group, ...]:
    """A multimodal model around whatever text model its text_config names."""
    text = config.sub("text_config")
    architectures = text.items("architectures")
    name = architectures[0] if architectures else ARCHITECTURE_OF.get(str(text.fields.get("model_type")))
    builder = FAMILIES.get(str(name))
    if builder is None:
        raise text.error("model_type", "is no text model that is known to be served with LoRA by vLLM 0.33")
    return _inside(builder, peft=peft)(config)


_LLAMA = _dense(embed="ends", kv_heads_default=True)
_BARE = _dense(vocabulary=False)
_LONGCAT = _renamed(
    _longcat,
    num_hidden_layers="num_layers",
    intermediate_size="ffn_hidden_size",
    moe_intermediate_size="expert_ffn_hidden_size",
)
_QWEN3 = _dense(embed="ends", head_dim=128)
_GEMMA = _dense(vocabulary=False, head_dim=256)

# By architecture, as vLLM's registry names them.
FAMILIES: dict[str, Builder] = {
    "AXK1ForCausalLM": _deepseek(),
    "AfmoeForCausalLM": _afmoe,
    "AliceAIForCausalLM": _alice,
    "Alpamayo2Super": _inside(_QWEN3),
    "ApertusForCausalLM": _ungated,
    "AudioFlamingo3ForConditionalGeneration": _by_text_config,
    "BagelForConditionalGeneration": _bagel,
    "BailingMoeForCausalLM": _bailing_moe,
    "BailingMoeV2ForCausalLM": _bailing_moe,
    "Blip2ForConditionalGeneration": _by("text_config"),
    "ChatGLMForConditionalGeneration": _renamed(_chatglm, num_hidden_layers="num_layers"),
    "ChatGLMModel": _renamed(_chatglm, num_hidden_layers="num_layers"),
    "Cohere2ForCausalLM": _dense(embed="every", head=None, kv_heads_default=True),
    "CohereCompassForConditionalGeneration": _inside(_dense(embed="every", head=None, kv_heads_default=True)),
    "CohereForCausalLM": _dense(embed="every", head=None, kv_heads_default=True),
    "Cosmos3ForConditionalGeneration": _inside(_QWEN3),
    "DeciLMForCausalLM": _deci,
    "DeepseekForCausalLM": _deepseek(latent=False),
    "DeepseekOCR2ForCausalLM": _by("language_config", "model"),
    "DeepseekOCRForCausalLM": _by("language_config", "model"),
    "DeepseekV2ForCausalLM": _deepseek(),
    "DeepseekV32ForCausalLM": _deepseek(sparse=True),
    "DeepseekV3ForCausalLM": _deepseek(),
    "DeepseekV4ForCausalLM": _deepseek_v4,
    "DeepseekV4ForConditionalGeneration": _inside(_deepseek_v4, peft="language_model.model"),
    "DotsOCRForCausalLM": _inside(_BARE, peft="model"),
    "Eagle2_5_VLForConditionalGeneration": _by("text_config"),
    "Ernie4_5ForCausalLM": _dense(embed="ends", head_dim=128, tied=True),
    "Ernie4_5_MoeForCausalLM": _ernie_moe,
    "Ernie4_5_VLMoeForConditionalGeneration": _ernie_vl,
    "Exaone4ForCausalLM": _dense(embed="ends", kv_heads_default=True),
    "Exaone4_5_ForConditionalGeneration": _by_text_config,
    "ExaoneForCausalLM": _renamed(_exaone, num_hidden_layers="num_layers"),
    "ExaoneMoEForCausalLM": _moe_after_dense(
        "num_experts",
        "moe_intermediate_size",
        "num_shared_experts",
        "mlp.shared_experts",
        vocabulary=True,
        kinds="mlp_layer_types",
    ),
    "ExaoneMoeForCausalLM": _moe_after_dense(
        "num_experts",
        "moe_intermediate_size",
        "num_shared_experts",
        "mlp.shared_experts",
        vocabulary=True,
        kinds="mlp_layer_types",
    ),
    "FalconH1ForCausalLM": _falcon_h1,
    "GLM4VForCausalLM": _renamed(_chatglm, num_hidden_layers="num_layers"),
    "Gemma2ForCausalLM": _GEMMA,
    "Gemma3ForCausalLM": _GEMMA,
    "Gemma3ForConditionalGeneration": _inside(_GEMMA),
    "Gemma4ForCausalLM": _gemma4,
    "Gemma4ForConditionalGeneration": _inside(_gemma4),
    "Gemma4UnifiedForConditionalGeneration": _inside(_gemma4),
    "GemmaForCausalLM": _GEMMA,
    "Glm4ForCausalLM": _BARE,
    "Glm4MoeForCausalLM": _moe_after_dense(
        "n_routed_experts", "moe_intermediate_size", "n_shared_experts", "mlp.shared_experts"
    ),
    "Glm4MoeLiteForCausalLM": _deepseek(),
    "Glm4vForConditionalGeneration": _inside(_fused(vocabulary=False, fused_qkv=False)),
    "Glm4vMoeForConditionalGeneration": _inside(
        _moe_after_dense("n_routed_experts", "moe_intermediate_size", "n_shared_experts", "mlp.shared_experts")
    ),
    "Glm5NextForConditionalGeneration": _inside(_glm5_next),
    "GlmAsrForConditionalGeneration": _inside(_dense(embed="ends")),
    "GlmMoeDsaForCausalLM": _deepseek(sparse=True),
    "GlmOcrForConditionalGeneration": _inside(_fused(vocabulary=False, fused_qkv=False)),
    "GptOssForCausalLM": _gpt_oss,
    "Granite4VisionForConditionalGeneration": _inside(_LLAMA),
    "GraniteForCausalLM": _LLAMA,
    "GraniteMoeForCausalLM": _mixtral(router=False, kv_heads_default=True),
    "GraniteMoeHybridForCausalLM": _granite_moe("mamba"),
    "GraniteMoeSWAForCausalLM": _granite_moe("attention"),
    "GraniteMoeSharedForCausalLM": _granite_moe("attention"),
    "GraniteSWAForCausalLM": _dense(embed="ends", tied=True),
    "GraniteSpeechForConditionalGeneration": _by_text_config,
    "GraniteSpeechPlusForConditionalGeneration": _by_text_config,
    "H2OVLChatModel": _by("llm_config"),
    "HYV3ForCausalLM": _moe_after_dense(
        "num_experts", "expert_hidden_dim", "num_shared_experts", "mlp.shared_mlp", head_dim=128
    ),
    "HYV4ForCausalLM": _hy_v4,
    "HyperCLOVAXForCausalLM": _LLAMA,
    "IQuestCoderForCausalLM": _LLAMA,
    "Idefics3ForConditionalGeneration": _idefics3,
    "InklingForCausalLM": _inkling,
    "InklingForConditionalGeneration": _inkling,
    "InternLM2ForCausalLM": _internlm2,
    "InternLM3ForCausalLM": _LLAMA,
    "InternS1ForConditionalGeneration": _by("text_config", "model.language_model"),
    "InternS1ProForConditionalGeneration": _inside(_qwen3_moe("fused")),
    "InternS2MobiusForConditionalGeneration": _inside(_mobius),
    "InternS2PreviewForConditionalGeneration": _inside(
        _qwen_hybrid("fused", interleaved=False, moe=True, vocabulary=True)
    ),
    "InternVLChatModel": _by("llm_config"),
    "InternVLForConditionalGeneration": _by_text_config,
    "IsaacForConditionalGeneration": _inside(_QWEN3, peft="model.text_model"),
    "JambaForCausalLM": _jamba,
    "K2HorizonForCausalLM": _k2_horizon,
    "KeyeForConditionalGeneration": _inside(_QWEN3, peft="model"),
    "KeyeVL1_5ForConditionalGeneration": _inside(_QWEN3, peft="model"),
    "LLaMAForCausalLM": _LLAMA,
    "LagunaForCausalLM": _laguna,
    "Lfm2ForCausalLM": _lfm2,
    "Lfm2MoeForCausalLM": _lfm2_moe,
    "Lfm2VlForConditionalGeneration": _by_text_config,
    "LightOnOCRForConditionalGeneration": _by_text_config,
    "Llama4ForCausalLM": _llama4,
    "Llama4ForConditionalGeneration": _inside(_llama4),
    "LlamaForCausalLM": _LLAMA,
    "Llama_Nemotron_Nano_VL": _by("llm_config"),
    "LlavaForConditionalGeneration": _by_text_config,
    "LlavaNextForConditionalGeneration": _by_text_config,
    "LlavaNextVideoForConditionalGeneration": _by_text_config,
    "LongcatFlashForCausalLM": _LONGCAT,
    "LongcatFlashNgramForCausalLM": _LONGCAT,
    "MiMoForCausalLM": _BARE,
    "MiniCPM3ForCausalLM": _minicpm3,
    "MiniCPMForCausalLM": _minicpm,
    "MiniCPMO": _minicpm_v,
    "MiniCPMOcrForConditionalGeneration": _inside(_qwen_hybrid("gated", interleaved=False, moe=False, vocabulary=True)),
    "MiniCPMV": _minicpm_v,
    "MiniCPMV4_6ForConditionalGeneration": _inside(
        _qwen_hybrid("gated", interleaved=False, moe=False, vocabulary=True)
    ),
    "MiniCPMV4_7ForConditionalGeneration": _inside(
        _qwen_hybrid("gated", interleaved=False, moe=False, vocabulary=True)
    ),
    "MiniMaxM2ForCausalLM": _mixtral(vocabulary=False, router=True, head_dim=128),
    "Ministral3ForCausalLM": _BARE,
    "Mistral3ForConditionalGeneration": _inside(_BARE),
    "MistralForCausalLM": _BARE,
    "MistralLarge3ForCausalLM": _deepseek(),
    "MixtralForCausalLM": _mixtral(),
    "Molmo2ForConditionalGeneration": _molmo2,
    "MolmoForCausalLM": _molmo,
    "MossAudioModel": lambda config: _inside(_QWEN3, peft="language_model.model")(_named(config, "language_config")),
    "MuseGlimmerForCausalLM": _muse_glimmer,
    "MuseGlimmerForConditionalGeneration": _muse_glimmer,
    "MuseSparkForConditionalGeneration": _muse_spark,
    "NVLM_D": _by("llm_config"),
    "NemotronForCausalLM": _ungated,
    "NemotronHForCausalLM": _nemotron_h,
    "NemotronHPuzzleForCausalLM": _nemotron_h,
    "NemotronH_Nano_Omni_Reasoning_V3": _nemotron_vl,
    "NemotronH_Nano_VL_V2": _nemotron_vl,
    "NemotronH_Omni_Reasoning_V3": _nemotron_vl,
    "NemotronH_Super_Omni_Reasoning_V3": _nemotron_vl,
    "OPTForCausalLM": _opt,
    "OlmoHybridForCausalLM": _olmo_hybrid,
    "OlmoeForCausalLM": _olmoe,
    "OpenCUAForConditionalGeneration": _inside(_BARE, peft="language_model.model"),
    "OpenPanguVLForConditionalGeneration": _inside(_pangu, peft="model.language_model"),
    "PaliGemmaForConditionalGeneration": _by_text_config,
    "PanguEmbeddedForCausalLM": _pangu,
    "PanguProMoEV2ForCausalLM": _pangu,
    "PanguUltraMoEForCausalLM": _pangu,
    "Param2MoEForCausalLM": _param2,
    "Phi3ForCausalLM": _fused(vocabulary=True),
    "Phi4MMForCausalLM": _fused(vocabulary=False),
    "PhiMoEForCausalLM": _mixtral(),
    "PixtralForConditionalGeneration": _by("text_config"),
    "Plamo3ForCausalLM": _plamo3,
    "QianfanOCRForConditionalGeneration": _by_text_config,
    "Qwen2ForCausalLM": _BARE,
    "Qwen2MoeForCausalLM": _qwen2_moe,
    "Qwen2VLForConditionalGeneration": _inside(_BARE),
    "Qwen2_5OmniForConditionalGeneration": _thinker(_BARE),
    "Qwen2_5OmniModel": _thinker(_BARE),
    "Qwen2_5_VLForConditionalGeneration": _inside(_BARE),
    "Qwen3ASRForConditionalGeneration": _thinker(_QWEN3),
    "Qwen3ASRRealtimeGeneration": _thinker(_QWEN3),
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3MoeForCausalLM": _qwen3_moe(),
    "Qwen3NextForCausalLM": _qwen_hybrid("gated", interleaved=True, moe=True, vocabulary=False),
    "Qwen3OmniMoeForConditionalGeneration": _thinker(_qwen3_moe("fused")),
    "Qwen3VLForConditionalGeneration": _inside(_QWEN3),
    "Qwen3VLMoeForConditionalGeneration": _inside(_qwen3_moe("fused")),
    "Qwen3_5ForCausalLM": _qwen_hybrid("gated", interleaved=False, moe=False, vocabulary=True),
    "Qwen3_5ForConditionalGeneration": _inside(_qwen_hybrid("gated", interleaved=False, moe=False, vocabulary=True)),
    "Qwen3_5MoeForCausalLM": _qwen_hybrid("gated", interleaved=False, moe=True, vocabulary=True),
    "Qwen3_5MoeForConditionalGeneration": _inside(_qwen_hybrid("fused", interleaved=False, moe=True, vocabulary=True)),
    "Qwen4ExpForCausalLM": _qwen4,
    "Qwen4ExpForConditionalGeneration": _inside(_qwen4),
    "Rnj1ForCausalLM": _BARE,
    "SarvamMLAForCausalLM": _sarvam_mla,
    "SarvamMoEForCausalLM": _bailing_moe,
    "SmolVLMForConditionalGeneration": _idefics3,
    "SolarForCausalLM": _LLAMA,
    "Step5ForCausalLM": _step5,
    "Step5ForConditionalGeneration": _inside(_step5),
    "TeleChat2ForCausalLM": _renamed(
        _LLAMA, num_hidden_layers="n_layer", num_attention_heads="n_head", intermediate_size="ffn_hidden_size"
    ),
    "TeleChat3ForCausalLM": _LLAMA,
    "TeleFLMForCausalLM": _LLAMA,
    "UltravoxModel": _by("text_config"),
    "UnlimitedOCRForCausalLM": _by("language_config", "model"),
    "VoxtralForConditionalGeneration": _by("text_config"),
    "VoxtralRealtimeGeneration": _by("text_config"),
    "WhisperForConditionalGeneration": _whisper,
}

# For a config.json without `architectures`, and for the text model inside a multimodal one.
ARCHITECTURE_OF: dict[str, str] = {
    "afmoe": "AfmoeForCausalLM",
    "apertus": "ApertusForCausalLM",
    "bailing_moe": "BailingMoeForCausalLM",
    "chatglm": "ChatGLMModel",
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "deepseek_v4": "DeepseekV4ForCausalLM",
    "ernie4_5": "Ernie4_5ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone": "ExaoneForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "exaone_moe": "ExaoneMoeForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    "glm4v": "Glm4vForConditionalGeneration",
    "glm4v_moe": "Glm4vMoeForConditionalGeneration",
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",
    "glm_ocr": "GlmOcrForConditionalGeneration",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granite_speech_plus": "GraniteSpeechPlusForConditionalGeneration",
    "granitemoe": "GraniteMoeForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "granitemoeshared": "GraniteMoeSharedForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "hy_v4": "HYV4ForCausalLM",
    "internlm2": "InternLM2ForCausalLM",
    "internvl": "InternVLForConditionalGeneration",
    "internvl_chat": "InternVLChatModel",
    "jamba": "JambaForCausalLM",
    "kimi_k2": "DeepseekV3ForCausalLM",
    "laguna": "LagunaForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4": "Llama4ForConditionalGeneration",
    "llama4_text": "Llama4ForCausalLM",
    "llava": "LlavaForConditionalGeneration",
    "llava_next": "LlavaNextForConditionalGeneration",
    "longcat_flash": "LongcatFlashForCausalLM",
    "mimo": "MiMoForCausalLM",
    "minicpm": "MiniCPMForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mistral3": "Mistral3ForConditionalGeneration",
    "mixtral": "MixtralForCausalLM",
    "muse_glimmer": "MuseGlimmerForConditionalGeneration",
    "nemotron": "NemotronForCausalLM",
    "nemotron-nas": "DeciLMForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "paligemma": "PaliGemmaForConditionalGeneration",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "plamo3": "Plamo3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_omni": "Qwen2_5OmniForConditionalGeneration",
    "qwen2_5_vl": "Qwen2_5_VLForConditionalGeneration",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen2_vl": "Qwen2VLForConditionalGeneration",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_asr": "Qwen3ASRForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_omni_moe": "Qwen3OmniMoeForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "solar": "SolarForCausalLM",
}

# In vLLM's registry, without its SupportsLoRA interface: vLLM refuses to start them with LoRA.
WITHOUT_LORA: frozenset[str] = frozenset(
    {
        "AriaForConditionalGeneration",
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "BailingMoeV3VLForConditionalGeneration",
        "BeamForCausalLM",
        "BeeForConditionalGeneration",
        "BloomForCausalLM",
        "Cohere2MoeForCausalLM",
        "Cohere2VisionForConditionalGeneration",
        "CohereAsrForConditionalGeneration",
        "Cosmos3EdgeForConditionalGeneration",
        "DbrxForCausalLM",
        "DeepseekV41ForCausalLM",
        "DeepseekVLV2ForCausalLM",
        "DiffusionGemmaForBlockDiffusion",
        "DomynEdgeForCausalLM",
        "DoryForCausalLM",
        "Dots3NoteForCausalLM",
        "FalconForCausalLM",
        "FalconMambaForCausalLM",
        "FireRedASR2ForConditionalGeneration",
        "FlintForCausalLM",
        "FunASRForConditionalGeneration",
        "FunAudioChatForConditionalGeneration",
        "GPT2LMHeadModel",
        "GPTJForCausalLM",
        "Gemma3nForCausalLM",
        "Gemma3nForConditionalGeneration",
        "Glm5NextForCausalLM",
        "HCXVisionV2ForCausalLM",
        "HfMoondream",
        "HrmTextForCausalLM",
        "IQuestLoopCoderForCausalLM",
        "KananaVForConditionalGeneration",
        "KimiK25ForConditionalGeneration",
        "KimiK3ForConditionalGeneration",
        "KimiLinearForCausalLM",
        "KimiVLForConditionalGeneration",
        "LlavaOnevision2ForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mamba2ForCausalLM",
        "MambaForCausalLM",
        "MiDashengLMModel",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "MiMoV2OmniForCausalLM",
        "MiniMaxM3SparseForCausalLM",
        "MiniMaxM3SparseForConditionalGeneration",
        "Moondream3ForCausalLM",
        "MoonshotKimiaForCausalLM",
        "MossTranscribeDiarizeForConditionalGeneration",
        "NemotronParseForConditionalGeneration",
        "OpenVLAForActionPrediction",
        "OrionForCausalLM",
        "Ovis",
        "Ovis2_5",
        "Ovis2_6ForCausalLM",
        "Ovis2_6_MoeForCausalLM",
        "PaddleOCRVLForConditionalGeneration",
        "Phi3VForCausalLM",
        "Phi4ForCausalLMV",
        "Qwen2AudioForConditionalGeneration",
        "RForConditionalGeneration",
        "RadioMBartPrefixForCausalLM",
        "SkyworkR1VChatModel",
        "StableLmForCausalLM",
        "Step1ForCausalLM",
        "Step3TextForCausalLM",
        "Step3VLForConditionalGeneration",
        "Step3p5ForCausalLM",
        "Step3p7ForConditionalGeneration",
        "StepVLForConditionalGeneration",
        "Zamba2ForCausalLM",
    }
)

# vLLM refuses pipeline parallelism for these.
WITHOUT_PIPELINE: frozenset[str] = frozenset(
    {
        "AliceAIForCausalLM",
        "Idefics3ForConditionalGeneration",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Nano_VL_V2",
        "NemotronH_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "Phi4MMForCausalLM",
        "SmolVLMForConditionalGeneration",
        "WhisperForConditionalGeneration",
    }
)
