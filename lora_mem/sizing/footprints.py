"""The bytes of each holder of a LoRA adapter in one vLLM worker, before anything is run.

Three holders (vLLM's words): *staged* are the tensors as they were received, *packed* is the registered `LoRAModel`,
*slots* are the buffers that vLLM allocates at start-up and that generation reads. Every figure is a sum over the shapes
of tensors that `lora_mem.sizing.tensors` lists one by one.
"""

from __future__ import annotations

import html
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from lora_mem.drawing import draw
from lora_mem.errors import SizingError
from lora_mem.sizing.options import (
    ITEMSIZE,
    RECEIVED_ITEMSIZE,
    OptionKeywords,
    Options,
    Strategy,
    gather,
    takes_options,
)
from lora_mem.sizing.resolving import Resolved, resolve
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.slots import slot_groups, slot_tensors
from lora_mem.sizing.tensors import (
    AdapterModule,
    Tensor,
    adapter_modules,
    check_sharded_ranks,
    packed_tensors,
    staged_tensors,
)
from lora_mem.sizing.units import BLOCK_ALIGNMENT, aligned, gib, most_under_way, power_of_two

if TYPE_CHECKING:
    import pandas as pd

HOLDERS = ("packed", "staged", "slots")


@dataclass(frozen=True, slots=True)
class Line:
    """One figure, with the formula it comes from and the inputs that went in."""

    name: str
    bytes: int
    formula: str
    inputs: Mapping[str, Any]
    meaning: str

    def __str__(self) -> str:
        """The figure, the formula and its inputs in one line."""
        inputs = ", ".join(f"{key}={value}" for key, value in self.inputs.items())
        return f"{self.name} = {self.bytes:,} bytes ({gib(self.bytes)}) = {self.formula}  [{inputs}]"


