"""Where the bytes and the milliseconds go: phases of a sync, with seconds, memory on both sides, and bytes copied.

    with lora_mem.profile() as profiler:
        with profiler.phase("stage"):
            request = lora_mem.stage_adapter(1, tensors, config)
        llm.llm_engine.add_lora(request)      # "load" and in it "build", "pack", "activate", "offload", by themselves
    print(profiler.result)

Works without a GPU: what cannot be measured is None, and `Profile.missing` says why.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import html
import inspect
import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast, overload

import torch

from lora_mem import vllm_hook
from lora_mem.drawing import draw
from lora_mem.staging.counters import copied, pinned_by_torch, resident
from lora_mem.staging.pinned import HostBlock

if TYPE_CHECKING:
    from matplotlib.axes import Axes

P = ParamSpec("P")
R = TypeVar("R")

RANGE = "lora_mem: "
"""Before a phase's name in a trace."""

_MOST_SNAPSHOT_ENTRIES = 100_000

# Profiles under way, and the blocks that are watched, phases among them: torch's peak counters are one for all of them.
_open: list[Profiler] = []
_frames: list[Watch] = []


@dataclass(frozen=True)
class Memory:
    """Bytes at one moment, or the most in some time.

    Attributes:
        allocated: that torch's GPU allocator counts; None without a GPU.
        reserved: that it keeps from the driver; None without a GPU.
        device_used: of the GPU in use by anyone (`torch.cuda.mem_get_info`); None where CUDA is not initialised.
        pinned: that this package has page-locked.
        pinned_by_torch: in torch's cache of page-locked memory, in use or not; None where CUDA is not initialised.
        host_resident: host memory of this process, page-locked memory included.
    """

    allocated: int | None
    reserved: int | None
    device_used: int | None
    pinned: int
    pinned_by_torch: int | None
    host_resident: int


@dataclass(frozen=True)
class Traced:
    """What torch's profiler saw the device do in a phase. Seconds are of the union of intervals: never counted twice.

    Attributes:
        kernels: seconds that a kernel ran.
        to_host: bytes of all copies to the host, whoever asked for them.
        to_host_seconds: that such a copy was under way.
        to_device: bytes of all copies to the device.
        to_device_seconds: that such a copy was under way.
        overlapped: seconds that a copy to the host was under way while a kernel ran.
    """

    kernels: float
    to_host: int
    to_host_seconds: float
    to_device: int
    to_device_seconds: float
    overlapped: float


@dataclass(frozen=True)
class Phase:
    """One phase, once: a name that comes again is another phase.

    Attributes:
        name: as given to `phase`, or "load", "rebuild", "build", "pack", "activate", "offload" of the hook.
        depth: how many phases it lies in.
        start: seconds since the profile began.
        seconds: on the host, until the device has done all of it (unless the profile does not synchronize).
        device_seconds: between two CUDA events on the stream that was current: until that stream has done its work.
            Copies on other streams, as a stage's, are in `seconds` and in a trace. None without a GPU.
        before: memory as it began.
        peak: the most of each figure. Of GPU memory allocated and reserved exact, by torch's own peak counters; of the
            others at the borders of phases and at samples.
        after: memory as it ended.
        to_host: bytes copied from GPUs to the host, counted by the code of this package that copies.
        to_device: bytes copied to GPUs: counted where vLLM copies an adapter into its slots. Copies by other code show
            in a trace only.
        error: what it was left with, or "".
        traced: with `trace`, on a GPU.
    """

    name: str
    depth: int
    start: float
    seconds: float
    device_seconds: float | None
    before: Memory
    peak: Memory
    after: Memory
    to_host: int
    to_device: int
    error: str = ""
    traced: Traced | None = None

    @property
    def to_host_rate(self) -> float | None:
        """Bytes a second: while copies were under way where that was traced, else of the phase; None without a copy."""
        if self.traced is not None:
            return _rate(self.traced.to_host, self.traced.to_host_seconds)
        return _rate(self.to_host, self.seconds)

    @property
    def to_device_rate(self) -> float | None:
        """Bytes a second, as `to_host_rate`."""
        if self.traced is not None:
            return _rate(self.traced.to_device, self.traced.to_device_seconds)
        return _rate(self.to_device, self.seconds)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rates = {"to_host_rate": self.to_host_rate, "to_device_rate": self.to_device_rate}
        return {**dataclasses.asdict(self), **rates}


