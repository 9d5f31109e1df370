"""A field that a config.json leaves out is sized as transformers fills it in for vLLM, or refused by its name."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

from lora_mem.errors import SizingError  # noqa: E402
from lora_mem.sizing.families import known  # noqa: E402
from lora_mem.sizing.modules import Group  # noqa: E402
from lora_mem.sizing.shapes import ModelShape, known_config  # noqa: E402

FACTS = Path(__file__).parents[1] / "facts" / "families.jsonl"
PUBLISHED = ("google/gemma-4-26B-A4B", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "MiniMaxAI/MiniMax-M2.5")


def configs() -> list[dict[str, Any]]:
    families = [json.loads(line) for line in FACTS.read_text().splitlines()]
    return [fact["config"] for fact in families if "config" in fact] + [known_config(name) for name in PUBLISHED]


def shortened(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The config itself, and without each of its fields."""
    yield "nothing", config
    for name, value in config.items():
        inner = list(value) if isinstance(value, dict) else [None]
        for field in inner:
            if {name, field} & {"architectures", "model_type"}:
                continue
            shorter = copy.deepcopy(config)
            del (shorter if field is None else shorter[name])[name if field is None else field]
            yield name if field is None else f"{name}.{field}", shorter


def filled(config: dict[str, Any]) -> dict[str, Any] | None:
    """What transformers makes of it, and would write; None where it has no class for it or refuses it."""
    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        return None
    fields = copy.deepcopy({name: value for name, value in config.items() if name != "model_type"})
    try:
        written = transformers.CONFIG_MAPPING[kind](**fields).to_dict()
    except Exception:
        return None
    architectures = config.get("architectures") or [known().model_types[str(kind)]]
    return {**json.loads(json.dumps(written, default=str)), "architectures": architectures}


def groups(config: dict[str, Any]) -> tuple[Group, ...] | str:
    try:
        return ModelShape.from_config(copy.deepcopy(config)).groups
    except SizingError as error:
        return str(error)


def test_what_a_config_leaves_out_is_what_transformers_fills_in() -> None:
    wrong, compared = [], 0
    for config in configs():
        for missing, shorter in shortened(config):
            complete = filled(shorter)
            found = groups(shorter)
            if complete is None or isinstance(found, str):
                continue
            compared += 1
            if found != groups(complete):
                wrong.append((config.get("architectures") or config["model_type"], missing))
    assert not wrong
    assert compared > 250
