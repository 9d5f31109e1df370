"""The questions people ask of a footprint: does it fit, how large a rank, how many slots, how many adapters, which TP.

Every answer is a search over `footprint`, which never estimates: an answer is the last value for which the sum of
weights, KV cache and the peak of a sync is within the GPU's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from lora_mem.errors import SizingError
from lora_mem.sizing.checks import whole_number
from lora_mem.sizing.footprints import FIGURES, Footprint, footprint, html_table
from lora_mem.sizing.options import MAX_LORA_RANKS, OptionKeywords, Options, gather, takes_options
from lora_mem.sizing.shapes import ModelShape, known_models
from lora_mem.sizing.units import gib

if TYPE_CHECKING:
    import pandas as pd

MIB = 1024**2

# Total memory as nvidia-smi reports it, in bytes.
GPUS = {
    "A100-40GB": 40960 * MIB,
    "A100-80GB": 81920 * MIB,
    "B200": 183359 * MIB,
    "H100-80GB": 81559 * MIB,
    "H200": 143771 * MIB,
    "L4": 23034 * MIB,
    "L40S": 46068 * MIB,
}

MOST_SLOTS = 4096  # where the search for slots and adapters ends


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer: a number (None where there is none), its unit, the formula and the inputs."""

    question: str
    value: int | None
    unit: str
    formula: str
    inputs: Mapping[str, Any]
    reason: str = ""

    def text(self) -> str:
        """The value for printing; bytes as GiB."""
        if self.value is None:
            return f"none: {self.reason}"
        return gib(self.value) if self.unit == "bytes" else f"{self.value:,} {self.unit}".strip()


@dataclass(frozen=True)
class Plan:
    """Whether an engine with these adapters fits, how far it could go, and what would save memory."""

    fits: bool
    headroom_bytes: int
    footprint: Footprint
    answers: tuple[Answer, ...] = field(repr=False)

    def why(self, question: str) -> str:
        """Formula and inputs of one answer.

        Raises:
            SizingError: no answer has that name.

        """
        for answer in self.answers:
            if answer.question == question:
                inputs = ", ".join(f"{key}={value}" for key, value in answer.inputs.items())
                return f"{answer.question} = {answer.text()} = {answer.formula}  [{inputs}]"
        raise SizingError("question", question, f"must be one of {', '.join(a.question for a in self.answers)}")

    def __getitem__(self, question: str) -> int | None:
        """The value of one answer."""
        for answer in self.answers:
            if answer.question == question:
                return answer.value
        raise SizingError("question", question, f"must be one of {', '.join(a.question for a in self.answers)}")

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; sizes in bytes."""
        return {
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "answers": {
                answer.question: {
                    "value": answer.value,
                    "unit": answer.unit,
                    "formula": answer.formula,
                    "inputs": dict(answer.inputs),
                    "reason": answer.reason,
                }
                for answer in self.answers
            },
            "footprint": self.footprint.to_dict(),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row for each answer."""
        import pandas

        rows = [(a.question, a.value, a.unit, a.formula, a.reason) for a in self.answers]
        return pandas.DataFrame(rows, columns=["question", "value", "unit", "formula", "reason"])

    def __repr__(self) -> str:
        """Plain and stable."""
        verdict = "fits" if self.fits else "does not fit"
        head = f"{self.footprint.model}: {verdict}, {gib(self.headroom_bytes)} of headroom per GPU"
        return "\n".join([head, *(f"  {answer.question:<28} {answer.text()}" for answer in self.answers)])

    def _repr_html_(self) -> str:
        verdict = "fits" if self.fits else "does not fit"
        rows = [(answer.question, answer.text(), answer.formula) for answer in self.answers]
        return html_table(f"{self.footprint.model}: {verdict}", ("question", "answer", "formula"), rows)


