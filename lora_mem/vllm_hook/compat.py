"""The vLLM of this process: its version, the classes that the hook builds on, and what they can do here."""

from __future__ import annotations

import functools
import gc
import importlib
import re
from typing import Any

TESTED_VLLM = ("0.32.0", "0.33.0")
"""The first and the last vLLM release that the tests ran against."""

_MANAGERS = ("WorkerLoRAManager", "LRUCacheWorkerLoRAManager")


@functools.cache
def vllm_version() -> str | None:
    """The version of the installed vLLM, or None; imports vLLM."""
    try:
        return str(importlib.import_module("vllm").__version__)
    except ImportError:
        return None


def in_tested_range(version: str | None) -> bool:
    """Whether the tests ran against a release between `TESTED_VLLM`'s two."""
    return version is not None and _release(TESTED_VLLM[0]) <= _release(version) <= _release(TESTED_VLLM[1])


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, for comparison; 0.33.1 counts as 0.33: the hook depends on no patch release."""
    return tuple(int(number) for number in re.findall(r"\d+", version.split("+")[0])[:2])


@functools.cache
def manager_classes() -> tuple[type, ...]:
    """vLLM's worker LoRA managers: separate definitions, since `LRUCacheWorkerLoRAManager` does not call `super()`."""
    module = importlib.import_module("vllm.lora.worker_manager")
    return tuple(getattr(module, name) for name in _MANAGERS)


def adapter_manager_class() -> type:
    """What holds a worker's registered adapters and slots."""
    found: type = importlib.import_module("vllm.lora.model_manager").LoRAModelManager
    return found


def check_managers() -> None:
    """Refuse a vLLM that lacks what the hook needs.

    Raises:
        RuntimeError: says what is missing, and which releases were tested.
    """
    for method in ("_load_adapter", "add_adapter"):
        if not any(method in vars(cls) for cls in manager_classes()):
            raise RuntimeError(
                f"vLLM {vllm_version()} has no {method} on {' or '.join(_MANAGERS)}; tested are {TESTED_VLLM[0]} to "
                f"{TESTED_VLLM[1]}. Install one of these"
            )


def managers_alive() -> list[Any]:
    """Every worker LoRA manager of this process, those included that were made before `install`."""
    classes = manager_classes()
    frozen = gc.get_freeze_count() > 0
    if frozen:
        gc.unfreeze()  # vLLM freezes what is alive after start-up, which also hides it from get_objects
    try:
        return [found for found in gc.get_objects() if issubclass(type(found), classes)]
    finally:
        if frozen:
            gc.freeze()


def pins_memory() -> bool:
    """Whether vLLM pins host memory here (not without a GPU, and not under WSL)."""
    from vllm.utils import torch_utils

    return bool(torch_utils.PIN_MEMORY)
