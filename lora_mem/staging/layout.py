"""Where each tensor of an adapter goes, so that it lies in host memory as vLLM packs it.

Names are read once; the same chunk of a later sync finds its `Route`, and costs no look at a name.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from lora_mem.errors import AdapterError
from lora_mem.sizing.rules import above_max_lora_rank, check
from lora_mem.sizing.serving import ServedModel, ServedModule, TensorName
from lora_mem.sizing.units import aligned
from lora_mem.staging.tensors import view_key

_MOST_ROUTED = 4
"""How many routes are remembered: as many as name each tensor of the adapter this often."""


@dataclass(frozen=True, eq=False)  # a layout makes each part once: compared and hashed by identity, for speed
class Part:
    """One tensor of a packed adapter: A or B of one projection of one module.

    Attributes:
        module: vLLM's name for it: a module of the adapter, or a layer's experts.
        projection: 0 where the module has only one; w1, w2, w3 of packed experts.
        is_a: A `[r, in]`, else B `[out, r]`.
        members: how many received tensors are stacked in it; 0 where one received tensor is the whole part.
        shape: local experts first, where it has any.
    """

    module: str
    projection: int
    is_a: bool
    members: int
    shape: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Source:
    """What a tensor is for.

    The experts of a projection have one together: with an object for each of 36,864 tensors, and for what it holds, a
    garbage collection takes 50 ms longer.

    Attributes:
        shape: of the tensor.
        parts: that it belongs in; none where it is another worker's expert.
        scale: what it is multiplied by: the scaling for B, 1 for A.
        takes: the served module that it is for; of experts that come one by one, any of them.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    scale: float
    takes: ServedModule


@dataclass(frozen=True, eq=False)
class Stack:
    """The tensors of one chunk that belong in one part together.

    Attributes:
        part: the part.
        members: the place of each of the tensors in it, ascending.
        scales: what each of them is multiplied by.
        pick: takes them out of the chunk's tensors, in the order of `members`.
    """

    part: Part
    members: tuple[int, ...]
    scales: tuple[float, ...]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]]

    @functools.cached_property
    def scale(self) -> float | None:
        """Of all of them, where they are the whole part and scaled alike; None where each is brought by itself."""
        whole = len(self.members) == self.part.members and len(set(self.scales)) == 1
        return self.scales[0] if whole else None


@dataclass(frozen=True, eq=False)
class Route:
    """Where the tensors of one chunk go, by their order in it.

    Attributes:
        taken: names of the tensors that are not ignored.
        whole: position and source of each tensor that is all of a part, or of several.
        stacks: the others.
    """

    taken: frozenset[str]
    whole: tuple[tuple[int, Source], ...]
    stacks: tuple[Stack, ...]


@dataclass(frozen=True)
class Announced:
    """What an adapter's config says will come.

    Attributes:
        parts: what it is laid out in.
        nbytes: bytes of a block for them, none of them shared.
        not_predicted_because: why the calculator did not say the same before, or "".
    """

    parts: frozenset[Part]
    nbytes: int
    not_predicted_because: str = ""

    @property
    def predicted(self) -> int | None:
        """Bytes that the calculator said before, which are these; None where it said nothing."""
        return None if self.not_predicted_because else self.nbytes


