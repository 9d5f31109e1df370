"""The spans of a load, for whoever wants to measure or watch one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lora_mem.staging.tensors import copied
from lora_mem.vllm_hook.state import process

Recorder = Callable[[str, int], AbstractContextManager[Any]]


@contextmanager
def recorded(recorder: Recorder, *, copies: bool = True) -> Iterator[None]:
    """Enter `recorder(span, lora_int_id)` around each load inside the `with` block, and around each part of it.

    Spans: "load", or "rebuild" where this version of a staged adapter had been loaded before; in it "build" (vLLM's
    `_load_adapter`), "pack" (what registering does to it: stack, scale, pin), "activate" (into a slot; by itself where
    only the slot had been taken) and "offload". Nothing is recorded of an adapter that is there already, nor while the
    hook is not installed.

    Args:
        recorder: returns a context manager for one span.
        copies: count what crosses the link into slots, as `copied.to_device`, which takes an activation longer.
    """
    entry = recorder, copies
    process.recorders.append(entry)
    try:
        yield
    finally:
        process.recorders.remove(entry)


@contextmanager
def observed(observer: Callable[[str, int], None]) -> Iterator[None]:
    """Call `observer(span, lora_int_id)` at the end of each span that `recorded` tells of, unless it failed."""

    @contextmanager
    def recorder(span: str, lora_int_id: int) -> Iterator[None]:
        yield
        observer(span, lora_int_id)

    with recorded(recorder, copies=False):
        yield


def span(name: str, lora_int_id: int) -> AbstractContextManager[Any]:
    """A span of a load, told to all recorders."""
    if not process.recorders:
        return nullcontext()
    stack = ExitStack()
    for recorder, _ in process.recorders:
        stack.enter_context(recorder(name, lora_int_id))
    if name == "activate" and any(copies for _, copies in process.recorders):
        stack.enter_context(_CopiesToDevice())
    return stack


class _CopiesToDevice(TorchFunctionMode):
    """Counts what crosses the link on its way into slots: vLLM slices and copies by itself, so it is seen there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.Tensor.copy_:
            target, source = args[:2]
            if target.is_cuda and not source.is_cuda:
                copied.to_device += target.numel() * source.element_size()
        elif func is torch.Tensor.to and result.is_cuda and not args[0].is_cuda:
            copied.to_device += args[0].nbytes
        return result
