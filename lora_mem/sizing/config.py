"""A config.json with checked access: a field that is missing or of the wrong kind is an error that names it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lora_mem.errors import SizingError


class Config:
    """An object of a config.json, the whole one or one inside it."""

    def __init__(self, fields: dict[str, Any], where: str, inside: str = "") -> None:
        """Read `fields`; `where` (a path or name) and `inside` (the parent field) appear in errors."""
        self.fields, self.where, self.inside = fields, where, inside

    def __contains__(self, name: str) -> bool:
        return self.fields.get(name) is not None

    def error(self, name: str, allowed: str) -> SizingError:
        return SizingError(f"{self.where}: field {self.inside}{name}", self.fields.get(name), allowed)

    def raw(self, name: str, missing: Any = None) -> Any:
        """What the field holds, whatever it is; `missing` where it is not there."""
        return self.fields.get(name, missing)

    def sub(self, name: str) -> Config:
        if not isinstance(self.fields.get(name), dict):
            raise self.error(name, "must be an object")
        return Config(self.fields[name], self.where, f"{self.inside}{name}.")

    def number(self, name: str, minimum: int = 1) -> int:
        value = self.fields.get(name)
        if value is None:
            raise self.error(name, f"is missing; a whole number >= {minimum} is needed")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(name, f"must be a whole number >= {minimum}")
        return value

    def real(self, name: str) -> float:
        value = self.fields.get(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 2**64:
            raise self.error(name, "must be a number above 0")
        return value

    def flag(self, name: str) -> bool:
        value = self.fields.get(name)
        if not isinstance(value, bool):
            raise self.error(name, "must be true or false")
        return value

    def items(self, name: str) -> list[Any]:
        """A list; empty where the field is missing."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, list):
            raise self.error(name, "must be a list")
        return value or []

    def numbers(self, name: str) -> set[int]:
        """Whole numbers, as a list or as a text with commas."""
        value = self.fields.get(name)
        found = value.split(",") if isinstance(value, str) else self.items(name)
        if not all(str(number).strip().isdigit() for number in found):
            raise self.error(name, "must be whole numbers, as a list or separated by commas")
        return {int(number) for number in found}


@dataclass(frozen=True)
class Field:
    """A field that is not read yet: whether it is there, how it is read, and `others` that could be there instead."""

    config: Config
    name: str
    there: bool
    read: Callable[[Config, str], Any] = Config.number
    others: tuple[str, ...] = ()

    def value(self) -> Any:
        if self.others:
            need = "a whole number >= 1" if self.read is Config.number else "one of them"
            raise self.config.error(self.name, f"is missing (and so is {', '.join(self.others)}); {need} is needed")
        return self.read(self.config, self.name)
