"""The bytes of each holder of a LoRA adapter in one vLLM worker, before anything is run.

Three holders (vLLM's words): *staged* are the tensors as they were received, *packed* is the registered `LoRAModel`,
*slots* are the buffers that vLLM allocates at start-up and that generation reads. Everything here is arithmetic on the
shapes of tensors; the same shapes can be listed one by one (`slot_tensors`, `packed_tensors`, `staged_tensors`).

Formulas from vLLM 0.33.0: slots `vllm/lora/layers/*.py` (`create_lora_weights`), packed
`PackedLoRALayerWeights.pack` and `pack_moe`, expert parallelism `MoEEPLoadSpec` and `_restrict_to_local_experts`.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lora_mem.layers import Experts, Group, Linear, Module, SizingError
from lora_mem.shapes import MODEL_DTYPES, ModelShape

if TYPE_CHECKING:
    import pandas as pd

MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
MAX_VOCAB_SIZE = 258048  # LogitsProcessorWithLoRA refuses more
GIB = 1024**3

Strategy = Literal["keep", "offload", "stage"]
Holder = Literal["packed", "staged", "slots"]


class Tensor(NamedTuple):
    """`copies` tensors of one shape; sizes in elements."""

    name: str
    shape: tuple[int, ...]
    copies: int = 1

    @property
    def elements(self) -> int:
        """Elements of all copies."""
        return prod(self.shape) * self.copies


@dataclass(frozen=True, slots=True)
class Options:
    """How the engine runs and what the adapter is; the arguments of `footprint`, checked, defaults filled in."""

    rank: int
    target_modules: str | tuple[str, ...]
    max_lora_rank: int
    max_loras: int
    max_cpu_loras: int
    tensor_parallel_size: int
    enable_expert_parallel: bool
    fully_sharded_loras: bool
    dtype: str
    lora_dtype: str

    @property
    def expert_parallel_size(self) -> int:
        """Workers that the routed experts are split over."""
        return self.tensor_parallel_size if self.enable_expert_parallel else 1

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Workers that each routed expert is sliced over; with expert parallelism none."""
        return 1 if self.enable_expert_parallel else self.tensor_parallel_size


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


def gib(size: int) -> str:
    """A size for printing, in GiB with four digits."""
    return f"{size / GIB:.4f} GiB"


