"""The tensors of an adapter in one worker, module by module: as they are received, and as vLLM packs them.

Rules from vLLM 0.33.0: `PackedLoRALayerWeights.pack`, `pack_moe` and `pack_moe_stacked`, and for expert parallelism
`_restrict_to_local_experts` and `_slice_moe_lora_ep`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from lora_mem.errors import SizingError
from lora_mem.sizing.modules import Experts, Linear, Module
from lora_mem.sizing.resolving import Resolved
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import chosen, expert_names, ranks_in_layer


class Tensor(NamedTuple):
    """`copies` tensors of one shape; sizes in elements. `shared`: a packed tensor that is the staged one itself."""

    name: str
    shape: tuple[int, ...]
    copies: int = 1
    shared: bool = False

    @property
    def elements(self) -> int:
        return prod(self.shape) * self.copies


@dataclass(frozen=True, slots=True)
class AdapterModule:
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


def adapter_modules(shape: ModelShape, options: Resolved) -> Iterator[AdapterModule]:
    """The modules that the adapter has, with the rank of each child."""
    for group, module in shape.kinds:
        taken = chosen(module, options)
        if not any(taken):
            continue
        path = group.path(None, module)
        dtypes = ((options.dtype, options.dtype),) * len(taken)
        # Without patterns one layer is as the others.
        layers = group.numbers if options.rank_pattern or options.alpha_pattern else group.numbers[:1]
        kinds = Counter(ranks_in_layer(group, module, layer, taken, options) for layer in layers)
        for kind, count in kinds.items():
            ranks, unscaled = zip(*kind, strict=True)
            yield AdapterModule(path, module, count * len(group.numbers) // len(layers), ranks, dtypes, unscaled)


def packed_tensors(part: AdapterModule, options: Resolved) -> list[Tensor]:
    """The tensors of one module in the registered `LoRAModel`.

    Dense modules keep the staged tensors that have `lora_dtype`: A as it is, B too unless a scaling is folded into it.
    """
    module, factors = part.module, list(_factors(part, options))
    if isinstance(module, Linear):
        return [Tensor(one.name, one.size, 1, one.same) for one in factors]
    local, shared = local_experts(module, options), options.enable_moe_shared_loras
    whole = local == module.num_experts
    if options.is_3d_lora_weight and not uses_3d_wrapper(module, options):
        # The 2D wrapper takes gate and up apart; both have the same A.
        w13_a, w13_b, w2_a, w2_b = factors
        half = w13_b._replace(size=(w13_b.size[0] // 2, w13_b.size[1]))
        factors = [w13_a, half, w2_a, w2_b, half]
    tensors = []
    for one in factors:
        count = 1 if one.outer else local
        # Shared-outer experts are taken as they come, but for those that expert parallelism cuts out; of fused experts
        # A is a view of what was staged, B is transposed, which copies. Experts one by one are stacked: copies.
        as_staged = count == 1 or whole if shared else options.is_3d_lora_weight and one.is_a and whole
        tensors.append(Tensor(one.name, (count, *one.size), 1, as_staged and one.same))
    return tensors


def staged_tensors(part: AdapterModule, options: Resolved) -> list[Tensor]:
    """The tensors of one module as they are received, with PEFT's names for the children.

    A worker is given its own experts only, where each expert has tensors of its own; tensors that hold all experts come
    whole (as vLLM's own loader reads them).
    """
    module, factors = part.module, _factors(part, options)
    if isinstance(module, Linear):
        return [Tensor(one.name, one.size) for one in factors]
    experts = module.num_experts
    if options.enable_moe_shared_loras:
        return [Tensor(one.name, (1 if one.outer else experts, *one.size)) for one in factors]
    if options.is_3d_lora_weight:  # the experts' ranks side by side
        sides = [(one, (experts, 1) if one.is_a else (1, experts)) for one in factors]
        return [Tensor(one.name, (one.size[0] * down, one.size[1] * across)) for one, (down, across) in sides]
    return [Tensor(f"*.{one.name}", one.size, local_experts(module, options)) for one in factors]


class _Factor(NamedTuple):
    """A or B of a dense child, or of a projection of one routed expert, as the adapter holds it.

    `outer`: one for all experts (A of w1 and w3, and B of w2, of shared-outer experts). `same`: in the dtype that is
    packed, with nothing to fold, so that vLLM can take it as it is.
    """

    name: str
    is_a: bool
    size: tuple[int, int]
    outer: bool
    same: bool


def _factors(part: AdapterModule, options: Resolved) -> Iterator[_Factor]:
    module, outer, sizes = part.module, False, []
    if isinstance(module, Linear):
        names = [child.name for child in module.children]
        sizes = [(module.input_size, child.output_size) for child in module.children]
    else:
        hidden, inter, outer = module.hidden_size, module.intermediate_size, options.enable_moe_shared_loras
        names = [*expert_names(module, fused=options.is_3d_lora_weight, shared=outer)]
        sizes = [(hidden, inter), (inter, hidden), (hidden, inter)][: len(part.ranks)]
        if options.is_3d_lora_weight:
            sizes = [(hidden, 2 * inter), (inter, hidden)]
    for name, (inputs, outputs), rank, (a, b), unscaled in zip(
        names, sizes, part.ranks, part.dtypes, part.unscaled, strict=True
    ):
        if rank:
            yield _Factor(f"{name}.A", True, (rank, inputs), outer and name != "w2", a == options.lora_dtype)
            same = b == options.lora_dtype and unscaled
            yield _Factor(f"{name}.B", False, (outputs, rank), outer and name == "w2", same)


def local_experts(module: Experts, options: Resolved) -> int:
    size = options.expert_parallel_size
    if module.num_experts % size:
        raise SizingError(
            "enable_expert_parallel",
            True,
            f"splits the {module.num_experts} num_experts of {module.name} over {size} workers (tensor_parallel_size *"
            " data_parallel_size), which must divide them",
        )
    return module.num_experts // size


def uses_3d_wrapper(module: Experts, options: Resolved) -> bool:
    """Whether vLLM wraps the experts with FusedMoE3DWithLoRA; mixed and shared formats force the 2D wrapper."""
    forced_2d = options.enable_mixed_moe_lora_format or options.enable_moe_shared_loras
    return module.layout == "fused" and not forced_2d


def check_sharded_ranks(parts: Iterable[AdapterModule], options: Resolved) -> None:
    """Refuse ranks that fully sharded experts cannot be sliced by; other modules' last ranks may be empty."""
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
