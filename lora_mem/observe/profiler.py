"""Where the bytes and the milliseconds go: phases of a sync, with seconds, memory on both sides, and bytes copied.

    with lora_mem.profile() as profiler:
        with profiler.phase("stage"):
            request = lora_mem.stage_adapter(1, tensors, config)
        llm.llm_engine.add_lora(request)      # "load", and in it "build", "pack", "activate", "offload", by themselves
    print(profiler.result)

Works without a GPU: what cannot be measured is None, and `Profile.missing` says why.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

import torch

from lora_mem import vllm_hook
from lora_mem.observe.profiles import Phase, Profile, Sample
from lora_mem.observe.recorders import sampling, snapshotting, trace_file, tracing
from lora_mem.observe.traces import RANGE, read_trace
from lora_mem.observe.watching import Watch, memory, most, watched
from lora_mem.staging.counters import copied

P = ParamSpec("P")
R = TypeVar("R")

_open: list[Profiler] = []


class Profiler:
    """Measures a block, or each call of a function; made by `profile`. For one thread at a time."""

    def __init__(
        self,
        *,
        trace: str | Path | None = None,
        trace_ops: bool = True,
        snapshot: str | Path | None = None,
        synchronize: bool = True,
        sample_every: float | None = None,
        device: int | None = None,
    ) -> None:
        number = isinstance(sample_every, int | float) and not isinstance(sample_every, bool)
        if sample_every is not None and not (number and 0 < sample_every <= threading.TIMEOUT_MAX):
            raise ValueError(f"sample_every is {sample_every!r}; it must be a number of seconds above 0, or None")
        if device is not None and (not isinstance(device, int) or isinstance(device, bool) or device < 0):
            raise ValueError(f"device is {device!r}; it must be a GPU's index from 0, or None for the current one")
        self._trace = _path("trace", trace)
        if self._trace is not None and not self._trace.name.endswith((".json", ".json.gz")) and self._trace.suffix:
            raise ValueError(f"trace is {str(trace)!r}; it must end in .json or .json.gz, or be a directory")
        self._trace_ops = trace_ops
        self._snapshot = _path("snapshot", snapshot)
        self._synchronize = synchronize
        self._sample_every = sample_every
        self._device = device
        self._block: ExitStack | None = None
        self._reset()

    def _reset(self) -> None:
        self._result: Profile | None = None
        self._begun = self._depth = 0
        # By the order in which phases began: fields of `Phase` that are known as one ends, its memory, its CUDA events.
        self._ended: dict[int, tuple[dict[str, Any], Watch, list[torch.cuda.Event]]] = {}
        self._samples: list[Sample] = []
        self._missing: list[str] = []
        self._written: dict[str, Path] = {}
        self._zero = time.perf_counter()

    @property
    def result(self) -> Profile:
        """What the last block, or the last call, has shown.

        Raises:
            RuntimeError: there has been none, or it is not over.
        """
        if self._result is None:
            raise RuntimeError("there is no result before the profiled block has ended")
        return self._result

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase of this name; inside another phase it is a part of that one.

        Raises:
            RuntimeError: outside of the profiled block.
        """
        if self not in _open:
            raise RuntimeError(f"phase {name!r} lies outside of the profiled block; open it inside")
        place, depth, error, seconds = self._begun, self._depth, "", 0.0
        self._begun += 1
        self._depth += 1
        events: list[torch.cuda.Event] = []
        to_host, to_device = copied.to_host, copied.to_device
        with watched(self._device) as watch:
            began = time.perf_counter()
            try:
                self._wait()
                self._mark(events)
                began = time.perf_counter()
                with self._range(name):
                    try:
                        yield
                    finally:
                        self._mark(events)
                        self._wait()
                        seconds = time.perf_counter() - began
            except BaseException as raised:
                error = f"{type(raised).__name__}: {raised}"
                raise
            finally:
                self._depth = depth
                fields = {"name": name, "depth": depth - 1, "error": error}  # the whole block is no phase
                fields |= {"start": began - self._zero, "seconds": seconds}
                fields |= {"to_host": copied.to_host - to_host, "to_device": copied.to_device - to_device}
                self._ended[place] = fields, watch, events

    def __enter__(self) -> Profiler:
        """Begin; the profiler itself."""
        if self._block is not None:
            raise RuntimeError("this profile is running already; make another one with profile()")
        if any(other._device != self._device for other in _open):
            raise RuntimeError("a profile of another device is open: torch's peak counters are read for one at a time")
        self._reset()
        with ExitStack() as stack:
            self._record(stack)
            stack.enter_context(self.phase("total"))
            self._block = stack.pop_all()
        return self

    def __exit__(self, *raised: Any) -> None:
        """End, write trace and snapshot, and make the result; an error of the block goes on its way."""
        block, self._block = self._block, None
        assert block is not None
        try:
            block.__exit__(*raised)
        finally:
            self._finish()

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Profile each call of a function, as a phase of its name; `function.profile` is the last call's result.

        Raises:
            TypeError: no function, or one whose body does not run when it is called: `async def`, or a generator's.
        """
        if not callable(function):
            raise TypeError(f"profile got {function!r} to decorate; give it a function, and options by their names")
        name = getattr(function, "__name__", type(function).__name__)
        generates = inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function)
        if generates or inspect.iscoroutinefunction(function):
            kind, where = ("a generator's", "loop that iterates it") if generates else ("a coroutine's", "await")
            raise TypeError(
                f"{name} is {kind} function: calling it runs nothing of its body, so there is nothing to profile; put "
                f"`with lora_mem.profile():` around the {where}"
            )

        @functools.wraps(function)
        def profiled(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                with self, self.phase(name):
                    return function(*args, **kwargs)
            finally:
                profiled.profile = self._result  # type: ignore[attr-defined]

        return profiled

    def _record(self, stack: ExitStack) -> None:
        """Open what records, the hook's phases among it, until the stack is closed."""
        if not torch.cuda.is_available():
            self._missing.append("GPU memory, device seconds and copies over the link: torch finds no CUDA device")
        elif not torch.cuda.is_initialized():
            self._missing.append("the GPU until CUDA is initialised in this process, which a profile does not do")
        if self._trace is not None:
            self._written["trace"] = trace_file(self._trace)
            stack.enter_context(tracing(self._written["trace"], ops=self._trace_ops))
        if self._snapshot is not None and torch.cuda.is_available():
            self._written["snapshot"] = self._snapshot
            if missing := stack.enter_context(snapshotting(self._snapshot)):
                self._missing.append(missing)
        elif self._snapshot is not None:
            self._missing.append("the memory snapshot: torch makes one of CUDA memory only")
        _open.append(self)
        stack.callback(_open.remove, self)
        self._zero = time.perf_counter()
        stack.enter_context(vllm_hook.recorded(lambda span, _: self.phase(span)))
        if self._sample_every is not None:
            stack.enter_context(sampling(self._sample_every, self._sample))
        else:
            self._missing.append(
                "peaks of device_used and of host memory inside a phase, only at its borders: pass sample_every"
            )

    def _sample(self) -> None:
        self._samples.append(Sample(time.perf_counter() - self._zero, memory(self._device)))

    def _finish(self) -> None:
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._wait(always=True)
        # A generator that was never closed has phases that never ended.
        found = [self._finished(*self._ended[place]) for place in sorted(self._ended)]
        if gpu and "trace" in self._written:
            traced = read_trace(self._written["trace"])
            if len(traced) == len(found):
                found = [dataclasses.replace(p, traced=t.traced) for p, t in zip(found, traced, strict=True)]
            else:
                self._missing.append(
                    f"what the device did, by phase: the trace has {len(traced)} of {len(found)} phases"
                )
        versions = {"torch": str(torch.__version__)}
        if "vllm" in sys.modules:
            versions["vllm"] = str(getattr(sys.modules["vllm"], "__version__", "unknown"))
        self._result = Profile(
            device=torch.cuda.get_device_name(self._device) if gpu else "cpu",
            versions=versions,
            total=dataclasses.replace(found[0], depth=0),
            phases=tuple(found[1:]),
            samples=tuple(self._samples),
            missing=tuple(self._missing),
            **{what: str(path) for what, path in self._written.items()},
        )

    def _finished(self, fields: dict[str, Any], watch: Watch, events: list[torch.cuda.Event]) -> Phase:
        inside = [s.memory for s in self._samples if 0 <= s.seconds - fields["start"] <= fields["seconds"]]
        return Phase(
            **fields,
            device_seconds=events[0].elapsed_time(events[1]) / 1e3 if len(events) == 2 else None,
            before=watch.before,
            peak=most([watch.peak, *inside]),
            after=watch.after,
        )

    def _range(self, name: str) -> AbstractContextManager[Any]:
        """The phase as a range for torch's profiler: by one of several open profiles, the one that traces."""
        owner = next((profiler for profiler in _open if profiler._trace is not None), _open[0])
        return torch.profiler.record_function(RANGE + name) if owner is self else nullcontext()

    def _mark(self, events: list[torch.cuda.Event]) -> None:
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            events.append(event)

    def _wait(self, *, always: bool = False) -> None:
        if (self._synchronize or always) and torch.cuda.is_initialized():
            torch.cuda.synchronize(self._device)


