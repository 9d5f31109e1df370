"""A real adapter: its tensors by name, shape and dtype, read without loading them, and what vLLM would do with each.

Names as vLLM 0.33.0 parses them (`parse_fine_tuned_lora_name`, `check_unexpected_modules` in `vllm/lora`).
"""

from __future__ import annotations

import json
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from lora_mem.buffers import Part, check_sharded_ranks, match_pattern, scaling_of, slot_rank
from lora_mem.footprints import Footprint, combine, footprint, sum_parts
from lora_mem.layers import Experts, Group, Linear, Module, SizingError
from lora_mem.shapes import ModelShape

DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
ITEMSIZES = {"BF16": 2, "F16": 2, "F32": 4, "F64": 8, "F8_E4M3": 1, "F8_E5M2": 1}
LARGEST_HEADER = 100_000_000  # as the safetensors library has it


@dataclass(frozen=True, slots=True)
class AdapterTensor:
    """One tensor of an adapter; `storage` tells tensors of the same memory (None: memory of its own)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int
    storage: object = None


@dataclass(frozen=True)
class Adapter:
    """An adapter's config and its tensors; nothing of their contents."""

    name: str
    config: Mapping[str, Any]
    tensors: tuple[AdapterTensor, ...]

    @property
    def rank(self) -> int:
        """The largest rank in the config, as vLLM compares it with max_lora_rank."""
        pattern = self.config.get("rank_pattern") or {}
        return max([int(self.config["r"]), *(int(rank) for rank in pattern.values())])

    @property
    def scaling(self) -> float:
        """What vLLM folds into B of a module that no pattern names: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        return scaling_of(self.config["lora_alpha"], self.config["r"], bool(self.config.get("use_rslora")))

    def scaling_at(self, module: str) -> float:
        """What vLLM folds into B of a module, by the module's name in the adapter (`get_rank_and_scaling`)."""
        ranks, alphas = (self.config.get(name) or {} for name in ("rank_pattern", "alpha_pattern"))
        # Fused experts have names of their own in the file; patterns are for those of the parameters.
        if module.endswith(".experts.base_layer"):
            module = module.removesuffix(".base_layer") + ".gate_up_proj"
        elif module.endswith(".experts"):
            module += ".down_proj"
        rank = match_pattern(ranks.items(), module, self.config["r"])
        alpha = match_pattern(alphas.items(), module, self.config["lora_alpha"])
        return scaling_of(alpha, rank, bool(self.config.get("use_rslora")))

    @property
    def staged_bytes(self) -> int:
        """Bytes of all tensors, those of the same memory counted once."""
        own = sum(tensor.nbytes for tensor in self.tensors if tensor.storage is None)
        shared: dict[object, int] = {}
        for tensor in self.tensors:
            if tensor.storage is not None:
                shared[tensor.storage] = max(shared.get(tensor.storage, 0), tensor.nbytes)
        return own + sum(shared.values())

    def check(self, model: ModelShape | dict[str, Any] | str | Path) -> AdapterCheck:
        """What vLLM would do with each tensor when it serves this adapter on `model`."""
        return _check(self, ModelShape.from_config(model))

    def footprint(self, model: ModelShape | dict[str, Any] | str | Path, **options: Any) -> Footprint:
        """The footprint of this very adapter: module by module with the ranks that its tensors have.

        Args:
            model: anything that `ModelShape.from_config` takes.
            options: arguments of `footprint`, but those that the adapter decides itself (rank, targets, dtype).
                `lora_dtype` is bfloat16 where it is not given: the model's dtype, which the adapter does not tell.

        Raises:
            SizingError: vLLM would refuse the adapter, or an option is wrong.

        """
        shape = ModelShape.from_config(model)
        found = self.check(shape)
        if found.refused:
            name, reason = next(iter(found.refused.items()))
            raise SizingError(f"{self.name}: tensor", name, f"{reason} ({len(found.refused)} tensors in all)")
        dtypes = {tensor.dtype for tensor in self.tensors}
        dtype = dtypes.pop() if len(dtypes) == 1 else ""
        if dtype not in DTYPES.values():
            raise SizingError(
                f"{self.name}: dtype", sorted({t.dtype for t in self.tensors}), "must be one for all tensors"
            )
        given = {"lora_dtype": "bfloat16", **options}
        # The engine by itself: whatever its slots' rank is, they can be sliced by it.
        slots = slot_rank(self.rank, given.pop("max_lora_rank", None))
        base = footprint(shape, rank=slots, max_lora_rank=slots, dtype=dtype, **given)
        assert base.options is not None
        wanted = replace(base.options, rank=self.rank, target_modules=("the adapter's own",))
        check_sharded_ranks(found.parts, wanted)
        sizes = sum_parts(found.parts, wanted)._replace(staged=self.staged_bytes - found.ignored_bytes)
        return combine(shape, wanted, base.slot_bytes, sizes, base.strategy, base.workers_per_node)


