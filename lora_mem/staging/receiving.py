"""Receive an adapter's tensors in any order and lay them out in host memory as vLLM packs them.

A tensor crosses the link once, to its final place: the experts of a projection are stacked on the GPU, the scaling is
folded into B there, and the result is copied to page-locked memory on a stream of its own while the next chunk arrives.
Nothing here knows vLLM: `vllm_hook` makes vLLM's objects from the finished parts.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import operator
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from lora_mem.errors import AdapterError
from lora_mem.sizing.rules import ServedModel, ServedModule, TensorName, check_adapter, compact
from lora_mem.sizing.units import MOST_UNDER_WAY, allowed_under_way
from lora_mem.staging.host_memory import HostBlock, aligned, copied, view_key
from lora_mem.staging.tensors import CASTABLE, HAVE_DATA, PLAIN, is_plain

_versions = itertools.count(1)


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


@dataclass(eq=False)
class StagedAdapter:
    """One adapter, kept to build it again after an eviction: as received, or laid out as vLLM packs it.

    Attributes:
        lora_int_id: vLLM's id for it.
        name: vLLM's name for it.
        config: PEFT's adapter_config as plain JSON values.
        tensors: as received, by PEFT's names; empty where `parts` is not. Never written to; an offload replaces device
            tensors by host copies.
        names: of the tensors that it was made of.
        parts: laid out; the scaling is in B. A part whose experts all share one factor has 1 in place of their number.
        block: what the parts lie in.
        from_device: tensors came from a GPU, whose memory has not been given back to the driver yet.
        why_not_laid_out: why vLLM has to pack the tensors itself.
        predicted: bytes that the calculator said its parts take, before they came; None where it did not.
        not_predicted_because: why not, or "".
        version: counts every stage in this process.
        path: stands for a directory in a request for this version; "" until it is staged.
        fits: worker LoRA managers of which it is known that the parts are what they would have laid out.
        loaded_in: worker LoRA managers that have built it from this version.
        registered_in: worker LoRA managers that have built it from this or an earlier version.
        models: vLLM's models made of `parts` that are alive: until they are gone, the block cannot be used again.
        fill: what has filled vLLM's slot while the parts arrived; None where nothing was to.
        why_not_filled: why not, or "".
    """

    lora_int_id: int
    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    parts: dict[Part, torch.Tensor] = field(default_factory=dict)
    block: HostBlock | None = None
    from_device: bool = False
    why_not_laid_out: str = ""
    predicted: int | None = None
    not_predicted_because: str = ""
    version: int = field(default_factory=lambda: next(_versions))
    path: str = ""
    fits: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    loaded_in: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    registered_in: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    models: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    fill: Any = None
    why_not_filled: str = "not asked for"
    _directory: tempfile.TemporaryDirectory[str] | None = None

    def config_directory(self) -> str:
        """A directory with this adapter's adapter_config.json and nothing else: vLLM reads the config from a file."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="lora_mem-")
            (Path(self._directory.name) / "adapter_config.json").write_text(json.dumps(self.config))
        return self._directory.name

    def held(self) -> list[torch.Tensor]:
        """The tensors it keeps."""
        return [*self.tensors.values(), *self.parts.values()]


class Filler:
    """Takes the parts of a module together, as soon as all of them have come: a slot is filled while they arrive.

    Parts are held until then: of one module, or of several whose parts together take `MOST_UNDER_WAY` bytes. Where
    modules come more mixed up than that, the oldest one is given up.

    Args:
        expected: all parts of each module.

    Attributes:
        filled: the modules that `fill` made use of.
    """

    def __init__(self, expected: Mapping[str, Collection[Part]]) -> None:
        self.filled: set[str] = set()
        self._expected = {module: len(parts) for module, parts in expected.items()}
        self._module_of = {part: module for module, parts in expected.items() for part in parts}
        self._held: dict[str, dict[Part, torch.Tensor]] = {}
        self._bytes = 0

    def fill(self, module: str, parts: dict[Part, torch.Tensor]) -> bool:
        """Make use of a module's parts, on the GPU or in the block, the scaling in them; returns whether it did."""
        raise NotImplementedError

    def take(self, part: Part, value: torch.Tensor) -> None:
        """A part that has arrived as a whole."""
        module = self._module_of.get(part)
        if module is None:
            return
        held = self._held.setdefault(module, {})
        held[part] = value
        self._bytes += value.nbytes
        if len(held) == self._expected[module]:
            self._let_go(module)
            if self.fill(module, held):
                self.filled.add(module)
        while self._bytes > MOST_UNDER_WAY and len(self._held) > 1:
            self._let_go(next(iter(self._held)))

    def clear(self) -> None:
        """Let go of what is held."""
        self._held.clear()
        self._bytes = 0

    def _let_go(self, module: str) -> None:
        self._bytes -= sum(value.nbytes for value in self._held.pop(module).values())