@dataclass(frozen=True)
class Sample:
    """Memory at one moment: seconds since the profile began, and bytes."""

    seconds: float
    memory: Memory


@dataclass(frozen=True)
class Profile:
    """What a profile found.

    Attributes:
        device: name of the GPU, or "cpu".
        versions: of torch and of vllm, where it was imported.
        total: the whole block, as a phase.
        phases: in the order in which they began.
        samples: memory over time, with `sample_every`.
        missing: what was not measured, and why.
        trace: file that the trace was written to, or None.
        snapshot: file that the memory snapshot was written to, or None.
    """

    device: str
    versions: dict[str, str]
    total: Phase
    phases: tuple[Phase, ...]
    samples: tuple[Sample, ...] = field(default=(), repr=False)
    missing: tuple[str, ...] = ()
    trace: str | None = None
    snapshot: str | None = None

    def phase(self, name: str, number: int = 1) -> Phase:
        """The phase of this name; of several the one of this number, from 1.

        Raises:
            KeyError: there is no such phase.
        """
        found = [phase for phase in self.phases if phase.name == name]
        if not 1 <= number <= len(found):
            names = ", ".join(dict.fromkeys(phase.name for phase in self.phases)) or "none"
            raise KeyError(f"no phase {name!r} of number {number}: there are {len(found)}; phases are {names}")
        return found[number - 1]

    def parts(self, phase: Phase) -> tuple[Phase, ...]:
        """The phases that lie in one of this profile's, and in no other one in between."""
        parts = []
        place = next(index for index, found in enumerate(self.phases) if found is phase)
        for found in self.phases[place + 1 :]:
            if found.depth <= phase.depth:
                break
            if found.depth == phase.depth + 1:
                parts.append(found)
        return tuple(parts)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; bytes and seconds."""
        values = dataclasses.asdict(self)
        return {**values, "total": self.total.to_dict(), "phases": [phase.to_dict() for phase in self.phases]}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """A profile from what `to_dict` gave, as a report records it."""

        def phase(found: Mapping[str, Any]) -> Phase:
            memories = {when: Memory(**found[when]) for when in ("before", "peak", "after")}
            traced = None if found["traced"] is None else Traced(**found["traced"])
            plain = {field.name: found[field.name] for field in dataclasses.fields(Phase)}
            return Phase(**{**plain, **memories, "traced": traced})

        changed = {
            "total": phase(values["total"]),
            "phases": tuple(phase(found) for found in values["phases"]),
            "samples": tuple(Sample(found["seconds"], Memory(**found["memory"])) for found in values["samples"]),
            "missing": tuple(values["missing"]),
        }
        return cls(**{**values, **changed})

    def to_json(self, path: str | Path | None = None, *, indent: int | None = None) -> str:
        """JSON text of `to_dict`; written to `path` too, where one is given."""
        text = json.dumps(self.to_dict(), indent=indent)
        if path is not None:
            Path(path).write_text(text)
        return text

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row a phase: seconds and bytes, `allocated_peak` and so on."""
        import pandas as pd

        rows = []
        for phase in self.phases:
            row: dict[str, Any] = {"phase": phase.name, "depth": phase.depth, "start": phase.start}
            row |= {"seconds": phase.seconds, "device_seconds": phase.device_seconds}
            for figure in dataclasses.fields(Memory):
                for when in ("before", "peak", "after"):
                    row[f"{figure.name}_{when}"] = getattr(getattr(phase, when), figure.name)
            row |= {"to_host": phase.to_host, "to_device": phase.to_device}
            row |= {"to_host_rate": phase.to_host_rate, "to_device_rate": phase.to_device_rate, "error": phase.error}
            rows.append(row)
        return pd.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Phases over time, nested ones below."""
        return draw(self, ax)

    def plot_memory(self, ax: Axes | None = None) -> Axes:
        """GPU and host memory over time, by the samples or else by the borders of phases."""
        from lora_mem.observe.plots import plot_memory

        return plot_memory(self, ax)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Columns and rows as text: milliseconds, and MiB (peak and after as the change since before)."""
        gpu = self.total.before.allocated is not None
        columns = ["phase", "ms"]
        columns += ["device ms", "GPU peak MiB", "GPU left MiB", "reserved left MiB"] if gpu else []
        columns += ["pinned MiB", "host MiB", "to host MiB", "to GPU MiB"]
        rows = []
        for phase in (*self.phases, self.total):
            row = ["  " * phase.depth + phase.name + (" (failed)" if phase.error else ""), f"{phase.seconds * 1e3:.2f}"]
            if gpu:
                row += [f"{(phase.device_seconds or 0) * 1e3:.2f}", _change(phase, "allocated", "peak")]
                row += [_change(phase, "allocated", "after"), _change(phase, "reserved", "after")]
            pinned = [_change(phase, name, "after") for name in ("pinned", "host_resident")]
            rows.append([*row, *pinned, f"{phase.to_host / 2**20:.2f}", f"{phase.to_device / 2**20:.2f}"])
        return columns, rows

    def __repr__(self) -> str:
        """A table as plain text."""
        columns, rows = self.table()
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        lines = [f"Profile on {self.device}"]
        for row in [columns, *rows]:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
        return "\n".join(lines + [f"not measured: {reason}" for reason in self.missing])

    def _repr_html_(self) -> str:
        columns, rows = self.table()
        head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
        body = ""
        for row in rows:
            name = html.escape(row[0]).replace("  ", "&emsp;")
            cells = "".join(f"<td>{html.escape(cell)}</td>" for cell in row[1:])
            body += f'<tr><td style="text-align: left">{name}</td>{cells}</tr>'
        notes = "".join(f"<br>not measured: {html.escape(reason)}" for reason in self.missing)
        return (
            f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>Profile on {html.escape(self.device)}; left is after minus before{notes}</p>"
        )