@takes_options
def plan(
    model: ModelShape | dict[str, Any] | str | Path,
    given: Options | None = None,
    /,
    *,
    gpu_bytes: int,
    weights_bytes: int,
    kv_cache_bytes: int = 0,
    host_memory_bytes: int | None = None,
    **options: Unpack[OptionKeywords],
) -> Plan:
    """Whether adapters of this kind fit, and how far they could go.

    Args:
        model: anything that `ModelShape.from_config` takes.
        given: the options as an object; or all of them as keywords.
        gpu_bytes: memory of one GPU that the engine may use.
        weights_bytes: the model's weights in one worker, at the given parallelism.
        kv_cache_bytes: the KV cache in one worker, and whatever else must stay free (activations, CUDA graphs).
        host_memory_bytes: host memory of one node that adapters may take; without it the question is not answered.
        options: options by name, in place of those of `given`; `help(lora_mem.Options)` lists them. `rank` is needed.

    Raises:
        SizingError: an argument is wrong, or does not fit the model.
        TypeError: there is no such option, or the rank is missing.

    """
    shape, asked = ModelShape.from_config(model), gather(given, options)
    for name, value in (("gpu_bytes", gpu_bytes), ("weights_bytes", weights_bytes)):
        whole_number(name, value)
    whole_number("kv_cache_bytes", kv_cache_bytes, 0)
    base = footprint(shape, asked)
    search = _Search(shape, asked, gpu_bytes, weights_bytes, kv_cache_bytes)
    used = weights_bytes + kv_cache_bytes + base.gpu_sync_peak_bytes
    inputs = {"gpu": gpu_bytes, "weights": weights_bytes, "kv_cache": kv_cache_bytes, "peak": base.gpu_sync_peak_bytes}
    headroom = Answer("headroom", gpu_bytes - used, "bytes", "gpu - weights - kv_cache - peak", inputs)
    answers = [
        headroom,
        search.largest_rank(),
        search.most_slots(),
        _most_adapters(base, host_memory_bytes),
        search.smallest_tp(),
        *savings(shape, asked),
    ]
    return Plan(used <= gpu_bytes, gpu_bytes - used, base, tuple(answers))


