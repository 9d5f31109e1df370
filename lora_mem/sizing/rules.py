"""Whether a model can serve an adapter, decided before anything is changed.

Nothing here knows vLLM or torch: `vllm_hook` says what a live model serves (`ServedModel`) and how names are read.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from lora_mem.errors import AdapterError

_LISTED = 12


@dataclass(frozen=True)
class TensorName:
    """What the name of an adapter's tensor says.

    Attributes:
        module: the module in the model's own naming, e.g. `model.layers.0.self_attn.q_proj`.
        peft_module: the module in the adapter's naming; PEFT's rank and alpha patterns match against this.
        is_a: whether it is the A factor; meaningless for a full module.
        is_full: a whole weight or bias (`modules_to_save`), not a factor.
    """

    module: str
    peft_module: str
    is_a: bool
    is_full: bool = False


_EVERYTHING = slice(None)


@dataclass(frozen=True)
class ServedModule:
    """Where one module of an adapter goes, and what its factors must look like.

    Attributes:
        in_features: columns of A, or None where they cannot be known.
        out_features: rows of B, or None where they cannot be known.
        experts: how many experts are stacked along the rank (PEFT's fused layout), or 1.
        stacked: factors carry a leading expert dimension, of one of these sizes: (A's, B's).
        rank_multiple: the rank must be a multiple of this.
        packed_in: the runtime module whose packed experts it becomes part of; "" where it is registered by its own
        name.
        projections: which of that module's projections it becomes, each with the rows of B that belong to it.
        expert: its place among this worker's experts, where each expert comes by itself; -1 on another worker.
        local: this worker's experts among those stacked in one tensor.
    """

    in_features: int | None
    out_features: int | None
    experts: int = 1
    stacked: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    rank_multiple: int = 1
    packed_in: str = ""
    projections: tuple[tuple[int, slice], ...] = ((0, _EVERYTHING),)
    expert: int | None = None
    local: slice = field(default_factory=lambda: _EVERYTHING)  # one object for all


@dataclass(frozen=True)
class ServedModel:
    """What one vLLM worker serves with LoRA.

    Attributes:
        modules: by the name that an adapter uses.
        complete: sets of modules of which an adapter must have all or none: a layer's local experts. By runtime module.
        either: pairs of runtime modules' layouts of which an adapter may use one only.
        ignored: whether vLLM ignores a module of this name by design (other pipeline ranks, `target_modules`, MTP).
        max_lora_rank: of the engine.
        expert_help: what to say where expert modules are not known.
        dtype: torch's name of that to which vLLM casts every factor.
        local_experts: how many experts this worker holds, by runtime module.
        projections: how many projections vLLM registers, by runtime module (3: w1, w2, w3; 2: fused w13, w2).
        repeated: projections that are another one's tensor, by runtime module: {2: 0} for w3 of a non-gated MoE.
        share: whether a factor that all experts share may stay one tensor on the host.
        aliases: names in `modules` that are second names.
    """

    modules: Mapping[str, ServedModule]
    complete: Mapping[str, tuple[frozenset[str], ...]]
    ignored: Callable[[str], bool]
    max_lora_rank: int
    expert_help: str = ""
    dtype: str = "bfloat16"
    local_experts: Mapping[str, int] = field(default_factory=dict)
    projections: Mapping[str, int] = field(default_factory=dict)
    repeated: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    share: bool = True
    aliases: frozenset[str] = frozenset()

    def unknown(self, modules: Collection[str]) -> str:
        """What to say of modules that are not served: all of them, and what is."""
        known = sorted({module.rpartition(".")[2] for module in self.modules})
        message = (
            f"{len(modules)} module{'s' if len(modules) > 1 else ''} that this model does not serve with LoRA: "
            f"{', '.join(compact(modules))}. It serves modules named {', '.join(known)}"
        )
        if self.expert_help and any(".experts" in module for module in modules):
            message += f". {self.expert_help}"
        return message


def plain_config(adapter_config: Any) -> dict[str, Any]:
    """PEFT's adapter config as plain JSON values.

    Args:
        adapter_config: a dict, a `peft.LoraConfig`, or any dataclass or object with PEFT's field names.

    Raises:
        AdapterError: not such an object, or `r` or `lora_alpha` is missing or not a positive number.
    """
    if isinstance(adapter_config, Mapping):
        values = dict(adapter_config)
    elif callable(getattr(adapter_config, "to_dict", None)):
        values = dict(adapter_config.to_dict())
    elif dataclasses.is_dataclass(adapter_config) and not isinstance(adapter_config, type):
        values = dataclasses.asdict(adapter_config)
    elif hasattr(adapter_config, "__dict__") and not isinstance(adapter_config, type):
        values = dict(vars(adapter_config))
    else:
        raise AdapterError(
            f"adapter_config is a {type(adapter_config).__name__}; it must be a dict as in adapter_config.json or an "
            "object with PEFT's fields, such as peft.LoraConfig"
        )
    for name, kind, words in (("r", Integral, "a positive integer"), ("lora_alpha", Real, "a positive number")):
        if not _is_positive(values.get(name), kind):
            raise AdapterError(f"adapter_config[{name!r}] is {values.get(name)!r}; it must be {words}")
        pattern = f"{'rank' if name == 'r' else 'alpha'}_pattern"
        entries = values.get(pattern) or {}
        if not isinstance(entries, Mapping):
            raise AdapterError(f"adapter_config[{pattern!r}] is {entries!r}; it must be a dict of patterns to numbers")
        for key, value in entries.items():
            _check_pattern(f"a key of adapter_config[{pattern!r}]", key)
            if not _is_positive(value, kind):
                raise AdapterError(f"adapter_config[{pattern!r}][{key!r}] is {value!r}; it must be {words}")
    peft_type = getattr(values.get("peft_type"), "value", values.get("peft_type"))
    if peft_type not in (None, "LORA"):
        raise AdapterError(f"adapter_config['peft_type'] is {peft_type!r}; vLLM serves LORA only")
    if not isinstance(values.get("use_rslora", False), (bool, type(None))):
        raise AdapterError(f"adapter_config['use_rslora'] is {values['use_rslora']!r}; it must be True or False")
    # vLLM asks for the field but takes the modules from the tensors' names.
    values["target_modules"] = values.get("target_modules") or []
    for name, also in (("target_modules", ", or 'all-linear'"), ("exclude_modules", "")):
        names = values.get(name) or []
        if isinstance(names, str):
            _check_pattern(f"adapter_config[{name!r}]", names)
        elif not isinstance(names, (list, tuple, set, frozenset)) or not all(isinstance(one, str) for one in names):
            raise AdapterError(
                f"adapter_config[{name!r}] is {names!r}; it must be a list of names or a regular expression{also}"
            )
    layers = values.get("layers_to_transform")
    if layers is not None and not all(
        isinstance(layer, Integral) for layer in (layers if isinstance(layers, (list, tuple)) else [layers])
    ):
        raise AdapterError(
            f"adapter_config['layers_to_transform'] is {layers!r}; it must be the number of a layer, or a list of them"
        )
    try:
        plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
    except (TypeError, ValueError) as error:
        raise AdapterError(f"adapter_config is not plain values, as in adapter_config.json: {error}") from None
    return plain


def _is_positive(value: Any, kind: type) -> bool:
    if not isinstance(value, kind) or isinstance(value, bool):
        return False
    number: Any = value
    return 0 < float(number) < float("inf")


def _check_pattern(what: str, pattern: Any) -> None:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        raise AdapterError(f"{what} is {pattern!r}, which is no regular expression: {error}") from None


def check_adapter(
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, TensorName],
    rank_of: Callable[[str], int],
    served: ServedModel | None,
) -> None:
    """Refuse an adapter that the model cannot serve in full.

    Args:
        shapes: of the tensors, by their names.
        names: what each name says; a tensor that is not in here is ignored by vLLM by design.
        rank_of: the rank that the adapter's config gives a module (`peft_module`).
        served: what the model serves, or None where no model is known yet: then only the adapter itself is checked.

    Raises:
        AdapterError: all problems of the kind that was found first, with the values and what is allowed.
    """
    factors: dict[str, dict[bool, str]] = {}
    twice: list[str] = []
    for tensor_name, name in names.items():
        if name.is_full or (served is not None and served.ignored(name.module)):
            continue
        pair = factors.setdefault(name.module, {})
        if name.is_a in pair:
            twice.append(f"{pair[name.is_a]} and {tensor_name}")
        pair[name.is_a] = tensor_name
    if twice:
        raise AdapterError(f"two tensors for the same factor: {some(twice)}")
    if not factors and not any(name.is_full for name in names.values()):
        raise AdapterError("the adapter has no factor (lora_A, lora_B) that this model would use")

    if served is not None:
        unknown = [module for module in factors if module not in served.modules]
        if unknown:
            raise AdapterError(served.unknown(unknown))

    halves = [
        f"{next(iter(pair.values()))} has no {'B' if True in pair else 'A'}"
        for pair in factors.values()
        if len(pair) == 1
    ]
    if halves:
        raise AdapterError(f"a factor is missing: {some(halves)}")

    wrong: list[str] = []
    for module, pair in factors.items():
        expected = served.modules[module] if served is not None else None
        rank = rank_of(names[pair[True]].peft_module)
        if served is not None and rank > served.max_lora_rank:
            raise AdapterError(
                f"rank {rank} of {module} is above the engine's max_lora_rank {served.max_lora_rank}; start vLLM with "
                f"max_lora_rank of {rank} or more"
            )
        wrong += _wrong_shapes(module, shapes[pair[True]], shapes[pair[False]], rank, expected)
    if wrong:
        raise AdapterError(f"shapes that do not fit: {some(wrong)}")

    if served is not None:
        for runtime_module, layouts in served.complete.items():
            present = [(layout, layout & factors.keys()) for layout in layouts]
            used = [(layout, have) for layout, have in present if have]
            if len(used) > 1:
                raise AdapterError(f"{runtime_module} is given in two layouts at once; vLLM takes one")
            if used and used[0][0] != used[0][1]:
                missing = sorted(used[0][0] - used[0][1])
                raise AdapterError(
                    f"{runtime_module} has factors for some experts but not for {some(missing)}; vLLM packs all of a "
                    "layer's experts or none"
                )


def _wrong_shapes(
    module: str, a: tuple[int, ...], b: tuple[int, ...], rank: int, expected: ServedModule | None
) -> list[str]:
    leading = 0
    if expected is not None and expected.stacked is not None:
        leading = 1
        for letter, shape, allowed in (("A", a, expected.stacked[0]), ("B", b, expected.stacked[1])):
            if len(shape) != 3 or shape[0] not in allowed:
                return [f"{module} {letter} is {list(shape)}, its first dimension must be one of {list(allowed)}"]
    if len(a) != 2 + leading or len(b) != 2 + leading:
        return [f"{module} A is {list(a)} and B is {list(b)}, each must have {2 + leading} dimensions"]
    experts = expected.experts if expected is not None else None
    if experts is None:
        # Without a model PEFT's fused experts cannot be told from a wrong rank; both factors must still agree.
        experts = a[0] // rank if rank and a[0] % rank == 0 else 1
    problems = []
    in_features = a[-1] if expected is None or expected.in_features is None else expected.in_features
    out_features = b[-2] if expected is None or expected.out_features is None else expected.out_features
    expected_a = [*a[:leading], experts * rank, in_features]
    expected_b = [*b[:leading], out_features, experts * rank]
    if list(a) != expected_a:
        problems.append(f"{module} A is {list(a)}, expected {expected_a} (rank {rank} by its config)")
    if list(b) != expected_b:
        problems.append(f"{module} B is {list(b)}, expected {expected_b} (rank {rank} by its config)")
    if expected is not None and rank % expected.rank_multiple:
        problems.append(
            f"{module} has rank {rank}, with fully_sharded_loras it must be a multiple of tensor_parallel_size "
            f"{expected.rank_multiple}"
        )
    return problems


def compact(modules: Iterable[str]) -> list[str]:
    """Module names with numbers written as ranges where many differ in nothing else: `layers.{0-47}.mlp.gate (48)`."""
    alike: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for module in sorted(modules):
        parts = re.split(r"(?<=\.)(\d+)(?=\.)", module)
        alike.setdefault(tuple(parts[::2]), []).append(tuple(int(number) for number in parts[1::2]))
    lines = []
    for words, numbers in alike.items():
        if len(numbers) <= 3:
            ranges = [[str(number) for number in one] for one in numbers]
        else:
            columns = [sorted(set(column)) for column in zip(*numbers, strict=True)]
            ranges = [[_ranges(column) for column in columns]]
        for one in ranges:
            line = "".join(itertools.chain(*itertools.zip_longest(words, one, fillvalue="")))
            lines.append(line if len(ranges) == len(numbers) else f"{line} ({len(numbers)} modules)")
    return lines


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    gapless = numbers[-1] - numbers[0] + 1 == len(numbers)
    return "{" + (f"{numbers[0]}-{numbers[-1]}" if gapless else ",".join(map(str, numbers))) + "}"


def some(items: Iterable[str]) -> str:
    """The first twelve, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more


def _plain(value: Any) -> Any:
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (Integral, Real)):
        return value.item() if hasattr(value, "item") else float(value)  # numpy's
    if type(value).__name__ == "dtype":  # torch's, which is not imported here
        return str(value).removeprefix("torch.")
    if hasattr(value, "value"):
        return value.value  # PEFT's enums
    if callable(getattr(value, "to_dict", None)):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return str(value)
