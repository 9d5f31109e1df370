"""An adapter that is staged: its tensors on the host, and what vLLM has made of it."""

from __future__ import annotations

import itertools
import json
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lora_mem.staging.layout import Part
from lora_mem.staging.pinned import HostBlock

_versions = itertools.count(1)


@dataclass(eq=False)
class StagedAdapter:
    """One adapter, kept to build it again after an eviction: as received, or laid out as vLLM packs it.

    Attributes:
        lora_int_id: vLLM's id for it.
        name: vLLM's name for it.
        config: PEFT's adapter_config as plain JSON values.
        tensors: as received, by PEFT's names; empty where `parts` is not. Never written to; an offload replaces device
            tensors by host copies.
        names: of the tensors that it was made of.
        parts: laid out; the scaling is in B. A part whose experts all share one factor has 1 in place of their number.
        block: what the parts lie in.
        from_device: tensors came from a GPU, whose memory has not been given back to the driver yet.
        why_not_laid_out: why vLLM has to pack the tensors itself.
        predicted: bytes that the calculator said its parts take, before they came; None where it did not.
        not_predicted_because: why not, or "".
        version: counts every stage in this process.
        path: stands for a directory in a request for this version; "" until it is staged.
        fits: worker LoRA managers of which it is known that the parts are what they would have laid out.
        loaded_in: worker LoRA managers that have built it from this version.
        registered_in: worker LoRA managers that have built it from this or an earlier version.
        models: vLLM's models made of `parts` that are alive: until they are gone, the block cannot be used again.
        fill: what has filled vLLM's slot while the parts arrived; None where nothing was to.
        why_not_filled: why not, or "".
    """

    lora_int_id: int
    name: str
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    parts: dict[Part, torch.Tensor] = field(default_factory=dict)
    block: HostBlock | None = None
    from_device: bool = False
    why_not_laid_out: str = ""
    predicted: int | None = None
    not_predicted_because: str = ""
    version: int = field(default_factory=lambda: next(_versions))
    path: str = ""
    fits: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    loaded_in: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    registered_in: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    models: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    fill: Any = None
    why_not_filled: str = "not asked for"
    _directory: tempfile.TemporaryDirectory[str] | None = None

    def config_directory(self) -> str:
        """A directory with this adapter's adapter_config.json and nothing else: vLLM reads the config from a file."""
        if self._directory is None:
            self._directory = tempfile.TemporaryDirectory(prefix="lora_mem-")
            (Path(self._directory.name) / "adapter_config.json").write_text(json.dumps(self.config))
        return self._directory.name

    def held(self) -> list[torch.Tensor]:
        """The tensors it keeps."""
        return [*self.tensors.values(), *self.parts.values()]
