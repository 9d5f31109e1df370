"""The questions people ask of a footprint: does it fit, how large a rank, how many slots, how many adapters, which TP.

Every answer is a search over `footprint`, which never estimates: an answer is the last value for which the sum of
weights, KV cache and the peak of a sync is within the GPU's memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

from lora_mem.drawing import html_table
from lora_mem.errors import SizingError
from lora_mem.sizing.footprints import FIGURES, Footprint, footprint
from lora_mem.sizing.options import MAX_LORA_RANKS, OptionKeywords, Options, gather, takes_options, whole_number
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


_FITS, _SAVED = "weights + kv_cache + peak <= gpu", "gpu_resident before - gpu_resident after"
QUESTIONS = {
    "headroom": ("headroom", "bytes", "gpu - weights - kv_cache - peak"),
    "largest_rank": ("largest rank that fits", "", f"largest rank with {_FITS}"),
    "most_slots": ("most slots that fit", "", f"largest max_loras with {_FITS}"),
    "most_adapters_per_host": ("most adapters on one host", "", "host_memory // (node_host / max_cpu_loras)"),
    "smallest_tp": (
        "smallest TP that fits",
        "",
        "smallest power of two with weights * given_tp / tp + kv_cache + peak <= gpu",
    ),
    "saved_by_fully_sharded": ("saved by fully_sharded_loras", "bytes", _SAVED),
    "saved_by_ep": ("saved by expert parallelism", "bytes", _SAVED),
    "saved_by_lower_max_lora_rank": ("saved by the smallest max_lora_rank", "bytes", _SAVED),
    "saved_by_offload": ("saved by the hook, against keep", "bytes", _SAVED),
}
"""In words, the unit, and how each is answered; by the keys of `Plan`, `Plan.to_dict` and the columns of `by_model`."""


class Answer(NamedTuple):
    """One answer: a number in `unit` (None where there is none, for a `reason`), the formula and its inputs."""

    question: str
    words: str
    unit: str
    formula: str
    value: int | None
    inputs: Mapping[str, Any]
    reason: str = ""

    def text(self) -> str:
        """The value for printing; bytes as GiB."""
        if self.value is None:
            return f"none: {self.reason}"
        return gib(self.value) if self.unit == "bytes" else f"{self.value:,}"


def _answer(question: str, value: int | None, inputs: Mapping[str, Any], reason: str = "") -> Answer:
    return Answer(question, *QUESTIONS[question], value, inputs, reason if value is None else "")


@dataclass(frozen=True)
class Plan:
    """Whether an engine with these adapters fits, how far it could go, and what would save memory.

    `plan[question]` is the value of one answer, by the keys of `QUESTIONS`.
    """

    fits: bool
    headroom_bytes: int
    footprint: Footprint
    answers: tuple[Answer, ...] = field(repr=False)

    def answer(self, question: str) -> Answer:
        """One answer.

        Raises:
            SizingError: no answer has that name.
        """
        for answer in self.answers:
            if answer.question == question:
                return answer
        raise SizingError("question", question, f"must be one of {', '.join(QUESTIONS)}")

    def __getitem__(self, question: str) -> int | None:
        return self.answer(question).value

    def why(self, question: str) -> str:
        """Formula and inputs of one answer."""
        answer = self.answer(question)
        inputs = ", ".join(f"{key}={value}" for key, value in answer.inputs.items())
        return f"{answer.words} = {answer.text()} = {answer.formula}  [{inputs}]"

    @property
    def verdict(self) -> str:
        """`fits`, or `does not fit`."""
        return "fits" if self.fits else "does not fit"

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON; sizes in bytes."""
        names = ("value", "unit", "formula", "inputs", "reason")
        return {
            "fits": self.fits,
            "headroom_bytes": self.headroom_bytes,
            "answers": {one.question: {name: getattr(one, name) for name in names} for one in self.answers},
            "footprint": self.footprint.to_dict(),
        }

    def to_frame(self) -> pd.DataFrame:
        """One row for each answer."""
        import pandas

        return pandas.DataFrame([*self.answers])[["question", "value", "unit", "formula", "reason"]]

    def __repr__(self) -> str:
        head = f"{self.footprint.model}: {self.verdict}, {gib(self.headroom_bytes)} of headroom per GPU"
        return "\n".join([head, *(f"  {answer.words:<36} {answer.text()}" for answer in self.answers)])

    def _repr_html_(self) -> str:
        rows = [(answer.words, answer.text(), answer.formula) for answer in self.answers]
        return html_table(f"{self.footprint.model}: {self.verdict}", ("question", "answer", "formula"), rows)


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
    headroom = gpu_bytes - weights_bytes - kv_cache_bytes - base.gpu_sync_peak_bytes
    inputs = {"gpu": gpu_bytes, "weights": weights_bytes, "kv_cache": kv_cache_bytes, "peak": base.gpu_sync_peak_bytes}

    def fits(weights: int = weights_bytes, **change: Any) -> bool:
        try:
            return weights + kv_cache_bytes + footprint(shape, asked, **change).gpu_sync_peak_bytes <= gpu_bytes
        except SizingError:
            return False

    answers = [
        _answer("headroom", headroom, inputs),
        _largest_rank(asked, fits),
        _most_slots(asked, fits),
        _most_adapters(base, host_memory_bytes),
        _smallest_tp(asked, fits, weights_bytes),
        *savings(shape, asked),
    ]
    return Plan(headroom >= 0, headroom, base, tuple(answers))


