"""The lines of families.toml: what each stands for, for the fields of one config.json.

    if CONDITION: LINE              and elif, else; or more lines, indented below it
    KIND NAME: INPUT -> SLICES = CHILDREN
    KIND NAME[COUNT]: INPUT -> SIZE = CHILDREN    experts
    BLOCK, BLOCK(ARGUMENTS)         the modules of a block
    [STAGE PREFIX x COUNT as PEFT_PREFIX]         the group of the modules that follow

A semicolon ends a line too. docs/families.md explains each.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, cast

from lora_mem.errors import SizingError
from lora_mem.sizing.config import Config
from lora_mem.sizing.expressions import Bound, Scope, parse
from lora_mem.sizing.modules import Child, ExpertLayout, Experts, Group, Linear, LinearKind, Module

CONDITION = re.compile(r"(?:(if|elif|else)(?: (.+?))?:(?: |$))?(.*?)(?:\s*#.*)?")
HEADER = re.compile(r"\[(first|last|ends|every)?\s*(\S*?)(?:\s+x (.+?))?(?:\s*\bas (.+))?\]")
MODULE = re.compile(r"(\w+) \.?([^\s\[:]+)(?:\[(.+)\])?: (.+) -> (.+?)(?: = (.+))?")
EXPERT_NAMES = {
    "gated": "gate_proj, down_proj, up_proj",
    "non_gated": "up_proj, down_proj",
    "fused": "gate_up_proj, down_proj",
}


class Line(NamedTuple):
    """A line, and the lines that are indented below it."""

    text: str
    inner: tuple[Line, ...]


@lru_cache(maxsize=1024)
def lines(text: str) -> tuple[Line, ...]:
    """The lines of a text."""
    rows = [(len(row) - len(row.lstrip()), part.strip()) for row in text.splitlines() for part in row.split(";")]
    return _tree([row for row in rows if row[1]])


def _tree(rows: list[tuple[int, str]]) -> tuple[Line, ...]:
    tops = [number for number, (indent, _) in enumerate(rows) if indent <= rows[0][0]]
    return tuple(Line(rows[top][1], _tree(rows[top + 1 : end])) for top, end in pairwise([*tops, len(rows)]))


class Lines(Scope):
    """The names of a family, or of a block in it, and the modules that its lines stand for."""

    def __init__(
        self, blocks: dict[str, Any], config: Config, definitions: dict[str, Any], family: Lines | None = None
    ) -> None:
        """Define the values of a family (and what it gives to blocks, as tables), or the parameters of a block."""
        self.given = {name: value for name, value in definitions.items() if isinstance(value, dict)}
        own = {name: value for name, value in definitions.items() if name not in self.given}
        super().__init__(config, own, family)
        self.blocks, self.family = blocks, family or self

    def groups(self, text: str, own: Group | None = None) -> list[Group]:
        """The modules of some lines, each in the group of the header above it, the first ones in `own`."""
        found: list[tuple[tuple[Group, ...], list[Module]]] = [((own,), [])] if own else []
        for item in self.expand(text):
            if isinstance(item, tuple):
                found.append((item, []))
            else:
                found[-1][1].append(item)
        return [replace(group, modules=tuple(modules)) for groups, modules in found for group in groups]

    def expand(self, text: str | tuple[Line, ...]) -> Iterator[Module | tuple[Group, ...]]:
        """The modules that some lines stand for, and the groups of their headers."""
        taken = False
        for line in lines(text) if isinstance(text, str) else text:
            found = CONDITION.fullmatch(self.text(line.text))
            word, condition, rest = found.groups() if found else ("", "", "")
            if word:
                taken = taken and word != "if"
                chosen = not taken and (word == "else" or bool(self.read(condition)))
                taken = taken or chosen
                if not chosen:
                    continue
            if " -> " in rest:
                yield self._module(rest)
            elif rest.startswith("["):
                yield self._header(rest)
            elif rest:
                yield from self._block(parse(rest))
            yield from self.expand(line.inner)

    def _header(self, text: str) -> tuple[Group, ...]:
        found = HEADER.fullmatch(text)
        if not found:
            raise SizingError("families: header", text, "must be like [STAGE PREFIX x COUNT as PEFT_PREFIX]")
        stage, prefix, count, peft_prefix = found.groups()
        group = Group(prefix, (), (), cast(Any, stage or "layers"), peft_prefix)
        if not count:
            return (group,)
        numbers = range(self.read(count))
        if not stage:
            return (replace(group, layers=tuple(numbers)),)
        return tuple(replace(group, prefix=prefix.replace("{}", str(number))) for number in numbers)

    def _block(self, node: ast.expr) -> Iterator[Module | tuple[Group, ...]]:
        call = node if isinstance(node, ast.Call) else ast.Call(node, [], [])
        name = ast.unparse(call.func)
        if name not in self.blocks:
            raise SizingError("families: block", name, f"is not a block; known: {', '.join(sorted(self.blocks))}")
        block = self.blocks[name]
        parameters = {name: value for name, value in block.items() if name not in ("check", "modules")}
        arguments = dict(zip([*parameters][: len(call.args)], call.args, strict=True))
        arguments |= {str(item.arg): item.value for item in call.keywords}
        inner = Lines(self.blocks, self.config, parameters, self.family)
        inner.names |= {name: Bound(value, self.family, "") for name, value in self.family.given.get(name, {}).items()}
        inner.names |= {name: Bound(value, self, "") for name, value in arguments.items()}
        for condition in lines(block.get("check", "")):
            inner.check(condition.text)
        return inner.expand(block["modules"])

    def _module(self, text: str) -> Module:
        found = MODULE.fullmatch(text)
        if not found:
            raise SizingError("families: module", text, "must be like KIND NAME: INPUT -> SLICES = CHILDREN")
        kind, name, count, before, after, names = found.groups()
        inputs = self._size(parse(before))
        if count:
            layout = cast(ExpertLayout, kind.removesuffix("_experts"))
            children = tuple(_names(names or EXPERT_NAMES[layout]))
            return Experts(name, self._size(parse(count)), inputs, self._size(parse(after)), layout, children)
        slices = parse(after)
        outputs = [self._slice(node) for node in (slices.elts if isinstance(slices, ast.Tuple) else [slices])]
        own = name.rpartition(".")[2]
        names = names or (f"({own})" if kind in ("embedding", "logits") else own)
        return Linear(
            name,
            cast(LinearKind, "merged" if kind == "unsplit" else kind),
            inputs,
            tuple(size for size, _, _ in outputs if size is not None),
            _children(names, [size or 0 for size, _, _ in outputs]),
            heads=tuple(heads for _, heads, _ in outputs if heads is not None),
            tensor_parallel=kind != "unsplit",
            replicated=tuple(index for index, (_, _, replicated) in enumerate(outputs) if replicated),
        )

    def _slice(self, node: ast.expr) -> tuple[int | None, int | None, bool]:
        """Size (None: left out), heads, and whether they are replicated."""
        match node:
            case ast.Call(func=ast.Name(id="replicated"), args=[inner]):
                return *self._slice(inner)[:2], True
            case ast.BinOp(left=size, op=ast.MatMult(), right=heads):
                return self._size(size), self._size(heads), False
            case ast.BoolOp(op=ast.Or(), values=[size, ast.Constant(value=None)]):
                return self._size(size) or None, None, False
        return self._size(node), None, False

    def _size(self, node: ast.expr) -> int:
        size = self.value(node)
        if isinstance(size, bool) or not isinstance(size, int):
            raise SizingError(f"{self.config.where}: {ast.unparse(node)}", size, "must be a whole number")
        return size


def _names(names: str) -> list[str]:
    return [] if names == "none" else names.split(", ")


def _children(names: str, sizes: list[int]) -> tuple[Child, ...]:
    """The modules of the checkpoint; one whose name is repeated, or that is alone, has several slices."""
    listed, found = _names(names), dict[str, int]()
    if listed:
        for name, size in zip(listed * len(sizes) if len(listed) == 1 else listed, sizes, strict=True):
            found[name] = found.get(name, 0) + size
    return tuple(Child(name.strip("()"), size, linear=name[0] != "(") for name, size in found.items())
