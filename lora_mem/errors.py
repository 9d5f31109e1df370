"""The errors that users meet: each says what was wrong, the value it had, what is allowed. And how they list names."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable

_LISTED = 12


class SizingError(ValueError):
    """Something asked for cannot be sized; the message names the argument or field, its value and what is allowed."""

    def __init__(self, what: str, value: object, allowed: str) -> None:
        """Say that `what`, which was `value`, is not as `allowed`."""
        super().__init__(f"{what}={value!r}: {allowed}")


class AdapterError(ValueError):
    """An adapter was refused. Nothing was changed: what was staged, registered and active before still is."""


def some(items: Iterable[str]) -> str:
    """The first twelve, and how many more there are."""
    listed = list(items)
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return ", ".join(listed[:_LISTED]) + more


def compact(modules: Iterable[str]) -> list[str]:
    """Module names with numbers written as ranges where many differ in nothing else: `layers.{0-47}.mlp.gate (48)`."""
    alike: dict[tuple[str, ...], list[list[int]]] = {}
    for module in sorted(modules):
        parts = re.split(r"(?<=\.)(\d+)(?=\.)", module)
        alike.setdefault(tuple(parts[::2]), []).append([int(number) for number in parts[1::2]])
    lines = []
    for words, numbers in alike.items():
        if few := len(numbers) <= 3:
            ranges = [[str(number) for number in one] for one in numbers]
        else:
            ranges = [[_ranges(sorted(set(column))) for column in zip(*numbers, strict=True)]]
        for one in ranges:
            line = "".join(itertools.chain(*itertools.zip_longest(words, one, fillvalue="")))
            lines.append(line if few else f"{line} ({len(numbers)} modules)")
    return lines


def _ranges(numbers: list[int]) -> str:
    if len(numbers) == 1:
        return str(numbers[0])
    gapless = numbers[-1] - numbers[0] + 1 == len(numbers)
    return "{" + (f"{numbers[0]}-{numbers[-1]}" if gapless else ",".join(map(str, numbers))) + "}"
