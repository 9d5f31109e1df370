"""The memory of LoRA adapters in vLLM: every byte calculated, and in-memory adapters moved off the GPU.

Everything here is loaded on first use, so `import lora_mem` needs neither torch nor vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "ModelShape": "shapes",
    "footprint": "footprints",
    "measure": "measuring",
    "install": "vllm_hook",
    "uninstall": "vllm_hook",
    "status": "vllm_hook",
    "stage_adapter": "vllm_hook",
    "open_stage": "vllm_hook",
    "drop_adapter": "vllm_hook",
    "offload_in_memory_adapter": "vllm_hook",
    "profile": "profiling",
}

__all__ = sorted(_HOME)

if TYPE_CHECKING:
    from lora_mem.footprints import footprint as footprint
    from lora_mem.shapes import ModelShape as ModelShape


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'lora_mem' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(f"lora_mem.{_HOME[name]}"), name)
    # Kept, so that the next access does not come through here.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext lora_mem`: the cell magic `%%lora_mem`, which profiles a cell by phase."""
    from lora_mem.magic import register

    register(shell)
