"""What the hook remembers in this process; filled by `lora_mem.vllm_hook`, read by all of it."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from lora_mem.sizing.serving import ServedModel
from lora_mem.vllm_hook.staged import StagedAdapter

if TYPE_CHECKING:
    from lora_mem.vllm_hook.slots import SlotFill

staged: dict[int, StagedAdapter] = {}
"""Complete adapters, by `lora_int_id`."""

managers: weakref.WeakSet[Any] = weakref.WeakSet()
"""The worker LoRA managers that the hook has seen."""

served: weakref.WeakKeyDictionary[Any, ServedModel] = weakref.WeakKeyDictionary()
"""What their models serve, once read."""

laid_out: weakref.WeakSet[Any] = weakref.WeakSet()
"""vLLM's models that were made of parts which a stage laid out, of whichever version."""

fills_of: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[int, SlotFill]] = weakref.WeakKeyDictionary()
"""By vLLM's adapter manager and the adapter's id; a stage, and then the adapter, keep theirs alive."""
