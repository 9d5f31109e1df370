"""What a model looks like to vLLM's LoRA: from a config.json, a dict or a known name, without loading anything."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

from lora_mem.errors import SizingError
from lora_mem.sizing.config import Config
from lora_mem.sizing.modules import Experts, Group, Module, read_object


@dataclass(frozen=True)
class ModelShape:
    """The modules of one model that vLLM can serve with LoRA, as groups of identical layers.

    Sizes are those of the whole model; parallelism is `footprint`'s business. `quantization` is the `quant_method` of
    the checkpoint, which can change the slots of routed experts.
    """

    name: str
    architecture: str
    num_hidden_layers: int
    groups: tuple[Group, ...]
    supports_pipeline: bool = True
    quantization: str = ""

    @classmethod
    def from_config(cls, source: ModelShape | dict[str, Any] | str | Path) -> ModelShape:
        """Read a model's shape.

        Args:
            source: the fields of a config.json as a dict; a path to one or to the directory that holds it; a hub name
                from the built-in table (`known_models()`), or any hub name where huggingface_hub is installed
                (its cache and its offline mode apply).

        Raises:
            SizingError: the source is not found, lacks a field, contradicts itself, or is a model that vLLM does not
                serve with LoRA.
        """
        if isinstance(source, ModelShape):
            return source
        if isinstance(source, str) and source in _table():
            return _known(source)
        fields, where = _fields(source)
        return _build(fields, where)

    @cached_property
    def memo(self) -> dict[Any, Any]:
        """Sums already taken over the modules, by what they depend on: sweeps ask for the same ones again."""
        return {}

    def modules(self) -> Iterator[tuple[str, Module]]:
        """Each runtime module with its path, e.g. `model.layers.0.self_attn.qkv_proj`, layers in order."""
        named = ((group.path(layer, module), module) for group, module, layer in self.places())
        return iter(sorted(named, key=lambda item: _order(item[0])))

    def places(self) -> Iterator[tuple[Group, Module, int]]:
        """Each module of each layer, group by group; outside the layers with 0 for the layer."""
        for group in self.groups:
            for layer, module in itertools.product(group.numbers, group.modules):
                yield group, module, layer

    @cached_property
    def kinds(self) -> tuple[tuple[Group, Module], ...]:
        """Each module of each group once."""
        return tuple((group, module) for group in self.groups for module in group.modules)

    @property
    def is_moe(self) -> bool:
        """Whether any layer has routed experts."""
        return any(isinstance(module, Experts) for _, module in self.kinds)

    def __repr__(self) -> str:
        modules = sum(len(group.numbers) * len(group.modules) for group in self.groups)
        return f"ModelShape({self.name!r}, {self.architecture}, layers={self.num_hidden_layers}, modules={modules})"


# Published with quantized experts; the table's facts say nothing of it.
QUANTIZED = {"openai/gpt-oss-120b": "mxfp4", "openai/gpt-oss-20b": "mxfp4"}


def known_models() -> tuple[str, ...]:
    """The hub names in the built-in table."""
    return tuple(_table())


def known_config(name: str) -> dict[str, Any]:
    """The facts that the built-in table holds of one model, as the fields of a config.json (a copy).

    Raises:
        SizingError: the table does not have it.
    """
    if name not in _table():
        raise SizingError("model", name, "is not in the built-in table; known_models() lists it")
    config: dict[str, Any] = json.loads(json.dumps(_table()[name]))
    return config


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = (resources.files("lora_mem.sizing") / "known_models.json").read_text(encoding="utf-8")
    table: dict[str, dict[str, Any]] = json.loads(text)
    return table


@cache
def _known(name: str) -> ModelShape:
    return replace(_build(_table()[name], name), quantization=QUANTIZED.get(name, ""))


def _order(path: str) -> tuple[int, int]:
    numbers = [int(part) for part in path.split(".") if part.isdigit()]
    if numbers:
        return 1, numbers[0]
    return (2, 0) if path.endswith("lm_head") else (0, 0)


def _fields(source: dict[str, Any] | str | Path) -> tuple[dict[str, Any], str]:
    """The fields of a config.json, and how to call it in errors."""
    if isinstance(source, dict):
        return source, "config"
    if not isinstance(source, str | Path) or not str(source):
        raise SizingError("model", source, "must be a dict, a path to a config.json or a hub name")
    try:
        path = Path(source).expanduser()
        if path.is_dir():
            path = path / "config.json"
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for a file, a home that is nobody's
        raise SizingError("model", source, f"is not a name or a path ({error})") from None
    if is_file:
        return read_object(path, "model"), str(path)
    text = str(source)
    if path.suffix == ".json" or text.count("/") != 1 or text.startswith((".", "~", "/")):
        raise SizingError(
            "model",
            text,
            "is not a file, nor a hub name in the built-in table; give a path to a config.json or a name"
            " such as Qwen/Qwen3-30B-A3B",
        )
    return _from_hub(text), text


def _from_hub(name: str) -> dict[str, Any]:
    """config.json of a hub repository, from huggingface_hub's cache or the network."""
    try:
        from huggingface_hub import constants, get_session, hf_hub_download, try_to_load_from_cache
    except ImportError:
        raise SizingError(
            "model", name, "is not in the built-in table; install huggingface_hub to look it up, or give a config.json"
        ) from None
    try:
        path = try_to_load_from_cache(name, "config.json")
        if not isinstance(path, str):
            if not constants.HF_HUB_OFFLINE:
                # Once, before the download, which would try for half a minute where there is no network.
                get_session().head(constants.ENDPOINT, timeout=5)
            path = hf_hub_download(name, "config.json")
    except Exception as error:  # the hub's errors are many: no such name, gated, offline, no network
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise SizingError(
            "model", name, f"is not in the built-in table and could not be read from the hub ({reason})"
        ) from None
    return read_object(Path(path), "model", name)


def _build(fields: dict[str, Any], where: str) -> ModelShape:
    from lora_mem.sizing.families import known

    families, config = known(), Config(fields, where)
    architecture = families.architecture(config)
    if architecture is None and "model_type" not in config:
        raise config.error("architectures", "is missing, and so is model_type; one of them is needed")
    if architecture not in families.architectures:
        raise config.error(
            "architectures" if config.items("architectures") else "model_type",
            f"is not known to be served with LoRA by vLLM; docs/families.md says how to add a model."
            f" Known: {', '.join(sorted(families.architectures))}",
        )
    text = config.sub("text_config") if "text_config" in config and "num_hidden_layers" not in config else config
    # A text model may keep its fields in text_config too; a multimodal one looks for its text model itself.
    groups = families.groups(architecture, text if architecture.endswith("ForCausalLM") else config)
    layers = 1 + max(index for group in groups for index in group.layers)
    quantized = next(
        (part.sub("quantization_config") for part in (config, text) if "quantization_config" in part), None
    )
    method = str(quantized.fields.get("quant_method", "")) if quantized is not None else ""
    return ModelShape(where, architecture, layers, groups, families.supports_pipeline(architecture), method)
