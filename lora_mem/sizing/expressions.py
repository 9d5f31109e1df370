"""The expressions of families.toml: a small part of Python over the fields of a config.json, walked, never executed.

A name is what the nearest definition says (a parameter of a block, a value of a family), else a field of the config,
which must be a whole number of at least 1. In its own definition a name is the field, so that `head_dim = "head_dim |
128"` gives the field a default.

    x(0)                a field that may be as low as 0
    x | y               y where x is missing or null; with True or False for y, x is read as one of them
    x | null            0 where the config says null; it must say that or a number
    x.y, x[0], x['y']   a field of an object, an entry of a list or of an object
    x[layer]            an entry of a list that has one for each layer; x[layer:] where it may have more
    a / b               which must come out even; a // b is rounded down
    has(x)              whether x is there
    raw(x), raw(x, y)   x as it is; y where it is missing
    list(x), len(x)     a list; empty where it is missing
    real(x)             a number above 0
    numbers(x)          whole numbers, as a list or as a text with commas
    object(x)           an object

and min, max, int, str, arithmetic, comparisons, `in`, `and`, `or`, `not`, `a if x else b`. `{x}` in any text is the
text that x is defined as.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

from lora_mem.errors import SizingError
from lora_mem.sizing.config import Config, Field

Definition = str | int | ast.expr

OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda item, items: item in items,
    ast.NotIn: lambda item, items: item not in items,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "int": int, "str": str}
# How a field is read where it is not a whole number.
READERS: dict[str, Callable[..., Any]] = {
    "raw": Config.raw,
    "list": Config.items,
    "len": lambda config, name: len(config.items(name)),
    "real": Config.real,
    "numbers": Config.numbers,
    "object": Config.sub,
}


@lru_cache(maxsize=4096)
def parse(text: str) -> ast.expr:
    """The expression in `text`.

    Raises:
        SizingError: it is none.

    """
    try:
        return ast.parse(f"({text}\n)", mode="eval").body
    except (SyntaxError, ValueError) as error:
        raise SizingError("families: expression", text, f"cannot be read ({error})") from None


class Bound(NamedTuple):
    """What a name stands for, the scope where that is worked out, and the name that is a field there."""

    definition: Definition
    scope: Scope
    own: str

    def text(self) -> str | None:
        """The definition where it is a text."""
        found = self.definition.value if isinstance(self.definition, ast.Constant) else self.definition
        return self.scope.text(found) if isinstance(found, str) else None

    def node(self) -> ast.expr:
        """The definition as an expression."""
        if isinstance(self.definition, ast.expr):
            return self.definition
        return parse(self.scope.text(str(self.definition)))


class Scope:
    """Names, over the fields of a config."""

    def __init__(self, config: Config, definitions: Mapping[str, Definition], outer: Scope | None = None) -> None:
        """Define names over the fields of `config` and the names of `outer`."""
        self.config, self.outer = config, outer
        self.names = {name: Bound(definition, self, name) for name, definition in definitions.items()}
        self._found: dict[tuple[str, str], Any] = {}

    def bound(self, name: str, own: str = "") -> Bound | None:
        """What a name stands for where `own` is being defined; None for a field."""
        if name != own and name in self.names:
            return self.names[name]
        return self.outer.bound(name) if self.outer else None

    def text(self, template: str) -> str:
        """`template` with the texts that its `{names}` stand for."""

        def word(match: re.Match[str]) -> str:
            text = bound.text() if (bound := self.bound(match[1])) else None
            return str(self.value(ast.Name(match[1]))) if text is None else text

        return re.sub(r"\{(\w+)\}", word, template) if "{" in template else template

    def read(self, text: str) -> Any:
        """The value of an expression.

        Raises:
            SizingError: a field is missing or wrong, or the text is not an expression of this language.

        """
        return self.value(parse(self.text(text)))

    def value(self, node: ast.expr, own: str = "") -> Any:
        """The value of a parsed expression, in the definition of `own`."""
        found = self.find(node, own)
        return found.value() if isinstance(found, Field) else found

    def find(self, node: ast.expr, own: str = "") -> Any:
        """The field that an expression names, not read yet; the value where it names none."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name(id=name):
                if bound := self.bound(name, own):
                    if (name, own) not in self._found:
                        self._found[name, own] = bound.scope.find(bound.node(), bound.own)
                    return self._found[name, own]
                return self.config if name == "config" else Field(self.config, name, name in self.config)
            case ast.Attribute(value=parent, attr=name):
                found = self.find(parent, own)
                if isinstance(found, Field) and not found.there:
                    return replace(found, read=Config.sub)
                inside = found.config.sub(found.name) if isinstance(found, Field) else found
                return Field(inside, name, name in inside)
            case ast.Subscript():
                return self._entry(node, own)
            case ast.Call(func=ast.Name(id="has"), args=[first]):
                found = self.find(first, own)
                return not isinstance(found, Field) or found.there
            case ast.Call(func=ast.Name(id=name), args=items) if name in FUNCTIONS:
                return FUNCTIONS[name](*(self.value(item, own) for item in items))
            case ast.Call(func=ast.Name(id=name), args=[first, *items]) if name in READERS:
                return self._reading(first, own, READERS[name], *(self.value(item, own) for item in items))
            case ast.Call(func=first, args=[least]):
                return self._reading(first, own, Config.number, self.value(least, own))
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                return self._either(left, right, own)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return self._exact(left, right, own)
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](self.value(left, own), self.value(right, own))
            case ast.UnaryOp(op=sign, operand=operand) if type(sign) in OPERATORS:
                return OPERATORS[type(sign)](self.value(operand, own))
            case ast.BoolOp(op=sign, values=[*operands, last]):
                for operand in operands:
                    if bool(value := self.value(operand, own)) is isinstance(sign, ast.Or):
                        return value
                return self.value(last, own)
            case ast.Compare(left=left, ops=signs, comparators=more) if all(type(sign) in OPERATORS for sign in signs):
                values = [self.value(item, own) for item in (left, *more)]
                return all(OPERATORS[type(sign)](*pair) for sign, pair in zip(signs, pairwise(values), strict=True))
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.find(body if self.value(test, own) else orelse, own)
            case ast.Tuple(elts=items):
                return tuple(self.value(item, own) for item in items)
        raise SizingError("families: expression", ast.unparse(node), "is not in the language of families.toml")

    def _reading(self, node: ast.expr, own: str, read: Callable[..., Any], *more: Any) -> Any:
        """A field, read in another way."""
        found = self.find(node, own)
        return (
            replace(found, read=lambda config, name: read(config, name, *more)) if isinstance(found, Field) else found
        )

    def _either(self, left: ast.expr, right: ast.expr, own: str) -> Any:
        """`left | right`: the first that is there."""
        found = self.find(left, own)
        if not isinstance(found, Field) or found.there:
            return found.config.flag(found.name) if isinstance(getattr(right, "value", None), bool) else found
        if isinstance(right, ast.Name) and right.id == "null":
            if found.name not in found.config.fields:
                raise found.config.error(found.name, "is missing; a whole number is needed, or null for none")
            return 0
        other = self.find(right, own)
        if not isinstance(other, Field) or other.there:
            return other
        return replace(found, others=(*found.others, f"{other.config.inside}{other.name}", *other.others))

    def _exact(self, left: ast.expr, right: ast.expr, own: str) -> Any:
        """`left / right`, which must come out even."""
        whole, part = self.value(left, own), self.value(right, own)
        if isinstance(whole, float):
            return whole / part
        if part and whole % part == 0:
            return whole // part
        divisor = self.find(right, own)
        if isinstance(divisor, Field):
            raise divisor.config.error(divisor.name, f"must divide {ast.unparse(left)}={whole}")
        field = self._blamed(left, own) or Field(self.config, ast.unparse(left), False)
        raise field.config.error(field.name, f"must be such that {ast.unparse(left)}={whole} is a multiple of {part}")

    def _entry(self, node: ast.Subscript, own: str) -> Field:
        """An entry of a list or an object, as a field of its own."""
        listed = self.find(node.value, own)
        place = node.slice.lower or node.slice if isinstance(node.slice, ast.Slice) else node.slice
        index, by_layer = self.value(place, own), isinstance(place, ast.Name) and place.id == "layer"
        config, name, entries = listed.config, listed.name, dict[Any, Any]()
        if listed.there and isinstance(index, str):
            # transformers pads such numbers with zeros.
            entries = {str(int(key)) if key.isdigit() else key: value for key, value in config.sub(name).fields.items()}
        elif listed.there:
            entries = dict(enumerate(config.raw(name) if isinstance(config.raw(name), str) else config.items(name)))
        if by_layer and not entries:
            return Field(config, name, False, _no_entries)
        layers = self.value(ast.Name("num_hidden_layers")) if by_layer else 0
        if by_layer and (len(entries) < layers or (len(entries) > layers and place is node.slice)):
            raise config.error(name, f"must have {layers} entries, one for each layer; it has {len(entries)}")
        entry = f"{name}[{index}]"
        there = by_layer or entries.get(index) is not None
        return Field(Config({entry: entries.get(index)}, config.where, config.inside), entry, there, Config.raw)

    def check(self, text: str) -> None:
        """Refuse a config that does not meet a condition; a comment after it says why it should.

        Raises:
            SizingError: naming the first field that the condition reads.

        """
        condition, _, reason = self.text(text).partition("  # ")
        node = parse(condition)
        if self.value(node):
            return
        need = f"does not fit: {condition} is needed"
        match node:
            case ast.Compare(ops=[ast.In()], comparators=[right]):
                need = f"must be one of {', '.join(map(str, self.value(right)))}"
            case ast.Compare(left=ast.Name() | ast.Subscript(), ops=[ast.Eq()], comparators=[right]):
                origin = "" if isinstance(right, ast.Constant) else f" ({ast.unparse(right)})"
                need = f"must be {self.value(right)!r}{origin}"
        field = self._blamed(node) or Field(self.config, condition, False)
        raise field.config.error(field.name, f"{need}: {reason}" if reason else need)

    def _blamed(self, node: ast.AST, own: str = "") -> Field | None:
        """The first field that an expression reads."""
        inside = list(ast.iter_child_nodes(node))
        match node:
            case ast.Name(id=name) if bound := self.bound(name, own):
                return bound.scope._blamed(bound.node(), bound.own)
            case ast.Name() | ast.Attribute() | ast.Subscript() | ast.BinOp(op=ast.BitOr()):
                found = self.find(node, own)
                if isinstance(found, Field):
                    return found
            case ast.Call(func=ast.Name(id=name), args=items) if name in ("has", *FUNCTIONS, *READERS):
                inside = [*items]
        return next(filter(None, (self._blamed(child, own) for child in inside)), None)


def _no_entries(config: Config, name: str) -> Any:
    raise config.error(name, "is missing; an entry is needed for each layer")