class Receiver:
    """Brings tensors to their places in a block of host memory.

    Args:
        layout: where each tensor goes.
        block: exactly as large as the parts that will arrive.
        announced: bytes that may arrive, where they are more than the block has; the rest lies beside it.
        filler: is given each part that arrives as a whole.

    Attributes:
        parts: what has its place so far.
        plans: of the chunks that have been taken.
        from_device: whether any of it came from a GPU.
        fused: whether one tensor held the factors of all experts of a layer.
    """

    def __init__(self, layout: Layout, block: HostBlock, announced: int = 0, filler: Filler | None = None) -> None:
        self.layout = layout
        self.block = block
        self.announced = announced
        self.filler = filler
        self._extra = 0
        self.parts: dict[Part, torch.Tensor] = {}
        self.plans: set[Plan] = set()
        # Those of one adapter: another stage's, complete meanwhile, may share names with them.
        self._checked_plans = layout.checked_plans
        self._received: set[str] | None = None  # names; not kept while chunks are those of the last complete adapter
        self.from_device = False
        self.fused = False
        self._copies = _DeviceCopies()

    def add_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors; when this returns, their memory may be used again (on a GPU: by work of the current stream).

        The experts of a projection that all come in one call are stacked and cross the link together; what comes apart
        is copied one by one, with the same result.

        Raises:
            AdapterError: an unknown name, a second tensor of a name, a wrong shape, a dtype that cannot be cast,
                or more than was announced.
        """
        names, values = tuple(tensors), list(tensors.values())
        plan = self.layout.plan(names)
        known = self._received is None and plan in self._checked_plans and plan not in self.plans
        if not known and not self.received.isdisjoint(plan.taken):
            twice = next(name for name in names if name in self.received)
            raise AdapterError(f"{twice} came twice")
        # One set for a property: 36,864 tensors leave no time for a look at each of them from Python.
        if not PLAIN.issuperset(map(type, values)):
            _refuse(plan, names, values)
        dtypes = set(map(_DTYPE, values))
        picked = [(group, group.pick(values)) for group in plan.groups]
        if len(dtypes) > 1:
            # Those that count, without what vLLM ignores.
            dtypes = {values[position].dtype for position, _ in plan.whole}
            dtypes.update(*(map(_DTYPE, members) for _, members in picked))
        alike = len(dtypes) == 1
        chosen = [(group, members, self._stacks(group, members, alike)) for group, members in picked]
        if not (
            all(dtype in CASTABLE for dtype in dtypes if plan.taken)
            and all(_fits([values[position]], source.shape) for position, source in plan.whole)
            and all(_fits(members, group.shape, stacked=stacks) for group, members, stacks in chosen)
        ):
            _refuse(plan, names, values)
        self.plans.add(plan)
        if not known:
            self.received.update(plan.taken)
        for position, source in plan.whole:
            self._take_whole(values[position].detach(), source)
        for group, members, stacks in chosen:
            try:
                self._take_members(group, members, stacks)
            except (RuntimeError, TypeError):
                if not _fits(members, group.shape):
                    _refuse(plan, names, values)
                if len(set(map(_DEVICE, members))) == 1:
                    raise
                self._take_one_by_one(group, members)

    @property
    def received(self) -> set[str]:
        """Names that have been taken."""
        if self._received is None:
            self._received = set().union(*(plan.taken for plan in self.plans))
        return self._received

    @property
    def waited(self) -> float:
        """Seconds that taking tensors was held up by copies under way."""
        return self._copies.waited

    def finish(self) -> None:
        """Wait until everything has arrived in the block.

        Raises:
            AdapterError: a factor or an expert is missing.
        """
        self._copies.finish()
        if self.filler is not None:
            self.filler.clear()
        checked = self.layout.checked_plans
        if self._received is not None or not checked or not self.plans == self._checked_plans == checked:
            self.layout.check_complete(self.received, self.plans)

    def abort(self) -> None:
        """Drop what has arrived; the block may be used again."""
        self._copies.finish()
        if self.filler is not None:
            self.filler.clear()
        self.parts.clear()
        self.plans.clear()
        self._checked_plans = self.layout.checked_plans
        self._received = None
        self.block.clear()

    def _take_whole(self, tensor: torch.Tensor, source: Source) -> None:
        """A tensor that is all of a part, or all experts of one or two projections at once."""
        self.fused |= source.fused
        for part, rows in zip(source.parts, source.rows, strict=False):
            value = tensor
            if source.fused:
                # PEFT's fused layout: A is [experts * r, in], B is [out, r * experts] with the experts innermost.
                rank = tensor.shape[0 if source.is_a else 1] // source.experts
                if source.is_a:
                    value = tensor.reshape(source.experts, rank, -1)[source.local]
                else:
                    value = tensor.reshape(-1, rank, source.experts)[rows, :, source.local].permute(2, 0, 1)
            elif len(part.shape) == 3 and part.shape[0] != tensor.shape[0]:
                value = tensor[source.local]
            self._put(part, value, source.scale)

    def _stacks(self, group: Group, members: Sequence[torch.Tensor], alike: bool) -> bool:
        """Whether the tensors of a group are stacked as they are; `alike` where all of their chunk have one dtype."""
        return (
            group.complete
            and group.part not in self.parts
            and self.layout.scales[group.part] is not None
            and (alike or len(set(map(_DTYPE, members))) == 1)
        )

    def _take_members(self, group: Group, members: tuple[torch.Tensor, ...], stacks: bool) -> None:
        """Experts of one projection: all of them, which are stacked where they can be, or some."""
        part = group.part
        scale = self.layout.scales[part]
        if scale is not None and part not in self.parts and self.layout.is_shared(group, members):
            self._put(part, members[0].detach().unsqueeze(0), scale)
        elif stacks and scale is not None:
            self._put_stack(part, members, scale)
        else:
            self._take_one_by_one(group, members)

    def _take_one_by_one(self, group: Group, members: tuple[torch.Tensor, ...]) -> None:
        part = group.part
        scale = self.layout.scales[part]
        place = self._place(part, part.shape)
        dtype = self.layout.dtype
        for member, tensor in zip(group.members, members, strict=True):
            value = tensor.detach().to(dtype)
            factor = self.layout.member_scales[part][member] if scale is None else scale
            if factor != 1.0:
                value = value * factor
            # On the current stream: whatever it does to the tensor afterwards comes after the copy.
            place[member].copy_(value, non_blocking=True)
            if value.is_cuda:
                self.from_device = True
                copied.to_host += value.nbytes
                self._copies.also_wait_for(value.device)

    def _put_stack(self, part: Part, members: tuple[torch.Tensor, ...], scale: float) -> None:
        """Copy a stack of tensors to a part's place, as `_put`; on the host it is made there."""
        place = self._place(part, part.shape)
        with torch.no_grad():
            if members[0].is_cuda:
                self._copies.make_room(place.nbytes)
                # New memory, which may be written to. `torch.stack` makes a view of each first, which takes longer.
                stack = torch.cat(members).view(part.shape)
                self._scale_and_copy(part, stack if stack.dtype == place.dtype else stack.to(place.dtype), scale)
                return
            if members[0].dtype == place.dtype:
                torch.stack(members, out=place)
            else:
                place.copy_(torch.stack(members))
            if scale != 1.0:
                place.mul_(scale)
        self._arrived(part, place)

    def _put(self, part: Part, value: torch.Tensor, scale: float) -> None:
        """Copy a value to a part's place: cast, then scaled, as vLLM does it, for the same bits."""
        place = self._place(part, tuple(value.shape))
        if value.is_cuda:
            self._copies.make_room(place.nbytes)
            own = torch.empty(value.shape, dtype=place.dtype, device=value.device).copy_(value)
            self._scale_and_copy(part, own, scale)
            return
        place.copy_(value)
        if scale != 1.0:
            place.mul_(scale)
        self._arrived(part, place)

    def _scale_and_copy(self, part: Part, own: torch.Tensor, scale: float) -> None:
        """Scale device memory of our own in place, and start its copy to the part's place."""
        self.from_device = True
        if scale != 1.0:
            own.mul_(scale)
        self._copies.start(own, self.parts[part])
        self._arrived(part, own)

    def _arrived(self, part: Part, value: torch.Tensor) -> None:
        if self.filler is not None:
            self.filler.take(part, value)

    def _place(self, part: Part, shape: tuple[int, ...]) -> torch.Tensor:
        place = self.parts.get(part)
        if place is None:
            try:
                place = self.block.take(shape, self.layout.dtype)
            except MemoryError as error:
                nbytes = part.nbytes(self.layout.dtype, shared=shape != part.shape)
                if self.block.used + self._extra + nbytes <= self.announced:
                    # The block was made for an adapter like the last one, whose experts shared a factor.
                    self._extra += nbytes
                    place = self.parts[part] = self.block.extra(shape, self.layout.dtype)
                    return place
                modules = {self.layout.read[name].module for name in self.received}
                others = modules - self.layout.announced_modules if self.layout.announced_modules else set()
                which = f" target_modules does not name {', '.join(compact(others))};" if others else ""
                raise AdapterError(
                    f"more has arrived than was announced: the adapter's block has {self.block.nbytes} bytes, and "
                    f"{part.module} does not fit ({error});{which} correct the adapter_config, or pass "
                    "nbytes to open_stage"
                ) from None
            self.parts[part] = place
        return place