@dataclass(frozen=True)
class Footprint:
    """What one adapter costs one worker, in bytes; see `footprint` for the meaning of each field.

    A prediction carries the model's shape and the options, a measurement (`measure`) what was found of each figure and
    of each kind of module; so both can say why.
    """

    packed_bytes: int
    staged_bytes: int
    shared_bytes: int
    slot_bytes: int
    slot_padding_bytes: int
    host_bytes: int
    host_pinned_bytes: int
    node_host_bytes: int
    node_host_pinned_bytes: int
    gpu_resident_bytes: int
    gpu_sync_peak_bytes: int
    model: str
    strategy: Strategy
    shape: ModelShape | None = field(default=None, repr=False)
    options: Resolved | None = field(default=None, repr=False)
    under_way_bytes: int = field(default=0, repr=False)
    workers_per_node: int = field(default=1, repr=False)
    found: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict, repr=False)
    found_rows: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)

    @property
    def registered_bytes(self) -> int:
        """What one adapter takes once it is registered and staged; memory that both share counted once."""
        return self.packed_bytes + self.staged_bytes - self.shared_bytes

    @property
    def registered_adapters(self) -> int:
        """How many of them the worker holds: `max_cpu_loras`; 1 for a measurement, which has no options."""
        return self.options.max_cpu_loras if self.options else 1

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Each figure with its formula and inputs."""
        return tuple(_lines(self))

    def phases(self, *, sleep_mode: bool = True) -> dict[str, dict[str, int]]:
        """Bytes of each holder on the GPU, phase by phase of a colocated run.

        `rest` is after start-up, `sync` while an adapter is brought in, `generation` after it, `training` while the
        trainer has the GPU. With `sleep_mode` vLLM sleeps during training: slots are in its pool and leave the GPU,
        registered and staged adapters are outside of it and stay.
        """
        kept = self.registered_adapters * self.registered_bytes if self.strategy == "keep" else 0
        sync = {"keep": kept, "offload": self.registered_bytes, "stage": self.under_way_bytes}[self.strategy]
        awake = {"slots": self.slot_bytes, "adapters": kept}
        return {
            "rest": {"slots": self.slot_bytes, "adapters": 0},
            "sync": {"slots": self.slot_bytes, "adapters": sync},
            "generation": awake,
            "training": {"slots": 0 if sleep_mode else self.slot_bytes, "adapters": kept},
        }

    def why(self, name: str) -> str:
        """Why a figure is what it is: its formula, its inputs and, for a holder, each kind of module that adds to it.

        Raises:
            SizingError: `name` is not one of the figures.

        """
        for line in self.lines:
            if name in (line.name, line.name.removesuffix("_bytes")):
                holder = {"packed_bytes": "packed", "staged_bytes": "staged", "slot_bytes": "slots"}.get(line.name)
                rows = self.rows(holder) if holder else iter(())
                parts = [f"  {row['module']}: {row['formula']} = {row['bytes']:,}" for row in rows]
                return "\n".join([line.meaning, str(line), *parts])
        raise SizingError("name", name, f"must be one of {', '.join(line.name for line in self.lines)}")

    def rows(self, holder: str) -> Iterator[dict[str, Any]]:
        """Each kind of module of one holder: how many, the shapes of its tensors and the bytes of all."""
        if holder not in HOLDERS:
            raise SizingError("holder", holder, f"must be one of {', '.join(HOLDERS)}")
        # A measurement has found all of its rows, the footprint of an adapter's file those that are not slots.
        if self.shape is None or self.options is None or (self.found_rows and holder != "slots"):
            yield from (dict(row) for row in self.found_rows if row["holder"] == holder)
            return
        received = holder == "staged" and self.strategy != "stage"
        itemsize = ITEMSIZE[self.options.dtype if received else self.options.lora_dtype]
        for path, count, tensors in _holder_tensors(self.shape, self.options, holder, self.strategy):
            yield _row(holder, path, count, tensors, itemsize)

    def compare(self, measured: Footprint) -> Comparison:
        """This prediction beside a measurement (or any other footprint), with the differences."""
        return Comparison(self, measured)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: figures in bytes, options, formulas and inputs, the GPU by phase, and each kind of module."""
        return {
            "model": self.model,
            **{name: getattr(self, name) for name in FIGURES},
            "strategy": self.strategy,
            "options": self.options.to_dict() if self.options else {},
            "why": [
                {"name": line.name, "bytes": line.bytes, "formula": line.formula, "inputs": dict(line.inputs)}
                for line in self.lines
            ],
            "phases": self.phases(),
            "modules": [row for holder in HOLDERS for row in self.rows(holder)],
        }

    def to_frame(self) -> pd.DataFrame:
        """One row for each holder and kind of module: holder, module, count, formula, bytes."""
        import pandas

        rows = [row for holder in HOLDERS for row in self.rows(holder)]
        return pandas.DataFrame(rows, columns=["holder", "module", "count", "formula", "bytes"])

    def plot(self, ax: Any = None) -> Any:
        """Bars of the holders by phase; takes and returns matplotlib's Axes."""
        return draw(self, ax)

    def __repr__(self) -> str:
        """Plain and stable: a table of the figures."""
        rows = [f"  {line.name:<20} {line.bytes:>20,}  {gib(line.bytes):>14}" for line in self.lines]
        assumed = [f"  assumed: {self.assumes}"] if self.assumes else []
        return "\n".join([f"Footprint of {self._title()}", *rows, *assumed])

    def _repr_html_(self) -> str:
        cells = [(line.name, f"{line.bytes:,}", gib(line.bytes), line.formula) for line in self.lines]
        table = html_table(self._title(), ("figure", "bytes", "GiB", "formula"), cells)
        return table + (f"<p>assumed: {html.escape(self.assumes)}</p>" if self.assumes else "")

    @property
    def assumes(self) -> str:
        """What was chosen for the caller and why, where a figure depends on it; else ""."""
        return self.options.assumes if self.options else ""

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Footprint:
        """The figures of a `to_dict`, as another process sent it; neither shape nor options come with it."""
        found = {line["name"]: (line["formula"], line["inputs"]) for line in plain["why"]}
        figures = {name: plain[name] for name in FIGURES}
        rows = tuple(plain.get("modules", ()))
        return cls(**figures, model=plain["model"], strategy=plain["strategy"], found=found, found_rows=rows)

    def _title(self) -> str:
        rank = f", rank {self.options.rank}" if self.options else ""
        return f"{self.model}{rank}, per worker ({self.strategy})"


FIGURES = (
    "packed_bytes",
    "staged_bytes",
    "shared_bytes",
    "slot_bytes",
    "slot_padding_bytes",
    "host_bytes",
    "host_pinned_bytes",
    "node_host_bytes",
    "node_host_pinned_bytes",
    "gpu_resident_bytes",
    "gpu_sync_peak_bytes",
)


