"""What a profile found, as plain data: read from JSON, tabulated and drawn without torch or vLLM."""

from __future__ import annotations

import dataclasses
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_mem.drawing import draw, html_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@dataclass(frozen=True)
class Memory:
    """Bytes at one moment, or the most in some time.

    Attributes:
        allocated: by torch's GPU allocator; None without a GPU.
        reserved: by torch's GPU allocator from the driver; None without a GPU.
        device_used: of the GPU in use by anyone (`torch.cuda.mem_get_info`); None where CUDA is not initialised.
        pinned: by this package.
        pinned_by_torch: in torch's cache of pinned memory, in use or not; None where CUDA is not initialised.
        host_resident: host memory of this process, pinned memory included.
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
        kernels: seconds in which a kernel ran.
        to_host: bytes of all copies to the host, whoever asked for them.
        to_host_seconds: in which such a copy was under way.
        to_device: bytes of all copies to the device.
        to_device_seconds: in which such a copy was under way.
        overlapped: seconds in which a copy to the host was under way while a kernel ran.
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
        name: as given to `phase`, or the hook's "load", "rebuild", "build", "pack", "activate" or "offload".
        depth: how many phases it lies in.
        start: seconds since the profile began.
        seconds: on the host, until the device has done all of it (unless the profile does not synchronize).
        device_seconds: between two CUDA events on the current stream. Copies on other streams, such as a stage's, are
            in `seconds` and in a trace. None without a GPU.
        before: memory as it began.
        peak: the most of each figure. GPU memory allocated and reserved is exact, by torch's own peak counters; the
            others are read at the borders of phases and at samples.
        after: memory as it ended.
        to_host: bytes copied from GPUs to the host by this package.
        to_device: bytes copied to GPUs by vLLM when it fills its slots. Copies by other code show in a trace only.
        error: the exception that ended it, or "".
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
        found = self.traced
        return _rate(self.to_host, self.seconds) if found is None else _rate(found.to_host, found.to_host_seconds)

    @property
    def to_device_rate(self) -> float | None:
        """Bytes a second, as `to_host_rate`."""
        found = self.traced
        return _rate(self.to_device, self.seconds) if found is None else _rate(found.to_device, found.to_device_seconds)

    def change(self, figure: str, when: str = "after") -> int | None:
        """Bytes of a figure of `Memory` at "peak" or "after" above what it was before; None where it is not known."""
        before, value = getattr(self.before, figure), getattr(getattr(self, when), figure)
        return None if before is None or value is None else value - before

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        rates = {"to_host_rate": self.to_host_rate, "to_device_rate": self.to_device_rate}
        return {**dataclasses.asdict(self), **rates}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Phase:
        """A phase from what `to_dict` gave."""
        found = {one.name: values[one.name] for one in dataclasses.fields(cls)}
        found |= {when: Memory(**values[when]) for when in ("before", "peak", "after")}
        found["traced"] = None if values["traced"] is None else Traced(**values["traced"])
        return cls(**found)


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
        versions: of torch and, where it was imported, of vllm.
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
        """The phases directly inside one of this profile's phases."""
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
        """A profile from what `to_dict` gave, as a report records it; what else is there is left out."""
        found = {one.name: values[one.name] for one in dataclasses.fields(cls) if one.name in values}
        found["total"] = Phase.from_dict(values["total"])
        found["phases"] = tuple(Phase.from_dict(phase) for phase in values["phases"])
        found["samples"] = tuple(Sample(one["seconds"], Memory(**one["memory"])) for one in values.get("samples", ()))
        found["missing"] = tuple(values.get("missing", ()))
        return cls(**found)

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
            row = phase.to_dict()
            memory = {f"{name}_{when}": n for when in ("before", "peak", "after") for name, n in row.pop(when).items()}
            rows.append({"phase": row.pop("name"), **row, **memory})
        return pd.DataFrame(rows).drop(columns="traced", errors="ignore")

    def plot(self, ax: Axes | None = None) -> Axes:
        """Phases over time, nested ones below."""
        return draw(self, ax)

    def plot_memory(self, ax: Axes | None = None) -> Axes:
        """GPU and host memory over time, by the samples or else by the borders of phases."""
        from lora_mem.observe.plots import plot_memory

        return plot_memory(self, ax)

    def table(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, columns and rows as text: milliseconds, and MiB (peak and retained: above what a phase began with)."""
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
        missing = "".join(f"; not measured: {reason}" for reason in self.missing)
        return f"Profile on {self.device}{missing}", columns, rows

    def __repr__(self) -> str:
        """A table as plain text."""
        _, columns, rows = self.table()
        widths = [max(map(len, column)) for column in zip(columns, *rows, strict=True)]
        lines = [f"Profile on {self.device}"]
        for row in [columns, *rows]:
            cells = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells[1:]]))
        return "\n".join(lines + [f"not measured: {reason}" for reason in self.missing])

    def _repr_html_(self) -> str:
        _, columns, rows = self.table()
        rows = [[row[0].replace("  ", "\u2003"), *row[1:]] for row in rows]
        notes = "".join(f"<br>not measured: {html.escape(reason)}" for reason in self.missing)
        caption = f"Profile on {self.device}; retained: after less before"
        return html_table(caption, columns, rows) + (f"<p>{notes[4:]}</p>" if notes else "")


def _rate(nbytes: int, seconds: float) -> float | None:
    return nbytes / seconds if nbytes and seconds > 0 else None


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3f}"


def _mib(nbytes: int | None, sign: str = "") -> str:
    return "" if nbytes is None else f"{nbytes / 2**20:{sign}.2f}"
