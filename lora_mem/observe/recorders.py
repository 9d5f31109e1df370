"""What a profile can record beside its phases: torch's trace, a snapshot of CUDA memory, memory over time."""

from __future__ import annotations

import gzip
import inspect
import json
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from lora_mem.observe.traces import load_trace
from lora_mem.staging.pinned import HostBlock

_MOST_SNAPSHOT_ENTRIES = 100_000
_WITHOUT_OPS = ("user_annotation", "gpu_user_annotation", "kernel", "gpu_memcpy", "gpu_memset")


def trace_file(path: Path) -> Path:
    """Where a trace goes: a file as it is; in a directory a new one, with a name that TensorBoard's plugin finds."""
    return path if path.suffix else path / f"lora_mem_{os.getpid()}.{time.time_ns()}.pt.trace.json.gz"


@contextmanager
def tracing(path: Path, *, ops: bool) -> Iterator[None]:
    """Write a Chrome trace of the block by torch's profiler; without `ops` phases, kernels and copies only."""
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError("trace: a torch profiler is running already, and torch has one at a time; end it first")
    tracer = torch.profiler.profile()  # of CPU and, where there is one, GPU
    try:
        with tracer:
            yield
    finally:
        path.parent.mkdir(parents=True, exist_ok=True)
        tracer.export_chrome_trace(str(path))
        if not ops:
            trace = load_trace(path)
            events = trace["traceEvents"]
            trace["traceEvents"] = [e for e in events if e.get("ph") == "M" or e.get("cat") in _WITHOUT_OPS]
            text = json.dumps(trace).encode()
            path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)


@contextmanager
def snapshotting(path: Path) -> Iterator[str]:
    """Write a snapshot of CUDA memory, with pinned memory where it is recorded; yields what will lack, or ""."""
    record = torch.cuda.memory._record_memory_history
    missing = ""
    options: dict[str, Any] = {"stacks": "python", "max_entries": _MOST_SNAPSHOT_ENTRIES}
    if "record_pinned_host_memory" in inspect.signature(record).parameters:
        options["record_pinned_host_memory"] = True
    else:
        missing = f"torch's own pinned memory in the snapshot: torch {torch.__version__} does not record it there"
    blocks: list[dict[str, Any]] = []

    def watch(address: int, nbytes: int) -> None:
        entry = {"action": "alloc" if nbytes > 0 else "free_completed", "addr": address, "size": abs(nbytes)}
        frame = {"name": "HostBlock", "filename": "lora_mem/staging/pinned.py", "line": 0}
        blocks.append(entry | {"stream": 0, "time_us": time.time_ns() // 1000, "frames": [frame]})

    if HostBlock.pinned_bytes:
        watch(1, HostBlock.pinned_bytes)
    record(**options)
    HostBlock.watchers.append(watch)
    try:
        yield missing
    finally:
        HostBlock.watchers.remove(watch)
        snapshot = torch.cuda.memory._snapshot()
        record(enabled=None)
        # Shown by the viewer as one more device, after the GPUs: the host's side of an offload.
        snapshot["device_traces"].append(blocks)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(pickle.dumps(snapshot))


@contextmanager
def sampling(seconds: float, sample: Callable[[], None]) -> Iterator[None]:
    """Call `sample` in a thread as often as that, from the block's beginning on, and once more at its end."""
    stop = threading.Event()

    def run() -> None:
        sample()
        while not stop.wait(seconds):
            sample()

    thread = threading.Thread(target=run, name="lora_mem profile", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        sample()
