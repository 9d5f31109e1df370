"""A real adapter: its tensors by name, shape and dtype, read without loading them, and what vLLM would do with each.

Names as vLLM 0.33.0 parses them (`parse_fine_tuned_lora_name`, `check_unexpected_modules` in `vllm/lora`).
"""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from lora_mem.errors import SizingError
from lora_mem.sizing.checks import check_pattern, positive_number, whole_number
from lora_mem.sizing.footprints import Footprint, combine, footprint, packed_rows, sum_parts
from lora_mem.sizing.modules import Experts, Group, Linear, Module, parse_object, read_bytes
from lora_mem.sizing.options import ITEMSIZE, MAX_LORA_RANKS, RECEIVED_ITEMSIZE
from lora_mem.sizing.resolving import Resolved, slot_rank
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import match_pattern, scaling_of
from lora_mem.sizing.tensors import AdapterModule, check_sharded_ranks, local_experts

# Dtypes of a safetensors header: torch's name and the bits of an element.
DTYPES = {
    "BF16": ("bfloat16", 16),
    "F16": ("float16", 16),
    "F32": ("float32", 32),
    "F64": ("float64", 64),
    "F4": ("float4_e2m1fn_x2", 4),
    "F6_E2M3": ("float6_e2m3fn", 6),
    "F6_E3M2": ("float6_e3m2fn", 6),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "C64": ("complex64", 64),
    "BOOL": ("bool", 8),
    **{
        f"{sign}{bits}": (f"{kind}{bits}", bits)
        for sign, kind in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
}
# Arguments of `footprint` that an adapter decides itself.
DECIDED = frozenset(
    {"rank", "rank_pattern", "scaling", "lora_alpha", "alpha_pattern", "use_rslora", "target_modules", "dtype"}
)
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
        ranks: list[int] = [self.config["r"], *pattern.values()]
        return max(ranks)

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
        return sum(_sizes(self.tensors))

    def check(
        self, model: ModelShape | dict[str, Any] | str | Path, *, max_lora_rank: int | None = None
    ) -> AdapterCheck:
        """What vLLM would do with this adapter on `model`: with its config, and with each tensor.

        Args:
            model: anything that `ModelShape.from_config` takes.
            max_lora_rank: of the engine; the smallest that vLLM allows for the config's ranks where it is not given.

        """
        return _check(self, ModelShape.from_config(model), max_lora_rank)

    def footprint(self, model: ModelShape | dict[str, Any] | str | Path, **options: Any) -> Footprint:
        """The footprint of this very adapter: module by module with the ranks that its tensors have.

        What is received has the tensors' own bytes, whatever their dtypes; with expert parallelism it is that of the
        worker that receives the most.

        Args:
            model: anything that `ModelShape.from_config` takes.
            options: arguments of `footprint`, but those that the adapter decides itself. `lora_dtype` is bfloat16 where
                it is not given: the model's dtype, which the adapter does not tell. `auto` is the adapter's own.

        Raises:
            SizingError: vLLM or `stage_adapter` would refuse the adapter, or an option is wrong.

        """
        for option in sorted(options.keys() & DECIDED):
            raise SizingError(option, options[option], "must be left out: the adapter decides it")
        shape, given = ModelShape.from_config(model), dict(options)
        max_lora_rank = given.pop("max_lora_rank", None)
        found = self.check(shape, max_lora_rank=max_lora_rank)
        for what, (value, reason) in found.refused_for.items():
            raise SizingError(f"{self.name}: {what}", value, reason)
        for name, reason in found.refused.items():
            raise SizingError(f"{self.name}: tensor", name, f"{reason} ({len(found.refused)} tensors in all)")
        dtypes = sorted({one.tensor.dtype for one in found.received})
        if other := [one.tensor for one in found.received if one.tensor.dtype not in RECEIVED_ITEMSIZE]:
            allowed = f"cannot be staged; allowed are {', '.join(RECEIVED_ITEMSIZE)} (vLLM's own loader casts any)"
            raise SizingError(f"{self.name}: dtype of {other[0].name}", other[0].dtype, allowed)
        given.setdefault("lora_dtype", "bfloat16")
        if given["lora_dtype"] == "auto":
            if len(dtypes) != 1 or dtypes[0] not in ITEMSIZE:
                raise SizingError("lora_dtype", "auto", f"must be named for an adapter of {' and '.join(dtypes)}")
            given["dtype"] = dtypes[0]
        # The engine by itself: whatever its slots' rank is, they can be sliced by it.
        slots = slot_rank(self.rank, max_lora_rank)
        base = footprint(shape, rank=slots, max_lora_rank=slots, **given)
        assert base.options is not None
        wanted = replace(
            base.options,
            rank=self.config["r"],
            rank_pattern=tuple((self.config.get("rank_pattern") or {}).items()),
            lora_alpha=self.config["lora_alpha"],
            alpha_pattern=tuple((self.config.get("alpha_pattern") or {}).items()),
            use_rslora=bool(self.config.get("use_rslora")),
            target_modules=("the adapter's own",),
            dtype=" and ".join(dtypes),
        )
        check_sharded_ranks(found.parts, wanted)
        mine = max(
            (found.received_by(worker, wanted) for worker in range(wanted.expert_parallel_size)),
            key=lambda received: sum(_sizes(one.tensor for one in received)),
        )
        sizes = sum_parts(found.parts, wanted, _sizes(one.tensor for one in mine))
        rows = [*packed_rows(found.parts, wanted)]
        rows += packed_rows(found.parts, wanted, "staged") if base.strategy == "stage" else _staged_rows(mine)
        return combine(shape, wanted, base.slot_bytes, sizes, base.strategy, base.workers_per_node, tuple(rows))


def _sizes(tensors: Iterable[AdapterTensor]) -> list[int]:
    """The bytes of tensors, those of one memory once."""
    own: list[int] = []
    shared: dict[object, int] = {}
    for tensor in tensors:
        if tensor.storage is None:
            own.append(tensor.nbytes)
        else:
            shared[tensor.storage] = max(shared.get(tensor.storage, 0), tensor.nbytes)
    return own + list(shared.values())


def _staged_rows(received: Iterable[Received]) -> Iterator[dict[str, Any]]:
    kinds: dict[str, list[Received]] = defaultdict(list)
    for one in received:
        kinds[one.place.key[0]].append(one)
    for path, found in kinds.items():
        row = {"holder": "staged", "module": path, "count": len({one.place.layer for one in found})}
        size = sum(_sizes(one.tensor for one in found))
        yield {**row, "formula": "sum over received tensors of their own bytes", "bytes": size}


class Received(NamedTuple):
    """A factor of the adapter, and the module that it is for."""

    tensor: AdapterTensor
    place: _Place


@dataclass(frozen=True)
class AdapterCheck:
    """What becomes of an adapter's tensors in vLLM.

    `served` are module names that have a module in the model; `ignored` are tensors that vLLM loads and never uses, or
    skips, with the reason; `refused` are those for which it refuses the whole adapter. `refused_for` is what else it
    refuses the adapter for: a field of its config, its value and the reason.
    """

    served: tuple[str, ...]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]
    refused_for: Mapping[str, tuple[object, str]]
    ignored_bytes: int
    parts: tuple[AdapterModule, ...]
    received: tuple[Received, ...]

    @property
    def ok(self) -> bool:
        """Whether vLLM takes the adapter and uses all of it."""
        return not self.ignored and not self.refused and not self.refused_for

    def received_by(self, worker: int, options: Resolved) -> list[Received]:
        """The factors that a worker is given: with expert parallelism none of the experts that live in others."""
        return [one for one in self.received if one.place.worker(options) in (None, worker)]

    def __repr__(self) -> str:
        """Plain and stable."""
        lines = [f"AdapterCheck: {len(self.served)} modules served, {len(self.ignored)} tensors ignored,"]
        lines[0] += f" {len(self.refused)} refused"
        lines += [f"  refused for {what}={value!r}: {why}" for what, (value, why) in self.refused_for.items()]
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
        SizingError: a file is missing or damaged (its size is held against the header), or a field of the config is
            missing or no such number.

    """
    if config is not None and not isinstance(config, Mapping):
        raise SizingError("config", config, "must be PEFT's config as a dict")
    if isinstance(source, Mapping):
        if config is None:
            raise SizingError("config", config, "is needed with a dict of tensors: PEFT's config as a dict")
        name, tensors = "adapter", tuple(_from_dict(source))
        config = {"target_modules": [], **config}  # as stage_adapter does
    elif isinstance(source, str | Path):
        path = Path(source)
        name, tensors = str(path), tuple(_from_file(_file(path, "adapter_model.safetensors")))
        if config is None:
            config_path = _file(path, "adapter_config.json")
            config = parse_object(read_bytes(config_path, "adapter"), "adapter", str(config_path))
    else:
        raise SizingError("source", source, "must be the directory of an adapter, or a dict of tensors")
    _check_config(config, f"{name}: config field ")
    return Adapter(name, config, tensors)


def _check_config(config: Mapping[str, Any], what: str) -> None:
    """Refuse a config whose ranks and alphas are no such numbers, or whose lists are none."""
    whole_number(f"{what}r", config.get("r"))
    positive_number(f"{what}lora_alpha", config.get("lora_alpha"))
    check_pattern(f"{what}rank_pattern", config.get("rank_pattern"), whole_number)
    check_pattern(f"{what}alpha_pattern", config.get("alpha_pattern"), positive_number)
    saved = config.get("modules_to_save")
    if saved is not None and not (isinstance(saved, list | tuple) and all(isinstance(one, str) for one in saved)):
        raise SizingError(f"{what}modules_to_save", saved, "must be a list of names, or null")


def _file(directory: Path, name: str) -> Path:
    try:
        path = directory.expanduser() / name
        found = path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for a file, a home that is nobody's
        raise SizingError("adapter", str(directory), f"is no path ({error})") from None
    if not found:
        raise SizingError("adapter", str(path), "is missing; the directory of an adapter holds it")
    return path


def _from_file(path: Path) -> Iterator[AdapterTensor]:
    """Names, dtypes and shapes from a safetensors file: 8 bytes of length, then that much JSON, then the data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            length = struct.unpack("<Q", start)[0] if len(start) == 8 else LARGEST_HEADER + 1
            text = file.read(length) if length <= LARGEST_HEADER else b""
    except OSError as error:
        raise SizingError("adapter", str(path), f"cannot be read ({error.strerror})") from None
    if len(text) != length:
        raise SizingError("adapter", str(path), "is no safetensors file: it is shorter than its header says")
    header = parse_object(text, "adapter", f"{path} (header)")
    header.pop("__metadata__", None)
    end = 0
    for begin, stop, shape, dtype, name in sorted((*_entry(header[name], name, str(path)), name) for name in header):
        if begin != end:
            raise SizingError("adapter", str(path), f"is damaged: {name} begins at byte {begin} of the data, not {end}")
        end = stop
        yield AdapterTensor(name, shape, dtype, stop - begin)
    if 8 + length + end != size:
        held = size - 8 - length
        raise SizingError("adapter", str(path), f"is damaged: its header tells of {end} bytes of data, it has {held}")