@dataclass(frozen=True)
class Comparison:
    """Two footprints side by side; `difference` is the second less the first, in bytes."""

    predicted: Footprint
    measured: Footprint

    @property
    def difference(self) -> dict[str, int]:
        """Measured less predicted for each figure."""
        return {name: getattr(self.measured, name) - getattr(self.predicted, name) for name in FIGURES}

    @property
    def equal(self) -> bool:
        """Whether the two agree to the byte."""
        return not any(self.difference.values())

    def rows(self) -> list[dict[str, Any]]:
        """One row for each figure."""
        return [
            {
                "figure": name,
                "predicted": getattr(self.predicted, name),
                "measured": getattr(self.measured, name),
                "difference": difference,
            }
            for name, difference in self.difference.items()
        ]

    def by_module(self) -> list[dict[str, Any]]:
        """One row for each holder and kind of module that either side has."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for side, result in enumerate((self.predicted, self.measured)):
            for holder in HOLDERS:
                for row in result.rows(holder):
                    sizes.setdefault((holder, row["module"]), [0, 0])[side] += row["bytes"]
        return [
            {
                "holder": holder,
                "module": module,
                "predicted": predicted,
                "measured": measured,
                "difference": measured - predicted,
            }
            for (holder, module), (predicted, measured) in sizes.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"equal": self.equal, "figures": self.rows(), "modules": self.by_module()}

    def to_frame(self) -> pd.DataFrame:
        """One row for each figure."""
        import pandas

        return pandas.DataFrame(self.rows())

    def __repr__(self) -> str:
        """Plain and stable."""
        head = f"{'figure':<20} {'predicted':>20} {'measured':>20} {'difference':>20}"
        body = [
            f"{row['figure']:<20} {row['predicted']:>20,} {row['measured']:>20,} {row['difference']:>+20,}"
            for row in self.rows()
        ]
        modules = [
            f"  {row['holder']} {row['module']}: {row['predicted']:,} {row['measured']:,} {row['difference']:+,}"
            for row in self.by_module()
            if row["difference"]
        ]
        return "\n".join([head, *body, *(["modules that differ:", *modules] if modules else [])])

    def _repr_html_(self) -> str:
        cells = [
            (row["figure"], f"{row['predicted']:,}", f"{row['measured']:,}", f"{row['difference']:+,}")
            for row in self.rows()
        ]
        return html_table("bytes", ("figure", "predicted", "measured", "difference"), cells)


def html_table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A plain table without ids, so that it is the same each time; text that starts with a digit is set right."""
    body = ""
    for row in rows:
        cells = "".join(
            f"<td style='text-align:right;white-space:nowrap'>{html.escape(cell)}</td>"
            if re.match(r"[-+]?\d", cell)
            else f"<td>{html.escape(cell)}</td>"
            for cell in row
        )
        body += f"<tr>{cells}</tr>"
    columns = "".join(f"<th>{html.escape(column)}</th>" for column in head)
    top = f"<caption>{html.escape(caption)}</caption><thead><tr>{columns}</tr></thead>"
    return f"<table>{top}<tbody>{body}</tbody></table>"


