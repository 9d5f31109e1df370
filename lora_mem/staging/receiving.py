"""Receive an adapter's tensors in any order, each straight to its place in host memory.

A tensor crosses the link once: the experts of a projection are stacked on the GPU, the scaling is folded into B there,
and the result is copied to pinned memory on a stream of its own while the next chunk arrives. Nothing here knows vLLM:
`vllm_hook` makes vLLM's objects of the parts.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from lora_mem.errors import AdapterError, compact, some
from lora_mem.sizing.units import MOST_UNDER_WAY, aligned
from lora_mem.staging.device_copies import DeviceCopies
from lora_mem.staging.layout import Layout, Part, Route, Source, Stack
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.tensors import CASTABLE, HAVE_DATA, PLAIN, check_tensors, copied


class Filler:
    """Takes the parts of a module together, as soon as all of them have come: a slot is filled while they arrive.

    Parts are held until then: of one module, or of several whose parts together take `MOST_UNDER_WAY` bytes. Where
    modules come more mixed up than that, the oldest one is given up.

    Args:
        module_of: the module of each part that will come.

    Attributes:
        filled: the modules that `fill` made use of.
    """

    def __init__(self, module_of: Mapping[Part, str]) -> None:
        self.filled: set[str] = set()
        self._module_of = module_of
        self._parts_in = Counter(module_of.values())
        self._held: dict[str, dict[Part, torch.Tensor]] = {}
        self._bytes = 0

    def fill(self, module: str, parts: dict[Part, torch.Tensor]) -> bool:
        """Make use of a module's parts, on the GPU or in the block, the scaling in them; returns whether it did."""
        raise NotImplementedError

    def take(self, part: Part, value: torch.Tensor) -> None:
        """A part that has arrived as a whole; of no use where its module is not known."""
        module = self._module_of.get(part)
        if module is None:
            return
        held = self._held.setdefault(module, {})
        held[part] = value
        self._bytes += value.nbytes
        if len(held) == self._parts_in[module]:
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


_SHAPE, _DTYPE, _DEVICE, _LAYOUT = map(operator.attrgetter, ("shape", "dtype", "device", "layout"))
_NUMEL = torch.Tensor.numel


