"""Where the bytes and the milliseconds go: phases of a sync, with seconds, memory on both sides, and bytes copied.

    with lora_mem.profile() as profiler:
        with profiler.phase("stage"):
            request = lora_mem.stage_adapter(1, tensors, config)
        llm.llm_engine.add_lora(request)      # "load", and in it "build", "pack", "activate", "offload", by themselves
    print(profiler.result)

Works without a GPU: what cannot be measured is None, and `Profile.missing` says why.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, overload

import torch

from lora_mem import vllm_hook
from lora_mem.observe.recorders import sampling, snapshotting, trace_file, tracing
from lora_mem.observe.results import Memory, Phase, Profile, Sample
from lora_mem.observe.traces import RANGE, read_trace
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.tensors import copied, pinned_by_torch, resident

P = ParamSpec("P")
R = TypeVar("R")


# -------------------------------------------------------------------------------------------------------------- memory


class Watch:
    """A block under way: memory as it began, the most since and, once it is over, memory as it ended."""

    def __init__(self, before: Memory) -> None:
        self.before = self.peak = self.after = before


_watches: list[Watch] = []  # under way: torch's peak counters are one for all of them


@contextmanager
def watched() -> Iterator[Watch]:
    """The most memory in a block, as `peak` once it is over; phases in it and profiles around it lose nothing by it."""
    watch = Watch(current_memory())
    _watches.append(watch)
    try:
        yield watch
    finally:
        watch.after = current_memory()
        _watches.remove(watch)


def current_memory() -> Memory:
    """Memory now; torch's peaks since the last call are told to every block under way, and reset.

    Use it in place of `torch.cuda.reset_peak_memory_stats` in code that is profiled: the counters are one for all.
    """
    now, peak = _read_memory()
    for watch in _watches:
        watch.peak = _most([watch.peak, peak])
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    return now


def _read_memory() -> tuple[Memory, Memory]:
    """Memory now, and the same with the peaks that torch has counted."""
    initialized = torch.cuda.is_initialized()
    gpu = initialized or torch.cuda.is_available()
    stats = torch.cuda.memory_stats() if initialized else {}
    free, total = torch.cuda.mem_get_info() if initialized else (0, 0)

    def counted(when: str) -> dict[str, Any]:
        return {kind: stats.get(f"{kind}_bytes.all.{when}", 0) if gpu else None for kind in ("allocated", "reserved")}

    now = Memory(
        **counted("current"),
        device_used=total - free if initialized else None,
        pinned=HostBlock.pinned_bytes,
        pinned_by_torch=pinned_by_torch(),
        host_resident=resident(),
    )
    return now, replace(now, **counted("peak"))


def _most(memories: Iterable[Memory]) -> Memory:
    """The largest of each figure; None where it was never known."""
    columns: Iterable[tuple[Any, ...]] = zip(*(vars(one).values() for one in memories), strict=True)
    figures: list[Any] = [max((n for n in column if n is not None), default=None) for column in columns]
    return Memory(*figures)


# -------------------------------------------------------------------------------------------------------------- phases


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
    ) -> None:
        number = isinstance(sample_every, int | float) and not isinstance(sample_every, bool)
        if sample_every is not None and not (number and 0 < sample_every <= threading.TIMEOUT_MAX):
            raise ValueError(f"sample_every is {sample_every!r}; it must be a number of seconds above 0, or None")
        self._trace, self._snapshot = _path("trace", trace), _path("snapshot", snapshot)
        if self._trace is not None and not self._trace.name.endswith((".json", ".json.gz")) and self._trace.suffix:
            raise ValueError(f"trace is {str(trace)!r}; it must end in .json or .json.gz, or be a directory")
        self._trace_ops = trace_ops
        self._synchronize = synchronize
        self._sample_every = sample_every
        self._block: ExitStack | None = None
        self._reset()

    def _reset(self) -> None:
        self._result: Profile | None = None
        self._depth = 0
        self._events: list[list[torch.cuda.Event]] = []  # of each phase, in the order in which they began
        self._ended: dict[int, Phase] = {}  # by that order
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
        place, depth, error, began, seconds = len(self._events), self._depth, "", 0.0, 0.0
        events: list[torch.cuda.Event] = []
        self._events.append(events)
        self._depth += 1
        to_host, to_device = copied.to_host, copied.to_device
        try:
            with watched() as watch:
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
            self._ended[place] = Phase(
                name=name,
                depth=max(0, depth - 1),  # the whole block is not a phase
                start=began - self._zero,
                seconds=seconds,
                device_seconds=None,  # once the device has passed its events
                before=watch.before,
                peak=watch.peak,
                after=watch.after,
                to_host=copied.to_host - to_host,
                to_device=copied.to_device - to_device,
                error=error,
            )

    def __enter__(self) -> Profiler:
        """Begin; the profiler itself."""
        if self._block is not None:
            raise RuntimeError("this profile is running already; make another one with profile()")
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
        self._samples.append(Sample(time.perf_counter() - self._zero, _read_memory()[0]))

    def _finish(self) -> None:
        gpu = torch.cuda.is_initialized()
        if gpu:
            torch.cuda.synchronize()
        # A generator that was never closed has phases that never ended.
        found = [self._with_device_seconds_and_samples(place) for place in sorted(self._ended)]
        if gpu and "trace" in self._written:
            traced = read_trace(self._written["trace"])
            if len(traced) == len(found):
                found = [replace(phase, traced=seen.traced) for phase, seen in zip(found, traced, strict=True)]
            else:
                self._missing.append(
                    f"what the device did, by phase: the trace has {len(traced)} of {len(found)} phases"
                )
        versions = {"torch": str(torch.__version__)}
        if "vllm" in sys.modules:
            versions["vllm"] = str(getattr(sys.modules["vllm"], "__version__", "unknown"))
        total, *phases = found
        self._result = Profile(
            device=torch.cuda.get_device_name() if gpu else "cpu",
            versions=versions,
            total=total,
            phases=tuple(phases),
            samples=tuple(self._samples),
            missing=tuple(self._missing),
            **{what: str(path) for what, path in self._written.items()},
        )

    def _with_device_seconds_and_samples(self, place: int) -> Phase:
        phase, events = self._ended[place], self._events[place]
        inside = [sample.memory for sample in self._samples if 0 <= sample.seconds - phase.start <= phase.seconds]
        device_seconds = events[0].elapsed_time(events[1]) / 1e3 if len(events) == 2 else None
        return replace(phase, device_seconds=device_seconds, peak=_most([phase.peak, *inside]))

    def _range(self, name: str) -> AbstractContextManager[Any]:
        """The phase as a range for torch's profiler: by one of several open profiles, the one that traces."""
        owner = next((profiler for profiler in _open if profiler._trace is not None), _open[0])
        return torch.profiler.record_function(RANGE + name) if owner is self else nullcontext()

    def _mark(self, events: list[torch.cuda.Event]) -> None:
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            events.append(event)

    def _wait(self) -> None:
        if self._synchronize and torch.cuda.is_initialized():
            torch.cuda.synchronize()


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

    Resets torch's peak counters (`torch.cuda.reset_peak_memory_stats`) where a phase begins and ends. Without options a
    phase costs some tens of microseconds, and waiting for the GPU. Profiles can be nested; each sees all phases that
    the hook records, and those of `lora_mem.observe.profiler.phase`. The GPU is torch's current one.

    Raises:
        ValueError: an option that is not allowed.
        TypeError: what is decorated is not a function, is an `async def` or makes a generator.
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
