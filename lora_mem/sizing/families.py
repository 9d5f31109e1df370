"""How vLLM builds each model family: what families.toml says of an architecture, for the fields of one config.json.

docs/families.md explains that file and how to add a family. LORA_MEM_FAMILIES names more such files (separated as in
PATH); what they say goes before the package's own.
"""

from __future__ import annotations

import ast
import os
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

from lora_mem.errors import SizingError
from lora_mem.sizing.config import Config
from lora_mem.sizing.lines import Lines, lines
from lora_mem.sizing.modules import Group, read_bytes

Table = dict[str, Any]

# What a family says beside its values and what it gives to blocks.
KEYS = {"architectures", "around", "like", "pipeline", "check", "needs", "per_layer", "layer", "prefix", "peft_prefix"}
KEYS |= {"outside", "text", "inside", "peft", "beside", "any_text", "variant", "variants"}


@dataclass(frozen=True)
class Families:
    """The blocks and families that are known.

    `architectures` maps an architecture of vLLM's registry to its family, and to the name of the text model in the
    checkpoint where that is inside a multimodal model. `model_types` maps the `model_type` of a config without
    `architectures`, or of the text model inside a multimodal one, to its architecture.
    """

    blocks: Table = field(default_factory=dict)
    families: Table = field(default_factory=dict)
    architectures: dict[str, tuple[str, str]] = field(default_factory=dict)
    model_types: dict[str, str] = field(default_factory=dict)

    def add(self, table: Table) -> None:
        """Add the blocks and families of one file."""
        self.blocks.update(table.get("block", {}))
        for name, family in table.get("family", {}).items():
            self.families[name] = family
            for peft, listed in {"": family.get("architectures", []), **family.get("around", {})}.items():
                for line in listed:
                    architecture, _, model_types = line.partition(": ")
                    self.architectures[architecture] = name, peft
                    self.model_types.update(dict.fromkeys(model_types.split(), architecture))

    def architecture(self, config: Config) -> str | None:
        """The architecture that a config names, known or not; None where it names none."""
        named = config.items("architectures")
        return str(named[0]) if named else self.model_types.get(str(config.raw("model_type")))

    def supports_pipeline(self, architecture: str) -> bool:
        """Whether vLLM serves an architecture with pipeline parallelism."""
        return bool(self._family(self.architectures[architecture][0]).get("pipeline", True))

    def groups(self, architecture: str, config: Config) -> tuple[Group, ...]:
        """The modules of a model of one architecture, as groups of identical layers.

        Raises:
            SizingError: the config lacks a field, or contradicts itself.

        """
        name, peft = self.architectures[architecture]
        around = self.families["around"] | {"peft": peft} if peft else {}
        try:
            return tuple(self._groups(self._family(name) | around, config))
        except SizingError:
            raise
        except (ArithmeticError, AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
            raise SizingError("families: family", name, f"cannot be worked out for {config.where} ({error})") from error

    def _family(self, name: str) -> Table:
        """What a family says, with what it has from the one that it is like."""
        if name not in self.families:
            raise SizingError("families: like", name, f"is not a family; known: {', '.join(sorted(self.families))}")
        own: Table = self.families[name]
        like: Table = self._family(own["like"]) if "like" in own else {"per_layer": {}}
        tables = {key: like[key] | own.get(key, {}) for key in like if isinstance(like[key], dict) and key != "around"}
        return like | own | tables

    def _groups(self, family: Table, config: Config) -> Iterator[Group]:
        whole = self._scope(family, config)
        text: Config = whole.read(f"object({family['text']})") if "text" in family else config
        if "any_text" in family:
            if text is config:
                raise config.error("text_config", "must be an object")
            architecture = self.architecture(text)
            if architecture not in self.architectures:
                raise text.error("model_type", "is not a text model that is known to be served with LoRA by vLLM")
            groups = list(self.groups(str(architecture), text))
        else:
            if "variants" in family:
                whole.check(f"{family['variant']} in {tuple(family['variants'])}  # what vLLM serves with LoRA")
                family = self._family(family["variants"][whole.read(family["variant"])]) | family
            groups = [*self._layers(family, text), *self._scope(family, text).groups(family.get("outside", ""))]
        for group in groups:
            yield _inside(group, family["inside"], family["peft"]) if "inside" in family else group
        yield from whole.groups(family.get("beside", ""))

    def _layers(self, family: Table, config: Config) -> list[Group]:
        """The layers, grouped by what they are made of, in the order of their first."""
        if "layer" not in family:
            return []
        list(self._scope(family, config).expand(family.get("needs", "")))
        own = Group(family.get("prefix", "model.layers.{}"), (), (), peft_prefix=family.get("peft_prefix"))
        made, layers = dict[str, list[Group]](), dict[Group, list[int]]()
        for index in range(self._scope(family, config).read("num_hidden_layers")):
            layer = self._scope(family, config, {**family["per_layer"], "layer": index})
            for condition in lines(family.get("check", "")):
                layer.check(condition.text)
            values = {name: ast.Constant(layer.read(name)) for name in family["per_layer"]}
            kind = repr([constant.value for constant in values.values()])
            if kind not in made:
                made[kind] = self._scope(family, config, values).groups(family["layer"], own)
            for group in made[kind]:
                layers.setdefault(group, []).append(index)
        groups = [replace(group, layers=tuple(indices)) for group, indices in layers.items()]
        return sorted(groups, key=lambda group: group.prefix != own.prefix)

    def _scope(self, family: Table, config: Config, more: Table | None = None) -> Lines:
        values = {name: value for name, value in family.items() if name not in KEYS}
        return Lines(self.blocks, config, values | (more or {}))


def _inside(group: Group, prefix: str, peft: str) -> Group:
    """A group of a text model inside a multimodal one."""
    path = group.peft_prefix or group.prefix
    renamed = path.replace("model", peft, 1) if path.startswith("model") else None
    return replace(group, prefix=f"{prefix}{group.prefix}".rstrip("."), peft_prefix=renamed)


def known() -> Families:
    """The families of the package, and of the files that LORA_MEM_FAMILIES names.

    Raises:
        SizingError: such a file cannot be read.

    """
    return _load(os.environ.get("LORA_MEM_FAMILIES", ""))


@lru_cache(maxsize=4)
def _load(more: str) -> Families:
    families = Families()
    families.add(tomllib.loads((resources.files("lora_mem.sizing") / "families.toml").read_text("utf-8")))
    for path in filter(None, more.split(os.pathsep)):
        try:
            families.add(tomllib.loads(read_bytes(Path(path), "LORA_MEM_FAMILIES").decode()))
        except ValueError as error:
            raise SizingError("LORA_MEM_FAMILIES", path, f"is not valid TOML ({error})") from None
    return families
