"""What is counted tensor by tensor: the bytes of the slots, and of one adapter as it is received and packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from lora_mem.sizing.options import ITEMSIZE, RECEIVED_ITEMSIZE
from lora_mem.sizing.resolving import Resolved
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.slots import slot_groups, slot_tensors
from lora_mem.sizing.tensors import AdapterModule, Tensor, adapter_modules, packed_tensors, staged_tensors
from lora_mem.sizing.units import aligned, power_of_two

HOLDERS = ("packed", "staged", "slots")
# What the elements of one slot, and the sizes of one adapter in one worker, depend on: a sweep asks for the same again.
_SLOTS_DEPEND_ON = attrgetter(
    *("max_lora_rank", "tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size", "pipeline_rank"),
    *("enable_expert_parallel", "fully_sharded_loras", "enable_mixed_moe_lora_format", "enable_moe_shared_loras"),
    *("lora_target_modules", "moe_backend"),
)
_ADAPTER_DEPENDS_ON = attrgetter(
    *("rank", "rank_pattern", "lora_alpha", "alpha_pattern", "use_rslora", "target_modules", "is_3d_lora_weight"),
    *("expert_parallel_size", "enable_mixed_moe_lora_format", "enable_moe_shared_loras", "dtype", "lora_dtype"),
)


class AdapterBytes(NamedTuple):
    """Bytes of one adapter in one worker."""

    packed: int
    staged: int
    shared: int
    pinned: int  # all of it in torch's pinned cache
    block: int  # the packed tensors in a block of `stage`
    largest: int  # packed tensor
    cast: int  # as many elements in the widest dtype that has to be cast; 0: none has


def slot_bytes(shape: ModelShape, options: Resolved) -> int:
    """Bytes of all slot buffers of one worker; `max_loras` times those of one slot."""
    key = ("slots", *_SLOTS_DEPEND_ON(options))
    if key not in shape.memo:
        one = replace(options, max_loras=1)
        shape.memo[key] = sum(
            count * sum(tensor.elements for tensor in slot_tensors(module, one))
            for _, module, count in slot_groups(shape, one)
        )
    return int(shape.memo[key]) * options.max_loras * ITEMSIZE[options.lora_dtype]


def adapter_bytes(shape: ModelShape, options: Resolved) -> AdapterBytes:
    key = ("adapter", *_ADAPTER_DEPENDS_ON(options))
    if key not in shape.memo:
        shape.memo[key] = sum_modules(adapter_modules(shape, options), options)
    found: AdapterBytes = shape.memo[key]
    return found


def sum_modules(
    modules: Iterable[AdapterModule], options: Resolved, received: Iterable[int] | None = None
) -> AdapterBytes:
    """Bytes of an adapter of these modules; each received tensor has the bytes in `received`, or else is of `dtype`."""
    modules, itemsize = list(modules), ITEMSIZE[options.lora_dtype]
    packed = shared = pinned = block = largest = 0
    for module in modules:
        for tensor in packed_tensors(module, options):
            size = tensor.elements * itemsize
            packed += size * module.count
            block += aligned(size) * module.count
            largest = max(largest, size)
            if tensor.shared:
                shared += size * module.count
            else:
                pinned += power_of_two(size // tensor.copies) * tensor.copies * module.count
    staged = Counter(received)
    for module in modules if received is None else ():
        for tensor in staged_tensors(module, options):
            staged[prod(tensor.shape) * ITEMSIZE[options.dtype]] += tensor.copies * module.count
    pinned += sum(power_of_two(size) * count for size, count in staged.items())
    dtypes = {dtype for module in modules for pair in module.dtypes for dtype in pair} - {"", options.lora_dtype}
    cast = largest // itemsize * max((RECEIVED_ITEMSIZE[dtype] for dtype in dtypes), default=0)
    return AdapterBytes(packed, sum(s * count for s, count in staged.items()), shared, pinned, block, largest, cast)


def rows_of(shape: ModelShape, options: Resolved, holder: str) -> Iterator[dict[str, Any]]:
    """Each kind of module of one holder: how many, the shapes of its tensors and the bytes of all."""
    if holder == "slots":
        for group, module, count in slot_groups(shape, options):
            if tensors := slot_tensors(module, options):
                yield _row(holder, group.path(None, module), count, tensors, options.lora_dtype)
    elif holder == "packed" or options.strategy == "stage":
        yield from packed_rows(adapter_modules(shape, options), options, holder)
    else:
        for one in adapter_modules(shape, options):
            yield _row(holder, one.path, one.count, staged_tensors(one, options), options.dtype)


def packed_rows(
    modules: Iterable[AdapterModule], options: Resolved, holder: str = "packed"
) -> Iterator[dict[str, Any]]:
    for one in modules:
        yield _row(holder, one.path, one.count, packed_tensors(one, options), options.lora_dtype)


def _row(holder: str, path: str, count: int, tensors: Sequence[Tensor], dtype: str) -> dict[str, Any]:
    shapes = " + ".join(
        (f"{tensor.copies}*" if tensor.copies > 1 else "") + "x".join(map(str, tensor.shape)) for tensor in tensors
    )
    size = sum(tensor.elements for tensor in tensors) * ITEMSIZE[dtype] * count
    formula = f"{count} * ({shapes}) * {ITEMSIZE[dtype]}"
    return {"holder": holder, "module": path, "count": count, "formula": formula, "bytes": size}
