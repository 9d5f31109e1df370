"""Tensors that show the same memory, and the memory that they show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch


def view_key(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that show the same memory in the same way. Valid while the tensor is alive."""
    storage = tensor.untyped_storage()
    # A meta tensor has no address; its storage object tells it apart.
    address = tensor.data_ptr() if tensor.device.type != "meta" else (storage._cdata, tensor.storage_offset())
    return tensor.device, address, tensor.dtype, tuple(tensor.shape), tensor.stride()


def memory(tensors: Iterable[torch.Tensor]) -> dict[tuple[str, int], int]:
    """Bytes of the memory that tensors show, by device and address; what several show counts once."""
    found: dict[tuple[str, int], int] = {}
    for tensor in tensors:
        if tensor.untyped_storage().nbytes():
            # Views of one block are told apart by where they start; a block's own total would count its padding.
            key = (str(tensor.device), tensor.data_ptr() or id(tensor))
            found[key] = max(found.get(key, 0), without_repeats(tensor).nbytes)
    return found


def without_repeats(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor with each expanded (stride 0) dimension cut to one element: `copy_` into stride 0 raises."""
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill one range without gaps or overlaps, in whatever order."""
    if tensor.is_contiguous():
        return True  # the common case, a flag
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True