@dataclass(frozen=True)
class _Search:
    shape: ModelShape
    asked: Options
    gpu: int
    weights: int
    kv_cache: int

    def _fits(self, weights: int | None = None, **change: Any) -> bool:
        try:
            result = footprint(self.shape, self.asked, **change)
        except SizingError:
            return False
        return (self.weights if weights is None else weights) + self.kv_cache + result.gpu_sync_peak_bytes <= self.gpu

    def largest_rank(self) -> Answer:
        asked, ceiling = self.asked, self.asked.max_lora_rank or MAX_LORA_RANKS[-1]
        if asked.lora_alpha or asked.alpha_pattern or asked.rank_pattern:
            # Where a module's rank is its alpha nothing is folded: such a rank can fit where a smaller one does not.
            best = next((rank for rank in range(ceiling, 0, -1) if self._fits(rank=rank)), 0)
        else:
            best = _last(lambda rank: self._fits(rank=rank), ceiling)
        reason = "" if best else "not even rank 1 fits"
        formula = "largest rank with weights + kv_cache + peak <= gpu"
        return Answer("largest_rank", best or None, "", formula, {"max_lora_rank": ceiling}, reason)

    def most_slots(self) -> Answer:
        registered = self.asked.max_cpu_loras

        def fits(slots: int) -> bool:
            return self._fits(max_loras=slots, max_cpu_loras=max(slots, registered or slots))

        best = _last(fits, MOST_SLOTS)
        reason = "" if best else "not even one slot fits"
        formula = "largest max_loras with weights + kv_cache + peak <= gpu"
        inputs = {"rank": self.asked.rank, "at_most": MOST_SLOTS}
        return Answer("most_slots", best or None, "", formula, inputs, reason)

    def smallest_tp(self) -> Answer:
        given = self.asked.tensor_parallel_size
        formula = "smallest power of two with weights * given_tp / tp + kv_cache + peak <= gpu"
        for tp in (1 << power for power in range(8)):
            if self._fits(weights=-(-self.weights * given // tp), tensor_parallel_size=tp):
                return Answer("smallest_tp", tp, "", formula, {"given_tp": given})
        return Answer("smallest_tp", None, "", formula, {"given_tp": given}, "no size up to 128 fits and divides")


def _last(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest number up to `ceiling` that fits (0: none), where a smaller one always fits too."""
    low, high = 0, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _most_adapters(base: Footprint, host_memory_bytes: int | None) -> Answer:
    formula, question = "host_memory // (node_host / max_cpu_loras)", "most_adapters_per_host"
    registered = base.options.max_cpu_loras if base.options else 1
    inputs = {"host_memory": host_memory_bytes, "node_host": base.node_host_bytes, "max_cpu_loras": registered}
    if host_memory_bytes is None:
        return Answer(question, None, "", formula, inputs, "host memory was not given")
    whole_number("host_memory_bytes", host_memory_bytes)
    if not base.node_host_bytes:
        return Answer(question, None, "", formula, inputs, "the strategy 'keep' holds no adapter on the host")
    return Answer(question, host_memory_bytes * registered // base.node_host_bytes, "", formula, inputs)


@takes_options
def savings(
    model: ModelShape | dict[str, Any] | str | Path,
    given: Options | None = None,
    /,
    **options: Unpack[OptionKeywords],
) -> tuple[Answer, ...]:
    """What each change would save, in bytes of GPU memory per worker: resident for the options, and for the hook too.

    The hook is measured against `keep`: an in-memory adapter that stays on the GPU.
    """
    shape, asked = ModelShape.from_config(model), gather(given, options)
    base, keep = footprint(shape, asked), footprint(shape, asked, strategy="keep")
    changes: dict[str, tuple[Footprint, OptionKeywords]] = {
        "saved_by_fully_sharded": (base, {"fully_sharded_loras": True}),
        "saved_by_ep": (base, {"enable_expert_parallel": True}),
        "saved_by_lower_max_lora_rank": (base, {"max_lora_rank": None}),
        "saved_by_offload": (keep, {"strategy": "offload"}),
    }
    return tuple(_saving(question, shape, asked, before, change) for question, (before, change) in changes.items())


def _saving(question: str, shape: ModelShape, asked: Options, before: Footprint, change: OptionKeywords) -> Answer:
    formula = "gpu_resident before - gpu_resident after"
    try:
        after = footprint(shape, asked, **change)
    except SizingError as error:
        return Answer(question, None, "bytes", formula, change, str(error))
    inputs = {"before": before.gpu_resident_bytes, "after": after.gpu_resident_bytes, **change}
    return Answer(question, before.gpu_resident_bytes - after.gpu_resident_bytes, "bytes", formula, inputs)


def sweep(model: ModelShape | dict[str, Any] | str | Path, **axes: Any) -> pd.DataFrame:
    """Footprints of all combinations, one row each: the options that vary, the figures in bytes, and `error`.

    An argument of `footprint` that is given as a list is varied (a tuple is one value, e.g. of target_modules).
    Combinations that vLLM would refuse have no figures and say why in `error`.
    """
    import pandas

    shape = ModelShape.from_config(model)
    varied = {name: value for name, value in axes.items() if isinstance(value, list)}
    fixed = {name: value for name, value in axes.items() if name not in varied}
    return pandas.DataFrame(list(_sweep_rows(shape, varied, fixed)))


def _sweep_rows(shape: ModelShape, varied: dict[str, Any], fixed: dict[str, Any]) -> Iterator[dict[str, Any]]:
    combinations = list(itertools.product(*varied.values()))
    for values in combinations:
        row: dict[str, Any] = dict(zip(varied, values, strict=True))
        try:
            result = footprint(shape, **fixed, **row)
        except SizingError as error:
            yield {**row, **dict.fromkeys(FIGURES), "error": str(error)}
        else:
            yield {**row, **{name: getattr(result, name) for name in FIGURES}, "error": ""}


def by_model(models: Sequence[str] | None = None, *, rank: int, **options: Any) -> pd.DataFrame:
    """Footprints and savings of models, one row each: the figures, what each change saves, in bytes, and `error`.

    Args:
        models: names or paths; default every model of the built-in table.
        rank: of the adapter.
        options: arguments of `footprint`. A model that they do not fit has no figures and says why in `error`.
    """
    import pandas

    rows = []
    for model in models or known_models():
        row: dict[str, Any] = {"model": model}
        try:
            result = footprint(model, rank=rank, **options)
            row |= {name: getattr(result, name) for name in FIGURES}
            row |= {answer.question: answer.value for answer in savings(model, rank=rank, **options)}
            row["error"] = ""
        except SizingError as error:
            row["error"] = str(error)
        rows.append(row)
    return pandas.DataFrame(rows).set_index("model").convert_dtypes()
