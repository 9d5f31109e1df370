"""The tensors of one adapter that are kept to build it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from lora_mem.staging.layout import Part
from lora_mem.staging.pinned import HostBlock


@dataclass(eq=False)
class StagedTensors:
    """The tensors of one adapter: as received, or laid out as vLLM packs them.

    Attributes:
        config: PEFT's adapter_config as plain JSON values.
        tensors: as received, by PEFT's names; empty where `parts` is not. Never written to; an offload replaces device
            tensors by host copies.
        names: of the tensors that it was made of.
        parts: laid out; the scaling is in B. A part whose experts all share one factor has 1 in place of their number.
        block: what the parts lie in.
        from_device: tensors came from a GPU, whose memory has not been given back to the driver yet.
        why_not_laid_out: why vLLM has to pack the tensors itself, or "".
    """

    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    names: frozenset[str] = frozenset()
    parts: dict[Part, torch.Tensor] = field(default_factory=dict)
    block: HostBlock | None = None
    from_device: bool = False
    why_not_laid_out: str = ""

    def held(self) -> list[torch.Tensor]:
        """The tensors it keeps."""
        return [*self.tensors.values(), *self.parts.values()]