def _entry(entry: Any, name: str, where: str) -> tuple[int, int, tuple[int, ...], str]:
    """First byte, end, shape and dtype of one tensor in a header."""

    def numbers(field: str) -> list[int]:
        value = entry.get(field)
        if not isinstance(value, list) or not all(type(one) is int and one >= 0 for one in value):
            raise SizingError(f"{where}: {field} of {name}", value, "must be a list of whole numbers >= 0")
        return value

    if not isinstance(entry, dict):
        raise SizingError(f"{where}: {name}", entry, "must be an object with dtype, shape and data_offsets")
    shape, offsets, kind = numbers("shape"), numbers("data_offsets"), entry.get("dtype")
    if not isinstance(kind, str) or kind not in DTYPES:
        raise SizingError(f"{where}: dtype of {name}", kind, f"must be one of {', '.join(DTYPES)}, as safetensors has")
    if len(offsets) != 2:
        raise SizingError(f"{where}: data_offsets of {name}", offsets, "must be two: the first byte and the end")
    dtype, bits = DTYPES[kind]
    begin, end = offsets
    if prod(shape) * bits != 8 * (end - begin):
        reason = f"is damaged: {name} has {end - begin} bytes, {kind} of shape {shape} needs {prod(shape) * bits // 8}"
        raise SizingError("adapter", where, reason)
    return begin, end, tuple(shape), dtype


