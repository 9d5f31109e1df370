"""PEFT's config of an adapter (`adapter_config.json`): one reading of it, and what vLLM refuses in it."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from numbers import Integral, Real
from typing import Any

from lora_mem.errors import AdapterError

UNSUPPORTED = {
    "use_dora": "vLLM has no DoRA",
    "lora_bias": "vLLM has no bias in LoRA",
    "alora_invocation_tokens": "vLLM has no activated LoRA (aLoRA)",
    "layer_replication": "vLLM has no layer_replication",
    "use_bdlora": "vLLM has no block-diagonal LoRA (BD-LoRA)",
    "use_qalora": "vLLM has no QALoRA",
}
"""PEFT's features that vLLM reads only to refuse them."""

PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")
"""PEFT's inits that leave the base model's weights as they are; others change them, which vLLM does not do."""


def plain_config(adapter_config: Any) -> dict[str, Any]:
    """PEFT's adapter config as plain JSON values.

    Args:
        adapter_config: a dict, a `peft.LoraConfig`, or any dataclass or object with PEFT's field names.

    Raises:
        AdapterError: not such an object, or a field is not as PEFT has it.
    """
    values = _fields(adapter_config)
    if values is None:
        raise AdapterError(
            f"adapter_config is a {type(adapter_config).__name__}; it must be a dict as in adapter_config.json or an "
            "object with PEFT's fields, such as peft.LoraConfig"
        )
    for (name, *keys), value, allowed in problems(values):
        where = "".join(f"[{key!r}]" for key in (name, *keys))
        raise AdapterError(f"adapter_config{where} is {value!r}; it {allowed}")
    # vLLM asks for the field but takes the modules from the tensors' names.
    values = {**values, "target_modules": values.get("target_modules") or []}
    try:
        plain: dict[str, Any] = json.loads(json.dumps(values, default=_plain))
    except (TypeError, ValueError) as error:
        raise AdapterError(f"adapter_config is not plain values, as in adapter_config.json: {error}") from None
    return plain


def problems(config: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], object, str]]:
    """What is not as PEFT has it: the field (and the key in it), its value, and what it must be."""
    for name, pattern, words, is_right in (
        ("r", "rank_pattern", "a positive integer", _is_positive_integer),
        ("lora_alpha", "alpha_pattern", "a positive number", _is_positive),
    ):
        if not is_right(config.get(name)):
            yield (name,), config.get(name), f"must be {words}"
        entries = config.get(pattern) or {}
        a_dict = f"must be a dict of names or regular expressions, each with {words}"
        if not isinstance(entries, Mapping):
            yield (pattern,), entries, a_dict
            continue
        for key, value in entries.items():
            if why_not := _no_pattern(rf"(.*\.)?({key})$" if isinstance(key, str) else key):
                yield (pattern,), {key: value}, f"{a_dict} ({why_not})"
            if not is_right(value):
                yield (pattern, key), value, f"must be {words}"
    peft_type = getattr(config.get("peft_type"), "value", config.get("peft_type"))
    if peft_type not in (None, "LORA"):
        yield ("peft_type",), peft_type, "must be LORA: vLLM serves no other"
    if not isinstance(config.get("use_rslora"), bool | None):
        yield ("use_rslora",), config["use_rslora"], "must be True or False"
    for name, also in (("target_modules", ", or 'all-linear'"), ("exclude_modules", "")):
        names = config.get(name) or ()
        why_not = f" ({_no_pattern(names)})" if isinstance(names, str) and _no_pattern(names) else ""
        if why_not or not (isinstance(names, str) or _are(str, names)):
            yield (name,), names, f"must be a list of names or a regular expression{also}{why_not}"
    saved, layers = config.get("modules_to_save"), config.get("layers_to_transform")
    if not _are(str, saved or ()):
        yield ("modules_to_save",), saved, "must be a list of names, or null"
    if layers is not None and not isinstance(layers, Integral) and not _are(Integral, layers):
        yield ("layers_to_transform",), layers, "must be the number of a layer, or a list of them"


def refusals(config: Mapping[str, Any], max_lora_rank: int) -> Iterator[tuple[str, tuple[object, str]]]:
    """Fields of the config for which vLLM refuses the adapter (`PEFTHelper.validate_legal`)."""
    if "target_modules" not in config:
        yield "config target_modules", (None, "is missing; vLLM needs the field, whatever it says")
    for field, reason in UNSUPPORTED.items():
        if config.get(field):
            yield f"config {field}", (config[field], reason)
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower() not in PLAIN_INITS:
        yield "config init_lora_weights", (init, "changes the base model's weights; convert it to a plain LoRA by PEFT")
    if config.get("bias", "none") != "none":
        yield "config bias", (config["bias"], "must be 'none': vLLM has no bias in adapters")
    saved = config.get("modules_to_save") or ()
    if not set(saved) <= {"classifier", "score"}:
        yield "config modules_to_save", (saved, "vLLM takes none but classifier and score")
    if largest_rank(config) > max_lora_rank:
        reason = f"the config's largest, is more than max_lora_rank={max_lora_rank}"
        yield "rank", (largest_rank(config), reason)


def largest_rank(config: Mapping[str, Any]) -> int:
    """The largest rank in the config, as vLLM compares it with `max_lora_rank`."""
    ranks: list[int] = [config["r"], *(config.get("rank_pattern") or {}).values()]
    return max(ranks)


def _is_positive(value: Any) -> bool:
    number: Any = value if isinstance(value, Real) and not isinstance(value, bool) else 0
    return bool(0 < number <= sys.float_info.max)


def _is_positive_integer(value: Any) -> bool:
    return isinstance(value, Integral) and _is_positive(value)


def _are(kind: type, values: Any) -> bool:
    is_list = isinstance(values, Collection) and not isinstance(values, str | bytes | Mapping)
    return is_list and all(isinstance(value, kind) for value in values)


def _no_pattern(pattern: Any) -> str:
    try:
        re.compile(pattern)
    except (re.error, TypeError) as error:
        return str(error)
    return ""


def _fields(value: Any) -> dict[str, Any] | None:
    """The fields of a dict, a dataclass or another object; None where it has none."""
    if isinstance(value, Mapping):
        return dict(value)
    if callable(getattr(value, "to_dict", None)):
        return dict(value.to_dict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return None if isinstance(value, type) else getattr(value, "__dict__", None)


def _plain(value: Any) -> Any:
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Integral | Real):
        return value.item() if hasattr(value, "item") else float(value)  # numpy's
    if type(value).__name__ == "dtype":  # torch's, which is not imported here
        return str(value).removeprefix("torch.")
    if hasattr(value, "value"):
        return value.value  # PEFT's enums
    is_config = callable(getattr(value, "to_dict", None)) or dataclasses.is_dataclass(value)
    return (_fields(value) if is_config else None) or str(value)