@dataclass(frozen=True)
class Footprint:
    """What one adapter costs one worker, in bytes; see `footprint` for the meaning of each field."""

    packed_bytes: int
    staged_bytes: int
    slot_bytes: int
    host_bytes: int
    gpu_resident_bytes: int
    gpu_sync_peak_bytes: int
    strategy: Strategy
    shape: ModelShape = field(repr=False)
    options: Options = field(repr=False)

    @cached_property
    def lines(self) -> tuple[Line, ...]:
        """Each figure with its formula and inputs."""
        return tuple(_lines(self))

    def why(self, name: str) -> str:
        """Why a figure is what it is: its formula, its inputs and, for a holder, each kind of module that adds to it.

        Raises:
            SizingError: `name` is not one of the figures.

        """
        for line in self.lines:
            if name in (line.name, line.name.removesuffix("_bytes")):
                parts = [f"{line.meaning}", str(line)]
                holder = {"packed_bytes": "packed", "staged_bytes": "staged", "slot_bytes": "slots"}.get(line.name)
                parts += [f"  {row['module']}: {row['formula']} = {row['bytes']:,}" for row in self.rows(holder)]
                return "\n".join(parts)
        raise SizingError("name", name, f"must be one of {', '.join(line.name for line in self.lines)}")

    def rows(self, holder: str | None = None) -> Iterator[dict[str, Any]]:
        """Each kind of module of each holder (or of one): layers, tensors and bytes."""
        if holder is None:
            return
        itemsize = MODEL_DTYPES[self.options.dtype if holder == "staged" else self.options.lora_dtype]
        for group, module, chosen in _selected(self.shape, self.options):
            if holder == "slots":
                found = slot_tensors(module, self.options)
            else:
                found = (packed_tensors if holder == "packed" else staged_tensors)(module, self.options, chosen)
            size = sum(tensor.elements for tensor in found) * itemsize * group.count
            if size:
                shapes = " + ".join(
                    (f"{tensor.copies}*" if tensor.copies > 1 else "") + "x".join(map(str, tensor.shape))
                    for tensor in found
                )
                yield {
                    "holder": holder,
                    "module": f"{group.prefix}.{module.name}".lstrip("."),
                    "count": group.count,
                    "formula": f"{group.count} * ({shapes}) * {itemsize}",
                    "bytes": size,
                }

    def to_dict(self) -> dict[str, Any]:
        """Everything, ready for JSON: the six figures in bytes, the options, and each figure's formula and inputs."""
        options = {item.name: getattr(self.options, item.name) for item in fields(self.options)}
        if not isinstance(self.options.target_modules, str):
            options["target_modules"] = list(self.options.target_modules)
        return {
            "model": self.shape.name,
            **{name: getattr(self, name) for name in FIGURES},
            "strategy": self.strategy,
            "options": options,
            "why": [
                {"name": line.name, "bytes": line.bytes, "formula": line.formula, "inputs": dict(line.inputs)}
                for line in self.lines
            ],
        }

    def to_frame(self) -> pd.DataFrame:
        """One row for each holder and kind of module: holder, module, count, formula, bytes."""
        import pandas

        rows = [row for holder in ("packed", "staged", "slots") for row in self.rows(holder)]
        return pandas.DataFrame(rows, columns=["holder", "module", "count", "formula", "bytes"])

    def __repr__(self) -> str:
        """Plain and stable: a table of the six figures."""
        head = f"Footprint of {self.shape.name}, rank {self.options.rank}, per worker ({self.strategy})"
        rows = [f"  {line.name:<20} {line.bytes:>20,}  {gib(line.bytes):>14}" for line in self.lines]
        return "\n".join([head, *rows])

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{line.name}</td><td style='text-align:right'>{line.bytes:,}</td>"
            f"<td style='text-align:right'>{gib(line.bytes)}</td><td>{html.escape(line.formula)}</td></tr>"
            for line in self.lines
        )
        head = html.escape(f"{self.shape.name}, rank {self.options.rank}, per worker ({self.strategy})")
        return (
            f"<table><caption>{head}</caption><thead><tr><th>figure</th><th>bytes</th><th>GiB</th><th>formula</th></tr>"
            f"</thead><tbody>{rows}</tbody></table>"
        )


FIGURES = ("packed_bytes", "staged_bytes", "slot_bytes", "host_bytes", "gpu_resident_bytes", "gpu_sync_peak_bytes")


