"""The bytes that are counted tensor by tensor: of the slots, and of one adapter as it is received and packed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from math import prod
from operator import attrgetter
from typing import NamedTuple

from lora_mem.sizing.options import ITEMSIZE, RECEIVED_ITEMSIZE
from lora_mem.sizing.resolving import Resolved
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.slots import slot_groups, slot_tensors
from lora_mem.sizing.tensors import AdapterModule, adapter_modules, packed_tensors, staged_tensors
from lora_mem.sizing.units import aligned, power_of_two

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


def slot_bytes(shape: ModelShape, options: Resolved) -> int:
    """Bytes of all slot buffers of one worker; `max_loras` times those of one slot."""
    key = ("slots", *_SLOTS_DEPEND_ON(options))
    if key not in shape.memo:
        one = replace(options, max_loras=1)
        elements = 0
        for _, module, count in slot_groups(shape, one):
            elements += count * sum(tensor.elements for tensor in slot_tensors(module, one))
        shape.memo[key] = elements
    return int(shape.memo[key]) * options.max_loras * ITEMSIZE[options.lora_dtype]


class AdapterBytes(NamedTuple):
    """Bytes of one adapter in one worker.

    `pinned` is all of it in torch's pinned cache, `block` the packed tensors in a block of `stage`, `largest` the
    largest packed tensor, `cast` as many elements in the widest dtype that has to be cast (0: none has).
    """

    packed: int
    staged: int
    shared: int
    pinned: int
    block: int
    largest: int
    cast: int


def adapter_bytes(shape: ModelShape, options: Resolved) -> AdapterBytes:
    """Bytes of the adapter that the options describe."""
    key = ("adapter", *_ADAPTER_DEPENDS_ON(options))
    if key not in shape.memo:
        shape.memo[key] = sum_modules(adapter_modules(shape, options), options)
    found: AdapterBytes = shape.memo[key]
    return found


def sum_modules(
    modules: Iterable[AdapterModule], options: Resolved, received: Iterable[int] | None = None
) -> AdapterBytes:
    """Bytes of an adapter made of `modules`, as it is received and packed.

    `received` are the bytes of each tensor as it is received; where they are not given all are taken to have `dtype`.
    """
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
    staged = Counter(received) if received is not None else _received(modules, options)
    pinned += sum(power_of_two(size) * count for size, count in staged.items())
    dtypes = {dtype for module in modules for pair in module.dtypes for dtype in pair} - {"", options.lora_dtype}
    cast = largest // itemsize * max((RECEIVED_ITEMSIZE[dtype] for dtype in dtypes), default=0)
    staged_bytes = sum(size * count for size, count in staged.items())
    return AdapterBytes(packed, staged_bytes, shared, pinned, block, largest, cast)


def _received(modules: Iterable[AdapterModule], options: Resolved) -> Counter[int]:
    """How many tensors of each size in bytes are received, all in `dtype`."""
    sizes: Counter[int] = Counter()
    for module in modules:
        for tensor in staged_tensors(module, options):
            sizes[prod(tensor.shape) * ITEMSIZE[options.dtype]] += tensor.copies * module.count
    return sizes