class Watch:
    """A block under way: memory as it began, and the most since."""

    def __init__(self, before: Memory) -> None:
        self.before = before
        self.peak = before


class _Frame(Watch):
    """A phase under way."""

    def __init__(self, before: Memory) -> None:
        super().__init__(before)
        self.copied = (copied.to_host, copied.to_device)
        self.events: list[torch.cuda.Event] = []
        self.began = 0.0
        self.seconds = 0.0


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
        self._block: AbstractContextManager[None] | None = None
        self._result: Profile | None = None
        self._reset()

    def _reset(self) -> None:
        self._result = None
        self._phases: list[Phase | None] = []
        self._events: dict[int, list[torch.cuda.Event]] = {}
        self._samples: list[Sample] = []
        self._missing: list[str] = []
        self._trace_written: Path | None = None
        self._snapshot_written: Path | None = None
        self._tracer: Any = None
        self._depth = 0
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
        place, depth, error = len(self._phases), self._depth, ""
        self._phases.append(None)
        self._depth += 1
        frame = _Frame(memory_and_peak(self._device)[0])
        _frames.append(frame)
        try:
            self._wait()
            self._record_event(frame)
            frame.began = time.perf_counter()
            with self._range(name):
                try:
                    yield
                finally:
                    self._record_event(frame)
                    self._wait()
                    frame.seconds = time.perf_counter() - frame.began
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            after = memory_and_peak(self._device)[0]
            _frames.remove(frame)
            self._depth = depth
            self._events[place] = frame.events
            self._phases[place] = Phase(
                name=name,
                depth=depth - 1,  # the whole block is no phase
                start=frame.began - self._zero,
                seconds=frame.seconds,
                device_seconds=None,
                before=frame.before,
                peak=frame.peak,
                after=after,
                to_host=copied.to_host - frame.copied[0],
                to_device=copied.to_device - frame.copied[1],
                error=error,
            )

    def __enter__(self) -> Profiler:
        """Begin; the profiler itself."""
        if self._block is not None:
            raise RuntimeError("this profile is running already; make another one with profile()")
        if any(other._device != self._device for other in _open):
            raise RuntimeError("a profile of another device is open: torch's peak counters are read for one at a time")
        block = self._run()
        block.__enter__()
        self._block = block
        return self

    def __exit__(self, *raised: Any) -> None:
        """End, write trace and snapshot, and make the result; an error of the block goes on its way."""
        block, self._block = self._block, None
        assert block is not None
        block.__exit__(*raised)

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        """Profile each call of a function, as a phase of its name; `function.profile` is the last call's result.

        Of an `async def`: from the call's first step to its last, with all that it awaits and, as memory is one for
        the process, what other tasks do to memory meanwhile. One call at a time: a second one beside it is refused.

        Raises:
            TypeError: no function, or a generator's, whose body runs where it is iterated.
        """
        if not callable(function):
            raise TypeError(f"profile got {function!r} to decorate; give it a function, and options by their names")
        name = getattr(function, "__name__", type(function).__name__)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{name} is a generator's function: calling it runs nothing of its body, so there is nothing to "
                "profile; put `with lora_mem.profile():` around the loop that iterates it"
            )

        @contextmanager
        def one_call() -> Iterator[None]:
            try:
                with self, self.phase(name):
                    yield
            finally:
                wrapper.profile = self._result

        @functools.wraps(function)
        def profiled(*args: P.args, **kwargs: P.kwargs) -> R:
            with one_call():
                return function(*args, **kwargs)

        @functools.wraps(function)
        async def profiled_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
            with one_call():
                return await function(*args, **kwargs)  # type: ignore[misc]

        wrapper: Any = profiled_coroutine if inspect.iscoroutinefunction(function) else profiled
        return cast("Callable[P, R]", wrapper)

    @contextmanager
    def _run(self) -> Iterator[None]:
        self._reset()
        if not torch.cuda.is_available():
            self._missing.append("GPU memory, device seconds and copies over the link: torch finds no CUDA device")
        elif not torch.cuda.is_initialized():
            self._missing.append("the GPU until CUDA is initialised in this process, which a profile does not do")
        try:
            with self._tracing(), self._snapshotting(), self._opened(), self._sampling(), self.phase("total"):
                yield
        finally:
            if self._phases:  # else nothing has begun: an option was refused
                self._finish()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        _open.append(self)
        self._zero = time.perf_counter()
        try:
            with vllm_hook.recorded(self.phase):
                yield
        finally:
            _open.remove(self)

    @contextmanager
    def _tracing(self) -> Iterator[None]:
        if self._trace is None:
            yield
            return
        if torch._C._autograd._profiler_enabled():
            raise RuntimeError("trace: a torch profiler is running already, and torch has one at a time; end it first")
        kinds = torch.profiler.ProfilerActivity
        activities = [kinds.CPU, kinds.CUDA] if torch.cuda.is_available() else [kinds.CPU]
        self._tracer = torch.profiler.profile(activities=activities)
        self._tracer.start()
        try:
            yield
        finally:
            self._tracer.stop()
            self._trace_written = _write_trace(self._tracer, self._trace, self._trace_ops)

    @contextmanager
    def _snapshotting(self) -> Iterator[None]:
        if self._snapshot is None:
            yield
            return
        if not torch.cuda.is_available():
            self._missing.append("the memory snapshot: torch makes one of CUDA memory only")
            yield
            return
        record = torch.cuda.memory._record_memory_history
        options: dict[str, Any] = {"stacks": "python", "max_entries": _MOST_SNAPSHOT_ENTRIES}
        if "record_pinned_host_memory" in inspect.signature(record).parameters:
            options["record_pinned_host_memory"] = True
        else:
            self._missing.append(
                f"torch's own page-locked memory in the snapshot: torch {torch.__version__} does not record it there"
            )
        blocks = [_snapshot_entry(1, HostBlock.pinned_bytes)] if HostBlock.pinned_bytes else []

        def watch(address: int, nbytes: int) -> None:
            blocks.append(_snapshot_entry(address, nbytes))

        record(**options)
        HostBlock.watchers.append(watch)
        try:
            yield
        finally:
            HostBlock.watchers.remove(watch)
            snapshot = torch.cuda.memory._snapshot()
            record(enabled=None)
            # Shown by the viewer as one more device, after the GPUs: the host's side of an offload.
            snapshot["device_traces"].append(blocks)
            self._snapshot.parent.mkdir(parents=True, exist_ok=True)
            with self._snapshot.open("wb") as file:
                pickle.dump(snapshot, file)
            self._snapshot_written = self._snapshot

    @contextmanager
    def _sampling(self) -> Iterator[None]:
        every = self._sample_every
        if every is None:
            self._missing.append(
                "peaks of device_used and of host memory inside a phase, only at its borders: pass sample_every"
            )
            yield
            return
        stop = threading.Event()

        def sample() -> None:
            while True:
                self._samples.append(Sample(time.perf_counter() - self._zero, self._memory()))
                if stop.wait(every):
                    return

        thread = threading.Thread(target=sample, name="lora_mem profile", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()
            self._samples.append(Sample(time.perf_counter() - self._zero, self._memory()))

    def _finish(self) -> None:
        gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
        self._wait(always=True)
        found = []
        for place, phase in enumerate(self._phases):
            if phase is None:
                continue  # a generator that was never closed
            events = self._events[place]
            if len(events) == 2:
                phase = dataclasses.replace(phase, device_seconds=events[0].elapsed_time(events[1]) / 1e3)
            inside = [s.memory for s in self._samples if 0 <= s.seconds - phase.start <= phase.seconds]
            found.append(dataclasses.replace(phase, peak=_most([phase.peak, *inside])))
        if gpu and self._trace_written is not None:
            traced = read_trace(self._trace_written)
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
            trace=None if self._trace_written is None else str(self._trace_written),
            snapshot=None if self._snapshot_written is None else str(self._snapshot_written),
        )

    def _range(self, name: str) -> AbstractContextManager[Any]:
        """The phase as a range for torch's profiler: by one of several open profiles, the one that traces."""
        owner = next((profiler for profiler in _open if profiler._tracer is not None), _open[0])
        return torch.profiler.record_function(RANGE + name) if owner is self else nullcontext()

    def _record_event(self, frame: _Frame) -> None:
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self._device))
            frame.events.append(event)

    def _wait(self, *, always: bool = False) -> None:
        if (self._synchronize or always) and torch.cuda.is_initialized():
            torch.cuda.synchronize(self._device)

    def _memory(self) -> Memory:
        return _memory(self._device)[0]


