"""The tensors of one module in one worker: slot buffers, packed and staged tensors, shape by shape.

Rules from vLLM 0.33.0: slots `vllm/lora/layers/*.py` (`create_lora_weights`) and which class wraps what
(`can_replace_layer`), packed `PackedLoRALayerWeights.pack`, `pack_moe` and `pack_moe_stacked`, expert parallelism
`_restrict_to_local_experts` and `_slice_moe_lora_ep`, pipeline stages `get_pp_indices`.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod, sqrt
from typing import NamedTuple, TypeVar

from lora_mem.errors import SizingError
from lora_mem.sizing.modules import Experts, Group, Linear, Module
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import check_targets, chosen, expert_names, ranks_in_layer, scaling_of

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MAX_VOCAB_SIZE = 258048  # LogitsProcessorWithLoRA refuses more
# Multiples that a MoE backend rounds the hidden size and a worker's intermediate size up to (`maybe_roundup_sizes`);
# the backends are those that take LoRA. Whatever is not listed keeps the sizes: `triton` and `marlin` stand for it.
MOE_BACKENDS = {
    "triton": (1, 1),
    "marlin": (1, 1),
    "flashinfer_trtllm": (1, 128),
    "fp8_per_block": (128, 128),
    "mxfp4_emulation": (32, 32),
    "mxfp4_marlin": (256, 128),
    "mxfp4_triton": (1, 64),
    "mxfp4_trtllm": (256, 128),
}
# Quantizations of a checkpoint whose MoE methods leave sizes as they are, whatever computes the experts.
KEEPS_SIZES = frozenset(
    {
        *("", "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "experts_int8", "fbgemm_fp8", "fp8"),
        *("gptq", "gptq_marlin", "modelopt", "modelopt_fp4", "moe_wna16"),
    }
)
LARGEST_FLOAT = sys.float_info.max
Value = TypeVar("Value")
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
RECEIVED_ITEMSIZE = {**ITEMSIZE, "float64": 8}
"""Of what an adapter's tensors may be; they are cast to one of `ITEMSIZE`."""


class Tensor(NamedTuple):
    """`copies` tensors of one shape; sizes in elements. `shared`: a packed tensor that is the staged one itself."""

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    shared: bool = False

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return prod(self.shape) * self.copies