def _from_dict(tensors: Mapping[str, Any]) -> Iterator[AdapterTensor]:
    for name, tensor in tensors.items():
        if not isinstance(name, str):
            raise SizingError("name of a tensor", name, "must be a string")
        if not all(hasattr(tensor, field) for field in ("shape", "dtype", "nbytes")):
            raise SizingError(f"tensor {name}", tensor, "must have shape, dtype and nbytes, as torch tensors do")
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
    expert: int | None = None

    def worker(self, options: Resolved) -> int | None:
        """The expert-parallel rank that the expert lives in; None where every worker has it."""
        if self.expert is None or not isinstance(self.module, Experts):
            return None
        return self.expert // local_experts(self.module, options)

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
            yield f"{path}.{expert}.{projection}", _Place(group, module, layer, index, inputs, outputs, 1, expert)


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


# PEFT's features that vLLM reads only to refuse them.
UNSUPPORTED = {
    "use_dora": "vLLM has no DoRA",
    "lora_bias": "vLLM has no bias in LoRA",
    "alora_invocation_tokens": "vLLM has no activated LoRA (aLoRA)",
    "layer_replication": "vLLM has no layer_replication",
    "use_bdlora": "vLLM has no block-diagonal LoRA (BD-LoRA)",
    "use_qalora": "vLLM has no QALoRA",
}
# The inits of PEFT that leave the base model's weights as they are; others change them, which vLLM does not do.
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica", "lora_ga")