def memory_and_peak(device: int | None = None) -> tuple[Memory, Memory]:
    """Memory now, and with torch's peaks since the last call; every open phase and watch learns of them.

    Use it in place of `torch.cuda.reset_peak_memory_stats` in code that is profiled: the counters are one for all.
    """
    now, most = _memory(device)
    for frame in _frames:
        frame.peak = _most([frame.peak, most])
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats(device)
    return now, most


@contextmanager
def watched(device: int | None = None) -> Iterator[Watch]:
    """The most memory in a block, as `peak` once it is over; phases in it and profiles around it lose nothing by it."""
    watch = Watch(memory_and_peak(device)[0])
    _frames.append(watch)
    try:
        yield watch
    finally:
        memory_and_peak(device)
        _frames.remove(watch)


def _memory(device: int | None) -> tuple[Memory, Memory]:
    """Memory now, and the same with the peaks that torch has counted."""
    initialized = torch.cuda.is_initialized()
    gpu = initialized or torch.cuda.is_available()
    stats = torch.cuda.memory_stats(device) if initialized else {}
    used = None
    if initialized:
        free, total = torch.cuda.mem_get_info(device)
        used = total - free

    def counted(name: str) -> int | None:
        return int(stats.get(f"{name}_bytes.all.current", 0)) if gpu else None

    def peak(name: str) -> int | None:
        return int(stats.get(f"{name}_bytes.all.peak", 0)) if gpu else None

    now = Memory(counted("allocated"), counted("reserved"), used, HostBlock.pinned_bytes, pinned_by_torch(), resident())
    return now, dataclasses.replace(now, allocated=peak("allocated"), reserved=peak("reserved"))


