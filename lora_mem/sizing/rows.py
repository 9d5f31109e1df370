"""Each kind of module of a holder as one row: how many, the shapes of its tensors, and the bytes of all."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lora_mem.sizing.options import ITEMSIZE
from lora_mem.sizing.resolving import Resolved
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.slots import slot_groups, slot_tensors
from lora_mem.sizing.tensors import AdapterModule, Tensor, adapter_modules, packed_tensors, staged_tensors


def rows_of(shape: ModelShape, options: Resolved, holder: str) -> Iterator[dict[str, Any]]:
    """The rows of one holder (`packed`, `staged` or `slots`) of the adapter that the options describe."""
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
    """The rows of packed tensors."""
    for one in modules:
        yield _row(holder, one.path, one.count, packed_tensors(one, options), options.lora_dtype)


def _row(holder: str, path: str, count: int, tensors: Sequence[Tensor], dtype: str) -> dict[str, Any]:
    shapes = " + ".join(
        (f"{tensor.copies}*" if tensor.copies > 1 else "") + "x".join(map(str, tensor.shape)) for tensor in tensors
    )
    size = sum(tensor.elements for tensor in tensors) * ITEMSIZE[dtype] * count
    formula = f"{count} * ({shapes}) * {ITEMSIZE[dtype]}"
    return {"holder": holder, "module": path, "count": count, "formula": formula, "bytes": size}