@dataclass(frozen=True, slots=True)
class Part:
    """A module of the adapter: how many layers have it, and of each child what decides its tensors' bytes.

    `ranks` are 0 for a child that is not adapted; `dtypes` those of A and B as received; `unscaled` says that the
    scaling is 1, so that nothing is folded into B. The last two do not matter for experts with tensors of their own.
    """

    path: str
    module: Module
    count: int
    ranks: tuple[int, ...]
    dtypes: tuple[tuple[str, str], ...]
    unscaled: tuple[bool, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine runs and what the adapter is: the arguments of `footprint`, checked, with defaults filled in."""

    rank: int
    rank_pattern: tuple[tuple[str, int], ...]
    lora_alpha: float | None
    alpha_pattern: tuple[tuple[str, float], ...]
    use_rslora: bool
    target_modules: str | tuple[str, ...]
    is_3d_lora_weight: bool
    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_rank: int
    data_parallel_size: int
    enable_expert_parallel: bool
    fully_sharded_loras: bool
    enable_mixed_moe_lora_format: bool
    enable_moe_shared_loras: bool
    lora_target_modules: tuple[str, ...] | None
    moe_backend: str
    dtype: str
    lora_dtype: str
    assumes: str  # what was chosen for the caller, and why; "" where nothing was

    @property
    def slot_key(self) -> tuple[object, ...]:
        """What the elements of one slot depend on."""
        return (
            self.max_lora_rank,
            self.tensor_parallel_size,
            self.pipeline_parallel_size,
            self.pipeline_rank,
            self.data_parallel_size,
            self.enable_expert_parallel,
            self.fully_sharded_loras,
            self.enable_mixed_moe_lora_format,
            self.enable_moe_shared_loras,
            self.lora_target_modules,
            self.moe_backend,
        )

    @property
    def adapter_key(self) -> tuple[object, ...]:
        """What the sizes of one adapter in one worker depend on."""
        return (
            self.rank,
            self.rank_pattern,
            self.lora_alpha,
            self.alpha_pattern,
            self.use_rslora,
            self.target_modules,
            self.is_3d_lora_weight,
            self.expert_parallel_size,
            self.enable_mixed_moe_lora_format,
            self.enable_moe_shared_loras,
            self.dtype,
            self.lora_dtype,
        )

    @property
    def experts_in_one_tensor(self) -> bool:
        """Whether the adapter holds a layer's routed experts in one tensor each factor, not expert by expert."""
        return self.is_3d_lora_weight or self.enable_moe_shared_loras

    @property
    def scaling(self) -> float | None:
        """What is folded into B of a module that no pattern names; None where it is not known."""
        return None if self.lora_alpha is None else scaling_of(self.lora_alpha, self.rank, self.use_rslora)

    @property
    def expert_parallel_size(self) -> int:
        """Workers that the routed experts are split over."""
        return self.tensor_parallel_size * self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Workers that each routed expert is sliced over: those of all data-parallel ranks, or none when split."""
        return 1 if self.enable_expert_parallel else self.tensor_parallel_size * self.data_parallel_size


# Slots


def slot_tensors(module: Module, options: Options) -> list[Tensor]:
    """The slot buffers of one module in one worker, named and shaped as vLLM allocates them.

    Raises:
        SizingError: `tensor_parallel_size` or `max_lora_rank` does not divide as vLLM requires.

    """
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


def _expert_slots(module: Experts, options: Options) -> list[Tensor]:
    loras, rank, tp = options.max_loras, options.max_lora_rank, options.expert_tensor_parallel_size
    round_hidden, round_inter = MOE_BACKENDS[options.moe_backend]
    hidden, sharded = _round_up(module.hidden_size, round_hidden), options.fully_sharded_loras
    local = local_experts(module, options)
    inter = _round_up(_divide(module.intermediate_size, tp, module, "intermediate size"), round_inter)
    rank_a = _divide(rank, tp, module, "max_lora_rank") if sharded else rank
    hidden_b = _divide(hidden, tp, module, "hidden size") if sharded else hidden
    outer = 1 if options.enable_moe_shared_loras else local
    slices, width = (1, inter) if module.layout == "non_gated" else (2, inter)
    if uses_3d_wrapper(module, options):
        slices, width = 1, 2 * inter
    a = [Tensor(f"w13_lora_a_stacked[{i}]", (loras, outer, rank_a, hidden)) for i in range(slices)]
    b = [Tensor(f"w13_lora_b_stacked[{i}]", (loras, local, width, rank)) for i in range(slices)]
    return [
        *a,
        Tensor("w2_lora_a_stacked[0]", (loras, local, rank, inter)),
        *b,
        Tensor("w2_lora_b_stacked[0]", (loras, outer, hidden_b, rank)),
    ]


def uses_3d_wrapper(module: Experts, options: Options) -> bool:
    """Whether vLLM wraps the experts with FusedMoE3DWithLoRA; mixed and shared formats force the 2D wrapper."""
    forced_2d = options.enable_mixed_moe_lora_format or options.enable_moe_shared_loras
    return module.layout == "fused" and not forced_2d


def local_experts(module: Experts, options: Options) -> int:
    """Routed experts that live in one worker.

    Raises:
        SizingError: expert parallelism does not divide them; vLLM's LoRA takes equal shares for granted.

    """
    size = options.expert_parallel_size
    if module.num_experts % size:
        raise SizingError(
            "enable_expert_parallel",
            True,
            f"splits the {module.num_experts} num_experts of {module.name} over {size} workers (tensor_parallel_size *"
            " data_parallel_size), which must divide them",
        )
    return module.num_experts // size


def slices_per_rank(module: Linear, tensor_parallel_size: int) -> tuple[int, ...]:
    """Output sizes of the slots of a column-parallel module in one worker.

    Key and value heads, and slices named so, are replicated where there are fewer heads than ranks.

    Raises:
        SizingError: `tensor_parallel_size` does not divide as vLLM requires.

    """
    tp = tensor_parallel_size
    if module.kind == "qkv":
        return _qkv_per_rank(module, tp)
    if module.kind == "mamba":
        return _mamba_per_rank(module, tp)
    widths = []
    for index, size in enumerate(module.slices):
        if index in module.replicated:
            heads = module.heads[index]
            widths.append(size // heads * _replicated_heads(heads, tp, module, "number of heads"))
        else:
            if module.heads:
                _divide(module.heads[index], tp, module, "number of heads")
            widths.append(_divide(size, tp, module, "output size"))
    return tuple(widths)


def _replicated_heads(heads: int, tp: int, module: Linear, what: str) -> int:
    """Heads in one worker: a share of them, or a whole one where there are fewer than workers."""
    if tp < heads:
        return _divide(heads, tp, module, what)
    if tp % heads:
        raise SizingError("tensor_parallel_size", tp, f"must be a multiple of {what}={heads} of {module.name}")
    return 1


def _qkv_per_rank(module: Linear, tp: int) -> tuple[int, ...]:
    heads, kv_heads, _ = module.heads
    local = _divide(heads, tp, module, "num_attention_heads")
    local_kv = _replicated_heads(kv_heads, tp, module, "num_key_value_heads")
    counts = (local, local_kv, local_kv)
    widths = tuple(
        size // total * count for size, total, count in zip(module.slices, module.heads, counts, strict=True)
    )
    # One tensor in the checkpoint: QKVParallelLinearWithLoRA has one slot for the three.
    return widths if len(module.children) > 1 else (sum(widths),)


def _mamba_per_rank(module: Linear, tp: int) -> tuple[int, ...]:
    """Slices of MambaMixer2's in_proj or conv1d in one worker.

    Where `tp` does not divide the groups of B and C there must be one group: vLLM extends it to one for each rank, and
    builds the module as one ColumnParallelLinear with a single slot.
    """
    groups = min(module.heads)
    if groups % tp == 0:
        return tuple(_divide(size, tp, module, "output size") for size in module.slices)
    if groups != 1:
        raise SizingError("tensor_parallel_size", tp, f"must divide the groups of {module.name}, which are {groups}")
    return (
        sum(
            size if heads == 1 else _divide(size, tp, module, "output size")
            for size, heads in zip(module.slices, module.heads, strict=True)
        ),
    )


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _divide(total: int, parts: int, module: Module, what: str) -> int:
    if total % parts:
        raise SizingError(
            "tensor_parallel_size", parts, f"must divide the {what} of {module.name}, which is {total}, as vLLM does"
        )
    return total // parts


# Which modules a worker has


def slot_groups(shape: ModelShape, options: Options) -> Iterator[tuple[Group, Module, int]]:
    """Each kind of module with slots, and how many of it one worker has, by its stage and the deployment's targets."""
    first, last = options.pipeline_rank == 0, options.pipeline_rank == options.pipeline_parallel_size - 1
    start, end = pipeline_layers(shape.num_hidden_layers, options.pipeline_rank, options.pipeline_parallel_size)
    here = {"first": first, "last": last, "ends": first or last, "every": True}
    for group in shape.groups:
        if group.stage != "layers":
            layers: Sequence[int] = (0,) if here[group.stage] else ()
        elif options.pipeline_parallel_size == 1:
            layers = group.layers
        else:
            layers = [layer for layer in group.layers if start <= layer < end]
        for module in group.modules:
            if options.lora_target_modules is None:
                count = len(layers)
            else:
                count = sum(
                    _deployed(group.path(layer, module), module, options.lora_target_modules) for layer in layers
                )
            if count:
                yield group, module, count


def worker_slots(shape: ModelShape, options: Options) -> Iterator[tuple[str, list[Tensor]]]:
    """Each module with slots in one worker, by its path in vLLM: the listing of what `slot_bytes` sums up."""
    start, end = pipeline_layers(shape.num_hidden_layers, options.pipeline_rank, options.pipeline_parallel_size)
    for group, module, _ in slot_groups(shape, options):
        tensors = slot_tensors(module, options)
        for layer in group.layers if group.stage == "layers" else (None,):
            if layer is None or start <= layer < end:
                path = group.path(layer or 0, module)
                targets = options.lora_target_modules
                if tensors and (targets is None or _deployed(path, module, targets)):
                    yield path, tensors


def pipeline_layers(layers: int, rank: int, size: int) -> tuple[int, int]:
    """First layer and the one after the last of a pipeline stage: vLLM's `get_pp_indices`."""
    parts = [layers // size] * size
    for index in range(2, layers % size + 2):
        parts[-index] += 1
    start = sum(parts[:rank])
    return start, start + parts[rank]


def _deployed(path: str, module: Module, targets: tuple[str, ...]) -> bool:
    """vLLM's `is_in_target_modules`: the last part of the path, the whole path, or a packed child."""
    if path.rpartition(".")[2] in targets or path in targets:
        return True
    return not isinstance(module, Experts) and any(child.name in targets for child in module.children)


# The adapter


def adapter_parts(shape: ModelShape, options: Options) -> Iterator[Part]:
    """The modules that the adapter has, with the rank of each child."""
    for group in shape.groups:
        for module in group.modules:
            taken = chosen(module, options)
            if not any(taken):
                continue
            path = group.path(None, module)
            dtypes = ((options.dtype, options.dtype),) * len(taken)
            if not options.rank_pattern and not options.alpha_pattern:
                ranks = tuple(options.rank * is_in for is_in in taken)
                yield Part(path, module, group.count, ranks, dtypes, (options.scaling == 1,) * len(taken))
                continue
            layers = group.layers if group.stage == "layers" else (0,)
            kinds = Counter(ranks_in_layer(group, module, layer, taken, options) for layer in layers)
            for kind, count in kinds.items():
                yield Part(path, module, count, tuple(r for r, _ in kind), dtypes, tuple(one for _, one in kind))


def packed_tensors(part: Part, options: Options) -> list[Tensor]:
    """The tensors of one module in the registered `LoRAModel`.

    Dense modules keep the staged tensors that have `lora_dtype`: A as it is, B too unless a scaling is folded into it.
    """
    module = part.module
    same = [
        {"A": a == options.lora_dtype, "B": b == options.lora_dtype and unscaled}
        for (a, b), unscaled in zip(part.dtypes, part.unscaled, strict=True)
    ]
    if not isinstance(module, Experts):
        return _dense_tensors(module, part.ranks, same)
    local, outer = local_experts(module, options), options.enable_moe_shared_loras
    whole = local == module.num_experts
    if outer:
        # Taken as they come, except that expert parallelism cuts the experts' own factors out.
        return [
            Tensor(f"{name}.{factor}", (count, *size), 1, (count == 1 or whole) and same[index][factor])
            for index, name, factor, count, size in _shared_outer(module, part.ranks, local)
        ]
    projections = _projections(module, part.ranks, options)
    if not options.is_3d_lora_weight:
        return [
            Tensor(f"{name}.{factor}", (local, *size))
            for name, inputs, outputs, rank in projections
            for factor, size in (("A", (rank, inputs)), ("B", (outputs, rank)))
        ]
    if uses_3d_wrapper(module, options):
        # A is a view of what was staged; B is transposed, which copies.
        return [
            Tensor(f"{name}.{factor}", (local, *size), 1, whole and factor == "A" and same[index]["A"])
            for index, (name, inputs, outputs, rank) in enumerate(projections)
            for factor, size in (("A", (rank, inputs)), ("B", (outputs, rank)))
        ]
    (_, hidden, twice, rank_1), (_, inter, out, rank_2) = projections
    return [
        Tensor("w1.A", (local, rank_1, hidden), 1, whole and same[0]["A"]),  # w3 has the same A
        Tensor("w1.B", (local, twice // 2, rank_1)),
        Tensor("w2.A", (local, rank_2, inter), 1, whole and same[1]["A"]),
        Tensor("w2.B", (local, out, rank_2)),
        Tensor("w3.B", (local, twice // 2, rank_1)),
    ]


def staged_tensors(part: Part, options: Options) -> list[Tensor]:
    """The tensors of one module as they are received, with PEFT's names for the children.

    A worker is given its own experts only, where each expert has tensors of its own; tensors that hold all experts come
    whole (as vLLM's own loader reads them).
    """
    module = part.module
    if not isinstance(module, Experts):
        return _dense_tensors(module, part.ranks, [{"A": False, "B": False}] * len(part.ranks))
    if options.enable_moe_shared_loras:
        return [
            Tensor(f"{name}.{factor}", (count, *size))
            for _, name, factor, count, size in _shared_outer(module, part.ranks, module.num_experts)
        ]
    projections = _projections(module, part.ranks, options)
    if options.is_3d_lora_weight:
        return [
            Tensor(f"{name}.{factor}", size)
            for name, inputs, outputs, rank in projections
            for factor, size in (
                ("A", (rank * module.num_experts, inputs)),
                ("B", (outputs, rank * module.num_experts)),
            )
        ]
    local = local_experts(module, options)
    return [
        Tensor(f"*.{name}.{factor}", size, local)
        for name, inputs, outputs, rank in projections
        for factor, size in (("A", (rank, inputs)), ("B", (outputs, rank)))
    ]


def _dense_tensors(module: Linear, ranks: tuple[int, ...], same: Sequence[Mapping[str, bool]]) -> list[Tensor]:
    tensors = []
    for child, rank, shared in zip(module.children, ranks, same, strict=True):
        if rank:
            tensors.append(Tensor(f"{child.name}.A", (rank, module.input_size), 1, shared["A"]))
            tensors.append(Tensor(f"{child.name}.B", (child.output_size, rank), 1, shared["B"]))
    return tensors


def _projections(module: Experts, ranks: tuple[int, ...], options: Options) -> list[tuple[str, int, int, int]]:
    """Name, input size, output size and rank of each projection of one routed expert, as the adapter holds it."""
    hidden, inter = module.hidden_size, module.intermediate_size
    if options.is_3d_lora_weight:
        sizes = [(hidden, 2 * inter), (inter, hidden)]
    else:
        sizes = [(hidden, inter), (inter, hidden), (hidden, inter)][: len(ranks)]
    names = expert_names(module, options)
    return [(name, *size, rank) for name, size, rank in zip(names, sizes, ranks, strict=True)]


def _shared_outer(
    module: Experts, ranks: tuple[int, ...], count: int
) -> Iterator[tuple[int, str, str, int, tuple[int, int]]]:
    """Shared-outer experts: A of w1 and w3 and B of w2 once for all experts, the other factors once for each."""
    hidden, inter = module.hidden_size, module.intermediate_size
    for index, name, inputs, outputs, rank in zip(
        range(3), ("w1", "w2", "w3"), (hidden, inter, hidden), (inter, hidden, inter), ranks, strict=True
    ):
        yield index, name, "A", count if name == "w2" else 1, (rank, inputs)
        yield index, name, "B", 1 if name == "w2" else count, (outputs, rank)


# Checking


def check_options(
    shape: ModelShape,
    *,
    rank: int,
    rank_pattern: Mapping[str, int] | None = None,
    scaling: float | None = None,
    lora_alpha: float | None = None,
    alpha_pattern: Mapping[str, float] | None = None,
    use_rslora: bool = False,
    target_modules: str | Sequence[str] = "all-linear",
    is_3d_lora_weight: bool | None = None,
    max_lora_rank: int | None = None,
    max_loras: int = 1,
    max_cpu_loras: int | None = None,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    pipeline_rank: int = 0,
    data_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    fully_sharded_loras: bool = False,
    enable_mixed_moe_lora_format: bool = False,
    enable_moe_shared_loras: bool = False,
    lora_target_modules: Sequence[str] | None = None,
    moe_backend: str | None = None,
    dtype: str = "bfloat16",
    lora_dtype: str = "auto",
) -> Options:
    """Check the arguments of `footprint` as vLLM would, and fill in the defaults.

    Raises:
        SizingError: an argument is not what vLLM allows, or does not fit the model.

    """
    rank = whole_number("rank", rank)
    ranks = check_pattern("rank_pattern", rank_pattern, whole_number)
    alphas = check_pattern("alpha_pattern", alpha_pattern, positive_number)
    rslora = _flag("use_rslora", use_rslora)
    largest = max([rank, *(value for _, value in ranks)])
    max_lora_rank = slot_rank(largest, max_lora_rank)
    max_loras = whole_number("max_loras", max_loras)
    max_cpu_loras = max_loras if max_cpu_loras is None else whole_number("max_cpu_loras", max_cpu_loras)
    if max_cpu_loras < max_loras:
        raise SizingError("max_cpu_loras", max_cpu_loras, f"must be at least max_loras={max_loras}, as vLLM requires")
    tp = whole_number("tensor_parallel_size", tensor_parallel_size)
    pp = whole_number("pipeline_parallel_size", pipeline_parallel_size)
    dp = whole_number("data_parallel_size", data_parallel_size)
    if pp > shape.num_hidden_layers:
        raise SizingError("pipeline_parallel_size", pp, f"must be at most the {shape.num_hidden_layers} layers")
    if pp > 1 and not shape.supports_pipeline:
        raise SizingError("pipeline_parallel_size", pp, f"must be 1: vLLM has none for {shape.architecture}")
    if whole_number("pipeline_rank", pipeline_rank, 0) >= pp:
        raise SizingError("pipeline_rank", pipeline_rank, f"must be below pipeline_parallel_size={pp}")
    ep = _flag("enable_expert_parallel", enable_expert_parallel)
    sharded = _flag("fully_sharded_loras", fully_sharded_loras)
    mixed = _flag("enable_mixed_moe_lora_format", enable_mixed_moe_lora_format) and shape.is_moe
    outer = _flag("enable_moe_shared_loras", enable_moe_shared_loras) and shape.is_moe
    if ep and not shape.is_moe:
        raise SizingError("enable_expert_parallel", ep, f"needs a model with routed experts; {shape.name} has none")
    ep = ep and tp * dp > 1
    if ep and sharded:
        raise SizingError(
            "fully_sharded_loras", True, "cannot go together with enable_expert_parallel; vLLM refuses it. Drop one"
        )
    if scaling is not None and lora_alpha is not None:
        raise SizingError("scaling", scaling, f"must be left out where lora_alpha={lora_alpha!r} decides it")
    if scaling is not None:
        lora_alpha = positive_number("scaling", scaling) * (sqrt(rank) if rslora else rank)
    elif lora_alpha is not None:
        positive_number("lora_alpha", lora_alpha)
    elif alphas or rslora:
        name, value = ("alpha_pattern", dict(alphas)) if alphas else ("use_rslora", rslora)
        raise SizingError(name, value, "needs lora_alpha, the alpha of all other modules")
    if dtype not in ITEMSIZE:
        raise SizingError("dtype", dtype, f"must be one of {', '.join(ITEMSIZE)}")
    if lora_dtype not in ("auto", "float16", "bfloat16"):
        raise SizingError("lora_dtype", lora_dtype, "must be one of auto, float16, bfloat16, as vLLM allows")
    options = Options(
        rank=rank,
        rank_pattern=ranks,
        lora_alpha=lora_alpha,
        alpha_pattern=alphas,
        use_rslora=rslora,
        target_modules=_names("target_modules", target_modules),
        is_3d_lora_weight=_format(shape, is_3d_lora_weight, mixed, outer),
        max_lora_rank=max_lora_rank,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        pipeline_rank=pipeline_rank,
        data_parallel_size=dp,
        enable_expert_parallel=ep,
        fully_sharded_loras=sharded,
        enable_mixed_moe_lora_format=mixed,
        enable_moe_shared_loras=outer,
        lora_target_modules=_deployment(shape, lora_target_modules),
        moe_backend=_moe_backend(moe_backend),
        dtype=dtype,
        lora_dtype=dtype if lora_dtype == "auto" else lora_dtype,
        assumes=_assumed_backend(shape) if moe_backend is None else "",
    )
    check_targets(shape, options)
    _check_vocabulary(shape, options)
    return options


def whole_number(name: str, value: object, minimum: int = 1) -> int:
    """The value, if it is a whole number of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SizingError(name, value, f"must be a whole number >= {minimum}")
    return value


def positive_number(name: str, value: object) -> float:
    """The value, if it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FLOAT:
        raise SizingError(name, value, "must be a finite number above 0")
    return value


def check_pattern(name: str, value: object, check: Callable[[str, object], Value]) -> tuple[tuple[str, Value], ...]:
    """The entries of PEFT's `rank_pattern` or `alpha_pattern`, if keys are regular expressions and `check` allows all.

    Raises:
        SizingError: they are not; names the entry.

    """
    if value is not None and not isinstance(value, Mapping):
        raise SizingError(name, value, "must be a dict of names or regular expressions to numbers")
    entries = []
    for key, number in (value or {}).items():
        try:
            re.compile(rf"(.*\.)?({key})$" if isinstance(key, str) else key)
        except (re.error, TypeError) as error:
            raise SizingError(f"{name} key", key, f"must be a name or a regular expression ({error})") from None
        entries.append((key, check(f"{name}[{key!r}]", number)))
    return tuple(entries)


def _moe_backend(given: str | None) -> str:
    if given is not None and given not in MOE_BACKENDS:
        raise SizingError("moe_backend", given, f"must be one of {', '.join(MOE_BACKENDS)}")
    return given or "triton"


def _assumed_backend(shape: ModelShape) -> str:
    """What it means that no backend was named, where the checkpoint's experts are quantized so that it matters."""
    if not shape.is_moe or shape.quantization in KEEPS_SIZES:
        return ""
    own = [name for name in MOE_BACKENDS if name.startswith(f"{shape.quantization}_")]
    others = ", ".join(own or [name for name in MOE_BACKENDS if name != "triton"])
    return (
        f"moe_backend=triton, which keeps the experts' sizes: {shape.name} has them in {shape.quantization}, and what"
        f" computes these may need larger slots. Name the one that vLLM's log says it takes (--moe-backend): {others}"
    )


def slot_rank(rank: int, given: int | None = None) -> int:
    """`max_lora_rank` for adapters of `rank`: as given, or the smallest that vLLM allows.

    Raises:
        SizingError: `rank` is more than vLLM or `given` allows, or vLLM does not allow `given`.

    """
    allowed = ", ".join(map(str, MAX_LORA_RANKS))
    if rank > MAX_LORA_RANKS[-1]:
        raise SizingError(
            "rank", rank, f"must be at most {MAX_LORA_RANKS[-1]}: vLLM's max_lora_rank is one of {allowed}"
        )
    if given is None:
        return next(value for value in MAX_LORA_RANKS if value >= rank)
    if whole_number("max_lora_rank", given) not in MAX_LORA_RANKS:
        raise SizingError("max_lora_rank", given, f"must be one of {allowed}, as vLLM allows")
    if rank > given:
        raise SizingError("max_lora_rank", given, f"must be at least the adapter's rank, which is {rank}")
    return given


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SizingError(name, value, "must be True or False")
    return value


def _names(argument: str, value: str | Sequence[str]) -> str | tuple[str, ...]:
    if value == "all-linear":
        return "all-linear"
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence | set) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise SizingError(argument, value, "must be all-linear, or one or more names of modules")
    if "all-linear" in names:
        raise SizingError(argument, list(names), "all-linear must stand alone")
    return names


def _format(shape: ModelShape, given: bool | None, mixed: bool, outer: bool) -> bool:
    """Whether the adapter holds its experts as vLLM's `is_3d_lora_weight` says, by default as the model does."""
    layouts = {module.layout for group in shape.groups for module in group.modules if isinstance(module, Experts)}
    fused = "fused" in layouts
    if outer and "non_gated" in layouts:
        raise SizingError(
            "enable_moe_shared_loras", True, f"needs experts with a gate; those of {shape.name} have none"
        )
    if given is None:
        return fused and not outer
    if _flag("is_3d_lora_weight", given) != fused and not mixed:
        kind = "3D" if fused else "2D"
        raise SizingError(
            "is_3d_lora_weight", given, f"needs enable_mixed_moe_lora_format: {shape.name} takes {kind} adapters"
        )
    if given and outer:
        raise SizingError("is_3d_lora_weight", given, "cannot go together with enable_moe_shared_loras")
    return given


def _deployment(shape: ModelShape, targets: Sequence[str] | None) -> tuple[str, ...] | None:
    if targets is None:
        return None
    names = _names("lora_target_modules", targets)
    if isinstance(names, str):
        raise SizingError("lora_target_modules", names, "must name modules; leave it out for all of them")
    for name in names:
        found = any(
            _deployed(group.path(layer, module), module, (name,))
            for group in shape.groups
            for module in group.modules
            for layer in (group.layers or (0,))
        )
        if not found:
            raise SizingError("lora_target_modules", name, f"is no module of {shape.name} that has slots")
    return names


def check_sharded_ranks(parts: Iterable[Part], options: Options) -> None:
    """Refuse ranks that fully sharded experts cannot be sliced by; other modules' last ranks may be empty.

    Raises:
        SizingError: the rank of an expert is no multiple of the workers that it is sliced over.

    """
    workers = options.expert_tensor_parallel_size
    if not options.fully_sharded_loras or workers == 1:
        return
    for part in parts:
        odd = [rank for rank in part.ranks if rank % workers]
        if isinstance(part.module, Experts) and odd:
            raise SizingError(
                "rank",
                odd[0],
                f"must be a multiple of {workers} (tensor_parallel_size * data_parallel_size) with fully_sharded_loras:"
                f" vLLM slices the rank of {part.path} over its workers",
            )


def _check_vocabulary(shape: ModelShape, options: Options) -> None:
    targets = options.lora_target_modules
    for group in shape.groups:
        for module in group.modules:
            if isinstance(module, Experts) or module.kind != "logits" or module.slices[0] <= MAX_VOCAB_SIZE:
                continue
            if targets is None or _deployed(group.path(0, module), module, targets):
                raise SizingError(
                    "vocab_size",
                    module.slices[0],
                    f"must be at most {MAX_VOCAB_SIZE} where lm_head has slots, as vLLM requires; leave lm_head out"
                    " of lora_target_modules",
                )
