"""What a profile or a bench found, as plain data: read from JSON, tabulated and drawn without torch or vLLM."""

from __future__ import annotations

import dataclasses
import functools
import html
import json
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from lora_mem.drawing import draw, html_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

T = TypeVar("T")
_hints = functools.cache(get_type_hints)
Table = tuple[str, list[str], list[list[str]]]  # caption, columns, rows

_FORMERLY = {"retained": "left", "retained_reserved": "left_reserved"}  # as older reports have it


@dataclass(frozen=True)
class Memory:
    """Bytes at one moment, or the most in some time."""

    allocated: int | None  # by torch's GPU allocator; None without a GPU
    reserved: int | None  # by torch's GPU allocator from the driver; None without a GPU
    device_used: int | None  # of the GPU, by anyone (`torch.cuda.mem_get_info`); None where CUDA is not initialised
    pinned: int  # by this package
    pinned_by_torch: int | None  # in torch's cache of pinned memory, in use or not; None where CUDA is not initialised
    host_resident: int  # of this process, pinned memory included


@dataclass(frozen=True)
class Traced:
    """What torch's profiler saw the device do in a phase. Time in which two things overlap counts once."""

    kernels: float  # seconds in which a kernel ran
    to_host: int  # bytes of all copies to the host, whoever asked for them
    to_host_seconds: float
    to_device: int
    to_device_seconds: float
    overlapped: float  # seconds in which a copy to the host was under way while a kernel ran


@dataclass(frozen=True)
class Phase:
    """One phase, once: a name that comes again is another phase.

    `seconds` are the host's, until the device has done all of it (unless the profile does not synchronize).
    `device_seconds` lie between two CUDA events on the current stream; copies on other streams, such as a stage's, are
    in `seconds` and in a trace. The peak of GPU memory allocated and reserved is exact, by torch's own counters; other
    figures are read at the borders of phases and at samples.
    """

    name: str  # as given to `phase`, or the hook's "load", "rebuild", "build", "pack", "activate" or "offload"
    depth: int  # how many phases it lies in
    start: float  # seconds since the profile began
    seconds: float
    device_seconds: float | None  # None without a GPU
    before: Memory
    peak: Memory
    after: Memory
    to_host: int  # bytes copied from GPUs to the host by this package
    to_device: int  # bytes copied to GPUs by vLLM as it fills slots; copies by other code show in a trace only
    error: str = ""  # the exception that ended it
    traced: Traced | None = None  # with `trace`, on a GPU

    @property
    def to_host_rate(self) -> float | None:
        """Bytes a second: while copies were under way where that was traced, else of the phase; None without a copy."""
        found = self.traced
        return _rate(found.to_host, found.to_host_seconds) if found else _rate(self.to_host, self.seconds)

    @property
    def to_device_rate(self) -> float | None:
        """Bytes a second, as `to_host_rate`."""
        found = self.traced
        return _rate(found.to_device, found.to_device_seconds) if found else _rate(self.to_device, self.seconds)

    def change(self, figure: str, when: str = "after") -> int | None:
        """Bytes of a figure of `Memory` at "peak" or "after" above what it was before; None where it is not known."""
        before, value = getattr(self.before, figure), getattr(getattr(self, when), figure)
        return None if before is None or value is None else value - before

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rates = {"to_host_rate": self.to_host_rate, "to_device_rate": self.to_device_rate}
        return dataclasses.asdict(self) | rates


@dataclass(frozen=True)
class Sample:
    """Memory at one moment."""

    seconds: float  # since the profile began
    memory: Memory