@takes_options
def footprint(
    shape: ModelShape | dict[str, Any] | str | Path,
    given: Options | None = None,
    /,
    **options: Unpack[OptionKeywords],
) -> Footprint:
    """Bytes of each holder in one worker.

    Args:
        shape: a `ModelShape`, or anything that `ModelShape.from_config` takes.
        given: the options as an object; or all of them as keywords.
        options: options by name, in place of those of `given`; `help(lora_mem.Options)` lists them. `rank` is needed.

    Returns:
        A `Footprint`, with these fields (bytes per worker):

        - `packed_bytes`: one registered adapter. Split by expert parallelism; not sliced by tensor parallelism, nor
          cut by pipeline parallelism (vLLM registers the whole adapter in each stage).
        - `staged_bytes`: what is kept of one adapter to build it again after an eviction. keep, offload: its tensors as
          received, of the experts that are local to the worker, or of all where one tensor holds all. stage: the
          packed tensors.
        - `shared_bytes`: the part of the packed tensors that is the staged memory itself. stage: all of it. keep,
          offload: the tensors that vLLM takes as they are (A of dense modules; B too where its scaling is 1; A of
          fused experts).
        - `slot_bytes`: A and B buffers of every module that vLLM can serve, for `max_loras` adapters.
        - `slot_padding_bytes`: the part of it that `rank` leaves empty below `max_lora_rank`.
        - `gpu_resident_bytes`: what stays on the GPU through generation and training.
            keep: slots + max_cpu_loras * (packed + staged - shared). offload, stage: slots.
        - `gpu_sync_peak_bytes`: the most that is on the GPU while an adapter is brought in, the caller's own tensors
          left out for stage, which copies them.
            keep: as resident. offload: slots + packed + staged - shared (the adapter being brought in; the others are
            on the host). stage: slots + what may be under way: 136 MiB or twice the largest packed tensor, or the whole
            adapter where that is less (and a stack of the largest one in `dtype`, where that is not `lora_dtype`).
            vLLM lets an adapter that is replaced go before it packs the new one; the host holds both while the new one
            is received.
        - `host_bytes`: pinned host memory when `max_cpu_loras` adapters are registered, of exact size.
            keep: 0. offload, stage: max_cpu_loras * (packed + staged - shared).
        - `host_pinned_bytes`: the same as it is page-locked. offload: as torch's pinned cache takes it, each tensor
          rounded up to a power of two. stage: lora_mem's own block, each tensor at a multiple of 256 bytes.
        - `node_host_bytes`, `node_host_pinned_bytes`: of all `workers_per_node` workers of a host, each of
          which has its own.

    Raises:
        SizingError: an option is not what vLLM allows, or does not fit the model.
        TypeError: there is no such option, or the rank is missing.

    """
    shape, given = ModelShape.from_config(shape), gather(given, options)
    resolved = resolve(shape, given)
    slots = slot_bytes(shape, resolved)
    if resolved.fully_sharded_loras:
        check_sharded_ranks(adapter_modules(shape, resolved), resolved)
    if given.pipeline_rank is None and given.pipeline_parallel_size > 1:
        ranks = [replace(resolved, pipeline_rank=rank) for rank in range(given.pipeline_parallel_size)]
        slots, resolved = max(((slot_bytes(shape, rank), rank) for rank in ranks), key=lambda pair: pair[0])
    workers = resolved.workers_per_node
    return combine(shape, resolved, slots, _adapter_bytes(shape, resolved), resolved.strategy, workers)


def _row(holder: str, path: str, count: int, tensors: Sequence[Tensor], itemsize: int) -> dict[str, Any]:
    shapes = " + ".join(
        (f"{tensor.copies}*" if tensor.copies > 1 else "") + "x".join(map(str, tensor.shape)) for tensor in tensors
    )
    size = sum(tensor.elements for tensor in tensors) * itemsize * count
    formula = f"{count} * ({shapes}) * {itemsize}"
    return {"holder": holder, "module": path, "count": count, "formula": formula, "bytes": size}


def packed_rows(parts: Iterable[AdapterModule], options: Resolved, holder: str = "packed") -> Iterator[dict[str, Any]]:
    """Rows of the packed tensors of `parts`, as `Footprint.rows` has them."""
    for part in parts:
        yield _row(holder, part.path, part.count, packed_tensors(part, options), ITEMSIZE[options.lora_dtype])


_DECIDES_SLOTS = attrgetter(
    "max_lora_rank",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "pipeline_rank",
    "data_parallel_size",
    "enable_expert_parallel",
    "fully_sharded_loras",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "lora_target_modules",
    "moe_backend",
)
_DECIDES_ADAPTER = attrgetter(
    "rank",
    "rank_pattern",
    "lora_alpha",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "is_3d_lora_weight",
    "expert_parallel_size",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
    "dtype",
    "lora_dtype",
)


def slot_bytes(shape: ModelShape, options: Resolved) -> int:
    """Bytes of all slot buffers of one worker; `max_loras` times those of one slot."""
    key = ("slots", *_DECIDES_SLOTS(options))
    if key not in shape.memo:
        one = replace(options, max_loras=1)
        elements = 0
        for _, module, count in slot_groups(shape, one):
            elements += count * sum(tensor.elements for tensor in slot_tensors(module, one))
        shape.memo[key] = elements
    return int(shape.memo[key]) * options.max_loras * ITEMSIZE[options.lora_dtype]


class AdapterBytes(NamedTuple):
    """Bytes of one adapter in one worker.

    `pinned` is all of it in torch's pinned cache, `block` the packed tensors in a block of `stage`, `largest` the
    largest packed tensor, `cast` as many elements in the widest dtype that has to be cast (0: none has).
    """

    packed: int
    staged: int
    shared: int
    pinned: int
    block: int
    largest: int
    cast: int


def _adapter_bytes(shape: ModelShape, options: Resolved) -> AdapterBytes:
    key = ("adapter", *_DECIDES_ADAPTER(options))
    if key not in shape.memo:
        shape.memo[key] = sum_parts(adapter_modules(shape, options), options)
    found: AdapterBytes = shape.memo[key]
    return found


