"""A real adapter: its config and its tensors by name, shape and dtype, read without loading them."""

from __future__ import annotations

import struct
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from lora_mem.errors import SizingError
from lora_mem.sizing import peft_config, rules
from lora_mem.sizing.counting import packed_rows, sum_modules
from lora_mem.sizing.footprints import Footprint, combine, footprint
from lora_mem.sizing.modules import Experts, Module, parse_object, read_object
from lora_mem.sizing.options import ITEMSIZE, MAX_LORA_RANKS, RECEIVED_ITEMSIZE
from lora_mem.sizing.resolving import Resolved, slot_rank
from lora_mem.sizing.rules import AdapterCheck
from lora_mem.sizing.serving import Place, ServedModule, ServedShape, serve
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import child_paths, rank_and_unscaled, scaling_of
from lora_mem.sizing.tensors import AdapterModule, check_sharded_ranks, local_experts

# Dtypes of a safetensors header: torch's name and the bits of an element.
DTYPES = {
    **{f"F{bits}": (f"float{bits}", bits) for bits in (16, 32, 64)},
    **{f"I{bits}": (f"int{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"U{bits}": (f"uint{bits}", bits) for bits in (8, 16, 32, 64)},
    **{f"F8_{kind}": (f"float8_{kind.lower()}", 8) for kind in ("E4M3FNUZ", "E5M2", "E5M2FNUZ")},
    **{f"F6_{kind}": (f"float6_{kind.lower()}fn", 6) for kind in ("E2M3", "E3M2")},
    "BF16": ("bfloat16", 16),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F4": ("float4_e2m1fn_x2", 4),
    "C64": ("complex64", 64),
    "BOOL": ("bool", 8),
}
# Arguments of `footprint` that an adapter decides itself.
DECIDED = frozenset(
    {"rank", "rank_pattern", "scaling", "lora_alpha", "alpha_pattern", "use_rslora", "target_modules", "dtype"}
)
LARGEST_HEADER = 100_000_000  # as the safetensors library has it


class AdapterTensor(NamedTuple):
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
        return peft_config.largest_rank(self.config)

    @property
    def scaling(self) -> float:
        """What vLLM folds into B of a module that no pattern names: alpha / r, or alpha / sqrt(r) for rsLoRA."""
        return scaling_of(self.config["lora_alpha"], self.config["r"], bool(self.config.get("use_rslora")))

    @property
    def staged_bytes(self) -> int:
        """Bytes of all tensors, those of the same memory counted once."""
        return sum(_sizes(self.tensors))

    def check(
        self,
        model: ModelShape | dict[str, Any] | str | Path,
        *,
        max_lora_rank: int | None = None,
        enable_mixed_moe_lora_format: bool = False,
        enable_moe_shared_loras: bool = False,
    ) -> AdapterCheck:
        """What vLLM would do with this adapter on `model`: with its config, and with each tensor.

        Args:
            model: anything that `ModelShape.from_config` takes.
            max_lora_rank: of the engine; the smallest that vLLM allows for the config's ranks where it is not given.
            enable_mixed_moe_lora_format: of the engine.
            enable_moe_shared_loras: of the engine.
        """
        mixed, shared = enable_mixed_moe_lora_format, enable_moe_shared_loras
        served = serve(ModelShape.from_config(model), self._slots(max_lora_rank), mixed=mixed, shared=shared)
        return self._check(served, max_lora_rank)

    def _slots(self, max_lora_rank: int | None) -> int:
        """`max_lora_rank` of the engine, also where the config's ranks are above what vLLM allows."""
        limit = MAX_LORA_RANKS[-1] if max_lora_rank is None else slot_rank(1, max_lora_rank)
        return slot_rank(min(self.rank, limit), max_lora_rank)

    def _check(self, served: ServedShape, max_lora_rank: int | None) -> AdapterCheck:
        shapes = {one.name: one.shape for one in self.tensors}
        refusals = dict(peft_config.refusals(self.config, max_lora_rank or MAX_LORA_RANKS[-1]))
        found = rules.check(shapes, served.read_name, served, refused_for=refusals)
        return replace(found, ignored_bytes=sum(one.nbytes for one in self.tensors if one.name in found.ignored))

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
        shape, given = ModelShape.from_config(model), {"lora_dtype": "bfloat16", **options}
        max_lora_rank = given.pop("max_lora_rank", None)
        slots = self._slots(max_lora_rank)
        mixed, shared = (bool(given.get(f"enable_{what}")) for what in ("mixed_moe_lora_format", "moe_shared_loras"))
        served = serve(shape, slots, mixed=mixed, shared=shared)
        received = self._received(served, max_lora_rank)
        dtypes = sorted({tensor.dtype for tensor in _tensors(received)})
        if given["lora_dtype"] == "auto":
            if len(dtypes) != 1 or dtypes[0] not in ITEMSIZE:
                raise SizingError("lora_dtype", "auto", f"must be named for an adapter of {' and '.join(dtypes)}")
            given["dtype"] = dtypes[0]
        if any(one.takes.packed_in for one in received):
            given.setdefault("is_3d_lora_weight", any(one.takes.fused for one in received))
        # The engine by itself: whatever its slots' rank is, they can be sliced by it.
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
        parts = tuple(_parts(received, served, wanted))
        check_sharded_ranks(parts, wanted)
        workers = [_given_to(worker, received, wanted) for worker in range(wanted.expert_parallel_size)]
        sizes, mine = max(((_sizes(_tensors(theirs)), theirs) for theirs in workers), key=lambda pair: sum(pair[0]))
        rows = [*packed_rows(parts, wanted)]
        rows += packed_rows(parts, wanted, "staged") if base.strategy == "stage" else _staged_rows(mine)
        return combine(shape, wanted, base.slot_bytes, sum_modules(parts, wanted, sizes), tuple(rows))

    def _received(self, served: ServedShape, max_lora_rank: int | None) -> list[Received]:
        """The factors and their places; refuses what vLLM or a stage refuses."""
        tensors = {one.name: one for one in self.tensors}
        found = self._check(served, max_lora_rank)
        for what, (value, reason) in found.refused_for.items():
            raise SizingError(f"{self.name}: {what}", value, reason)
        for name, reason in found.refused.items():
            raise SizingError(f"{self.name}: tensor", name, f"{reason} ({len(found.refused)} tensors in all)")
        places, modules = served.places, served.modules
        received = [
            Received(places[module], modules[module], (tensors[a], tensors[b]))
            for module, (a, b) in found.served.items()
        ]
        for wrong in (one for one in _tensors(received) if one.dtype not in RECEIVED_ITEMSIZE):
            allowed = f"cannot be staged; allowed are {', '.join(RECEIVED_ITEMSIZE)} (vLLM's own loader casts any)"
            raise SizingError(f"{self.name}: dtype of {wrong.name}", wrong.dtype, allowed)
        return received


class Received(NamedTuple):
    """The two factors of a module, and where it belongs."""

    place: Place
    takes: ServedModule
    factors: tuple[AdapterTensor, AdapterTensor]


def _given_to(worker: int, received: list[Received], options: Resolved) -> list[Received]:
    """What a worker is given: with expert parallelism no expert that comes by itself and lives in another."""
    if options.expert_parallel_size == 1:
        return received
    given = []
    for one in received:
        module, expert = one.place[1], one.takes.expert
        if expert is None or not isinstance(module, Experts) or expert // local_experts(module, options) == worker:
            given.append(one)
    return given


def _tensors(received: Iterable[Received]) -> Iterator[AdapterTensor]:
    return (tensor for one in received for tensor in one.factors)


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
        kinds[one.place[0]].append(one)
    for path, found in kinds.items():
        row = {"holder": "staged", "module": path, "count": len({one.place[2] for one in found})}
        formula = "sum over received tensors of their own bytes"
        yield {**row, "formula": formula, "bytes": sum(_sizes(_tensors(found)))}


Child = tuple[int, tuple[str, str], bool]
"""What of a child's factors decides the bytes: rank, dtypes of A and B, and whether the scaling is 1."""


def _parts(received: Iterable[Received], served: ServedShape, options: Resolved) -> Iterator[AdapterModule]:
    """The modules of the adapter, in the model's order; layers that have the same of one are counted together."""
    found: dict[int, dict[int, Child]] = defaultdict(dict)  # by place, of which each is one object
    for one in received:
        children, child, (a, b) = found[id(one.place)], one.takes.projections[0][0], one.factors
        dtypes = (a.dtype, b.dtype)
        if child in children and children[child][1] != dtypes:
            dtypes = ("", "")  # experts of several dtypes are not stacked before they are cast
        unscaled = False
        if one.takes.expert is None and (name := served.read_name(a.name)):
            _, unscaled = rank_and_unscaled(name.peft_module, options)
        children[child] = (a.shape[-2] // one.takes.experts, dtypes, unscaled)
    kinds: dict[tuple[str, Module], Counter[tuple[Child, ...]]] = defaultdict(Counter)
    for at, (path, module, _) in {id(place): place for place in served.places.values()}.items():
        count, nothing = len(child_paths(module, options, path)), (0, ("", ""), False)
        if at in found:
            kinds[path, module][tuple(found[at].get(child, nothing) for child in range(count))] += 1
    for (path, module), layers in kinds.items():
        for kind, times in layers.items():
            yield AdapterModule(path, module, times, *zip(*kind, strict=True))


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
            config = read_object(_file(path, "adapter_config.json"), "adapter")
    else:
        raise SizingError("source", source, "must be the directory of an adapter, or a dict of tensors")
    for (field, *keys), value, allowed in peft_config.problems(config):
        where = "".join(f"[{key!r}]" for key in keys)
        raise SizingError(f"{name}: config field {field}{where}", value, allowed)
    return Adapter(name, config, tensors)


def _file(directory: Path, name: str) -> Path:
    try:
        path = directory.expanduser() / name
        found = path.is_file()
    except (OSError, RuntimeError) as error:  # a name too long for a file, a home that is nobody's
        raise SizingError("adapter", str(directory), f"is not a path ({error})") from None
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
        raise SizingError("adapter", str(path), "is not a safetensors file: it is shorter than its header says")
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
        raise SizingError("adapter", str(path), f"is damaged: its header says {end} bytes of data, the file has {held}")


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
