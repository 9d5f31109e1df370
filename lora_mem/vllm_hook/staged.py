"""An adapter that is staged: its tensors, and what vLLM has made of them."""

from __future__ import annotations

import itertools
import json
import tempfile
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lora_mem.staging.adapter import StagedTensors
from lora_mem.staging.layout import Announced

_versions = itertools.count(1)


@dataclass(eq=False, kw_only=True)
class StagedAdapter(StagedTensors):
    """One version of an adapter, kept to build it again after an eviction.

    Attributes:
        lora_int_id: vLLM's id for it.
        name: vLLM's name for it.
        announced: what its config said would come; None where nobody went by that.
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
    announced: Announced | None = None
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