@dataclass(eq=False)
class Layout:
    """Where the tensors of adapters of one config go.

    Attributes:
        served: what the worker's model serves.
        read: what tensors' names say; raises AdapterError for one that is not PEFT's.
        rank_and_scaling: of a module, by the adapter's config.
        names: what the names seen so far say, without those that vLLM ignores by design.
        sources: what the tensors of these names are for; None for one that is ignored.
        checked: the names of the last adapter that was found complete.
        shared: the parts of the last adapter of which all experts had one factor.
        announced: what the config announces, once worked out.
    """

    served: ServedModel
    read: Callable[[Iterable[str]], dict[str, TensorName]]
    rank_and_scaling: Callable[[str], tuple[int, float]]
    names: dict[str, TensorName] = field(default_factory=dict)
    sources: dict[str, Source | None] = field(default_factory=dict)
    checked: frozenset[str] = frozenset()
    shared: frozenset[Part] = frozenset()
    announced: Announced | None = None
    _routes: dict[tuple[str, ...], Route] = field(default_factory=dict)
    _routed: int = 0  # names in the routes
    _parts: dict[tuple[Any, ...], Part] = field(default_factory=dict)
    _sources: dict[tuple[Any, ...], Source] = field(default_factory=dict)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        """To which every factor is cast."""
        dtype: torch.dtype = getattr(torch, self.served.dtype)
        return dtype

    def route(self, names: tuple[str, ...]) -> Route:
        """Where the tensors of a chunk go.

        Raises:
            AdapterError: names that are not PEFT's, or modules that the model does not serve; all are listed.
        """
        route = self._routes.get(names)
        if route is None:
            route = self._new_route(names)
            # Chunks that are cut differently each time must not pile up.
            if self._routed + len(names) > _MOST_ROUTED * len(self.sources):
                self._routes.clear()
                self._routed = 0
            self._routes[names] = route
            self._routed += len(names)
        return route

    def check_complete(self, names: Set[str]) -> None:
        """Refuse an adapter of tensors of these names where a factor or an expert is missing.

        Raises:
            AdapterError: see `AdapterCheck.require`.
        """
        if names != self.checked:
            known = (name for name in self.names if name in names)
            shapes = {name: source.shape for name in known if (source := self.sources[name])}
            check(shapes, self.names.get, self.served, lambda module: self.rank_and_scaling(module)[0]).require()
            self.checked = frozenset(names)

    def knows(self, names: Iterable[str]) -> bool:
        """Whether these are the names of the last adapter that was found complete."""
        return bool(self.checked) and self.checked == frozenset(names)

    def parts_of(self, names: Iterable[str]) -> frozenset[Part]:
        """The parts that tensors of these names are laid out in."""
        names = list(names)
        self._learn(names)
        return frozenset(part for name in names if (source := self.sources[name]) is not None for part in source.parts)

    def bytes_of(self, parts: Iterable[Part], shared: frozenset[Part] = frozenset()) -> int:
        """Bytes of a block that holds exactly these parts, of the `shared` ones one factor for all experts."""
        shapes = (part.shape[1:] if part in shared else part.shape for part in parts)
        return sum(aligned(math.prod(shape) * self.dtype.itemsize) for shape in shapes)

    def exact_nbytes(self, tensors: Mapping[str, torch.Tensor]) -> int:
        """Bytes of a block for tensors that come all at once: a factor that all experts share takes its place once."""
        route, values = self.route(tuple(tensors)), list(tensors.values())
        parts = {stack.part for stack in route.stacks}.union(*(source.parts for _, source in route.whole))
        shared = frozenset(stack.part for stack in route.stacks if self.is_shared(stack, stack.pick(values)))
        return self.bytes_of(parts, shared)

    def is_shared(self, stack: Stack, members: Sequence[torch.Tensor]) -> bool:
        """Whether these are all experts of a projection and show one factor, which vLLM can be given once."""
        if not self.served.share or stack.scale is None or len(members) < 2:
            return False
        first, second = members[0], members[1]  # a look at two of them is enough in an adapter that shares nothing
        return first.data_ptr() == second.data_ptr() and first.numel() > 0 and len(set(map(view_key, members))) == 1

    def _learn(self, names: Iterable[str]) -> None:
        """Work out what tensors of these names are for."""
        new = [name for name in names if name not in self.sources]
        if not new:
            return
        if wrong := [name for name in new if not isinstance(name, str)]:
            raise AdapterError(f"names must be strings, got {wrong[0]!r}")
        read = {key: name for key, name in self.read(new).items() if not self.served.ignored(name.module)}
        if unknown := {name.module for name in read.values()} - self.served.modules.keys():
            raise AdapterError(self.served.unknown(unknown))
        self.sources |= {key: self._source(read[key]) if key in read else None for key in new}
        self.names |= read

    def _new_route(self, names: tuple[str, ...]) -> Route:
        self._learn(names)
        whole: list[tuple[int, Source]] = []
        stacks: dict[Part, dict[int, tuple[int, Source]]] = {}
        for position, name in enumerate(names):
            source = self.sources[name]
            if source is None:
                continue
            expert = self.served.modules[self.names[name].module].expert
            if expert is None or not source.parts:
                whole.append((position, source))
                continue
            for part in source.parts:
                stacks.setdefault(part, {})[expert] = position, source
        taken = frozenset(name for name in names if self.sources[name] is not None)
        return Route(taken, tuple(whole), tuple(_stack(part, found) for part, found in stacks.items()))

    def _source(self, name: TensorName) -> Source:
        takes = self.served.modules[name.module]
        rank, scaling = self.rank_and_scaling(name.peft_module)
        if rank > self.served.max_lora_rank:
            raise AdapterError(f"{name.module} {above_max_lora_rank(rank, self.served)}")
        if takes.in_features is None or takes.out_features is None:
            raise AdapterError(f"{name.module} has a shape that only vLLM itself can check; use stage_adapter")
        inner = takes.experts * rank
        shape: tuple[int, ...] = (inner, takes.in_features) if name.is_a else (takes.out_features, inner)
        if takes.stacked is not None:
            shape = (takes.stacked[0 if name.is_a else 1][0], *shape)
        elsewhere = takes.expert == -1
        parts = () if elsewhere else tuple(self._parts_for(name, takes, rank, takes.in_features, takes.out_features))
        scale = 1.0 if name.is_a else float(scaling)
        key = (shape, parts, scale)
        if key not in self._sources:
            self._sources[key] = Source(shape, parts, scale, takes)
        return self._sources[key]

    def _parts_for(self, name: TensorName, takes: ServedModule, rank: int, fan_in: int, fan_out: int) -> Iterable[Part]:
        if not takes.packed_in:
            yield self._part(name.module, 0, name.is_a, 0, (rank, fan_in) if name.is_a else (fan_out, rank))
            return
        experts = self.served.experts[takes.packed_in].local_experts
        if takes.stacked is not None and takes.stacked[0 if name.is_a else 1] == (1,):
            experts = 1
        members = experts if takes.expert is not None else 0
        # In the fused layout gate and up share one A; it is one part, and vLLM gets it twice.
        for projection, rows in takes.projections[:1] if name.is_a else takes.projections:
            shape = (experts, rank, fan_in) if name.is_a else (experts, len(range(*rows.indices(fan_out))), rank)
            yield self._part(takes.packed_in, projection, name.is_a, members, shape)

    def _part(self, *key: Any) -> Part:
        if key not in self._parts:
            self._parts[key] = Part(*key)
        return self._parts[key]


def shared_parts(parts: Mapping[Part, torch.Tensor]) -> frozenset[Part]:
    """Those of which one factor stands for all experts."""
    return frozenset(part for part, tensor in parts.items() if tuple(tensor.shape) != part.shape)


def _stack(part: Part, found: Mapping[int, tuple[int, Source]]) -> Stack:
    """The stack of tensors that were found in a chunk: by member of the part, position in the chunk and source."""
    members = tuple(sorted(found))
    positions = [found[member][0] for member in members]
    pick: Callable[[Sequence[Any]], tuple[Any, ...]] = operator.itemgetter(*positions)
    if len(positions) == 1:
        pick = lambda values: (values[positions[0]],)  # noqa: E731
    return Stack(part, members, tuple(found[member][1].scale for member in members), pick)