class Receiver:
    """Brings tensors to their places in a block of host memory.

    Args:
        layout: where each tensor goes.
        block: exactly as large as the parts that will arrive.
        announced: bytes that may arrive, where they are more than the block has; the remainder lies beside it.
        filler: is given each part that arrives as a whole.

    Attributes:
        parts: what has its place so far.
        received: names of the tensors that have been taken.
        from_device: whether any of it came from a GPU.
        fused: whether one tensor held the factors of all experts of a layer.
    """

    def __init__(self, layout: Layout, block: HostBlock, announced: int = 0, filler: Filler | None = None) -> None:
        self.layout = layout
        self.block = block
        self.announced = announced
        self.filler = filler
        self.parts: dict[Part, torch.Tensor] = {}
        self.received: set[str] = set()
        self.from_device = False
        self.fused = False
        self._beside = 0  # bytes of parts that lie beside the block
        self._copies = DeviceCopies()

    @torch.no_grad()
    def add_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take tensors; when this returns, their memory may be used again (on a GPU: by work of the current stream).

        The experts of a projection that all come in one call are stacked and cross the link together; what comes apart
        is copied one by one, with the same result.

        Args:
            tensors: by PEFT's names; dense, of the shapes that the config's ranks give, on the host or a GPU.

        Raises:
            AdapterError: an unknown name, a second tensor of a name, a wrong shape, a dtype that cannot be cast,
                or more than was announced.
        """
        names, values = tuple(tensors), list(tensors.values())
        route = self.layout.route(names)
        if not self.received.isdisjoint(route.taken):
            raise AdapterError(f"{next(name for name in names if name in self.received)} came twice")
        # One set for a property: 36,864 tensors leave no time for a look at each of them from Python.
        if not PLAIN.issuperset(map(type, values)):
            _refuse(route, names, values)
        stacks: list[tuple[Stack, tuple[torch.Tensor, ...], bool]] = []
        fit = all(
            _fits((values[position],), source.shape, {values[position].dtype}) for position, source in route.whole
        )
        for stack in route.stacks:
            members = stack.pick(values)
            dtypes = set(map(_DTYPE, members))
            at_once = stack.scale is not None and stack.part not in self.parts and len(dtypes) == 1
            # Torch stacks nothing with the first that is not like it; on a GPU, where it concatenates, nothing that has
            # as many elements.
            one_tells = at_once and (not members[0].is_cuda or len(set(map(_NUMEL, members))) == 1)
            fit = fit and _fits(members[:1] if one_tells else members, stack.part.shape[1:], dtypes)
            stacks.append((stack, members, at_once))
        if not fit:
            _refuse(route, names, values)
        self.received |= route.taken
        for position, source in route.whole:
            self._take_whole(values[position], source)
        for stack, members, at_once in stacks:
            try:
                self._take_members(stack, members, at_once=at_once)
            except (RuntimeError, TypeError):
                if not _fits(members, stack.part.shape[1:], set(map(_DTYPE, members))):
                    _refuse(route, names, values)
                if len(set(map(_DEVICE, members))) == 1:
                    raise
                self._take_members(stack, members, at_once=False)

    @property
    def waited(self) -> float:
        """Seconds that taking tensors was held up by copies under way."""
        return self._copies.waited

    def finish(self) -> None:
        """Wait until everything has arrived in the block.

        Raises:
            AdapterError: a factor or an expert is missing.
        """
        self._settle()
        self.layout.check_complete(self.received)

    def abort(self) -> None:
        """Drop what has arrived; the block may be used again."""
        self._settle()
        self.parts.clear()
        self.received.clear()
        self.block.clear()
        self._beside = 0

    def _settle(self) -> None:
        self._copies.finish()
        if self.filler is not None:
            self.filler.clear()

    def _take_whole(self, tensor: torch.Tensor, source: Source) -> None:
        """A tensor that is all of a part, or all experts of one or two projections at once."""
        takes = source.takes
        self.fused |= takes.fused
        for part, (_, rows) in zip(source.parts, takes.projections, strict=False):
            value = tensor
            if takes.fused and part.is_a:
                # PEFT's fused layout: A is [experts * r, in], B is [out, r * experts] with the experts innermost.
                value = tensor.reshape(takes.experts, -1, tensor.shape[1])[takes.local]
            elif takes.fused:
                value = tensor.reshape(tensor.shape[0], -1, takes.experts)[rows, :, takes.local].permute(2, 0, 1)
            elif len(part.shape) == 3 and part.shape[0] != tensor.shape[0]:
                value = tensor[takes.local]
            self._put(part, (value,), source.scale)

    def _take_members(self, stack: Stack, members: tuple[torch.Tensor, ...], *, at_once: bool) -> None:
        """Experts of one projection: all of them `at_once`, or one by one."""
        if at_once and stack.scale is not None:
            one = len(members) == 1 or self.layout.is_shared(stack, members)
            self._put(stack.part, (members[0].unsqueeze(0),) if one else members, stack.scale)
            return
        place = self._place(stack.part, stack.part.shape)
        for member, tensor, scale in zip(stack.members, members, stack.scales, strict=True):
            value = tensor.to(place.dtype)
            if scale != 1.0:
                value = value * scale
            # On the current stream: whatever it does to the tensor afterwards comes after the copy.
            place[member].copy_(value, non_blocking=True)
            if value.is_cuda:
                self.from_device = True
                copied.to_host += value.nbytes
                self._copies.also_wait_for(value.device)

    def _put(self, part: Part, values: tuple[torch.Tensor, ...], scale: float) -> None:
        """Bring a part to its place: cast, then scaled, as vLLM does it, for the same bits.

        Args:
            part: the part.
            values: one tensor with as many dimensions as the part, or the members that are stacked in it.
            scale: what they are multiplied by.
        """
        first, several = values[0], len(values) > 1
        place = own = self._place(part, part.shape if several else tuple(first.shape))
        if first.is_cuda and several:
            # `torch.stack` makes a view of each first, which takes longer.
            self._copies.make_room(place.nbytes)
            own = torch.cat(values).view(part.shape).to(place.dtype)
        elif first.is_cuda:
            self._copies.make_room(place.nbytes)
            own = torch.empty_like(place, device=first.device).copy_(first)
        elif several and first.dtype == place.dtype:
            torch.stack(values, out=place)
        else:
            place.copy_(torch.stack(values) if several else first)
        if scale != 1.0:
            own.mul_(scale)
        if own is not place:
            self.from_device = True
            self._copies.start(own, place)
        if self.filler is not None:
            self.filler.take(part, own)

    def _place(self, part: Part, shape: tuple[int, ...]) -> torch.Tensor:
        """Where a part lies: of its own shape, or with one factor for all experts."""
        if part not in self.parts:
            dtype = self.layout.dtype
            nbytes = aligned(math.prod(shape) * dtype.itemsize)
            try:
                self.parts[part] = self.block.take(shape, dtype)
            except MemoryError as error:
                if self.block.used + self._beside + nbytes > self.announced:
                    raise AdapterError(self._too_much(part, error)) from None
                # The block was made for an adapter like the last one, whose experts shared a factor.
                self._beside += nbytes
                self.parts[part] = self.block.extra(shape, dtype)
        return self.parts[part]

    def _too_much(self, part: Part, error: MemoryError) -> str:
        announced, others = self.layout.announced, set()
        if announced is not None:
            came = {one.module for one in self.layout.parts_of(self.received)}
            others = came - {one.module for one in announced.parts}
        which = f" target_modules does not name {', '.join(compact(others))};" if others else ""
        return (
            f"more has arrived than was announced: the adapter's block has {self.block.nbytes} bytes, and "
            f"{part.module} does not fit ({error});{which} correct the adapter_config, or pass nbytes to open_stage"
        )


def _fits(tensors: Sequence[torch.Tensor], shape: tuple[int, ...], dtypes: set[torch.dtype]) -> bool:
    """Whether tensors of these dtypes are dense, of this shape, can be cast, and lie where they can be read."""
    try:
        shapes = set(map(_SHAPE, tensors))
    except RuntimeError:  # a nested tensor has none
        return False
    return (
        shapes == {shape}
        and dtypes.issubset(CASTABLE)
        and set(map(_LAYOUT, tensors)) == {torch.strided}
        and all(device.type in HAVE_DATA for device in set(map(_DEVICE, tensors)))
    )


def _refuse(route: Route, names: Sequence[str], values: Sequence[Any]) -> NoReturn:
    """Say which tensors of a chunk cannot be taken, and why."""
    shapes = {position: source.shape for position, source in route.whole}
    for stack in route.stacks:
        shapes.update(dict.fromkeys(stack.pick(range(len(names))), stack.part.shape[1:]))
    # Of a tensor that vLLM ignores only the type counts.
    positions = [at for at, value in enumerate(values) if at in shapes or type(value) not in PLAIN]
    check_tensors({names[at]: values[at] for at in positions})
    wrong = [
        f"{names[at]} is {list(values[at].shape)}, expected {list(shapes[at])}"
        for at in positions
        if values[at].shape != shapes[at]
    ]
    raise AdapterError(f"shapes that do not fit: {some(wrong)} (by the model and the rank in its config)")
