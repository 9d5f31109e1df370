"""The tensors of an adapter in one worker, module by module: as they are received, and as vLLM packs them.

Rules from vLLM 0.33.0: `PackedLoRALayerWeights.pack`, `pack_moe` and `pack_moe_stacked`, and for expert parallelism
`_restrict_to_local_experts` and `_slice_moe_lora_ep`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
        """Elements of all copies."""
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
    for group in shape.groups:
        for module in group.modules:
            taken = chosen(module, options)
            if not any(taken):
                continue
            path = group.path(None, module)
            dtypes = ((options.dtype, options.dtype),) * len(taken)
            if not options.rank_pattern and not options.alpha_pattern:
                ranks = tuple(options.rank * is_in for is_in in taken)
                yield AdapterModule(
                    path, module, group.count, ranks, dtypes, (options.folded_scaling == 1,) * len(taken)
                )
                continue
            layers = group.layers if group.stage == "layers" else (0,)
            kinds = Counter(ranks_in_layer(group, module, layer, taken, options) for layer in layers)
            for kind, count in kinds.items():
                yield AdapterModule(
                    path, module, count, tuple(r for r, _ in kind), dtypes, tuple(one for _, one in kind)
                )


def packed_tensors(part: AdapterModule, options: Resolved) -> list[Tensor]:
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


def staged_tensors(part: AdapterModule, options: Resolved) -> list[Tensor]:
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


def _projections(module: Experts, ranks: tuple[int, ...], options: Resolved) -> list[tuple[str, int, int, int]]:
    """Name, input size, output size and rank of each projection of one routed expert, as the adapter holds it."""
    hidden, inter = module.hidden_size, module.intermediate_size
    if options.is_3d_lora_weight:
        sizes = [(hidden, 2 * inter), (inter, hidden)]
    else:
        sizes = [(hidden, inter), (inter, hidden), (hidden, inter)][: len(ranks)]
    names = expert_names(module, fused=options.is_3d_lora_weight, shared=options.enable_moe_shared_loras)
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


def local_experts(module: Experts, options: Resolved) -> int:
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


def uses_3d_wrapper(module: Experts, options: Resolved) -> bool:
    """Whether vLLM wraps the experts with FusedMoE3DWithLoRA; mixed and shared formats force the 2D wrapper."""
    forced_2d = options.enable_mixed_moe_lora_format or options.enable_moe_shared_loras
    return module.layout == "fused" and not forced_2d


def check_sharded_ranks(parts: Iterable[AdapterModule], options: Resolved) -> None:
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