def _refused_config(adapter: Adapter, max_lora_rank: int) -> Iterator[tuple[str, tuple[object, str]]]:
    """Fields of the config for which vLLM refuses the adapter (`PEFTHelper.validate_legal`)."""
    config = adapter.config
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
    if adapter.rank > max_lora_rank:
        yield "rank", (adapter.rank, f"the config's largest, is more than max_lora_rank={max_lora_rank}")


def _check(adapter: Adapter, shape: ModelShape, max_lora_rank: int | None) -> AdapterCheck:
    limit = MAX_LORA_RANKS[-1] if max_lora_rank is None else slot_rank(1, max_lora_rank)
    refused_for = dict(_refused_config(adapter, limit))
    slots = slot_rank(min(adapter.rank, limit), max_lora_rank)
    places = _places(shape)
    ends = {name.rpartition(".")[2] for name in places} | {"experts", "base_layer"}
    ignored: dict[str, str] = {}
    refused: dict[str, str] = {}
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
    if len(ignored) == len(adapter.tensors) and not any(map(_parse, ignored)):
        refused_for["tensors"] = (len(adapter.tensors), "has no LoRA weight; vLLM fails on such an adapter")
    fitting: dict[tuple[str, int], dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    for module, pair in factors.items():
        place = places[module]
        if reason := _misfit(pair, place, slots):
            refused |= {tensor.name: reason for tensor in pair.values()}
        else:
            fitting[place.key][place.child].append(module)
    for children in fitting.values():
        if reason := _misfit_experts(children, factors, places):
            refused |= {t.name: reason for names in children.values() for name in names for t in factors[name].values()}
    served = tuple(module for module in factors if not any(t.name in refused for t in factors[module].values()))
    found: dict[tuple[str, int], dict[int, _Pair]] = defaultdict(dict)
    # Scalings of ranks that vLLM refuses are nobody's business.
    for module in () if refused_for else served:
        place, pair = places[module], factors[module]
        rank, dtypes = pair["A"].shape[0] // place.copies, (pair["A"].dtype, pair["B"].dtype)
        before = found[place.key].get(place.child)
        if before is not None and before.dtypes != dtypes:
            dtypes = ("", "")  # experts of several dtypes are not stacked before they are cast
        found[place.key][place.child] = _Pair(rank, dtypes, place.expert is None and adapter.scaling_at(module) == 1)
    return AdapterCheck(
        served,
        ignored,
        refused,
        refused_for,
        sum(tensor.nbytes for tensor in adapter.tensors if tensor.name in ignored),
        tuple(_parts(shape, found)),
        tuple(Received(tensor, places[module]) for module in served for tensor in factors[module].values()),
    )


def _misfit_experts(
    children: Mapping[int, list[str]], factors: Mapping[str, Mapping[str, AdapterTensor]], places: Mapping[str, _Place]
) -> str:
    """Why vLLM cannot pack the routed experts of a layer; empty where it can, or where they are no experts."""
    module = next(places[name].module for names in children.values() for name in names)
    if not isinstance(module, Experts):
        return ""
    if missing := [child for index, child in enumerate(module.children) if index not in children]:
        return f"has no {', '.join(missing)} beside it; vLLM needs each routed expert whole"
    for index, child in enumerate(module.children):
        names = children[index]
        if len(names) != (1 if module.layout == "fused" else module.num_experts):
            return f"has {child} for {len(names)} of {module.num_experts} experts; vLLM needs all"
        if len({factors[name]["A"].shape[0] for name in names}) > 1:
            return f"has experts whose ranks of {child} differ; vLLM cannot pack them"
    return ""


def _misfit(pair: Mapping[str, AdapterTensor], place: _Place, max_lora_rank: int) -> str:
    """Why a pair of factors does not fit its module; empty where it does."""
    if set(pair) != {"A", "B"}:
        return f"has no lora_{'B' if 'A' in pair else 'A'} beside it"
    a, b = pair["A"].shape, pair["B"].shape
    if len(a) != 2 or len(b) != 2 or a[0] != b[1] or a[0] % place.copies:
        return f"has factors of shapes {a} and {b}, which do not go together"
    if (a[1], b[0]) != (place.inputs, place.outputs):
        return f"has factors of shapes {a} and {b}; the module maps {place.inputs} to {place.outputs}"
    if a[0] // place.copies > max_lora_rank:
        return f"has rank {a[0] // place.copies}, which does not fit slots of max_lora_rank={max_lora_rank}"
    return ""


class _Pair(NamedTuple):
    """What of a module's two factors decides the bytes: rank, dtypes of A and B, whether the scaling is 1."""

    rank: int
    dtypes: tuple[str, str]
    unscaled: bool


_NOTHING = _Pair(0, ("", ""), False)


def _parts(shape: ModelShape, found: Mapping[tuple[str, int], Mapping[int, _Pair]]) -> Iterator[AdapterModule]:
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
                yield AdapterModule(path, module, times, ranks, dtypes, unscaled)