def sum_parts(parts: Iterable[AdapterModule], options: Resolved, received: Iterable[int] | None = None) -> AdapterBytes:
    """Bytes of an adapter made of `parts`, as it is received and packed.

    Args:
        parts: its modules.
        options: checked ones.
        received: the bytes of each tensor as it is received; by the parts, all in `dtype`, where it is not given.

    """
    parts, itemsize = list(parts), ITEMSIZE[options.lora_dtype]
    packed = shared = pinned = block = largest = 0
    for part in parts:
        for tensor in packed_tensors(part, options):
            size = tensor.elements * itemsize
            packed += size * part.count
            block += aligned(size) * part.count
            largest = max(largest, size)
            if tensor.shared:
                shared += size * part.count
            else:
                pinned += power_of_two(size // tensor.copies) * tensor.copies * part.count
    staged = Counter(received) if received is not None else _received(parts, options)
    pinned += sum(power_of_two(size) * count for size, count in staged.items())
    dtypes = {
        dtype for part in parts for pair in part.dtypes for dtype in pair if dtype not in ("", options.lora_dtype)
    }
    cast = largest // itemsize * max((RECEIVED_ITEMSIZE[dtype] for dtype in dtypes), default=0)
    staged_bytes = sum(size * count for size, count in staged.items())
    return AdapterBytes(packed, staged_bytes, shared, pinned, block, largest, cast)


def _received(parts: Iterable[AdapterModule], options: Resolved) -> Counter[int]:
    """How many tensors of each size in bytes are received, all in `dtype`."""
    sizes: Counter[int] = Counter()
    for part in parts:
        for tensor in staged_tensors(part, options):
            sizes[prod(tensor.shape) * ITEMSIZE[options.dtype]] += tensor.copies * part.count
    return sizes


def combine(
    shape: ModelShape,
    options: Resolved,
    slots: int,
    adapter: AdapterBytes,
    strategy: Strategy,
    workers: int,
    rows: tuple[Mapping[str, Any], ...] = (),
) -> Footprint:
    """The figures from their parts; `slots` in bytes, `rows` of what the options do not tell."""
    packed, registered = adapter.packed, options.max_cpu_loras
    staged, shared = (packed, packed) if strategy == "stage" else (adapter.staged, adapter.shared)
    both = packed + staged - shared
    host = 0 if strategy == "keep" else registered * both
    pinned = {"keep": 0, "offload": registered * adapter.pinned, "stage": registered * adapter.block}[strategy]
    under_way = most_under_way(packed, adapter.largest) + adapter.cast
    return Footprint(
        packed_bytes=packed,
        staged_bytes=staged,
        shared_bytes=shared,
        slot_bytes=slots,
        slot_padding_bytes=padding(slots, options.rank, options.max_lora_rank),
        host_bytes=host,
        host_pinned_bytes=pinned,
        node_host_bytes=workers * host,
        node_host_pinned_bytes=workers * pinned,
        gpu_resident_bytes=slots + (registered * both if strategy == "keep" else 0),
        gpu_sync_peak_bytes=slots + {"keep": registered * both, "offload": both, "stage": under_way}[strategy],
        model=shape.name,
        strategy=strategy,
        shape=shape,
        options=options,
        under_way_bytes=under_way,
        workers_per_node=workers,
        found_rows=rows,
    )


def padding(slots: int, rank: int, max_lora_rank: int) -> int:
    """The part of `slots` bytes that adapters of `rank` leave empty."""
    return slots * (max_lora_rank - rank) // max_lora_rank


def _holder_tensors(
    shape: ModelShape, options: Resolved, holder: str, strategy: Strategy
) -> Iterator[tuple[str, int, list[Tensor]]]:
    """Path, count and tensors of each kind of module of one holder."""
    if holder == "slots":
        for group, module, count in slot_groups(shape, options):
            tensors = slot_tensors(module, options)
            if tensors:
                yield group.path(None, module), count, tensors
        return
    listing = packed_tensors if holder == "packed" or strategy == "stage" else staged_tensors
    for part in adapter_modules(shape, options):
        yield part.path, part.count, listing(part, options)


_MEANING = {
    "packed_bytes": "One registered adapter (LoRAModel) in one worker; not sliced by tensor parallelism.",
    "staged_bytes": "What is kept of one adapter to build it again: as received, or packed (stage).",
    "shared_bytes": "The part of the packed tensors that is the staged memory itself.",
    "slot_bytes": "The A and B buffers that vLLM allocates at start-up, whatever the adapter targets.",
    "slot_padding_bytes": "The part of the slots that the adapter's rank leaves empty.",
    "host_bytes": "Pinned host memory with max_cpu_loras adapters registered, of exact size.",
    "host_pinned_bytes": "The same as it is page-locked: in torch's pinned cache (offload), in one block (stage).",
    "node_host_bytes": "Exact bytes of all workers of one host.",
    "node_host_pinned_bytes": "The same as it is page-locked.",
    "gpu_resident_bytes": "What stays on the GPU through generation and training.",
    "gpu_sync_peak_bytes": "The most on the GPU while an adapter is brought in.",
}


def _lines(result: Footprint) -> Iterator[Line]:
    options = result.options
    if options is None:
        for name in FIGURES:
            formula, inputs = result.found.get(name, ("measured", {}))
            yield Line(name, getattr(result, name), formula, inputs, _MEANING[name])
        return
    adapter: dict[str, Any] = {"rank": options.rank, "target_modules": options.target_modules}
    if options.rank_pattern:
        adapter["rank_pattern"] = dict(options.rank_pattern)
    alpha_pattern = {"alpha_pattern": dict(options.alpha_pattern)} if options.alpha_pattern else {}
    if options.enable_expert_parallel:
        adapter["expert_parallel_size"] = options.expert_parallel_size
    engine = ("max_loras", "max_lora_rank", "tensor_parallel_size", "fully_sharded_loras")
    formulas: dict[str, tuple[str, dict[str, Any]]] = {
        "packed_bytes": (
            "sum over targeted modules of (rank * inputs + outputs * rank) * itemsize, experts local to the worker",
            {**adapter, "dtype": options.lora_dtype},
        ),
        "staged_bytes": ("sum over received tensors of elements * itemsize", {**adapter, "dtype": options.dtype}),
        "shared_bytes": (
            "sum over packed tensors that vLLM takes as they were staged",
            {
                "scaling": options.folded_scaling,
                **alpha_pattern,
                "dtype": options.dtype,
                "lora_dtype": options.lora_dtype,
            },
        ),
        "slot_bytes": (
            "sum over served modules of max_loras * (A + B elements at max_lora_rank, sliced) * itemsize",
            {name: getattr(options, name) for name in engine} | {"dtype": options.lora_dtype},
        ),
        "slot_padding_bytes": ("slots * (max_lora_rank - rank) // max_lora_rank", {}),
        "host_pinned_bytes": _pinned_formula(result),
        "node_host_bytes": ("workers_per_node * host", {}),
        "node_host_pinned_bytes": ("workers_per_node * host_pinned", {}),
    }
    if result.strategy == "stage":
        formulas |= {"staged_bytes": ("packed", {}), "shared_bytes": ("packed", {})}
    both, registered = "(packed + staged - shared)", "max_cpu_loras * (packed + staged - shared)"
    by_strategy = {
        "host_bytes": {"keep": "0", "offload": registered, "stage": registered},
        "gpu_resident_bytes": {"keep": f"slots + {registered}", "offload": "slots", "stage": "slots"},
        "gpu_sync_peak_bytes": {
            "keep": f"slots + {registered}",
            "offload": f"slots + {both}",
            "stage": "slots + under_way",
        },
    }
    values = {
        "slots": result.slot_bytes,
        "packed": result.packed_bytes,
        "staged": result.staged_bytes,
        "shared": result.shared_bytes,
        "under_way": result.under_way_bytes,
        "max_cpu_loras": options.max_cpu_loras,
        "max_lora_rank": options.max_lora_rank,
        "rank": options.rank,
        "workers_per_node": result.workers_per_node,
        "host": result.host_bytes,
        "host_pinned": result.host_pinned_bytes,
    }
    for name in FIGURES:
        formula, inputs = formulas[name] if name in formulas else (by_strategy[name][result.strategy], {})
        inputs = inputs or {key: value for key, value in values.items() if re.search(rf"\b{key}\b", formula)}
        yield Line(name, getattr(result, name), formula, inputs, _MEANING[name])


def _pinned_formula(result: Footprint) -> tuple[str, dict[str, Any]]:
    options = result.options
    inputs = {"max_cpu_loras": options.max_cpu_loras} if options else {}
    if result.strategy == "keep":
        return "0", {}
    if result.strategy == "stage":
        rule = f"bytes rounded up to a multiple of {BLOCK_ALIGNMENT}"
        return f"max_cpu_loras * sum over packed tensors of their {rule}", inputs
    return "max_cpu_loras * sum over tensors of the next power of two of their bytes", inputs