class _DeviceCopies:
    """Copies from device memory of our own to the host, on a stream of their own, with a bounded amount under way."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._bytes = 0
        self.waited = 0.0
        self._worked_on: dict[torch.device, torch.cuda.Stream] = {}
        self._also: set[torch.device] = set()

    def make_room(self, nbytes: int) -> None:
        """Before so many bytes more are taken from the device's memory: let go of what has arrived on the host, and
        wait while it would be too much under way.
        """
        most = allowed_under_way(nbytes)
        while self._under_way and (self._bytes + nbytes > most or self._under_way[0][0].query()):
            self._wait_for_oldest()

    def start(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy once the current stream's work on `source` is done."""
        device = source.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(self._current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        # Held until the copy is done: the allocator would hand the memory to the current stream's next tensor.
        self._under_way.append((stream.record_event(), source))
        self._bytes += source.nbytes
        copied.to_host += source.nbytes

    def also_wait_for(self, device: torch.device) -> None:
        """Copies were issued on the current stream of a device."""
        self._current_stream(device)
        self._also.add(device)

    def finish(self) -> None:
        """Wait for all copies."""
        while self._under_way:
            self._wait_for_oldest()
        for device in self._also:
            self._worked_on[device].synchronize()
        self._also.clear()

    def _current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The current stream, which comes after the one that was current before, where that was another."""
        current = torch.cuda.current_stream(device)
        before = self._worked_on.setdefault(device, current)
        if before == current:
            return current
        current.wait_stream(before)
        self._worked_on[device] = current
        return current

    def _wait_for_oldest(self) -> None:
        event, source = self._under_way.popleft()
        began = time.perf_counter()
        event.synchronize()
        self.waited += time.perf_counter() - began
        self._bytes -= source.nbytes


_SHAPE, _DTYPE, _DEVICE, _LAYOUT = map(operator.attrgetter, ("shape", "dtype", "device", "layout"))


def _fits(tensors: Sequence[torch.Tensor], shape: torch.Size, *, stacked: bool = False) -> bool:
    """Whether tensors are dense, of this shape, and can be read.

    Where they will be `stacked`, layout and device of the first are enough: torch takes what is like it, nothing else.
    """
    looked_at = tensors[:1] if stacked else tensors
    try:
        shapes = set(map(_SHAPE, tensors))
    except RuntimeError:  # a nested tensor has none
        return False
    return (
        shapes == {shape}
        and set(map(_LAYOUT, looked_at)) == {torch.strided}
        and all(device.type in HAVE_DATA for device in set(map(_DEVICE, looked_at)))
    )


def _refuse(plan: Plan, names: Sequence[str], values: Sequence[Any]) -> NoReturn:
    """Say which tensor of a chunk cannot be taken, and why."""
    expected: dict[int, Source | Group] = dict(plan.whole)
    for group in plan.groups:
        for position in group.pick(range(len(names))):
            expected[position] = group
    for position, place in sorted(expected.items()):
        name, tensor = names[position], values[position]
        if not is_plain(tensor):
            kind = "nested tensor" if getattr(tensor, "is_nested", False) else type(tensor).__name__
            raise AdapterError(f"{name} is a {kind}; it must be a plain dense torch tensor")
        if tensor.shape != place.shape:
            raise AdapterError(
                f"shapes that do not fit: {name} is {list(tensor.shape)}, expected {list(place.shape)} (by "
                "the model and the rank in its config)"
            )
        if tensor.dtype not in CASTABLE:
            raise AdapterError(
                f"cannot cast {name} ({tensor.dtype}); allowed are {', '.join(str(dtype) for dtype in CASTABLE)}"
            )
        if tensor.device.type not in HAVE_DATA:
            raise AdapterError(f"cannot read {name} ({tensor.device}); tensors must be on the host or a GPU")
    ignored = [name for name, value in zip(names, values, strict=True) if type(value) not in PLAIN]
    raise AdapterError(f"{(ignored or names)[0]} is not a plain dense torch tensor")


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
