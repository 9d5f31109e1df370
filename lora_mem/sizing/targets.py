"""Which modules an adapter has factors for, and of what rank, by the rules that PEFT reads its config with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from math import sqrt
from typing import TYPE_CHECKING, Any, TypeVar

from lora_mem.errors import SizingError
from lora_mem.sizing.modules import Experts, Group, Linear, Module, join
from lora_mem.sizing.shapes import ModelShape

if TYPE_CHECKING:
    from lora_mem.sizing.resolving import Resolved

Value = TypeVar("Value")


def targeted(config: dict[str, Any]) -> Callable[[str], bool]:
    """PEFT's rule for which modules an adapter has.

    `target_modules`, less `exclude_modules`, is a regular expression for the whole name, or names of which one is the
    module's or its ending; names only hold in `layers_to_transform`, where that is given. `modules_to_save` have none.
    Names of a layer's experts, here or in `target_parameters`, stand for all modules that the experts come as.
    """
    targets = config["target_modules"]
    by_name, in_layers, excluded = named(targets), _in_layers(config), named(config.get("exclude_modules") or ())
    whole = named(() if isinstance(targets, str) else targets)
    parameters = any("experts" in parameter for parameter in config.get("target_parameters") or ())
    saved = [re.compile(rf"(^|.*\.){name}($|\..*)") for name in config.get("modules_to_save") or ()]

    def wanted(module: str) -> bool:
        experts = re.match(r"(.*\.experts)(\.|$)", module)
        if experts and parameters:
            return True
        if excluded(module) or any(pattern.match(module) for pattern in saved):
            return False
        if targets == "all-linear":
            return module.rpartition(".")[2] not in ("embed_tokens", "lm_head")
        return in_layers(module) and (by_name(module) or (experts is not None and whole(experts[1])))

    return wanted


def named(names: str | Iterable[str]) -> Callable[[str], bool]:
    """PEFT's rule for names of modules: a regular expression for all of one, or one of them or its end, at a dot."""
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


# In a model: what the options of `footprint` name


def match_pattern(pattern: Iterable[tuple[str, Value]], name: str, default: Value) -> Value:
    """PEFT's rule for `rank_pattern` and `alpha_pattern`: the first key that is the name or its end, at a dot."""
    return next((value for key, value in pattern if re.match(rf"(.*\.)?({key})$", name)), default)


def scaling_of(alpha: float, rank: int, use_rslora: bool) -> float:
    """What vLLM folds into B: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    return alpha / sqrt(rank) if use_rslora else alpha / rank


def deployed(path: str, module: Module, targets: tuple[str, ...] | None) -> bool:
    """vLLM's `is_in_target_modules`: the last part of the path, the whole path, or a packed child; None: all."""
    if targets is None or path.rpartition(".")[2] in targets or path in targets:
        return True
    return isinstance(module, Linear) and any(child.name in targets for child in module.children)


FUSED = ("gate_up_proj", "down_proj")


def expert_names(module: Experts, *, fused: bool, shared: bool) -> tuple[str, ...]:
    """What an adapter calls the projections of an expert, in the order w1, w2, w3 (or gate_up, down).

    `fused` is vLLM's `is_3d_lora_weight`, `shared` its `enable_moe_shared_loras`.
    """
    if shared:
        return ("w1", "w2", "w3")
    if fused:
        return FUSED
    return ("gate_proj", "down_proj", "up_proj") if module.layout == "fused" else module.children


def child_paths(module: Module, options: Resolved, path: str, expert: int = 0) -> list[str]:
    """PEFT's path of each child of a module at `path`: of one expert, where experts have tensors of their own."""
    if isinstance(module, Linear):
        parent = path.rpartition(".")[0]
        return [join(parent, child.name) for child in module.children]
    inner = path if options.experts_in_one_tensor else f"{path}.{expert}"
    names = expert_names(module, fused=options.is_3d_lora_weight, shared=options.enable_moe_shared_loras)
    return [f"{inner}.{name}" for name in names]