def footprint(
    shape: ModelShape | dict[str, Any] | str | Path,
    *,
    rank: int,
    target_modules: str | Sequence[str] = "all-linear",
    max_lora_rank: int | None = None,
    max_loras: int = 1,
    max_cpu_loras: int | None = None,
    tensor_parallel_size: int = 1,
    enable_expert_parallel: bool = False,
    fully_sharded_loras: bool = False,
    dtype: str = "bfloat16",
    lora_dtype: str = "auto",
    strategy: Strategy = "offload",
) -> Footprint:
    """Bytes of each holder in one worker.

    Args:
        shape: a `ModelShape`, or anything that `ModelShape.from_config` takes.
        rank: the adapter's rank.
        target_modules: PEFT's names (`q_proj`, or longer ends of a path such as `self_attn.q_proj`), `experts` for the
            routed experts, or `all-linear`: what PEFT means by it (every nn.Linear but `lm_head`) where experts are
            nn.Linear too. Slots do not depend on it: vLLM allocates them for every module that it can serve.
        max_lora_rank: rank of the slots; the smallest that vLLM allows for `rank` where it is not given.
        max_loras: slots.
        max_cpu_loras: registered adapters; `max_loras` where it is not given, as in vLLM.
        tensor_parallel_size: workers that slots are sliced over.
        enable_expert_parallel: routed experts are split over the workers instead of sliced.
        fully_sharded_loras: vLLM's option of that name.
        dtype: dtype of the adapter's tensors as they are received, and of the model.
        lora_dtype: dtype of slots and packed tensors; `auto` is `dtype`.
        strategy: where staged and packed live after a sync; see below.

    Returns:
        A `Footprint`, with these fields (bytes per worker):

        - `packed_bytes`: one registered adapter. vLLM slices it by expert parallelism, and not by tensor parallelism.
        - `staged_bytes`: the tensors of one adapter as received, of the experts that are local to the worker. `fused`
          experts come as one tensor for all experts, so that these are staged whole.
        - `slot_bytes`: A and B buffers of every module that vLLM can serve, for `max_loras` adapters.
        - `gpu_resident_bytes`: what stays on the GPU through generation and training.
            keep: slots + max_cpu_loras * (staged + packed). offload, stage: slots.
        - `gpu_sync_peak_bytes`: the most that is on the GPU while an adapter is brought in.
            keep: as resident. offload: slots + staged + packed (the adapter being brought in; all others are on the
            host). stage: slots + the largest packed module, which is assembled on the GPU on its way to the host.
        - `host_bytes`: pinned host memory when `max_cpu_loras` adapters are registered.
            keep: 0. offload: max_cpu_loras * (staged + packed). stage: max_cpu_loras * packed.

        Staged and packed are counted in full each. Where vLLM takes a staged tensor as it is (a dense module whose
        scaling is 1), both are one storage and the worker needs less than this.

    Raises:
        SizingError: an argument is not what vLLM allows, or does not fit the model.

    """
    shape = ModelShape.from_config(shape)
    options = _options(
        shape,
        rank=rank,
        target_modules=target_modules,
        max_lora_rank=max_lora_rank,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        tensor_parallel_size=tensor_parallel_size,
        enable_expert_parallel=enable_expert_parallel,
        fully_sharded_loras=fully_sharded_loras,
        dtype=dtype,
        lora_dtype=lora_dtype,
    )
    lora_size, staged_size = MODEL_DTYPES[options.lora_dtype], MODEL_DTYPES[options.dtype]
    packed = staged = slots = largest = 0
    for group, module, chosen in _selected(shape, options):
        one = sum(tensor.elements for tensor in packed_tensors(module, options, chosen)) * lora_size
        largest = max(largest, one)
        packed += one * group.count
        staged += sum(tensor.elements for tensor in staged_tensors(module, options, chosen)) * staged_size * group.count
        slots += sum(tensor.elements for tensor in slot_tensors(module, options)) * lora_size * group.count
    registered = options.max_cpu_loras
    if strategy == "keep":
        host, resident, peak = 0, slots + registered * (staged + packed), slots + registered * (staged + packed)
    elif strategy == "offload":
        host, resident, peak = registered * (staged + packed), slots, slots + staged + packed
    elif strategy == "stage":
        host, resident, peak = registered * packed, slots, slots + largest
    else:
        raise SizingError("strategy", strategy, "must be 'keep', 'offload' or 'stage'")
    return Footprint(packed, staged, slots, host, resident, peak, strategy, shape, options)


