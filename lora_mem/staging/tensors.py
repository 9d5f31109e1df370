"""An adapter's tensors: what is asked of them, the memory that they show, and bytes that are counted."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lora_mem.errors import AdapterError, some
from lora_mem.sizing.options import RECEIVED_ITEMSIZE

CASTABLE: tuple[torch.dtype, ...] = tuple(getattr(torch, name) for name in RECEIVED_ITEMSIZE)
"""The dtypes a factor may have; vLLM casts it to `lora_dtype`."""

HAVE_DATA = ("cpu", "cuda")
"""Devices from which a factor can be read."""

PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
"""Types of tensors that can be read; a subclass may stand for anything."""


def is_plain(tensor: Any) -> bool:
    """Whether this is a tensor as any adapter's are: of no subclass, dense, not nested."""
    return type(tensor) in PLAIN and tensor.layout == torch.strided and not tensor.is_nested


def _kind(value: Any) -> str:
    return "nested tensor" if getattr(value, "is_nested", False) else type(value).__name__


def check_tensors(
    tensors: Mapping[str, torch.Tensor], *, check_finite: bool = False, cast_to: Iterable[torch.dtype] = ()
) -> None:
    """Refuse what no model could serve: not a dict of plain floating-point tensors.

    Args:
        tensors: by PEFT's names.
        check_finite: also look for NaN and Inf, which reads every value once.
        cast_to: and for values that a cast to one of these dtypes would make Inf.

    Raises:
        AdapterError: naming the tensors, their type or dtype and what is allowed.
    """
    if not isinstance(tensors, Mapping) or not tensors:
        raise AdapterError(
            f"tensors is {'empty' if isinstance(tensors, Mapping) else 'a ' + type(tensors).__name__}; it must be a "
            "dict of PEFT names ('base_model.model.<module>.lora_A.weight') to tensors"
        )
    if wrong_name := [name for name in tensors if not isinstance(name, str)]:
        raise AdapterError(f"names must be strings, got {some(map(repr, wrong_name))}")
    if wrong_type := [f"{name} ({_kind(tensor)})" for name, tensor in tensors.items() if not is_plain(tensor)]:
        raise AdapterError(
            f"only plain dense torch tensors can be staged, got {some(wrong_type)}; pass full_tensor() of a DTensor, "
            "to_dense() of a sparse tensor"
        )
    if no_data := [f"{name} ({one.device})" for name, one in tensors.items() if one.device.type not in HAVE_DATA]:
        raise AdapterError(f"cannot read {some(no_data)}; tensors must be on the host or a GPU")
    if wrong_dtype := [f"{name} ({one.dtype})" for name, one in tensors.items() if one.dtype not in CASTABLE]:
        raise AdapterError(f"cannot cast {some(wrong_dtype)}; allowed are {', '.join(map(str, CASTABLE))}")
    if not check_finite:
        return
    if not_finite := [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())]:
        raise AdapterError(f"NaN or Inf in {some(not_finite)}")
    for dtype in cast_to:
        too_large = [name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor.to(dtype)).all())]
        if too_large:
            raise AdapterError(f"values too large for the slots' {dtype} in {some(too_large)}")


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


@dataclass
class Copied:
    """Bytes copied between GPUs and the host so far, each way; only ever grows. A profile takes differences of it.

    Counted by the code that copies: an offload, a stage, and vLLM's copies into slots while a profile is open.
    """

    to_host: int = 0
    to_device: int = 0


copied = Copied()


def pinned_by_torch() -> int | None:
    """Bytes that torch's own cache of pinned memory holds, in use or not; None without a GPU in this process."""
    if not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def resident() -> int:
    """Bytes of host memory that this process has resident."""
    with open("/proc/self/statm", "rb") as file:
        pages = int(file.read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
