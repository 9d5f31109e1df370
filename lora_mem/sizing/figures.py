"""The figures of a footprint: what each means, and the formula that it is computed by under each strategy.

Three holders (vLLM's words): *staged* are the tensors as they were received, *packed* is the registered `LoRAModel`,
*slots* are the buffers that vLLM allocates at start-up and that generation reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any, NamedTuple

from lora_mem.sizing.options import STRATEGIES, Strategy
from lora_mem.sizing.resolving import Resolved
from lora_mem.sizing.units import BLOCK_ALIGNMENT, gib

HOLDERS = ("packed", "staged", "slots")


class _Figure(NamedTuple):
    """A formula with `sum over` is counted, tensor by tensor; any other is evaluated (`compute`)."""

    meaning: str
    keep: str
    offload: str
    stage: str


def _figure(meaning: str, formula: str, *, stage: str = "", keep: str = "") -> _Figure:
    return _Figure(meaning, keep or formula, formula, stage or formula)


ONE, ALL = "(packed + staged - shared)", "max_cpu_loras * (packed + staged - shared)"
PADDING = "slots * (max_lora_rank - rank) // max_lora_rank"
_FIGURES = {
    "packed_bytes": _figure(
        "One registered adapter (LoRAModel) in one worker. Split by expert parallelism; not sliced by tensor"
        " parallelism, nor cut by pipeline parallelism (vLLM registers the whole adapter in each pipeline rank).",
        "sum over targeted modules of (rank * inputs + outputs * rank) * itemsize, experts local to the worker",
    ),
    "staged_bytes": _figure(
        "What is kept of one adapter to build it again after an eviction. keep, offload: its tensors as received, of"
        " the worker's own experts, or of all where one tensor holds all. stage: the packed tensors.",
        "sum over received tensors of elements * itemsize",
        stage="packed",
    ),
    "shared_bytes": _figure(
        "The part of the packed tensors that is the staged memory itself. keep, offload: what vLLM takes as it is (A"
        " of dense modules, B too where its scaling is 1, A of fused experts). stage: all of them.",
        "sum over packed tensors that vLLM takes as they were staged",
        stage="packed",
    ),
    "slot_bytes": _figure(
        "The A and B buffers that vLLM allocates at start-up, whatever the adapter targets.",
        "sum over served modules of max_loras * (A + B elements at max_lora_rank, sliced) * itemsize",
    ),
    "slot_padding_bytes": _figure("The part of the slots that the adapter's rank leaves empty.", PADDING),
    "host_bytes": _figure("Pinned host memory with max_cpu_loras adapters registered, of exact size.", ALL, keep="0"),
    "host_pinned_bytes": _figure(
        "The same as it is pinned: by torch's pinned cache, tensor by tensor (offload), or in one block (stage).",
        "max_cpu_loras * sum over tensors of the next power of two of their bytes",
        stage=f"max_cpu_loras * sum over packed tensors of their bytes rounded up to a multiple of {BLOCK_ALIGNMENT}",
        keep="0",
    ),
    "node_host_bytes": _figure("Exact bytes of all workers of one host; each has its own.", "workers_per_node * host"),
    "node_host_pinned_bytes": _figure("The same as it is pinned.", "workers_per_node * host_pinned"),
    "gpu_resident_bytes": _figure(
        "What stays on the GPU through generation and training.", "slots", keep=f"slots + {ALL}"
    ),
    "gpu_sync_peak_bytes": _figure(
        "The most on the GPU while an adapter is brought in. keep: as resident. offload: with that adapter; the others"
        " are on the host. stage: with what may be under way (136 MiB, or twice the largest packed tensor, or the"
        " whole adapter where that is less; more by a stack of the largest where it is cast), without the caller's own"
        " tensors, which it copies.",
        f"slots + {ONE}",
        stage="slots + under_way",
        keep=f"slots + {ALL}",
    ),
}
FIGURES = tuple(_FIGURES)
_SHORT = {name: {"slot_bytes": "slots"}.get(name, name.removesuffix("_bytes")) for name in FIGURES}
_CODE = {
    strategy: {
        name: compile(getattr(figure, strategy), name, "eval")
        for name, figure in _FIGURES.items()
        if "sum over" not in getattr(figure, strategy)
    }
    for strategy in STRATEGIES
}


def evaluate(formula: str | CodeType, inputs: Mapping[str, Any]) -> int:
    """The value of one of the formulas here."""
    value: int = eval(formula, {}, inputs)
    return value


def compute(strategy: Strategy, values: dict[str, Any]) -> dict[str, Any]:
    """Every figure in bytes, from what was counted.

    Args:
        strategy: where staged and packed tensors are after a sync.
        values: what the formulas name; the figures that are evaluated are added.

    """
    for name, code in _CODE[strategy].items():
        values[_SHORT[name]] = evaluate(code, values)
    return {name: values[short] for name, short in _SHORT.items()}


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


def measured_lines(figures: Mapping[str, int], found: Mapping[str, tuple[str, Mapping[str, Any]]]) -> Iterator[Line]:
    """Lines of a measurement: the formula and the inputs as they were found."""
    for name, figure in _FIGURES.items():
        yield Line(name, figures[name], *found.get(name, ("measured", {})), figure.meaning)


def predicted_lines(figures: Mapping[str, int], values: Mapping[str, Any], options: Resolved) -> Iterator[Line]:
    """Lines of a prediction: `values` are what `compute` took and added."""
    code = _CODE[options.strategy]
    for name, figure in _FIGURES.items():
        if name in code:
            inputs = {key: value for key, value in values.items() if key in code[name].co_names}
        else:
            inputs = _counted_from(name, options)
        yield Line(name, figures[name], getattr(figure, options.strategy), inputs, figure.meaning)


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
