"""What the hook remembers in this process, in one place."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_mem.sizing.serving import ServedModel
from lora_mem.staging.arena import Arena
from lora_mem.staging.layout import Layout
from lora_mem.staging.offload import Moved
from lora_mem.vllm_hook.patches import Patches
from lora_mem.vllm_hook.staged import StagedAdapter

if TYPE_CHECKING:
    from lora_mem.sizing.options import Strategy
    from lora_mem.vllm_hook.events import Recorder
    from lora_mem.vllm_hook.slots import SlotFill
    from lora_mem.vllm_hook.stage import Stage


@dataclass(eq=False)
class Process:
    """All that is remembered from call to call.

    Attributes:
        strategy: what `install` was asked for.
        inactive_because: why the hook handles no requests, or "".
        patches: of vLLM's classes and objects.
        recorders: of loads, and whether they read `copied.to_device`.
        managers: the worker LoRA managers that the hook has seen.
        served: what their models serve, once read.
        layouts: of adapters in their workers, by what shapes them.
        staged: complete adapters, by `lora_int_id`.
        open_stages: adapters under way. Weak: a stage that its owner has lost must not block its id.
        offloads: what the last offload of an adapter did.
        models: every model of vLLM's that was made here and is alive: vLLM tells adapters apart by id only, and an id
            can change hands.
        laid_out: of these, those made of parts that a stage laid out.
        fills_of: slots under way, by vLLM's adapter manager and the adapter's id; a stage, and then the adapter, keep
            theirs alive.
        armed: loads whose adapter has yet to leave the GPU: (id of the manager, adapter id). Empty but for the time of
            a load, which is what makes a repeated `add_adapter` of a loaded adapter cost one look at it.
        arena: the host memory that adapters are laid out in.
    """

    strategy: Strategy = "stage"
    inactive_because: str = "install() was not called in this process"
    patches: Patches = field(default_factory=Patches)
    recorders: list[tuple[Recorder, bool]] = field(default_factory=list)
    managers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    served: weakref.WeakKeyDictionary[Any, ServedModel] = field(default_factory=weakref.WeakKeyDictionary)
    layouts: weakref.WeakKeyDictionary[Any, dict[str, Layout]] = field(default_factory=weakref.WeakKeyDictionary)
    staged: dict[int, StagedAdapter] = field(default_factory=dict)
    open_stages: weakref.WeakValueDictionary[int, Stage] = field(default_factory=weakref.WeakValueDictionary)
    offloads: dict[int, Moved] = field(default_factory=dict)
    models: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    laid_out: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    fills_of: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[int, SlotFill]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    armed: set[tuple[int, int]] = field(default_factory=set)
    arena: Arena = field(default_factory=Arena)

    def forget(self, because: str) -> None:
        """Take every patch back and forget every adapter; what is vLLM's (managers, models) lives as long as there."""
        self.patches.take_back()
        self.inactive_because = because
        for stage in list(self.open_stages.values()):
            stage.abort()
        for known in (self.staged, self.armed, self.offloads, self.served, self.layouts, self.arena):
            known.clear()  # type: ignore[attr-defined]


process = Process()
