"""What torch's traces say of phases: when the device ran kernels and copied, and what ran. Reads without torch."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_mem.observe.results import Traced

RANGE = "lora_mem: "  # before a phase's name in a trace

Event = dict[str, Any]
Span = tuple[float, float]  # begin and end

# What a device does: the category of its events, and what their names contain.
_DEVICE = {"kernels": ("kernel", ""), "to host": ("gpu_memcpy", "DtoH"), "to device": ("gpu_memcpy", "HtoD")}


@dataclass(frozen=True)
class TracedPhase:
    """A phase in a trace: its name, when it began (seconds since the trace's first event), its seconds, what ran."""

    name: str
    start: float
    seconds: float
    traced: Traced


def read_trace(path: str | Path) -> tuple[TracedPhase, ...]:
    """The phases in a trace that `profile` wrote, in the order in which they began, the whole block first."""
    events = _events(path)
    kernels, to_host, to_device = (_of_device(events, kind) for kind in _DEVICE)
    found = []
    for event in _ranges(events):
        begin, end = event["ts"], event["ts"] + event["dur"]
        busy, down, up = (_spans(kind, begin, end) for kind in (kernels, to_host, to_device))
        traced = Traced(
            kernels=_length(busy),
            to_host=_bytes(to_host, begin, end),
            to_host_seconds=_length(down),
            to_device=_bytes(to_device, begin, end),
            to_device_seconds=_length(up),
            overlapped=_length(busy) + _length(down) - _length(_union(busy + down)),
        )
        found.append(TracedPhase(_name(event), begin / 1e6, (end - begin) / 1e6, traced))
    return tuple(found)


def read_device(path: str | Path) -> dict[str, tuple[Span, ...]]:
    """When the device ran kernels, copied to the host and to the device: seconds since the trace's first event.

    Of each kind (begin, end) of intervals that do not touch.
    """
    events = _events(path)
    spans = {kind: _spans(_of_device(events, kind), 0, float("inf")) for kind in _DEVICE}
    return {kind: tuple((begin / 1e6, end / 1e6) for begin, end in found) for kind, found in spans.items()}


def trace_frame(path: str | Path) -> Any:
    """What ran in a trace that `profile` wrote, by phase, as a pandas DataFrame, the longest first.

    Columns: phase (the innermost), kind ("op": torch's outermost operators on the host; "kernel" and "copy" on the
    device), name, calls, milliseconds.
    """
    import pandas as pd

    events = _events(path)
    ranges = _ranges(events)
    rows = []
    ended: dict[Any, float] = {}
    for event in events:
        kind = {"cpu_op": "op", "kernel": "kernel", "gpu_memcpy": "copy"}.get(str(event.get("cat")))
        around = [r for r in ranges if r["ts"] <= event["ts"] < r["ts"] + r["dur"]]
        if kind is None or not around:
            continue
        if kind == "op":
            if event["ts"] < ended.get(event["tid"], 0):
                continue  # inside another operator
            ended[event["tid"]] = event["ts"] + event["dur"]
        rows.append((_name(around[-1]), kind, event["name"], event["dur"] / 1e3))
    columns = ["phase", "kind", "name"]
    times = pd.DataFrame(rows, columns=[*columns, "milliseconds"]).groupby(columns, sort=False).milliseconds
    frame = times.agg(calls="count", milliseconds="sum").reset_index()
    return frame.sort_values("milliseconds", ascending=False, ignore_index=True)


def load_trace(path: Path) -> dict[str, Any]:
    """A Chrome trace, `.json` or `.json.gz`, as it is."""
    text = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(text) if path.suffix == ".gz" else text)
    return trace


def _events(path: str | Path) -> list[Event]:
    """What has a duration, the outer before the inner; microseconds since the first began."""
    events = [event for event in load_trace(Path(path))["traceEvents"] if event.get("ph") == "X"]
    zero = min((event["ts"] for event in events), default=0)
    return sorted(({**e, "ts": e["ts"] - zero} for e in events), key=lambda e: (e["ts"], -e["dur"]))


def _ranges(events: Iterable[Event]) -> list[Event]:
    return [e for e in events if e.get("cat") == "user_annotation" and str(e["name"]).startswith(RANGE)]


def _name(event: Event) -> str:
    return str(event["name"]).removeprefix(RANGE)


def _of_device(events: Iterable[Event], kind: str) -> list[Event]:
    category, direction = _DEVICE[kind]
    return [event for event in events if event.get("cat") == category and direction in event["name"]]


def _spans(events: Iterable[Event], begin: float, end: float) -> list[Span]:
    """When any of these ran between two times, as intervals that do not touch."""
    within = [(max(begin, event["ts"]), min(end, event["ts"] + event["dur"])) for event in events]
    return _union([(first, last) for first, last in within if first < last])


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


def _bytes(events: Iterable[Event], begin: float, end: float) -> int:
    """Of the copies that began between two times."""
    return sum(int(event["args"]["bytes"]) for event in events if begin <= event["ts"] < end)
