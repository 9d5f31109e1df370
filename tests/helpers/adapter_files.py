"""An adapter of a tiny MoE model, as shapes and as a directory whose weights file has no data."""

import json
import struct
from math import prod
from pathlib import Path
from typing import Any

from tiny_config import config

CONFIG = config(num_experts=4)

PEFT = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}

PREFIX = "base_model.model.model.layers"


def pair(module: str, inputs: int, outputs: int, rank: int = 4) -> dict[str, tuple[int, ...]]:
    return {
        f"{PREFIX}.{module}.lora_A.weight": (rank, inputs),
        f"{PREFIX}.{module}.lora_B.weight": (outputs, rank),
    }


def whole_adapter(rank: int = 4) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        shapes |= pair(f"{layer}.self_attn.q_proj", 32, 64, rank)
        shapes |= pair(f"{layer}.self_attn.o_proj", 64, 32, rank)
        for expert in range(4):
            path = f"{layer}.mlp.experts.{expert}"
            shapes |= pair(f"{path}.gate_proj", 32, 16, rank) | pair(f"{path}.up_proj", 32, 16, rank)
            shapes |= pair(f"{path}.down_proj", 16, 32, rank)
    return shapes


def put(directory: Path, header: bytes, data: int) -> Path:
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + data)
    return directory


def write(directory: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, Any] | None = None) -> Path:
    """A directory whose weights file has a header and a hole: the data must never be needed."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        size = 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    put(directory, text, offset)
    (directory / "adapter_config.json").write_text(json.dumps(PEFT if config is None else config), encoding="utf-8")
    return directory