@dataclass(frozen=True)
class AdapterCheck:
    """What becomes of an adapter's tensors in vLLM.

    `served` are module names that have a module in the model; `ignored` are tensors that vLLM loads and never uses, or
    skips, with the reason; `refused` are those for which it refuses the whole adapter.
    """

    served: tuple[str, ...]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]
    ignored_bytes: int
    parts: tuple[Part, ...]

    @property
    def ok(self) -> bool:
        """Whether vLLM takes the adapter and uses all of it."""
        return not self.ignored and not self.refused

    def __repr__(self) -> str:
        """Plain and stable."""
        lines = [f"AdapterCheck: {len(self.served)} modules served, {len(self.ignored)} tensors ignored,"]
        lines[0] += f" {len(self.refused)} refused"
        lines += [f"  ignored {name}: {reason}" for name, reason in list(self.ignored.items())[:10]]
        lines += [f"  refused {name}: {reason}" for name, reason in list(self.refused.items())[:10]]
        return "\n".join(lines)


def read_adapter(source: str | Path | Mapping[str, Any], config: Mapping[str, Any] | None = None) -> Adapter:
    """Read an adapter's names and shapes.

    Args:
        source: a directory with adapter_config.json and adapter_model.safetensors (its header only is read), or a dict
            of tensors (anything with `shape`, `dtype` and `nbytes`; torch tensors of one storage are told apart).
        config: PEFT's config as a dict; needed for a dict of tensors.

    Raises:
        SizingError: a file is missing or damaged, or the config lacks a field.

    """
    if isinstance(source, Mapping):
        if config is None:
            raise SizingError("config", config, "is needed with a dict of tensors: PEFT's config as a dict")
        name, tensors = "adapter", tuple(_from_dict(source))
    else:
        path = Path(source).expanduser()
        name, tensors = str(path), tuple(_from_header(path / "adapter_model.safetensors"))
        config = _read_config(path / "adapter_config.json") if config is None else config
    for field in ("r", "lora_alpha"):
        if not isinstance(config.get(field), int | float) or isinstance(config[field], bool) or config[field] <= 0:
            raise SizingError(f"{name}: config field {field}", config.get(field), "must be a number above 0")
    return Adapter(name, config, tensors)


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise SizingError("adapter", str(path), "is missing; the directory of an adapter holds it") from None
    except json.JSONDecodeError as error:
        raise SizingError("adapter", str(path), f"is not valid JSON ({error})") from None
    if not isinstance(config, dict):
        raise SizingError("adapter", str(path), "must hold a JSON object")
    return config


def _from_header(path: Path) -> Iterator[AdapterTensor]:
    """Names, dtypes and shapes from a safetensors header: 8 bytes of length, then that much JSON."""
    if not path.is_file():
        raise SizingError("adapter", str(path), "is missing; the directory of an adapter holds it")
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
        text = file.read(length) if length <= LARGEST_HEADER else b""
    try:
        header = json.loads(text)
    except ValueError:
        raise SizingError("adapter", str(path), "is no safetensors file: its header cannot be read") from None
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        shape, kind, (begin, end) = tuple(entry["shape"]), entry["dtype"], entry["data_offsets"]
        if prod(shape) * ITEMSIZES.get(kind, 0) != end - begin:
            raise SizingError("adapter", str(path), f"is damaged: {name} does not have the bytes that its shape needs")
        yield AdapterTensor(name, shape, DTYPES.get(kind, kind), end - begin)


def _from_dict(tensors: Mapping[str, Any]) -> Iterator[AdapterTensor]:
    for name, tensor in tensors.items():
        view = getattr(tensor, "data_ptr", None)
        # Meta tensors and empty ones all have address 0; those share nothing.
        address = view() if callable(view) and getattr(getattr(tensor, "device", None), "type", "") != "meta" else 0
        storage = (address, tuple(tensor.shape), str(tensor.dtype)) if address else None
        dtype = str(tensor.dtype).rpartition(".")[2]
        yield AdapterTensor(name, tuple(tensor.shape), dtype, int(tensor.nbytes), storage)


