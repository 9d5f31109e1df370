"""The memory of LoRA adapters in vLLM: every byte calculated, and in-memory adapters moved off the GPU.

Everything here is loaded on first use, so `import lora_mem` needs neither torch nor vllm.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lora_mem.version import __version__ as __version__

if TYPE_CHECKING:
    from lora_mem.errors import AdapterError as AdapterError
    from lora_mem.errors import SizingError as SizingError
    from lora_mem.observe.measuring import measure as measure
    from lora_mem.observe.profiler import profile as profile
    from lora_mem.sizing.adapters import read_adapter as read_adapter
    from lora_mem.sizing.footprints import footprint as footprint
    from lora_mem.sizing.options import Options as Options
    from lora_mem.sizing.planning import plan as plan
    from lora_mem.sizing.shapes import ModelShape as ModelShape
    from lora_mem.vllm_hook import drop_adapter as drop_adapter
    from lora_mem.vllm_hook import install as install
    from lora_mem.vllm_hook import offload_in_memory_adapter as offload_in_memory_adapter
    from lora_mem.vllm_hook import open_stage as open_stage
    from lora_mem.vllm_hook import reserve as reserve
    from lora_mem.vllm_hook import stage_adapter as stage_adapter
    from lora_mem.vllm_hook import status as status
    from lora_mem.vllm_hook import trim as trim
    from lora_mem.vllm_hook import uninstall as uninstall
    from lora_mem.worker import WorkerExtension as WorkerExtension

_ROOMS = {
    "errors": "AdapterError SizingError",
    "observe.measuring": "measure",
    "observe.profiler": "profile",
    "sizing.adapters": "read_adapter",
    "sizing.footprints": "footprint",
    "sizing.options": "Options",
    "sizing.planning": "plan",
    "sizing.shapes": "ModelShape",
    "vllm_hook": "drop_adapter install offload_in_memory_adapter open_stage reserve stage_adapter status trim "
    "uninstall",
    "worker": "WorkerExtension",
}
_HOME = {name: f"lora_mem.{room}" for room, names in _ROOMS.items() for name in names.split()}

__all__ = [*_HOME]


if not TYPE_CHECKING:  # to a type checker the names are those above, and no others

    def __getattr__(name: str) -> Any:
        if name not in _HOME:
            raise AttributeError(f"module 'lora_mem' has no attribute {name!r}; it has {', '.join(__all__)}")
        # Kept, so that the next access does not come through here.
        value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext lora_mem`: the cell magic `%%lora_mem`, which profiles a cell by phase."""
    from lora_mem.observe.magic import register

    register(shell)