def _most(memories: Iterable[Memory]) -> Memory:
    """The largest of each figure."""
    figures: dict[str, Any] = {}
    for memory in memories:
        for name, value in vars(memory).items():
            before = figures.get(name)
            figures[name] = value if before is None or (value is not None and value > before) else before
    return Memory(**figures)


def _path(option: str, value: Any) -> Path | None:
    if not isinstance(value, str | os.PathLike | None):
        raise ValueError(f"{option} is {value!r}; it must be a path, or None")
    return None if value is None else Path(value)


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes and seconds > 0 else None


def _change(phase: Phase, figure: str, when: str) -> str:
    before, value = getattr(phase.before, figure), getattr(getattr(phase, when), figure)
    return f"{(value - before) / 2**20:+.2f}"


# -------------------------------------------------------------------------------------------------------------- traces


Span = tuple[float, float]


@dataclass(frozen=True)
class TracedPhase:
    """A phase in a trace: its name, when it began (seconds since the trace's first event), its seconds, what ran."""

    name: str
    start: float
    seconds: float
    traced: Traced


def read_trace(path: str | Path) -> tuple[TracedPhase, ...]:
    """The phases in a trace that `profile` wrote, in the order in which they began, the whole block first.

    Args:
        path: of a Chrome trace, `.json` or `.json.gz`.
    """
    events = _events(path)
    zero = min((event["ts"] for event in events), default=0)
    kernels = [event for event in events if event.get("cat") == "kernel"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    to_host = [event for event in copies if "DtoH" in event["name"]]
    to_device = [event for event in copies if "HtoD" in event["name"]]
    found = []
    for event in sorted(_ranges(events), key=lambda e: (e["ts"], -e["dur"])):
        begin, end = event["ts"], event["ts"] + event["dur"]
        busy = _spans(kernels, begin, end)
        down, up = _spans(to_host, begin, end), _spans(to_device, begin, end)
        traced = Traced(
            kernels=_length(busy),
            to_host=_bytes(to_host, begin, end),
            to_host_seconds=_length(down),
            to_device=_bytes(to_device, begin, end),
            to_device_seconds=_length(up),
            overlapped=_length(busy) + _length(down) - _length(_union(busy + down)),
        )
        name = str(event["name"]).removeprefix(RANGE)
        found.append(TracedPhase(name, (begin - zero) / 1e6, (end - begin) / 1e6, traced))
    return tuple(found)


def read_device(path: str | Path) -> dict[str, tuple[Span, ...]]:
    """When a trace's device ran kernels, copied to the host and copied to the device: (begin, end), in seconds.

    Of each kind intervals that do not touch, since the trace's first event, as the phases of `read_trace`.

    Args:
        path: of a Chrome trace, `.json` or `.json.gz`.
    """
    events = _events(path)
    zero = min((event["ts"] for event in events), default=0)
    kinds = {"kernels": ("kernel", ""), "to host": ("gpu_memcpy", "DtoH"), "to device": ("gpu_memcpy", "HtoD")}
    found = {}
    for kind, (category, direction) in kinds.items():
        of_kind = [event for event in events if event.get("cat") == category and direction in event["name"]]
        spans = _spans(of_kind, float("-inf"), float("inf"))
        found[kind] = tuple(((begin - zero) / 1e6, (end - zero) / 1e6) for begin, end in spans)
    return found


def _write_trace(tracer: Any, path: Path, ops: bool) -> Path:
    """Write a Chrome trace: to a file, or into a directory under a name that TensorBoard's plugin looks for."""
    if not path.suffix:
        path = path / f"lora_mem_{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"
    path.parent.mkdir(parents=True, exist_ok=True)
    tracer.export_chrome_trace(str(path))
    if not ops:
        packed = path.suffix == ".gz"
        trace = json.loads(gzip.decompress(path.read_bytes()) if packed else path.read_bytes())
        kept = ("user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset")
        trace["traceEvents"] = [e for e in trace["traceEvents"] if e.get("ph") == "M" or e.get("cat") in kept]
        text = json.dumps(trace).encode()
        path.write_bytes(gzip.compress(text) if packed else text)
    return path


def trace_frame(path: str | Path) -> Any:
    """What ran in a trace that `profile` wrote, by phase, as a pandas DataFrame, the longest first.

    Args:
        path: of a Chrome trace, `.json` or `.json.gz`.

    Columns: phase (the innermost), kind ("op": torch's outermost operators on the host; "kernel" and "copy" on the
    device), name, calls, milliseconds.
    """
    import pandas as pd

    events = _events(path)
    ranges = sorted(_ranges(events), key=lambda event: event["ts"])
    rows: dict[tuple[str, str, str], list[float]] = {}
    ended: dict[Any, float] = {}
    for event in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        kind = {"cpu_op": "op", "kernel": "kernel", "gpu_memcpy": "copy"}.get(str(event.get("cat")))
        around = [r for r in ranges if r["ts"] <= event["ts"] < r["ts"] + r["dur"]]
        if kind is None or not around:
            continue
        if kind == "op":
            if event["ts"] < ended.get(event["tid"], 0):
                continue  # inside another operator
            ended[event["tid"]] = event["ts"] + event["dur"]
        name = str(around[-1]["name"]).removeprefix(RANGE)
        row = rows.setdefault((name, kind, str(event["name"])), [0, 0.0])
        row[0] += 1
        row[1] += event["dur"] / 1e3
    found = [{"phase": p, "kind": k, "name": n, "calls": c, "milliseconds": ms} for (p, k, n), (c, ms) in rows.items()]
    frame = pd.DataFrame(found, columns=["phase", "kind", "name", "calls", "milliseconds"])
    return frame.sort_values("milliseconds", ascending=False, ignore_index=True)


def _events(path: str | Path) -> list[dict[str, Any]]:
    path = Path(path)
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [event for event in json.loads(text)["traceEvents"] if event.get("ph") == "X"]


def _ranges(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [e for e in events if e.get("cat") == "user_annotation" and str(e["name"]).startswith(RANGE)]


def _spans(events: Iterable[dict[str, Any]], begin: float, end: float) -> list[Span]:
    """When any of these ran between two times, as intervals that do not touch."""
    return _union(
        [
            (max(begin, event["ts"]), min(end, event["ts"] + event["dur"]))
            for event in events
            if event["ts"] < end and event["ts"] + event["dur"] > begin
        ]
    )


def _union(spans: list[Span]) -> list[Span]:
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def _length(spans: list[Span]) -> float:
    """Seconds, of intervals in microseconds."""
    return sum(end - begin for begin, end in spans) / 1e6


def _bytes(events: Iterable[dict[str, Any]], begin: float, end: float) -> int:
    """Bytes of the copies that began between two times."""
    return sum(int(event["args"]["bytes"]) for event in events if begin <= event["ts"] < end)


def _snapshot_entry(address: int, nbytes: int) -> dict[str, Any]:
    """A page-locked block as an entry of torch's snapshot."""
    return {
        "action": "alloc" if nbytes > 0 else "free_completed",
        "addr": address,
        "size": abs(nbytes),
        "stream": 0,
        "time_us": time.time_ns() // 1000,
        "frames": [{"name": "HostBlock", "filename": "lora_mem/staging/pinned.py", "line": 0}],
    }


# -------------------------------------------------------------------------------------------------------------- public


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
        snapshot: write a snapshot of torch's CUDA memory for pytorch.org/memory_viz, with the blocks that this package
            page-locks as one more device, and torch's own page-locked memory where torch records it.
        synchronize: wait for the GPU where a phase begins and ends, so that its work counts where it belongs. False
            changes nothing in what the GPU does when; then `seconds` are the host's alone.
        sample_every: seconds between samples of memory, taken by a thread: a timeline, and peaks of what torch does
            not count.
        device: index of the GPU; default the current one.

    Resets torch's peak counters (`torch.cuda.reset_peak_memory_stats`) where a phase begins and ends. Without options a
    phase costs some tens of microseconds, and waiting for the GPU. Profiles can be nested; each sees all phases that
    the hook records, and those of `lora_mem.observe.profiling.phase`.

    An `async def` is profiled from its first step to its last, all that it awaits included; a generator is refused.

    Raises:
        ValueError: an option that is not allowed.
        TypeError: what is decorated is no function, or makes a generator.
    """
    if function is not None:
        return Profiler()(function)
    return Profiler(**options)


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Measure the block as a phase of every open profile of this process; where there is none, do nothing.

    For code that does not know who profiles it.
    """
    with ExitStack() as stack:
        for profiler in list(_open):
            stack.enter_context(profiler.phase(name))
        yield
