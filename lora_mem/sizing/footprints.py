"""The bytes of each holder of a LoRA adapter in one vLLM worker, before anything is run.

Every figure is a sum over the shapes of tensors that `lora_mem.sizing.tensors` and `lora_mem.sizing.slots` list one by
one, or a formula over such sums (`lora_mem.sizing.figures`).
"""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from lora_mem.drawing import draw, html_table
from lora_mem.errors import SizingError
from lora_mem.sizing.counting import AdapterBytes, adapter_bytes, slot_bytes
from lora_mem.sizing.figures import FIGURES, HOLDERS, Line, compute, measured_lines, predicted_lines
from lora_mem.sizing.options import OptionKeywords, Options, Strategy, gather, takes_options
from lora_mem.sizing.resolving import Resolved, resolve
from lora_mem.sizing.rows import rows_of
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.tensors import adapter_modules, check_sharded_ranks
from lora_mem.sizing.units import gib, most_under_way

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Footprint:
    """What one adapter costs one worker, in bytes; `why(name)` says what a figure means and how it comes about.

    A prediction carries the model's shape, the options and the values that its formulas name, a measurement (`measure`)
    what was found of each figure and of each kind of module; so both can say why.
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

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Each figure with its formula and inputs."""
        figures = {name: getattr(self, name) for name in FIGURES}
        if self.options is None:
            return tuple(measured_lines(figures, self.found))
        return tuple(predicted_lines(figures, self.values, self.options))

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
            return (dict(row) for row in self.found_rows if row["holder"] == holder)
        return rows_of(self.shape, self.options, holder)

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
        sizes = {name: (getattr(self.predicted, name), getattr(self.measured, name)) for name in FIGURES}
        return [{"figure": name, **_beside(*pair)} for name, pair in sizes.items()]

    def by_module(self) -> list[dict[str, Any]]:
        """One row for each holder and kind of module that either side has."""
        sizes: dict[tuple[str, str], list[int]] = {}
        for side, result in enumerate((self.predicted, self.measured)):
            for holder in HOLDERS:
                for row in result.rows(holder):
                    sizes.setdefault((holder, row["module"]), [0, 0])[side] += row["bytes"]
        return [{"holder": holder, "module": module, **_beside(*pair)} for (holder, module), pair in sizes.items()]

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
    shape: ModelShape,
    options: Resolved,
    slots: int,
    adapter: AdapterBytes,
    rows: tuple[Mapping[str, Any], ...] = (),
) -> Footprint:
    """The footprint of what was counted; `slots` in bytes, `rows` of what the options do not tell."""
    pinned = adapter.block if options.strategy == "stage" else adapter.pinned
    values = {
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
        "host_pinned": options.max_cpu_loras * pinned,
    }
    return Footprint(
        **compute(options.strategy, values),
        model=shape.name,
        strategy=options.strategy,
        shape=shape,
        options=options,
        values=values,
        found_rows=rows,
    )