def slot_tensors(module: Module, options: Options) -> list[Tensor]:
    """The slot buffers of one module in one worker, named and shaped as vLLM allocates them.

    Raises:
        SizingError: `tensor_parallel_size` or `max_lora_rank` does not divide as vLLM requires.

    """
    loras, rank = options.max_loras, options.max_lora_rank
    sharded = options.fully_sharded_loras
    if isinstance(module, Experts):
        tp = options.expert_tensor_parallel_size
        local = _divide(module.num_experts, options.expert_parallel_size, module, "num_experts")
        inter = _divide(module.intermediate_size, tp, module, "intermediate size")
        rank_a = _divide(rank, tp, module, "max_lora_rank") if sharded else rank
        hidden_b = _divide(module.hidden_size, tp, module, "hidden size") if sharded else module.hidden_size
        slices, width = {"gated": (2, inter), "non_gated": (1, inter), "fused": (1, 2 * inter)}[module.layout]
        a = [Tensor(f"w13_lora_a_stacked[{i}]", (loras, local, rank_a, module.hidden_size)) for i in range(slices)]
        b = [Tensor(f"w13_lora_b_stacked[{i}]", (loras, local, width, rank)) for i in range(slices)]
        return [
            *a,
            Tensor("w2_lora_a_stacked[0]", (loras, local, rank, inter)),
            *b,
            Tensor("w2_lora_b_stacked[0]", (loras, local, hidden_b, rank)),
        ]
    if module.kind == "embedding":
        return [
            Tensor("lora_a_stacked[0]", (loras, module.input_size, rank)),
            Tensor("lora_b_stacked[0]", (loras, 1, module.slices[0], rank)),
        ]
    tp = options.tensor_parallel_size if module.tensor_parallel else 1
    rank_a, width_a, widths_b = rank, module.input_size, module.slices
    if module.kind in ("column", "merged", "qkv"):
        if sharded:
            # No sharded class takes three or more slices unless they are q, k and v: vLLM leaves the module out.
            if module.kind == "merged" and len(module.children) != 2:
                return []
            rank_a = _divide(rank, tp, module, "max_lora_rank")
        widths_b = slices_per_rank(module, tp)
    elif module.kind == "row":
        width_a = _divide(module.input_size, tp, module, "input size")
        if sharded:
            widths_b = (_divide(module.slices[0], tp, module, "output size"),)
    elif module.kind == "mamba":
        if sharded and min(module.heads) % tp == 0:
            return []
        rank_a = _divide(rank, tp, module, "max_lora_rank") if sharded else rank
        widths_b = _mamba_per_rank(module, tp)
    a = [Tensor(f"lora_a_stacked[{i}]", (loras, 1, rank_a, width_a)) for i in range(len(widths_b))]
    return a + [Tensor(f"lora_b_stacked[{i}]", (loras, 1, width, rank)) for i, width in enumerate(widths_b)]


