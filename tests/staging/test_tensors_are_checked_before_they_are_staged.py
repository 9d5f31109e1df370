"""Tensors that cannot be staged are refused by name, before any of them is."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


from lora_mem.errors import AdapterError  # noqa: E402
from lora_mem.staging.tensors import check_tensors  # noqa: E402


def test_tensors_of_the_wrong_kind_are_refused():
    good = torch.zeros(2, 2)
    for tensors, message in [
        ({}, "tensors is empty"),
        ([good], "tensors is a list"),
        ({1: good}, "names must be strings, got 1"),
        ({"a": [1.0]}, r"only plain dense torch tensors can be staged, got a \(list\)"),
        ({"a": good.to_sparse()}, "only plain dense torch tensors"),
        ({"a": torch.nested.nested_tensor([good])}, "only plain dense torch tensors"),
        ({"a": good.to("meta")}, r"cannot read a \(meta\); tensors must be on the host or a GPU"),
        ({"a": good.to(torch.int8)}, r"cannot cast a \(torch.int8\); allowed are torch.bfloat16"),
        ({"a": good.to(torch.complex64)}, "cannot cast a"),
        ({"a": good.to(torch.float8_e4m3fn)}, "cannot cast a"),
    ]:
        with pytest.raises(AdapterError, match=message):
            check_tensors(tensors)
    check_tensors({"a": torch.nn.Parameter(good), "b": good.half(), "c": good.double()})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_are_looked_at_only_when_asked(value):
    tensors = {"good": torch.zeros(2), "bad": torch.tensor([1.0, value])}
    check_tensors(tensors)
    with pytest.raises(AdapterError, match="NaN or Inf in bad"):
        check_tensors(tensors, check_finite=True)


def test_values_that_the_cast_would_make_infinite():
    tensors = {"good": torch.tensor([65504.0]), "bad": torch.tensor([1e6])}
    check_tensors(tensors, check_finite=True, cast_to=[torch.bfloat16])
    with pytest.raises(AdapterError, match=r"too large for the slots' torch.float16 in bad"):
        check_tensors(tensors, check_finite=True, cast_to=[torch.float16])
