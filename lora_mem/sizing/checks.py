"""What one value may be: each check returns the value, or raises a `SizingError` that names it."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from lora_mem.errors import SizingError

LARGEST_FLOAT = sys.float_info.max
Value = TypeVar("Value")
Check = Callable[[str, Any], Any]


def whole_number(name: str, value: object, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SizingError(name, value, f"must be a whole number >= {minimum}")
    return value


def positive_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST_FLOAT:
        raise SizingError(name, value, "must be a finite number above 0")
    return value


def flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SizingError(name, value, "must be True or False")
    return value


def one_of(allowed: Sequence[object], why: str = "") -> Check:
    """A check that takes what is `allowed`; `why` ends the error."""

    def check(name: str, value: object) -> object:
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise SizingError(name, value, f"must be one of {', '.join(map(str, allowed))}{why}")
        return value

    return check


def module_names(name: str, value: Any) -> str | tuple[str, ...]:
    """`all-linear`, or one or more names of modules as a tuple."""
    if value == "all-linear":
        return "all-linear"
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence | set) else ()
    if not names or not all(isinstance(one, str) and one for one in names):
        raise SizingError(name, value, "must be all-linear, or one or more names of modules")
    if "all-linear" in names:
        raise SizingError(name, list(names), "all-linear must stand alone")
    return names


def deployment_names(name: str, value: Any) -> tuple[str, ...]:
    """One or more names of modules as a tuple."""
    names = module_names(name, value)
    if isinstance(names, str):
        raise SizingError(name, names, "must name modules; leave it out for all of them")
    return names


def pattern(name: str, value: Any, check: Callable[[str, object], Value]) -> tuple[tuple[str, Value], ...]:
    """The entries of PEFT's `rank_pattern` or `alpha_pattern`: names or regular expressions, and allowed numbers."""
    if isinstance(value, tuple) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in value):
        value = dict(value)  # as this function returned it
    if value is not None and not isinstance(value, Mapping):
        raise SizingError(name, value, "must be a dict of names or regular expressions to numbers")
    entries = []
    for key, number in (value or {}).items():
        try:
            re.compile(rf"(.*\.)?({key})$" if isinstance(key, str) else key)
        except (re.error, TypeError) as error:
            raise SizingError(f"{name} key", key, f"must be a name or a regular expression ({error})") from None
        entries.append((key, check(f"{name}[{key!r}]", number)))
    return tuple(entries)
