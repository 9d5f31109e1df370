"""The hook: in-memory adapters in vLLM, and off the GPU once vLLM's LoRA slots hold them. All that knows vLLM.

`served` reads what an engine serves, `layouts` where its adapters lie in host memory, `stage` receives them, `loading`
stands in front of vLLM's own functions, `models` makes vLLM's models of what is staged, `slots` fills vLLM's slots.

vLLM's plugin loader imports this package in each of its processes, so that everything here is loaded on first use.
"""

from __future__ import annotations

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lora_mem.sizing.options import Strategy as Strategy
    from lora_mem.staging.offload import release_device_memory as release_device_memory
    from lora_mem.vllm_hook.blocks import drop_adapter as drop_adapter
    from lora_mem.vllm_hook.blocks import reserve as reserve
    from lora_mem.vllm_hook.blocks import trim as trim
    from lora_mem.vllm_hook.events import observed as observed
    from lora_mem.vllm_hook.events import recorded as recorded
    from lora_mem.vllm_hook.installation import install as install
    from lora_mem.vllm_hook.installation import status as status
    from lora_mem.vllm_hook.installation import uninstall as uninstall
    from lora_mem.vllm_hook.live import LiveAdapter as LiveAdapter
    from lora_mem.vllm_hook.live import LiveWorker as LiveWorker
    from lora_mem.vllm_hook.live import bytes_by_device as bytes_by_device
    from lora_mem.vllm_hook.live import holders as holders
    from lora_mem.vllm_hook.live import live_adapters as live_adapters
    from lora_mem.vllm_hook.live import live_managers as live_managers
    from lora_mem.vllm_hook.live import live_worker as live_worker
    from lora_mem.vllm_hook.live import lora_layers as lora_layers
    from lora_mem.vllm_hook.live import manager_of as manager_of
    from lora_mem.vllm_hook.live import places as places
    from lora_mem.vllm_hook.live import registered_ids as registered_ids
    from lora_mem.vllm_hook.live import registered_model as registered_model
    from lora_mem.vllm_hook.live import slot_buffers as slot_buffers
    from lora_mem.vllm_hook.loading import offload_in_memory_adapter as offload_in_memory_adapter
    from lora_mem.vllm_hook.models import build_model as build_model
    from lora_mem.vllm_hook.models import lively_weights as lively_weights
    from lora_mem.vllm_hook.models import pack_without_engine as pack_without_engine
    from lora_mem.vllm_hook.served import served_model as served_model
    from lora_mem.vllm_hook.stage import Stage as Stage
    from lora_mem.vllm_hook.stage import open_stage as open_stage
    from lora_mem.vllm_hook.stage import stage_adapter as stage_adapter

_ROOMS = {
    "blocks": "drop_adapter reserve trim",
    "events": "observed recorded",
    "installation": "install status uninstall",
    "live": "LiveAdapter bytes_by_device holders live_adapters live_managers live_worker lora_layers "
    "manager_of places registered_ids registered_model slot_buffers",
    "loading": "offload_in_memory_adapter",
    "models": "build_model lively_weights pack_without_engine",
    "served": "served_model",
    "stage": "Stage open_stage stage_adapter",
}
_HOME = {name: f"lora_mem.vllm_hook.{room}" for room, names in _ROOMS.items() for name in names.split()}
_HOME |= {"Strategy": "lora_mem.sizing.options", "release_device_memory": "lora_mem.staging.offload"}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(_HOME)}")
    value = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
    return value


def plugin() -> None:
    """vLLM's plugin entry point: installs the hook where `LORA_MEM=1`, else does nothing.

    vLLM calls it in each of its processes, possibly more than once. A vLLM that the hook does not fit keeps running
    without it; `status()` and one log line say why.
    """
    if os.environ.get("LORA_MEM") != "1":
        return
    try:
        from lora_mem.vllm_hook.installation import install

        install()
    except Exception as error:
        logging.getLogger(__name__).error("lora_mem is inactive: %s", error)
