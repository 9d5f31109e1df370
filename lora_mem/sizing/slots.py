"""The slot buffers of one worker, named and shaped as vLLM allocates them.

Rules from vLLM 0.33.0: `vllm/lora/layers/*.py` (`create_lora_weights`), which class wraps what (`can_replace_layer`)
and pipeline ranks (`get_pp_indices`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from lora_mem.errors import SizingError
from lora_mem.sizing.modules import Experts, Group, Linear, Module
from lora_mem.sizing.options import MOE_BACKENDS
from lora_mem.sizing.resolving import Resolved
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import deployed
from lora_mem.sizing.tensors import Tensor, local_experts, uses_3d_wrapper


def slot_tensors(module: Module, options: Resolved) -> list[Tensor]:
    """The slot buffers of one module in one worker, named and shaped as vLLM allocates them."""
    if isinstance(module, Experts):
        return _expert_slots(module, options)
    loras, rank, sharded = options.max_loras, options.max_lora_rank, options.fully_sharded_loras
    if module.kind == "embedding":
        a = Tensor("lora_a_stacked[0]", (loras, module.input_size, rank))
        return [a, Tensor("lora_b_stacked[0]", (loras, 1, module.slices[0], rank))]
    tp = options.tensor_parallel_size if module.tensor_parallel else 1
    rank_a, width_a, widths_b = rank, module.input_size, module.slices
    if module.kind in ("column", "merged", "mamba", "qkv"):
        if sharded:
            if not _has_sharded_class(module, tp):
                return []
            rank_a = _divide(rank, tp, module, "max_lora_rank")
        widths_b = slices_per_rank(module, tp)
    elif module.kind == "row":
        width_a = _divide(module.input_size, tp, module, "input size")
        if sharded:
            widths_b = (_divide(module.slices[0], tp, module, "output size"),)
    slots = range(len(widths_b))
    a_slots = [Tensor(f"lora_a_stacked[{i}]", (loras, 1, rank_a, width_a)) for i in slots]
    return a_slots + [Tensor(f"lora_b_stacked[{i}]", (loras, 1, widths_b[i], rank)) for i in slots]


def _has_sharded_class(module: Linear, tp: int) -> bool:
    """Whether vLLM has a fully sharded wrapper: not for three or more slices, unless they are q, k and v."""
    if module.kind == "mamba":
        return min(module.heads) % tp != 0  # then it is one ColumnParallelLinear
    return module.kind != "merged" or len(module.children) == 2


def _expert_slots(module: Experts, options: Resolved) -> list[Tensor]:
    loras, rank, tp = options.max_loras, options.max_lora_rank, options.expert_tensor_parallel_size
    round_hidden, round_inter = MOE_BACKENDS[options.moe_backend]
    hidden, local = _round_up(module.hidden_size, round_hidden), local_experts(module, options)
    inter = _round_up(_divide(module.intermediate_size, tp, module, "intermediate size"), round_inter)
    rank_a, hidden_b, outer = rank, hidden, 1 if options.enable_moe_shared_loras else local
    if options.fully_sharded_loras:
        rank_a = _divide(rank, tp, module, "max_lora_rank")
        hidden_b = _divide(hidden, tp, module, "hidden size")
    slices, width = (1, inter) if module.layout == "non_gated" else (2, inter)
    if uses_3d_wrapper(module, options):
        slices, width = 1, 2 * inter
    return [
        *(Tensor(f"w13_lora_a_stacked[{i}]", (loras, outer, rank_a, hidden)) for i in range(slices)),
        Tensor("w2_lora_a_stacked[0]", (loras, local, rank, inter)),
        *(Tensor(f"w13_lora_b_stacked[{i}]", (loras, local, width, rank)) for i in range(slices)),
        Tensor("w2_lora_b_stacked[0]", (loras, outer, hidden_b, rank)),
    ]


def slices_per_rank(module: Linear, tp: int) -> tuple[int, ...]:
    """Output sizes of the slots of a column-parallel module in one worker.

    Key and value heads, and slices named so, are replicated where there are fewer heads than ranks.
    """
    if module.kind == "mamba":
        return _mamba_per_rank(module, tp)
    is_qkv = module.kind == "qkv"
    widths = []
    for index, (size, heads) in enumerate(itertools.zip_longest(module.slices, module.heads)):
        if index in ((1, 2) if is_qkv else module.replicated):
            local = _replicated_heads(heads, tp, module, "num_key_value_heads" if is_qkv else "number of heads")
            widths.append(size // heads * local)
        else:
            if heads:
                _divide(heads, tp, module, "num_attention_heads" if is_qkv else "number of heads")
            widths.append(_divide(size, tp, module, "output size"))
    # q, k and v of one tensor in the checkpoint: QKVParallelLinearWithLoRA has one slot for the three.
    return (sum(widths),) if is_qkv and len(module.children) == 1 else tuple(widths)


def _replicated_heads(heads: int, tp: int, module: Linear, what: str) -> int:
    """Heads in one worker: a share of them, or a whole one where there are fewer than workers."""
    if tp < heads:
        return _divide(heads, tp, module, what)
    if tp % heads:
        raise SizingError("tensor_parallel_size", tp, f"must be a multiple of {what}={heads} of {module.name}")
    return 1


def _mamba_per_rank(module: Linear, tp: int) -> tuple[int, ...]:
    """Slices of MambaMixer2's in_proj or conv1d in one worker.

    Where `tp` does not divide the groups of B and C there must be one group: vLLM extends it to one for each rank, and
    builds the module as one ColumnParallelLinear with a single slot.
    """
    groups = min(module.heads)
    if groups != 1 and groups % tp:
        raise SizingError("tensor_parallel_size", tp, f"must divide the groups of {module.name}, which are {groups}")
    extended = groups % tp != 0
    widths = tuple(
        size if extended and heads == 1 else _divide(size, tp, module, "output size")
        for size, heads in zip(module.slices, module.heads, strict=True)
    )
    return (sum(widths),) if extended else widths


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _divide(total: int, parts: int, module: Module, what: str) -> int:
    if total % parts:
        raise SizingError(
            "tensor_parallel_size", parts, f"must divide the {what} of {module.name}, which is {total}, as vLLM does"
        )
    return total // parts


def slot_groups(shape: ModelShape, options: Resolved) -> Iterator[tuple[Group, Module, int]]:
    """Each kind of module with slots, and how many one worker has, by its pipeline rank and `lora_target_modules`."""
    targets = options.lora_target_modules
    for group in shape.groups:
        layers = _layers_here(shape, options, group)
        for module in group.modules:
            count = len(layers)
            if targets is not None:
                count = sum(deployed(group.path(layer, module), module, targets) for layer in layers)
            if count:
                yield group, module, count


def worker_slots(shape: ModelShape, options: Resolved) -> Iterator[tuple[str, list[Tensor]]]:
    """Each module with slots in one worker, by its path in vLLM: the listing of what `slot_bytes` sums up."""
    for group, module, _ in slot_groups(shape, options):
        tensors = slot_tensors(module, options)
        for layer in _layers_here(shape, options, group):
            path = group.path(layer, module)
            if tensors and deployed(path, module, options.lora_target_modules):
                yield path, tensors


def _layers_here(shape: ModelShape, options: Resolved, group: Group) -> Sequence[int]:
    """The layers of a group that one worker has; 0 stands for modules outside of the layers."""
    rank, size = options.pipeline_rank, options.pipeline_parallel_size
    if group.stage == "layers":
        start, end = pipeline_layers(shape.num_hidden_layers, rank, size)
        return group.layers if size == 1 else [layer for layer in group.layers if start <= layer < end]
    first, last = rank == 0, rank == size - 1
    return (0,) if {"first": first, "last": last, "ends": first or last, "every": True}[group.stage] else ()


def pipeline_layers(layers: int, rank: int, size: int) -> tuple[int, int]:
    """First layer and the one after the last of a pipeline rank: vLLM's `get_pp_indices`."""
    parts = [layers // size] * size
    for index in range(2, layers % size + 2):
        parts[-index] += 1
    start = sum(parts[:rank])
    return start, start + parts[rank]
