"""The bytes of each holder of a LoRA adapter in one vLLM worker, before anything is run.

Three holders (vLLM's words): *staged* are the tensors as they were received, *packed* is the registered `LoRAModel`,
*slots* are the buffers that vLLM allocates at start-up and that generation reads. Every figure is a sum over tensors
(`lora_mem.sizing.counting`), or a formula over such sums.
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from lora_mem.drawing import draw, html_table
from lora_mem.errors import SizingError
from lora_mem.sizing.counting import HOLDERS, AdapterBytes, adapter_bytes, rows_of, slot_bytes
from lora_mem.sizing.options import OptionKeywords, Options, Strategy, gather, takes_options
from lora_mem.sizing.resolving import Resolved, resolve
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.tensors import adapter_modules, check_sharded_ranks
from lora_mem.sizing.units import BLOCK_ALIGNMENT, gib, most_under_way

if TYPE_CHECKING:
    import pandas as pd


def _figure(meaning: str, formula: str, *, stage: str = "", keep: str = "") -> Any:
    """A figure's field: what it means, and its formula by strategy; with `sum over` it is counted, not evaluated."""
    return field(metadata={"meaning": meaning, "keep": keep or formula, "offload": formula, "stage": stage or formula})


class Line(NamedTuple):
    """One figure, with the formula it comes from and the inputs that went in."""

    name: str
    bytes: int
    formula: str
    inputs: Mapping[str, Any]
    meaning: str

    def __str__(self) -> str:
        inputs = ", ".join(f"{key}={value}" for key, value in self.inputs.items())
        return f"{self.name} = {self.bytes:,} bytes ({gib(self.bytes)}) = {self.formula}  [{inputs}]"