@dataclass(frozen=True)
class Profile:
    """What a profile found."""

    device: str  # name of the GPU, or "cpu"
    versions: dict[str, str]  # of torch and, where it was imported, of vllm
    total: Phase  # the whole block
    phases: tuple[Phase, ...]  # in the order in which they began
    samples: tuple[Sample, ...] = field(default=(), repr=False)  # with `sample_every`
    missing: tuple[str, ...] = ()  # what was not measured, and why
    trace: str | None = None  # files that were written
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
        """The phases directly inside one of this profile's phases."""
        later = self.phases[next(place for place, one in enumerate(self.phases) if one is phase) + 1 :]
        end = next((place for place, one in enumerate(later) if one.depth <= phase.depth), len(later))
        return tuple(one for one in later[:end] if one.depth == phase.depth + 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; bytes and seconds."""
        phases = {"total": self.total.to_dict(), "phases": [phase.to_dict() for phase in self.phases]}
        return dataclasses.asdict(self) | phases

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Read what `to_dict` gave, after JSON too.

        Raises:
            ValueError: a field is missing, by name.
        """
        return _read(cls, values)

    def to_json(self, path: str | Path | None = None) -> str:
        """JSON text of `to_dict`; written to `path` too, where one is given."""
        text = json.dumps(self.to_dict())
        if path is not None:
            Path(path).write_text(text)
        return text

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row a phase: seconds and bytes, `allocated_peak` and so on."""
        import pandas as pd

        rows = []
        for phase in self.phases:
            row = phase.to_dict()
            memory = {f"{name}_{when}": n for when in ("before", "peak", "after") for name, n in row.pop(when).items()}
            del row["traced"]
            rows.append({"phase": row.pop("name"), **row, **memory})
        return pd.DataFrame(rows)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Phases over time, nested ones below."""
        return draw(self, ax)

    def plot_memory(self, ax: Axes | None = None) -> Axes:
        """GPU and host memory over time, by the samples or else by the borders of phases."""
        from lora_mem.observe.plots import plot_memory

        return plot_memory(self, ax)

    def table(self) -> Table:
        """Caption, columns and rows: milliseconds, and MiB (peak and retained: above what a phase began with)."""
        gpu = self.total.before.allocated is not None
        traced = any(phase.traced for phase in self.phases)
        columns = ["phase", "ms"]
        columns += ["device ms", "GPU peak MiB", "GPU retained MiB", "reserved retained MiB"] if gpu else []
        columns += ["pinned MiB", "host MiB", "to host MiB", "to GPU MiB"]
        columns += ["kernels ms", "copying to host ms", "beside kernels ms"] if traced else []
        rows = []
        for phase in (*self.phases, self.total):
            row = ["  " * phase.depth + phase.name + (" (failed)" if phase.error else ""), _ms(phase.seconds)]
            if gpu:
                row += [_ms(phase.device_seconds), _mib(phase.change("allocated", "peak"), "+")]
                row += [_mib(phase.change("allocated"), "+"), _mib(phase.change("reserved"), "+")]
            pinned = (phase.change("pinned") or 0) + (phase.change("pinned_by_torch") or 0)
            row += [_mib(pinned, "+"), _mib(phase.change("host_resident"), "+")]
            row += [_mib(phase.to_host), _mib(phase.to_device)]
            if traced:
                seen = phase.traced
                row += map(_ms, (seen.kernels, seen.to_host_seconds, seen.overlapped) if seen else (None, None, None))
            rows.append(row)
        return f"Profile on {self.device}" + "".join(f"; not measured: {what}" for what in self.missing), columns, rows

    def __repr__(self) -> str:
        """A table as plain text."""
        _, columns, rows = self.table()
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [f"Profile on {self.device}"]
        for name, *figures in [columns, *rows]:
            cells = [cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True)]
            lines.append("  ".join([name.ljust(widths[0]), *cells]))
        return "\n".join(lines + [f"not measured: {reason}" for reason in self.missing])

    def _repr_html_(self) -> str:
        _, columns, rows = self.table()
        rows = [[row[0].replace("  ", "\u2003"), *row[1:]] for row in rows]
        notes = "<br>".join(f"not measured: {html.escape(reason)}" for reason in self.missing)
        caption = f"Profile on {self.device}; retained: after less before"
        return html_table(caption, columns, rows) + (f"<p>{notes}</p>" if notes else "")


@dataclass(frozen=True)
class Sync:
    """One sync of a new version of the adapter: seconds, and bytes once the adapter is active in its slot."""

    strategy: str  # "fill" is "stage" with `fill_slot`
    number: int  # from 1; the first of a strategy pays for what is reserved once
    seconds: float  # from the first tensor made to the adapter active in its slot, transport included
    transport: float  # what the transport alone takes, measured by itself just before
    receiving: float  # taking the tensors ("stage" and "fill": in turn with the transport)
    adding: float  # vLLM's `add_lora`: pack, register, slots, and for "offload" the offload
    offloading: float
    rebuilding: float  # `add_lora` after an eviction from slots and host cache
    python: float  # microseconds a tensor in receiving, without waiting for copies; 0 where nothing is received
    peak: int  # the most GPU memory above the baseline, which the slots are part of
    retained: int  # GPU memory allocated above the baseline
    retained_reserved: int  # the same, reserved
    pinned: int  # host memory pinned by this package
    pinned_by_torch: int  # torch's cache of pinned memory
    held: dict[str, dict[str, int]]  # by holder (slots, registered, staged) and device; shared bytes count once
    tokens: tuple[int, ...]  # greedy; none where nothing was generated
    rebuilt_tokens: tuple[int, ...]  # the same after the rebuild
    slots: str  # a digest of the bits of all slot buffers
    rebuilt_slots: str
    transporting: float = 0.0  # what the transport took in this sync, without waiting for its work on the device


@dataclass(frozen=True)
class Held:
    """Bytes held after one of many syncs: GPU allocated and reserved, pinned by us and by torch, host resident."""

    allocated: int
    reserved: int
    pinned: int
    pinned_by_torch: int
    resident: int