def _largest_rank(asked: Options, fits: Callable[..., bool]) -> Answer:
    ceiling = asked.max_lora_rank or MAX_LORA_RANKS[-1]
    if asked.lora_alpha or asked.alpha_pattern or asked.rank_pattern:
        # Where a module's rank is its alpha nothing is folded: such a rank can fit where a smaller one does not.
        best = next((rank for rank in range(ceiling, 0, -1) if fits(rank=rank)), 0)
    else:
        best = _last(lambda rank: fits(rank=rank), ceiling)
    return _answer("largest_rank", best or None, {"max_lora_rank": ceiling}, "not even rank 1 fits")


def _most_slots(asked: Options, fits: Callable[..., bool]) -> Answer:
    registered = asked.max_cpu_loras or 0
    best = _last(lambda slots: fits(max_loras=slots, max_cpu_loras=max(slots, registered)), MOST_SLOTS)
    inputs = {"rank": asked.rank, "at_most": MOST_SLOTS}
    return _answer("most_slots", best or None, inputs, "not even one slot fits")


def _smallest_tp(asked: Options, fits: Callable[..., bool], weights: int) -> Answer:
    given = asked.tensor_parallel_size
    sizes = (1 << power for power in range(8))
    best = next((tp for tp in sizes if fits(-(-weights * given // tp), tensor_parallel_size=tp)), None)
    return _answer("smallest_tp", best, {"given_tp": given}, "no size up to 128 fits and divides")


def _last(fits: Callable[[int], bool], ceiling: int) -> int:
    """The largest number up to `ceiling` that fits (0: none), where a smaller one always fits too."""
    low, high = 0, ceiling
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _most_adapters(base: Footprint, host_memory_bytes: int | None) -> Answer:
    registered, value, reason = base.registered_adapters, None, ""
    inputs = {"host_memory": host_memory_bytes, "node_host": base.node_host_bytes, "max_cpu_loras": registered}
    if host_memory_bytes is None:
        reason = "host memory was not given"
    elif not base.node_host_bytes:
        reason = "the strategy 'keep' holds no adapter on the host"
    else:
        value = whole_number("host_memory_bytes", host_memory_bytes) * registered // base.node_host_bytes
    return _answer("most_adapters_per_host", value, inputs, reason)


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
    answers = []
    for question, (before, change) in changes.items():
        try:
            after = footprint(shape, asked, **change).gpu_resident_bytes
        except SizingError as error:
            answers.append(_answer(question, None, change, str(error)))
        else:
            inputs = {"before": before.gpu_resident_bytes, "after": after, **change}
            answers.append(_answer(question, before.gpu_resident_bytes - after, inputs))
    return tuple(answers)


def sweep(model: ModelShape | dict[str, Any] | str | Path, **axes: Any) -> pd.DataFrame:
    """Footprints of all combinations, one row each: the options that vary, the figures in bytes, and `error`.

    An option of `footprint` that is given as a list is varied (a tuple is one value, e.g. of target_modules).
    Combinations that vLLM would refuse have no figures and say why in `error`.
    """
    import pandas

    shape = ModelShape.from_config(model)
    varied = {name: value for name, value in axes.items() if isinstance(value, list)}
    fixed = {name: value for name, value in axes.items() if name not in varied}
    chosen = (dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values()))
    return pandas.DataFrame([{**row, **_figures(shape, fixed | row)} for row in chosen])


@takes_options
def by_model(models: Sequence[str] | None = None, **options: Unpack[OptionKeywords]) -> pd.DataFrame:
    """Footprints and savings of models, one row each: the figures, what each change saves, in bytes, and `error`.

    Args:
        models: names or paths; default every model of the built-in table.
        options: options of `footprint`. A model that they do not fit has no figures and says why in `error`.
    """
    import pandas

    rows = []
    for model in models or known_models():
        row: dict[str, Any] = {"model": model, **_figures(model, options)}
        if not row["error"]:
            row |= {answer.question: answer.value for answer in savings(model, **options)}
        rows.append(row)
    return pandas.DataFrame(rows).set_index("model").convert_dtypes()


def _figures(model: ModelShape | str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The figures in bytes, or None of each and an `error`."""
    try:
        result = footprint(model, **options)
    except SizingError as error:
        return {**dict.fromkeys(FIGURES), "error": str(error)}
    return {**result.figures, "error": ""}