ONE, ALL = "(packed + staged - shared)", "max_cpu_loras * (packed + staged - shared)"
PADDING = "slots * (max_lora_rank - rank) // max_lora_rank"


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """What one adapter costs one worker, in bytes; `why(name)` says what a figure means and how it comes about.

    A prediction carries the model's shape, the options and the values that its formulas name, a measurement (`measure`)
    what was found of each figure and of each kind of module; so both can say why.
    """

    packed_bytes: int = _figure(
        "One registered adapter (LoRAModel) in one worker. Split by expert parallelism; not sliced by tensor"
        " parallelism, nor cut by pipeline parallelism (vLLM registers the whole adapter in each pipeline rank).",
        "sum over targeted modules of (rank * inputs + outputs * rank) * itemsize, experts local to the worker",
    )
    staged_bytes: int = _figure(
        "What is kept of one adapter to build it again after an eviction. keep, offload: its tensors as received,"
        " of the worker's own experts, or of all where one tensor holds all. stage: the packed tensors.",
        "sum over received tensors of elements * itemsize",
        stage="packed",
    )
    shared_bytes: int = _figure(
        "The part of the packed tensors that is the staged memory itself. keep, offload: what vLLM takes as it is"
        " (A of dense modules, B too where its scaling is 1, A of fused experts). stage: all of them.",
        "sum over packed tensors that vLLM takes as they were staged",
        stage="packed",
    )
    slot_bytes: int = _figure(
        "The A and B buffers that vLLM allocates at start-up, whatever the adapter targets.",
        "sum over served modules of max_loras * (A + B elements at max_lora_rank, sliced) * itemsize",
    )
    slot_padding_bytes: int = _figure("The part of the slots that the adapter's rank leaves empty.", PADDING)
    host_bytes: int = _figure(
        "Pinned host memory with max_cpu_loras adapters registered, of exact size.", ALL, keep="0"
    )
    host_pinned_bytes: int = _figure(
        "The same as it is pinned: by torch's pinned cache, tensor by tensor (offload), or in one block (stage).",
        "max_cpu_loras * sum over tensors of the next power of two of their bytes",
        stage=f"max_cpu_loras * sum over packed tensors of their bytes rounded up to a multiple of {BLOCK_ALIGNMENT}",
        keep="0",
    )
    node_host_bytes: int = _figure(
        "Exact bytes of all workers of one host; each has its own.", "workers_per_node * host"
    )
    node_host_pinned_bytes: int = _figure("The same as it is pinned.", "workers_per_node * host_pinned")
    gpu_resident_bytes: int = _figure(
        "What stays on the GPU through generation and training.", "slots", keep=f"slots + {ALL}"
    )
    gpu_sync_peak_bytes: int = _figure(
        "The most on the GPU while an adapter is brought in. keep: as resident. offload: with that adapter; the"
        " others are on the host. stage: with what may be under way (136 MiB, or twice the largest packed tensor,"
        " or the whole adapter where that is less; more by a stack of the largest where it is cast), without the"
        " caller's own tensors, which it copies.",
        f"slots + {ONE}",
        stage="slots + under_way",
        keep=f"slots + {ALL}",
    )
    model: str
    strategy: Strategy
    shape: ModelShape | None = field(default=None, repr=False)
    options: Resolved | None = field(default=None, repr=False)
    values: Mapping[str, Any] = field(default_factory=dict, repr=False)
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

    @property
    def assumes(self) -> str:
        """What was chosen for the caller and why, where a figure depends on it; else ""."""
        return self.options.assumes if self.options else ""

    @property
    def figures(self) -> dict[str, int]:
        """Each figure by its name."""
        return {name: getattr(self, name) for name in FIGURES}

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Each figure with its formula and inputs."""
        return tuple(
            Line(name, getattr(self, name), *self._formula(name), figure["meaning"]) for name, figure in FIGURES.items()
        )

    def _formula(self, name: str) -> tuple[str, Mapping[str, Any]]:
        if self.options is None:
            return self.found.get(name, ("measured", {}))
        formula = FIGURES[name][self.strategy]
        if code := _code(formula):
            return formula, {key: value for key, value in self.values.items() if key in code.co_names}
        return formula, _counted_from(name, self.options)

    def phases(self, *, sleep_mode: bool = True) -> dict[str, dict[str, int]]:
        """Bytes of each holder on the GPU, phase by phase of a colocated run.

        `baseline` is after start-up, `sync` while an adapter is brought in, `generation` after it, `training` while the
        trainer has the GPU. With `sleep_mode` vLLM sleeps during training: slots are in its pool and leave the GPU,
        registered and staged adapters are outside of it and stay.
        """
        kept, brought_in = (size - self.slot_bytes for size in (self.gpu_resident_bytes, self.gpu_sync_peak_bytes))
        return {
            "baseline": {"slots": self.slot_bytes, "adapters": 0},
            "sync": {"slots": self.slot_bytes, "adapters": brought_in},
            "generation": {"slots": self.slot_bytes, "adapters": kept},
            "training": {"slots": 0 if sleep_mode else self.slot_bytes, "adapters": kept},
        }

    def why(self, name: str) -> str:
        """Why a figure is what it is: its formula, its inputs and, for a holder, each kind of module that adds to it.

        Raises:
            SizingError: `name` is not one of the figures.
        """
        for line in self.lines:
            if name in (line.name, line.name.removesuffix("_bytes")):
                rows = self.rows(_short(line.name)) if _short(line.name) in HOLDERS else ()
                parts = [f"  {row['module']}: {row['formula']} = {row['bytes']:,}" for row in rows]
                return "\n".join([line.meaning, str(line), *parts])
        raise SizingError("name", name, f"must be one of {', '.join(FIGURES)}")

    def rows(self, holder: str) -> Iterator[dict[str, Any]]:
        """Each kind of module of one holder: how many, the shapes of its tensors and the bytes of all."""
        if holder not in HOLDERS:
            raise SizingError("holder", holder, f"must be one of {', '.join(HOLDERS)}")
        # A measurement has found all of its rows, the footprint of an adapter's file those that are not slots.
        if self.shape is None or self.options is None or (self.found_rows and holder != "slots"):
            return (dict(row) for row in self.found_rows if row["holder"] == holder)
        return rows_of(self.shape, self.options, holder)

    def _all_rows(self) -> list[dict[str, Any]]:
        return [row for holder in HOLDERS for row in self.rows(holder)]

    def compare(self, measured: Footprint) -> Comparison:
        """This prediction beside a measurement (or any other footprint), with the differences."""
        return Comparison(self, measured)

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: figures in bytes, options, formulas and inputs, the GPU by phase, and each kind of module."""
        return {
            "model": self.model,
            **self.figures,
            "strategy": self.strategy,
            "options": self.options.to_dict() if self.options else {},
            "why": [
                {"name": line.name, "bytes": line.bytes, "formula": line.formula, "inputs": dict(line.inputs)}
                for line in self.lines
            ],
            "phases": self.phases(),
            "modules": self._all_rows(),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> Footprint:
        """The figures of a `to_dict`, as another process sent it; neither shape nor options come with it."""
        found = {line["name"]: (line["formula"], line["inputs"]) for line in plain["why"]}
        figures, rows = {name: plain[name] for name in FIGURES}, tuple(plain.get("modules", ()))
        return cls(**figures, model=plain["model"], strategy=plain["strategy"], found=found, found_rows=rows)

    def to_frame(self) -> pd.DataFrame:
        """One row for each holder and kind of module: holder, module, count, formula, bytes."""
        import pandas

        return pandas.DataFrame(self._all_rows(), columns=["holder", "module", "count", "formula", "bytes"])

    def plot(self, ax: Any = None) -> Any:
        """Bars of the holders by phase; takes and returns matplotlib's Axes."""
        return draw(self, ax)

    def __repr__(self) -> str:
        rows = [f"  {line.name:<20} {line.bytes:>20,}  {gib(line.bytes):>14}" for line in self.lines]
        assumed = [f"  assumed: {self.assumes}"] if self.assumes else []
        return "\n".join([f"Footprint of {self._title()}", *rows, *assumed])

    def _repr_html_(self) -> str:
        cells = [(line.name, f"{line.bytes:,}", gib(line.bytes), line.formula) for line in self.lines]
        table = html_table(self._title(), ("figure", "bytes", "GiB", "formula"), cells)
        return table + (f"<p>assumed: {html.escape(self.assumes)}</p>" if self.assumes else "")

    def _title(self) -> str:
        rank = f", rank {self.options.rank}" if self.options else ""
        return f"{self.model}{rank}, per worker ({self.strategy})"


FIGURES: dict[str, Mapping[str, str]] = {item.name: item.metadata for item in fields(Footprint) if item.metadata}
"""Each figure by its name, in the order of `Footprint`."""


def _short(name: str) -> str:
    """What formulas call a figure."""
    return {"slot_bytes": "slots"}.get(name, name.removesuffix("_bytes"))


@cache
def _code(formula: str) -> CodeType | None:
    return None if "sum over" in formula else compile(formula, "formula", "eval")


def evaluate(formula: str, values: Mapping[str, Any]) -> int:
    """The value of one of the formulas here."""
    return int(eval(_code(formula) or "", {}, values))


def _counted_from(name: str, options: Resolved) -> dict[str, Any]:
    """The options that a sum over tensors depends on."""
    if name == "slot_bytes":
        names = ("max_loras", "max_lora_rank", "tensor_parallel_size", "fully_sharded_loras")
        return {name: getattr(options, name) for name in names} | {"dtype": options.lora_dtype}
    if name == "shared_bytes":
        alphas = {"alpha_pattern": dict(options.alpha_pattern)} if options.alpha_pattern else {}
        dtypes = {"dtype": options.dtype, "lora_dtype": options.lora_dtype}
        return {"scaling": options.folded_scaling, **alphas, **dtypes}
    if name == "host_pinned_bytes":
        return {"max_cpu_loras": options.max_cpu_loras}
    adapter: dict[str, Any] = {"rank": options.rank, "target_modules": options.target_modules}
    if options.rank_pattern:
        adapter["rank_pattern"] = dict(options.rank_pattern)
    if options.enable_expert_parallel:
        adapter["expert_parallel_size"] = options.expert_parallel_size
    return {**adapter, "dtype": options.lora_dtype if name == "packed_bytes" else options.dtype}


@dataclass(frozen=True)
class Comparison:
    """Two footprints side by side; a difference is the second less the first, in bytes."""

    predicted: Footprint
    measured: Footprint

    @property
    def difference(self) -> dict[str, int]:
        """Measured less predicted for each figure."""
        return {row["figure"]: row["difference"] for row in self.rows()}

    @property
    def equal(self) -> bool:
        """Whether the two agree to the byte."""
        return self.predicted.figures == self.measured.figures

    def rows(self) -> list[dict[str, Any]]:
        """One row for each figure."""
        pairs = zip(FIGURES, self.predicted.figures.values(), self.measured.figures.values(), strict=True)
        return [{"figure": name, **_beside(*pair)} for name, *pair in pairs]

    def by_module(self) -> list[dict[str, Any]]:
        """One row for each holder and kind of module that either side has."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for side, result in enumerate((self.predicted, self.measured)):
            for row in result._all_rows():
                sizes.setdefault((row["holder"], row["module"]), [0, 0])[side] += row["bytes"]
        rows = [{"holder": holder, "module": module, **_beside(*pair)} for (holder, module), pair in sizes.items()]
        return sorted(rows, key=lambda row: HOLDERS.index(row["holder"]))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {"equal": self.equal, "figures": self.rows(), "modules": self.by_module()}

    def to_frame(self) -> pd.DataFrame:
        """One row for each figure."""
        import pandas

        return pandas.DataFrame(self.rows())

    def __repr__(self) -> str:
        head = f"{'figure':<20} {'predicted':>20} {'measured':>20} {'difference':>20}"
        body = [
            f"{name:<20} {predicted:>20} {measured:>20} {more:>20}" for name, predicted, measured, more in self._cells()
        ]
        modules = [
            f"  {row['holder']} {row['module']}: {row['predicted']:,} {row['measured']:,} {row['difference']:+,}"
            for row in self.by_module()
            if row["difference"]
        ]
        return "\n".join([head, *body, *(["modules that differ:", *modules] if modules else [])])

    def _repr_html_(self) -> str:
        return html_table("bytes", ("figure", "predicted", "measured", "difference"), self._cells())

    def _cells(self) -> list[tuple[str, ...]]:
        numbers = ("{predicted:,}", "{measured:,}", "{difference:+,}")
        return [(row["figure"], *(number.format(**row) for number in numbers)) for row in self.rows()]


def _beside(predicted: int, measured: int) -> dict[str, int]:
    return {"predicted": predicted, "measured": measured, "difference": measured - predicted}


@takes_options
def footprint(
    model: ModelShape | dict[str, Any] | str | Path,
    given: Options | None = None,
    /,
    **options: Unpack[OptionKeywords],
) -> Footprint:
    """Bytes of each holder in one worker.

    Args:
        model: a `ModelShape`, or anything that `ModelShape.from_config` takes.
        given: the options as an object; or all of them as keywords.
        options: options by name, in place of those of `given`; `help(lora_mem.Options)` lists them. `rank` is needed.

    Returns:
        A `Footprint`: bytes per worker. `result.why(name)` says what a figure means and how it comes about.

    Raises:
        SizingError: an option is not what vLLM allows, or does not fit the model.
        TypeError: there is no such option, or the rank is missing.
    """
    shape, given = ModelShape.from_config(model), gather(given, options)
    resolved = resolve(shape, given)
    slots = slot_bytes(shape, resolved)
    if resolved.fully_sharded_loras:
        check_sharded_ranks(adapter_modules(shape, resolved), resolved)
    if given.pipeline_rank is None and given.pipeline_parallel_size > 1:
        ranks = [replace(resolved, pipeline_rank=rank) for rank in range(given.pipeline_parallel_size)]
        slots, resolved = max(((slot_bytes(shape, rank), rank) for rank in ranks), key=lambda pair: pair[0])
    return combine(shape, resolved, slots, adapter_bytes(shape, resolved))


def combine(
    shape: ModelShape, options: Resolved, slots: int, adapter: AdapterBytes, rows: tuple[Mapping[str, Any], ...] = ()
) -> Footprint:
    """The footprint of what was counted; `slots` in bytes, `rows` of what the options do not tell."""
    values: dict[str, Any] = {
        "slots": slots,
        "packed": adapter.packed,
        "staged": adapter.staged,
        "shared": adapter.shared,
        "under_way": most_under_way(adapter.packed, adapter.largest) + adapter.cast,
        "max_cpu_loras": options.max_cpu_loras,
        "max_lora_rank": options.max_lora_rank,
        "rank": options.rank,
        "workers_per_node": options.workers_per_node,
        "host": 0,
        "host_pinned": options.max_cpu_loras * (adapter.block if options.strategy == "stage" else adapter.pinned),
    }
    for name, figure in FIGURES.items():
        if _code(figure[options.strategy]):
            values[_short(name)] = evaluate(figure[options.strategy], values)
    return Footprint(
        **{name: values[_short(name)] for name in FIGURES},
        model=shape.name,
        strategy=options.strategy,
        shape=shape,
        options=options,
        values=values,
        found_rows=rows,
    )