def slices_per_rank(module: Linear, tensor_parallel_size: int) -> tuple[int, ...]:
    """Output sizes of a column-parallel module in one worker; key and value heads are replicated where they are few.

    Raises:
        SizingError: `tensor_parallel_size` does not divide as vLLM requires.

    """
    tp = tensor_parallel_size
    if module.kind != "qkv":
        for heads in module.heads:
            _divide(heads, tp, module, "number of heads")
        return tuple(_divide(size, tp, module, "output size") for size in module.slices)
    heads, kv_heads, _ = module.heads
    _divide(heads, tp, module, "num_attention_heads")
    if tp >= kv_heads:
        _divide(tp, kv_heads, module, "tensor_parallel_size", by="num_key_value_heads")
    else:
        _divide(kv_heads, tp, module, "num_key_value_heads")
    widths = tuple(size // total * max(1, total // tp) for size, total in zip(module.slices, module.heads, strict=True))
    # One tensor in the checkpoint: QKVParallelLinearWithLoRA has one slot for the three.
    return widths if len(module.children) > 1 else (sum(widths),)


def _mamba_per_rank(module: Linear, tp: int) -> tuple[int, ...]:
    """Slices of MambaMixer2's in_proj or conv1d in one worker; B and C are the two slices before the last heads.

    Where `tp` does not divide the groups there must be one group: vLLM extends it to one for each rank, and builds the
    module as one ColumnParallelLinear with a single slot.
    """
    groups = min(module.heads)
    if groups % tp == 0:
        return tuple(_divide(size, tp, module, "output size") for size in module.slices)
    if groups != 1:
        raise SizingError("tensor_parallel_size", tp, f"must divide the groups of {module.name}, which are {groups}")
    return (
        sum(
            size if heads == groups else _divide(size, tp, module, "output size")
            for size, heads in zip(module.slices, module.heads, strict=True)
        ),
    )


def packed_tensors(module: Module, options: Options, chosen: Sequence[bool]) -> list[Tensor]:
    """The tensors of one module in the registered `LoRAModel`; `chosen` says which children the adapter has."""
    rank = options.rank
    if isinstance(module, Experts):
        if not any(chosen):
            return []
        local = module.num_experts // options.expert_parallel_size
        return [
            Tensor(f"{name}.{factor}", (local, *size))
            for name, inputs, outputs in _expert_projections(module)
            for factor, size in (("lora_a", (rank, inputs)), ("lora_b", (outputs, rank)))
        ]
    return [
        Tensor(f"{child.name}.{factor}", size)
        for child, taken in zip(module.children, chosen, strict=True)
        if taken
        for factor, size in (("lora_a", (rank, module.input_size)), ("lora_b", (child.output_size, rank)))
    ]


def staged_tensors(module: Module, options: Options, chosen: Sequence[bool]) -> list[Tensor]:
    """The tensors of one module as they are received, with PEFT's names; `chosen` as in `packed_tensors`."""
    if not isinstance(module, Experts):
        return packed_tensors(module, options, chosen)
    if not any(chosen):
        return []
    rank = options.rank
    if module.layout == "fused":
        wide = rank * module.num_experts
        return [
            Tensor(f"{name}.{factor}", size)
            for name, inputs, outputs in _expert_projections(module)
            for factor, size in (("lora_a", (wide, inputs)), ("lora_b", (outputs, wide)))
        ]
    local = module.num_experts // options.expert_parallel_size
    return [
        Tensor(f"*.{name}.{factor}", size, local)
        for name, inputs, outputs in _expert_projections(module)
        for factor, size in (("lora_a", (rank, inputs)), ("lora_b", (outputs, rank)))
    ]


def _expert_projections(module: Experts) -> Iterator[tuple[str, int, int]]:
    """Name, input and output size of each projection of one routed expert."""
    hidden, inter = module.hidden_size, module.intermediate_size
    sizes = {
        "gated": ((hidden, inter), (inter, hidden), (hidden, inter)),
        "non_gated": ((hidden, inter), (inter, hidden)),
        "fused": ((hidden, 2 * inter), (inter, hidden)),
    }[module.layout]
    for name, (inputs, outputs) in zip(module.children, sizes, strict=True):
        yield name, inputs, outputs


def _divide(total: int, parts: int, module: Module, what: str, by: str = "tensor_parallel_size") -> int:
    if total % parts:
        if by == "num_key_value_heads":
            raise SizingError(
                "tensor_parallel_size", total, f"must be a multiple of num_key_value_heads={parts} of {module.name}"
            )
        raise SizingError(
            "tensor_parallel_size",
            parts,
            f"must divide the {what} of {module.name}, which is {total}, as vLLM requires",
        )
    return total // parts


def _selected(shape: ModelShape, options: Options) -> Iterator[tuple[Group, Module, tuple[bool, ...]]]:
    """Each kind of module with its group, and which of its children the adapter targets."""
    for group in shape.groups:
        for module in group.modules:
            yield group, module, _chosen(module, options.target_modules)


def _chosen(module: Module, targets: str | tuple[str, ...]) -> tuple[bool, ...]:
    if isinstance(module, Experts):
        return _chosen_experts(module, targets)
    if targets == "all-linear":
        return tuple(child.linear for child in module.children)
    parent = module.name.rpartition(".")[0]
    return tuple(any(_matches(f"{parent}.{child.name}", target) for target in targets) for child in module.children)


def _chosen_experts(module: Experts, targets: str | tuple[str, ...]) -> tuple[bool, ...]:
    if targets == "all-linear" or any(_matches(module.name, target) for target in targets):
        return (True,) * len(module.children)
    if module.layout == "fused":
        paths = [f"{module.name}.{child}" for child in module.children]
        # A parameter is no module: PEFT reaches it by `target_parameters`, whose names hold the parent's too.
        chosen = tuple(any("." in target and _matches(path, target) for target in targets) for path in paths)
    else:
        paths = [f"{module.name}.0.{child}" for child in module.children]
        chosen = tuple(any(_matches(path, target) for target in targets) for path in paths)
    if any(chosen) and not all(chosen):
        missing = [child for child, taken in zip(module.children, chosen, strict=True) if not taken]
        raise SizingError(
            "target_modules",
            list(targets),
            f"takes a part of each routed expert of {module.name} only; vLLM needs {', '.join(missing)} too"
            " (`experts` takes them all)",
        )
    return chosen


def _matches(path: str, target: str) -> bool:
    """PEFT's rule: the target is the path or its end, at a dot."""
    return path == target or path.endswith(f".{target}")


def _integer(name: str, value: object, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SizingError(name, value, f"must be a whole number >= {minimum}")
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SizingError(name, value, "must be True or False")
    return value


def _options(
    shape: ModelShape,
    *,
    rank: int,
    target_modules: str | Sequence[str],
    max_lora_rank: int | None,
    max_loras: int,
    max_cpu_loras: int | None,
    tensor_parallel_size: int,
    enable_expert_parallel: bool,
    fully_sharded_loras: bool,
    dtype: str,
    lora_dtype: str,
) -> Options:
    rank = _integer("rank", rank)
    allowed = ", ".join(map(str, MAX_LORA_RANKS))
    if rank > MAX_LORA_RANKS[-1]:
        raise SizingError(
            "rank", rank, f"must be at most {MAX_LORA_RANKS[-1]}: vLLM's max_lora_rank is one of {allowed}"
        )
    if max_lora_rank is None:
        max_lora_rank = next(allowed_rank for allowed_rank in MAX_LORA_RANKS if allowed_rank >= rank)
    elif _integer("max_lora_rank", max_lora_rank) not in MAX_LORA_RANKS:
        raise SizingError("max_lora_rank", max_lora_rank, f"must be one of {allowed}, as vLLM allows")
    if rank > max_lora_rank:
        raise SizingError("max_lora_rank", max_lora_rank, f"must be at least the adapter's rank, which is {rank}")
    max_loras = _integer("max_loras", max_loras)
    max_cpu_loras = max_loras if max_cpu_loras is None else _integer("max_cpu_loras", max_cpu_loras)
    if max_cpu_loras < max_loras:
        raise SizingError("max_cpu_loras", max_cpu_loras, f"must be at least max_loras={max_loras}, as vLLM requires")
    tp = _integer("tensor_parallel_size", tensor_parallel_size)
    ep = _flag("enable_expert_parallel", enable_expert_parallel)
    fully_sharded = _flag("fully_sharded_loras", fully_sharded_loras)
    if dtype not in MODEL_DTYPES:
        raise SizingError("dtype", dtype, f"must be one of {', '.join(MODEL_DTYPES)}")
    if lora_dtype not in ("auto", "float16", "bfloat16"):
        raise SizingError("lora_dtype", lora_dtype, "must be one of auto, float16, bfloat16, as vLLM allows")
    if ep and not shape.is_moe:
        raise SizingError("enable_expert_parallel", ep, f"needs a model with routed experts; {shape.name} has none")
    if ep and fully_sharded and tp > 1:
        raise SizingError(
            "fully_sharded_loras", True, "cannot go together with enable_expert_parallel; vLLM refuses it. Drop one"
        )
    return Options(
        rank=rank,
        target_modules=_targets(shape, target_modules),
        max_lora_rank=max_lora_rank,
        max_loras=max_loras,
        max_cpu_loras=max_cpu_loras,
        tensor_parallel_size=tp,
        enable_expert_parallel=ep and tp > 1,
        fully_sharded_loras=fully_sharded,
        dtype=dtype,
        lora_dtype=dtype if lora_dtype == "auto" else lora_dtype,
    )


def _targets(shape: ModelShape, target_modules: str | Sequence[str]) -> str | tuple[str, ...]:
    """Normal form of `target_modules`; each name must take at least one module of the model."""
    if target_modules == "all-linear":
        return "all-linear"
    names = (target_modules,) if isinstance(target_modules, str) else tuple(target_modules)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise SizingError("target_modules", target_modules, "must be all-linear, or one or more names of modules")
    if "all-linear" in names:
        raise SizingError("target_modules", list(names), "all-linear must stand alone")
    available = target_names(shape)
    for name in names:
        if not any(_matches(path, name) for path in available):
            known = sorted({path.rpartition(".")[2] for path in available} | ({"experts"} if shape.is_moe else set()))
            raise SizingError(
                "target_modules",
                name,
                f"is no module of {shape.name} that vLLM serves with LoRA; it has: {', '.join(known)}",
            )
    return names


def target_names(shape: ModelShape) -> set[str]:
    """Paths within a layer that PEFT's target_modules can name, `mlp.experts` standing for the routed experts."""
    names: set[str] = set()
    for group in shape.groups:
        for module in group.modules:
            parent = module.name.rpartition(".")[0]
            if isinstance(module, Experts):
                names.add(module.name)
                middle = "" if module.layout == "fused" else "0."
                names.update(f"{module.name}.{middle}{child}" for child in module.children)
            else:
                names.update(f"{parent}.{child.name}" for child in module.children)
    return names


def _lines(result: Footprint) -> Iterator[Line]:
    options = result.options
    adapter = {"rank": options.rank, "target_modules": options.target_modules}
    if options.enable_expert_parallel:
        adapter["expert_parallel_size"] = options.expert_parallel_size
    yield Line(
        "packed_bytes",
        result.packed_bytes,
        "sum over targeted modules of (rank * inputs + outputs * rank) * itemsize, experts local to the worker",
        {**adapter, "dtype": options.lora_dtype},
        "One registered adapter (LoRAModel) in one worker; not sliced by tensor parallelism.",
    )
    yield Line(
        "staged_bytes",
        result.staged_bytes,
        "sum over received tensors of elements * itemsize",
        {**adapter, "dtype": options.dtype},
        "One adapter's tensors as received.",
    )
    yield Line(
        "slot_bytes",
        result.slot_bytes,
        "sum over served modules of max_loras * (A + B elements at max_lora_rank, sliced) * itemsize",
        {
            "max_loras": options.max_loras,
            "max_lora_rank": options.max_lora_rank,
            "tensor_parallel_size": options.tensor_parallel_size,
            "fully_sharded_loras": options.fully_sharded_loras,
            "dtype": options.lora_dtype,
        },
        "The A and B buffers that vLLM allocates at start-up, whatever the adapter targets.",
    )
    packed, staged, slots = result.packed_bytes, result.staged_bytes, result.slot_bytes
    sizes = {"slots": slots, "staged": staged, "packed": packed, "max_cpu_loras": options.max_cpu_loras}
    both = "max_cpu_loras * (staged + packed)"
    host = {"keep": "0", "offload": both, "stage": "max_cpu_loras * packed"}
    resident = {"keep": f"slots + {both}", "offload": "slots", "stage": "slots"}
    peak = {"keep": f"slots + {both}", "offload": "slots + staged + packed", "stage": "slots + largest packed module"}
    for name, formulas, meaning in (
        ("host_bytes", host, "Pinned host memory with max_cpu_loras adapters registered."),
        ("gpu_resident_bytes", resident, "What stays on the GPU through generation and training."),
        ("gpu_sync_peak_bytes", peak, "The most on the GPU while an adapter is brought in."),
    ):
        formula = formulas[result.strategy]
        inputs = {key: value for key, value in sizes.items() if re.search(rf"\b{key}\b", formula)}
        yield Line(name, getattr(result, name), formula, inputs, meaning)