@dataclass(frozen=True)
class Bench:
    """What `lora-mem bench` found; bytes and seconds."""

    device: str  # name of the GPU, or "cpu"
    versions: dict[str, str]  # of torch, vllm and this package
    model: str  # name or path
    layers: int
    rank: int  # of the adapter
    max_lora_rank: int  # of the engine's slots
    tensors: int  # how many a sync transports
    packed_bytes: int  # of the adapter as vLLM registers it, measured
    predicted: dict[str, int]  # the calculator's bytes by holder; empty where it does not know the model
    slot_bytes: int  # measured
    reserving: float  # seconds to pin one adapter's memory
    link: float  # bytes a second of one large copy from the device to the host
    streamed: float  # bytes a second from an adapter that is on the device to its place on the host, by "stage"
    slot_copy: float  # seconds of one copy of `packed_bytes` from pinned memory to the device
    syncs: tuple[Sync, ...] = ()
    repeats: tuple[Held, ...] = ()  # after each of many more syncs by "stage" and "fill", if asked for
    skipped: dict[str, str] = field(default_factory=dict)  # strategies that were not run, and why

    @property
    def tokens_equal(self) -> bool | None:
        """Whether every sync of a version gave the same tokens, rebuilt too; None where nothing was generated."""
        if not any(sync.tokens or sync.rebuilt_tokens for sync in self.syncs):
            return None
        return self._equal(lambda sync: {sync.tokens, sync.rebuilt_tokens})

    @property
    def slots_equal(self) -> bool:
        """Whether every sync of the same version left the same bits in the slots, before and after its rebuild."""
        return self._equal(lambda sync: {sync.slots, sync.rebuilt_slots})

    def _equal(self, values: Callable[[Sync], set[Any]]) -> bool:
        by_number: dict[int, set[Any]] = defaultdict(set)
        for sync in self.syncs:
            by_number[sync.number] |= values(sync)
        return all(len(found) == 1 for found in by_number.values())

    def table(self) -> Table:
        """Caption, columns and rows: seconds, and bytes in GiB, or in MiB where the adapter is small."""
        unit, scale = ("GiB", 2**30) if self.packed_bytes >= 2**30 else ("MiB", 2**20)
        columns = ["strategy", "total s", "recv", "add", "offl.", "rebuild", "peak", "retained", "resv.", "pinned"]
        rows = []
        for sync in self.syncs:
            figures = [sync.seconds, sync.receiving, sync.adding, sync.offloading, sync.rebuilding]
            sizes = [sync.peak, sync.retained, sync.retained_reserved, sync.pinned + sync.pinned_by_torch]
            figures += [size / scale for size in sizes]
            rows.append([f"{sync.strategy} {sync.number}", *(f"{figure:.3f}" for figure in figures)])
        limit = f"{self.packed_bytes / self.link:.3f}"
        rows.append(["link limit", limit, "", "", "", f"{self.slot_copy:.3f}", "", "", "", ""])
        predicted = {name: f"{nbytes / scale:.4f}" for name, nbytes in self.predicted.items()}
        caption = (
            f"{self.model}, {self.layers} layers, rank {self.rank}, {self.tensors} tensors on {self.device}; "
            f"seconds, then {unit}. "
            f"Packed {self.packed_bytes / scale:.4f} (predicted {predicted.get('packed_bytes', 'not')}), slots "
            f"{self.slot_bytes / scale:.4f} (predicted {predicted.get('slot_bytes', 'not')})"
            + "".join(f"; {strategy} left out: {reason}" for strategy, reason in self.skipped.items())
        )
        return caption, columns, rows

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars by strategy, in seconds: first and last sync, and the rebuild."""
        return draw(self, ax)

    def _repr_html_(self) -> str:
        return html_table(*self.table())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return dataclasses.asdict(self) | {"tokens_equal": self.tokens_equal, "slots_equal": self.slots_equal}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Bench:
        """Read what `to_dict` gave, after JSON too; what it does not know is left out.

        Raises:
            ValueError: a field is missing, by name.
        """
        return _read(cls, values)


def _read(cls: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass from what `dataclasses.asdict` gave, lists in place of tuples and more keys than fields allowed."""
    hints, found, missing = _hints(cls), {}, []  # type: ignore[arg-type]
    for one in dataclasses.fields(cls):  # type: ignore[arg-type]
        key = one.name if one.name in values else _FORMERLY.get(one.name, one.name)
        if key in values:
            found[one.name] = _value(hints[one.name], values[key])
        elif one.default is one.default_factory is dataclasses.MISSING:
            missing.append(one.name)
    if missing:
        raise ValueError(f"this is no {cls.__name__}: it has no {', '.join(missing)}; write it with to_dict()")
    return cls(**found)


def _value(hint: Any, value: Any) -> Any:
    """A field's value, by its type: a dataclass, a tuple of them, or what is plain already."""
    kind = next((one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)), None)
    if isinstance(value, list | tuple):
        return tuple(_value(kind, one) for one in value)
    return _read(kind, value) if isinstance(kind, type) and isinstance(value, Mapping) else value


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes and seconds > 0 else None


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _mib(nbytes: int | None, sign: str = "") -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:{sign}.2f}"