def _path(option: str, value: Any) -> Path | None:
    if not isinstance(value, str | os.PathLike | None):
        raise ValueError(f"{option} is {value!r}; it must be a path, or None")
    return None if value is None else Path(value)


@overload
def profile(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def profile(
    *,
    trace: str | Path | None = None,
    trace_ops: bool = True,
    snapshot: str | Path | None = None,
    synchronize: bool = True,
    sample_every: float | None = None,
    device: int | None = None,
) -> Profiler: ...
def profile(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Profile a block, or each call of a function: `with profile() as p`, `@profile`, `@profile(trace="traces")`.

    Args:
        trace: write a trace of torch's profiler with the phases as ranges: a file ending in .json or .json.gz, or a
            directory, for TensorBoard. Perfetto and chrome://tracing read both. Costs far more than the phases do.
        trace_ops: keep torch's operators and CUDA calls in the trace; False leaves phases, kernels and copies.
        snapshot: write a snapshot of torch's CUDA memory for pytorch.org/memory_viz, with this package's pinned blocks
            as one more device, and torch's own pinned memory where torch records it.
        synchronize: wait for the GPU where a phase begins and ends, so that its work counts where it belongs. False
            changes nothing in what the GPU does when; then `seconds` are the host's alone.
        sample_every: seconds between samples of memory, taken by a thread: a timeline, and peaks of what torch does
            not count.
        device: index of the GPU; default the current one.

    Resets torch's peak counters (`torch.cuda.reset_peak_memory_stats`) where a phase begins and ends. Without options a
    phase costs some tens of microseconds, and waiting for the GPU. Profiles can be nested; each sees all phases that
    the hook records, and those of `lora_mem.observe.profiler.phase`.

    Raises:
        ValueError: an option that is not allowed.
        TypeError: what is decorated is no function, is an `async def` or makes a generator.
    """
    return Profiler(**options) if function is None else Profiler()(function)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Measure the block as a phase of every open profile of this process; where there is none, do nothing.

    For code that does not know who profiles it.
    """
    with ExitStack() as stack:
        for profiler in list(_open):
            stack.enter_context(profiler.phase(name))
        yield
