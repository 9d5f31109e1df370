"""Receive an adapter's tensors in any order and lay them out in host memory as vLLM packs them.

A tensor crosses the link once, to its final place: the experts of a projection are stacked on the GPU, the scaling is
folded into B there, and the result is copied to page-locked memory on a stream of its own while the next chunk arrives.
Nothing here knows vLLM: `vllm_hook` makes vLLM's objects from the finished parts.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from lora_mem.errors import AdapterError
from lora_mem.sizing.rules import compact
from lora_mem.staging.counters import copied
from lora_mem.staging.device_copies import DeviceCopies
from lora_mem.staging.filling import Filler
from lora_mem.staging.layout import Group, Layout, Part, Plan, Source
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.tensors import CASTABLE, HAVE_DATA, PLAIN, is_plain


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
        self._copies = DeviceCopies()

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
