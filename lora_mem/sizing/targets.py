"""Which modules an adapter has factors for, by the rules that PEFT reads its config with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any


def targeted(config: dict[str, Any]) -> Callable[[str], bool]:
    """PEFT's rule for which modules an adapter has.

    `target_modules`, less `exclude_modules`, is a regular expression for the whole name, or names of which one is the
    module's or its ending; names only hold in `layers_to_transform`, where that is given. `modules_to_save` have none.
    """
    targets = config["target_modules"]
    parameters = tuple(config.get("target_parameters") or ())
    excluded = _named(config.get("exclude_modules") or ())
    saved = [re.compile(rf"(^|.*\.){name}($|\..*)") for name in config.get("modules_to_save") or ()]

    def left_out(module: str) -> bool:
        return excluded(module) or any(pattern.match(module) for pattern in saved)

    if targets == "all-linear":
        return lambda module: module.rpartition(".")[2] not in ("embed_tokens", "lm_head") and not left_out(module)
    named, in_layers = _named(targets), _in_layers(config)
    # PEFT's fused experts: gate_up_proj is stored as experts.base_layer, down_proj as experts.
    fused = any("experts" in parameter for parameter in parameters) or (
        not isinstance(targets, str) and "experts" in targets
    )

    def wanted(module: str) -> bool:
        if fused and (module.endswith((".experts", ".experts.base_layer")) or ".experts." in module):
            return True
        return named(module) and in_layers(module) and not left_out(module)

    return wanted


def _named(names: str | Iterable[str]) -> Callable[[str], bool]:
    """PEFT's rule for names of modules: a regular expression for all of one, or one of them or its ending."""
    if isinstance(names, str):
        pattern = re.compile(names)
        return lambda module: pattern.fullmatch(module) is not None
    endings = tuple(f".{name}" for name in names)
    return lambda module: f".{module}".endswith(endings) if endings else False


def _in_layers(config: dict[str, Any]) -> Callable[[str], bool]:
    """PEFT's `layers_to_transform`, by the first number in a name, or the first after one of `layers_pattern`."""
    layers = config.get("layers_to_transform")
    if isinstance(config["target_modules"], str) or layers is None or layers == []:
        return lambda module: True
    numbers = {layers} if isinstance(layers, int) else set(layers)
    patterns = config.get("layers_pattern") or []
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = [rf"(?:^|.*?\.){pattern}\.(\d+)\." for pattern in patterns] or [r".*?\.[^.]*\.(\d+)\."]

    def inside(module: str) -> bool:
        matches = (re.match(pattern, module) for pattern in found)
        match = next((match for match in matches if match), None)
        return match is not None and int(match.group(1)) in numbers

    return inside
