"""What the hook remembers in this process: staged adapters, and everything else in one place."""

from __future__ import annotations

import itertools
import json
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_mem.sizing.serving import ServedModel
from lora_mem.staging.layout import Announced, Layout, Part
from lora_mem.staging.offload import Moved
from lora_mem.staging.pinned import Arena, HostBlock
from lora_mem.vllm_hook.patches import Patches

if TYPE_CHECKING:
    from lora_mem.sizing.options import Strategy
    from lora_mem.vllm_hook.events import Recorder
    from lora_mem.vllm_hook.slots import SlotFill
    from lora_mem.vllm_hook.stage import Stage


_versions = itertools.count(1)


@dataclass(eq=False)
class StagedAdapter:
    """One version of an adapter, kept to build it again after an eviction."""

    lora_int_id: int
    name: str
    config: dict[str, Any]  # PEFT's, as plain JSON values
    version: int = field(default_factory=lambda: next(_versions))
    path: str = ""  # stands for a directory in a request for this version; "" until it is staged
    # As received, by PEFT's names; never written to, though an offload replaces device tensors by host copies.
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    # Or laid out as vLLM packs them, with the scaling in B. Where all experts share one factor the part has 1 of them.
    parts: dict[Part, torch.Tensor] = field(default_factory=dict)
    why_not_laid_out: str = ""  # why vLLM has to pack the tensors itself
    names: frozenset[str] = frozenset()  # of the tensors that it was made of
    block: HostBlock | None = None  # that the parts lie in
    from_device: bool = False  # it came from a GPU, whose memory has not been given back to the driver yet
    announced: Announced | None = None  # what its config said would come; None where nobody went by that
    fill: SlotFill | None = None  # what has filled vLLM's slot while the parts arrived
    why_not_filled: str = "not asked for"
    # Of the worker LoRA managers: which would have laid it out alike, have built this version, have built any version.
    fits: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    loaded_in: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    registered_in: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    # vLLM's models made of it that are alive: until they are gone, the block cannot be used again.
    models: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    _directory: tempfile.TemporaryDirectory[str] | None = None

    def held(self) -> list[torch.Tensor]:
        """The tensors it keeps."""
        return [*self.tensors.values(), *self.parts.values()]

    def config_directory(self) -> str:
        """A directory with this adapter's adapter_config.json and nothing else: vLLM reads the config from a file."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="lora_mem-")
            (Path(self._directory.name) / "adapter_config.json").write_text(json.dumps(self.config))
        return self._directory.name


@dataclass(eq=False)
class Process:
    """All that is remembered from call to call."""

    strategy: Strategy = "stage"
    inactive_because: str = "install() was not called in this process"  # "" while the hook handles requests
    patches: Patches = field(default_factory=Patches)
    recorders: list[tuple[Recorder, bool]] = field(default_factory=list)  # and whether they read `copied.to_device`
    # The worker LoRA managers that the hook has seen, what their models serve, and their layouts by what shapes them.
    managers: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    served: weakref.WeakKeyDictionary[Any, ServedModel] = field(default_factory=weakref.WeakKeyDictionary)
    layouts: weakref.WeakKeyDictionary[Any, dict[str, Layout]] = field(default_factory=weakref.WeakKeyDictionary)
    staged: dict[int, StagedAdapter] = field(default_factory=dict)  # complete ones, by `lora_int_id`
    # Weak: a stage that its owner has lost must not block its id.
    open_stages: weakref.WeakValueDictionary[int, Stage] = field(default_factory=weakref.WeakValueDictionary)
    offloads: dict[int, Moved] = field(default_factory=dict)  # the last one of each adapter
    # Every model of vLLM's that was made here and is alive, and those of laid-out parts: vLLM tells adapters apart by
    # id only, and an id can change hands.
    models: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    laid_out: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    # Slots under way, by vLLM's adapter manager and the adapter's id; a stage, then the adapter, keep theirs alive.
    fills_of: weakref.WeakKeyDictionary[Any, weakref.WeakValueDictionary[int, SlotFill]] = field(
        default_factory=weakref.WeakKeyDictionary
    )
    # Loads whose adapter has yet to leave the GPU: (id of the manager, adapter id). Empty but for the time of a load,
    # which is what makes a repeated `add_adapter` of a loaded adapter cost one look at it.
    armed: set[tuple[int, int]] = field(default_factory=set)
    arena: Arena = field(default_factory=Arena)  # the host memory that adapters are laid out in

    def forget(self, because: str) -> None:
        """Take every patch back and forget every adapter; what is vLLM's (managers, models) lives as long as there."""
        self.patches.take_back()
        self.inactive_because = because
        for stage in list(self.open_stages.values()):
            stage.abort()
        for known in (self.staged, self.armed, self.offloads, self.served, self.layouts, self.arena):
            known.clear()  # type: ignore[attr-defined]


process = Process()