# Names


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a name of the adapter belongs: a child of a module of a layer; `expert` for one of the routed experts."""

    group: Group
    module: Module
    layer: int
    child: int
    inputs: int
    outputs: int
    copies: int = 1  # experts within one tensor

    @property
    def key(self) -> tuple[str, int]:
        return self.group.path(None, self.module), self.layer


def _places(shape: ModelShape) -> dict[str, _Place]:
    """Every module name that an adapter of this model can have, in PEFT's and in vLLM's spelling."""
    places: dict[str, _Place] = {}
    for group in shape.groups:
        for layer in group.layers if group.stage == "layers" else (0,):
            for module in group.modules:
                for path in {group.peft_path(layer, module), group.path(layer, module)}:
                    for name, place in _module_places(group, module, layer, path):
                        places[name] = place
    return places


def _module_places(group: Group, module: Module, layer: int, path: str) -> Iterator[tuple[str, _Place]]:
    if isinstance(module, Linear):
        parent = path.rpartition(".")[0]
        for index, child in enumerate(module.children):
            name = f"{parent}.{child.name}" if parent else child.name
            yield name, _Place(group, module, layer, index, module.input_size, child.output_size)
        return
    hidden, inter, count = module.hidden_size, module.intermediate_size, module.num_experts
    if module.layout == "fused":
        yield f"{path}.base_layer", _Place(group, module, layer, 0, hidden, 2 * inter, count)
        yield path, _Place(group, module, layer, 1, inter, hidden, count)
        return
    for expert in range(count):
        for index, projection in enumerate(module.children):
            inputs, outputs = (inter, hidden) if index == 1 else (hidden, inter)
            yield f"{path}.{expert}.{projection}", _Place(group, module, layer, index, inputs, outputs)


def _parse(name: str) -> tuple[str, str] | None:
    """Module and factor (A or B) of a tensor's name; None where vLLM cannot parse it."""
    name = name.removeprefix("base_model.model.")
    for end, factor in (
        (".lora_A.weight", "A"),
        (".lora_B.weight", "B"),
        (".lora_embedding_A", "A"),
        (".lora_embedding_B", "B"),
    ):
        if name.endswith(end):
            return name.removesuffix(end), factor
    return None


def _check(adapter: Adapter, shape: ModelShape) -> AdapterCheck:
    places = _places(shape)
    ends = {name.rpartition(".")[2] for name in places} | {"experts", "base_layer"}
    ignored: dict[str, str] = {}
    refused: dict[str, str] = {}
    found: dict[tuple[str, int], dict[int, _Pair]] = defaultdict(dict)
    factors: dict[str, dict[str, AdapterTensor]] = defaultdict(dict)
    for tensor in adapter.tensors:
        if tensor.name.endswith((".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")):
            ignored[tensor.name] = "a copy of the base model's embedding, which vLLM skips"
            continue
        parsed = _parse(tensor.name)
        if parsed is None:
            refused[tensor.name] = "is no LoRA weight that vLLM can parse"
        elif parsed[0] in places:
            factors[parsed[0]][parsed[1]] = tensor
        elif parsed[0].rpartition(".")[2] in ends:
            ignored[tensor.name] = "names a kind of module that the model has, but none that has slots"
        else:
            refused[tensor.name] = "names no module that the model serves with LoRA"
    for module, pair in factors.items():
        place = places[module]
        reason = _misfit(pair, place)
        if reason:
            refused |= {tensor.name: reason for tensor in pair.values()}
        else:
            rank, dtypes = pair["A"].shape[0] // place.copies, (pair["A"].dtype, pair["B"].dtype)
            found[place.key][place.child] = _Pair(rank, dtypes, adapter.scaling_at(module) == 1)
    sizes = {tensor.name: tensor.nbytes for tensor in adapter.tensors}
    served = tuple(module for module in factors if not any(t.name in refused for t in factors[module].values()))
    return AdapterCheck(served, ignored, refused, sum(sizes[name] for name in ignored), tuple(_parts(shape, found)))


def _misfit(pair: Mapping[str, AdapterTensor], place: _Place) -> str:
    """Why a pair of factors does not fit its module; empty where it does."""
    if set(pair) != {"A", "B"}:
        return f"has no lora_{'B' if 'A' in pair else 'A'} beside it"
    a, b = pair["A"].shape, pair["B"].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % place.copies:
        return f"has factors of shapes {a} and {b}, which do not go together"
    if (a[1], b[0]) != (place.inputs, place.outputs):
        return f"has factors of shapes {a} and {b}; the module maps {place.inputs} to {place.outputs}"
    return ""


class _Pair(NamedTuple):
    """What of a module's two factors decides the bytes: rank, dtypes of A and B, whether the scaling is 1."""

    rank: int
    dtypes: tuple[str, str]
    unscaled: bool


_NOTHING = _Pair(0, ("", ""), False)


def _parts(shape: ModelShape, found: Mapping[tuple[str, int], Mapping[int, _Pair]]) -> Iterator[Part]:
    for group in shape.groups:
        for module in group.modules:
            path = group.path(None, module)
            count = len(module.children)
            kinds: Counter[tuple[_Pair, ...]] = Counter()
            for layer in group.layers if group.stage == "layers" else (0,):
                pairs = found.get((path, layer), {})
                if pairs:
                    kinds[tuple(pairs.get(index, _NOTHING) for index in range(count))] += 1
            for kind, times in kinds.items():
                ranks, dtypes, unscaled = zip(*kind, strict=True)
                if isinstance(module, Experts) and not all(ranks):
                    missing = [child for child, rank in zip(module.children, ranks, strict=True) if not rank]
                    raise SizingError(
                        "adapter", path, f"has no {', '.join(missing)}; vLLM needs each routed expert whole"
                    )
                yield Part(path, module, times, ranks, dtypes, unscaled)