def chosen(module: Module, options: Resolved) -> tuple[bool, ...]:
    """Which children of a module `target_modules` names."""
    targets, paths = options.target_modules, child_paths(module, options, module.name)
    is_named = named(() if targets == "all-linear" else targets)
    if isinstance(module, Linear):
        linear = [child.linear for child in module.children]
        return tuple(linear if targets == "all-linear" else map(is_named, paths))
    if targets == "all-linear" or is_named(module.name):
        return (True,) * len(paths)
    # A parameter is not a module: PEFT reaches it by `target_parameters`, whose names hold the parent's too.
    is_named = named([target for target in targets if "." in target or not options.experts_in_one_tensor])
    found = tuple(map(is_named, paths))
    if any(found) and not all(found):
        missing = [path.rpartition(".")[2] for path, taken in zip(paths, found, strict=True) if not taken]
        raise SizingError(
            "target_modules",
            list(targets),
            f"takes a part of each routed expert of {module.name} only; vLLM needs {', '.join(missing)} too"
            " (`experts` takes them all)",
        )
    return found


def rank_and_unscaled(module: str, options: Resolved) -> tuple[int, bool]:
    """The rank of a module, by its name in the adapter, and whether its scaling is 1: vLLM's `get_rank_and_scaling`.

    Fused experts have names of their own in the file; patterns are for those of the parameters.
    """
    if module.endswith(".experts.base_layer"):
        module = module.removesuffix(".base_layer") + ".gate_up_proj"
    elif module.endswith(".experts"):
        module += ".down_proj"
    rank = match_pattern(options.rank_pattern, module, options.rank)
    alpha = match_pattern(options.alpha_pattern, module, options.lora_alpha)
    return rank, alpha is not None and scaling_of(alpha, rank, options.use_rslora) == 1


def ranks_in_layer(
    group: Group, module: Module, layer: int, taken: tuple[bool, ...], options: Resolved
) -> tuple[tuple[int, bool], ...]:
    """The rank of each child in one layer and whether its scaling is 1; 0 and False where it is not `taken`."""
    path = group.peft_path(layer, module)
    if isinstance(module, Linear) or options.experts_in_one_tensor:
        found = [rank_and_unscaled(name, options) for name in child_paths(module, options, path)]
        return tuple((rank * is_in, one and is_in) for (rank, one), is_in in zip(found, taken, strict=True))
    # Experts of their own are stacked, which copies them: it does not matter whether they are scaled.
    if not options.rank_pattern:
        return ((options.rank, False),) * len(taken)
    experts = (child_paths(module, options, path, expert) for expert in range(module.num_experts))
    ranks = [{rank_and_unscaled(name, options)[0] for name in names} for names in zip(*experts, strict=True)]
    if any(len(different) > 1 for different in ranks):
        raise SizingError(
            "rank_pattern",
            dict(options.rank_pattern),
            f"gives the experts of {path} different ranks; vLLM refuses that",
        )
    return tuple((different.pop(), False) for different in ranks)


def check_targets(shape: ModelShape, options: Resolved) -> None:
    """Refuse a name or a pattern that no module matches: PEFT and vLLM would leave it out without a word."""
    modules = [module for _, module in shape.kinds]
    if options.target_modules != "all-linear":
        available = {path for module in modules for path in child_paths(module, options, module.name)}
        available |= {module.name for module in modules if isinstance(module, Experts)}
        for name in options.target_modules:
            if not any(map(named([name]), available)):
                known = ", ".join(sorted({path.rpartition(".")[2] for path in available}))
                reason = f"is not a module of {shape.name} that vLLM serves with LoRA; it has: {known}"
                raise SizingError("target_modules", name, reason)
    for argument, patterns in (("rank_pattern", options.rank_pattern), ("alpha_pattern", options.alpha_pattern)):
        for pattern, value in patterns:
            if not any(match_pattern([(pattern, value)], name, None) for name in _adapted(shape, options)):
                raise SizingError(argument, pattern, f"matches no module of {shape.name} that the adapter targets")


def _adapted(shape: ModelShape, options: Resolved) -> Iterator[str]:
    """PEFT's path of each module that the adapter has, experts one by one."""
    for group, module in shape.kinds:
        taken = chosen(module, options)
        one_by_one = isinstance(module, Experts) and not options.experts_in_one_tensor
        for layer in group.numbers if any(taken) else ():
            path = group.peft_path(layer, module)
            for expert in range(module.num_experts) if isinstance(module, Experts) and one_by_one else (0,):
                paths = child_paths(module, options, path, expert)
                yield from (name for name, is_in in zip(paths, taken, strict=True) if is_in)
