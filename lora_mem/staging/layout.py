"""Where each tensor of an adapter goes, so that it lies in memory as vLLM packs it."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lora_mem.errors import AdapterError
from lora_mem.sizing.rules import ServedModel, ServedModule, TensorName, check_adapter
from lora_mem.sizing.units import aligned
from lora_mem.staging.views import view_key

_MOST_PLANNED = 4
"""How many plans of chunks are remembered: as many as name each tensor of the adapter this often."""


@dataclass(frozen=True, eq=False)  # a layout makes each part once: compared and hashed by identity, for speed
class Part:
    """One tensor of a registered adapter: A or B of one projection of one module.

    Attributes:
        module: vLLM's name for it: a module of the adapter, or a layer's experts.
        projection: 0 where the module has one only; w1, w2, w3 of packed experts.
        is_a: A `[r, in]`, else B `[out, r]`.
        members: how many received tensors are stacked in it; 0 where one received tensor is the whole part.
        shape: members or local experts first, where it has any.
    """

    module: str
    projection: int
    is_a: bool
    members: int
    shape: tuple[int, ...]

    def nbytes(self, dtype: torch.dtype, *, shared: bool = False) -> int:
        """Bytes it takes in a block, with alignment; with `shared`, of one factor for all experts."""
        return aligned(math.prod(self.shape[1:] if shared else self.shape) * dtype.itemsize)


@dataclass(frozen=True, eq=False)
class Source:
    """What a tensor is for: the parts that it belongs in, and how it is brought there.

    The experts of a projection have one together: an object for each of 36,864 tensors, and what it holds, are what a
    garbage collection takes 50 ms to look at.
    """

    shape: torch.Size
    parts: tuple[Part, ...]
    rows: tuple[slice, ...]
    experts: int
    fused: bool
    local: slice
    scale: float
    is_a: bool


@dataclass(frozen=True, eq=False)
class Group:
    """The tensors of one chunk that belong in one part, which several tensors share.

    Attributes:
        part: the part.
        members: the place of each of the tensors in it, ascending.
        shape: of each of them.
        pick: takes them out of the chunk's tensors, in the order of `members`.
    """

    part: Part
    members: tuple[int, ...]
    shape: torch.Size
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]

    @functools.cached_property
    def complete(self) -> bool:
        """Whether these are all of the part."""
        return len(self.members) == self.part.members


@dataclass(frozen=True, eq=False)
class Plan:
    """Where the tensors of one chunk go, by their order in it: the same chunk of the next sync needs no look at a name.

    Attributes:
        taken: names of the tensors that are not ignored.
        whole: position and source of each tensor that is all of a part, or of several.
        groups: the others.
    """

    taken: frozenset[str]
    whole: tuple[tuple[int, Source], ...]
    groups: tuple[Group, ...]


@dataclass(eq=False)
class Layout:
    """Where each tensor of an adapter goes, worked out once per name and remembered from sync to sync.

    Attributes:
        served: what the worker's model serves.
        names: what a tensor's name says; raises AdapterError for one that is not PEFT's.
        rank_and_scaling: of a module, by the adapter's config.
        sources: what was worked out so far; None for a tensor that vLLM ignores by design.
        members: the place among the experts of a tensor that is one expert's.
        read: what the names seen so far say.
        scales: of a part that is stacked from several tensors, or None where they differ.
        member_scales: of each of these tensors, by its place.
        checked: the names of the last adapter that was found complete.
        checked_plans: the plans of its chunks, which share no name; none where its chunks were not all remembered.
        plans: of the chunks seen so far, by their names in order.
        announced: bytes of the adapter that the config announces, once worked out.
        announced_modules: the modules that it announces.
        announced_parts: what they are laid out in.
        predicted: what the calculator says of these bytes; None where it says nothing.
        not_predicted_because: why it does not, or "".
        shared: the parts of the last adapter of which all experts had one factor.
    """

    served: ServedModel
    names: Callable[[Iterable[str]], dict[str, TensorName]]
    rank_and_scaling: Callable[[str], tuple[int, float]]
    sources: dict[str, Source | None] = field(default_factory=dict)
    members: dict[str, int] = field(default_factory=dict)
    read: dict[str, TensorName] = field(default_factory=dict)
    scales: dict[Part, float | None] = field(default_factory=dict)
    member_scales: dict[Part, dict[int, float]] = field(default_factory=dict)
    checked: frozenset[str] = frozenset()
    checked_plans: frozenset[Plan] = frozenset()
    plans: dict[tuple[str, ...], Plan] = field(default_factory=dict)
    announced: int = 0
    announced_modules: frozenset[str] = frozenset()
    announced_parts: frozenset[Part] = frozenset()
    predicted: int | None = None
    not_predicted_because: str = ""
    shared: frozenset[Part] = frozenset()
    _parts_by_key: dict[tuple[Any, ...], Part] = field(default_factory=dict)
    _sources_by_parts: dict[tuple[Any, ...], Source] = field(default_factory=dict)
    _planned: int = 0

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """To which every factor is cast."""
        dtype: torch.dtype = getattr(torch, self.served.dtype)
        return dtype

    def learn(self, names: Iterable[str]) -> None:
        """Work out where tensors of these names go.

        Raises:
            AdapterError: names that are not PEFT's, or modules that the model does not serve; all are listed.
        """
        new = [name for name in names if name not in self.sources]
        if not new:
            return
        if not all(isinstance(name, str) for name in new):
            raise AdapterError(
                f"names must be strings, got {next(name for name in new if not isinstance(name, str))!r}"
            )
        read = self.names(new)
        self.read.update(read)
        unknown = {
            name.module
            for name in read.values()
            if not self.served.ignored(name.module) and name.module not in self.served.modules
        }
        if unknown:
            raise AdapterError(self.served.unknown(unknown))
        for tensor_name in new:
            name = read.get(tensor_name)
            ignored = name is None or self.served.ignored(name.module)
            self.sources[tensor_name] = None if ignored or name is None else self._source(tensor_name, name)

    def plan(self, names: tuple[str, ...]) -> Plan:
        """Where the tensors of a chunk go.

        Raises:
            AdapterError: as `learn`, or one name is there twice.
        """
        plan = self.plans.get(names)
        if plan is None:
            plan = self._plan(names)
            # Chunks that are cut differently each time must not pile up.
            if self._planned + len(names) > _MOST_PLANNED * len(self.sources):
                self.plans.clear()
                self._planned = 0
            self.plans[names] = plan
            self._planned += len(names)
        return plan

    def _plan(self, names: tuple[str, ...]) -> Plan:
        self.learn(names)
        taken: set[str] = set()
        whole: list[tuple[int, Source]] = []
        positions: dict[Part, dict[int, int]] = {}
        shapes: dict[Part, torch.Size] = {}
        for position, name in enumerate(names):
            source = self.sources[name]
            if source is None:
                continue
            if name in taken:
                raise AdapterError(f"{name} came twice")
            taken.add(name)
            member = self.members.get(name)
            if member is None or not source.parts:
                whole.append((position, source))
                continue
            for part in source.parts:
                positions.setdefault(part, {})[member] = position
                shapes[part] = source.shape
        groups = tuple(
            Group(part, tuple(sorted(found)), shapes[part], _picker([found[member] for member in sorted(found)]))
            for part, found in positions.items()
        )
        return Plan(frozenset(taken), tuple(whole), groups)

    def check_complete(self, received: Collection[str], plans: Collection[Plan] = ()) -> None:
        """Refuse an adapter of these tensors where a factor or an expert is missing.

        Args:
            received: their names.
            plans: of the chunks that they came in.

        Raises:
            AdapterError: see `check_adapter`.
        """
        self.checked_plans = frozenset()
        complete = frozenset(received)
        if self.checked != complete:
            shapes = {name: tuple(source.shape) for name in sorted(complete) if (source := self.sources[name])}
            names = {name: self.read[name] for name in shapes}
            check_adapter(shapes, names, lambda module: self.rank_and_scaling(module)[0], self.served)
            self.checked = complete
        if sum(len(plan.taken) for plan in plans) == len(complete):
            self.checked_plans = frozenset(plans)

    def knows(self, names: Iterable[str]) -> bool:
        """Whether these are the names of the last adapter that was found complete."""
        return bool(self.checked) and self.checked == frozenset(names)

    def nbytes(self, names: Collection[str]) -> int:
        """Bytes of a block that holds exactly the parts of these tensors, none of them shared."""
        return sum(part.nbytes(self.dtype) for part in self.parts_of(names))

    def parts_of(self, names: Iterable[str]) -> frozenset[Part]:
        """The parts that tensors of these names are laid out in."""
        names = list(names)
        self.learn(names)
        return frozenset(part for name in names if (source := self.sources[name]) is not None for part in source.parts)

    def exact_nbytes(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """The same for tensors that come all at once: a factor that all experts share takes its place once."""
        values = list(tensors.values())
        plan = self.plan(tuple(tensors))
        parts = {group.part for group in plan.groups}.union(*(source.parts for _, source in plan.whole))
        shared = {group.part for group in plan.groups if self.is_shared(group, group.pick(values))}
        return sum(part.nbytes(self.dtype) for part in parts) - self.saved(shared)

    def saved(self, shared: Iterable[Part]) -> int:
        """Bytes that these parts take less where all experts share one factor."""
        dtype = self.dtype
        return sum(part.nbytes(dtype) - part.nbytes(dtype, shared=True) for part in shared)

    def is_shared(self, group: Group, members: Sequence[torch.Tensor]) -> bool:
        """Whether these are all experts of a projection and show one factor, which vLLM can be given once."""
        return (
            self.served.share
            and group.complete
            and group.part.members > 1
            and self.scales[group.part] is not None
            and _all_the_same(members)
        )

    def _source(self, tensor_name: str, name: TensorName) -> Source:
        takes = self.served.modules[name.module]
        rank, scaling = self.rank_and_scaling(name.peft_module)
        if rank > self.served.max_lora_rank:
            raise AdapterError(
                f"rank {rank} of {name.module} is above the engine's max_lora_rank {self.served.max_lora_rank}; start "
                f"vLLM with max_lora_rank of {rank} or more"
            )
        if takes.in_features is None or takes.out_features is None:
            raise AdapterError(f"{name.module} has a shape that only vLLM itself can check; use stage_adapter")
        shape: tuple[int, ...] = (takes.experts * rank, takes.in_features)
        if not name.is_a:
            shape = (takes.out_features, takes.experts * rank)
        if takes.stacked is not None:
            shape = (takes.stacked[0 if name.is_a else 1][0], *shape)
        parts = () if takes.expert == -1 else tuple(self._parts(name, takes, rank))
        scale = 1.0 if name.is_a else float(scaling)
        if takes.expert is not None:
            self.members[tensor_name] = takes.expert
            for part in parts:
                self.member_scales.setdefault(part, {})[takes.expert] = scale
                if self.scales.setdefault(part, scale) != scale:
                    self.scales[part] = None
        key = (shape, parts, scale)
        if takes.expert is None or key not in self._sources_by_parts:
            self._sources_by_parts[key] = Source(
                shape=torch.Size(shape),
                parts=parts,
                rows=tuple(rows for _, rows in takes.projections),
                experts=takes.experts,
                fused=bool(takes.packed_in) and takes.expert is None and takes.stacked is None,
                local=takes.local,
                scale=scale,
                is_a=name.is_a,
            )
        return self._sources_by_parts[key]

    def _parts(self, name: TensorName, takes: ServedModule, rank: int) -> Iterable[Part]:
        assert takes.in_features is not None
        assert takes.out_features is not None
        if not takes.packed_in:
            shape = (rank, takes.in_features) if name.is_a else (takes.out_features, rank)
            yield self._part(name.module, 0, name.is_a, 0, shape)
            return
        experts = self.served.local_experts[takes.packed_in]
        if takes.stacked is not None and takes.stacked[0 if name.is_a else 1] == (1,):
            experts = 1
        # In the fused layout gate and up share one A; it is one part, and vLLM gets it twice.
        projections = takes.projections[:1] if name.is_a else takes.projections
        for projection, rows in projections:
            out = len(range(*rows.indices(takes.out_features)))
            members = experts if takes.expert is not None else 0
            packed = (experts, rank, takes.in_features) if name.is_a else (experts, out, rank)
            yield self._part(takes.packed_in, projection, name.is_a, members, packed)

    def _part(self, *key: Any) -> Part:
        if key not in self._parts_by_key:
            self._parts_by_key[key] = Part(*key)
        return self._parts_by_key[key]


def _picker(positions: list[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    if len(positions) == 1:
        return lambda values: (values[positions[0]],)
    pick: Callable[[Sequence[Any]], tuple[Any, ...]] = operator.itemgetter(*positions)
    return pick


def _all_the_same(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all show the same memory in the same way: one factor, sent once for all experts."""
    first, second = tensors[0], tensors[1]
    # One look at two of them is enough in an adapter that shares nothing.
    return first.data_ptr() == second.data_ptr() and first.numel() > 0 and len(set(map(view_key, tensors))) == 1
