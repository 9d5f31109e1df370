"""What is asked of an adapter's tensors themselves, whatever the model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
