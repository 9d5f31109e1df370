"""The modules of a model as vLLM's LoRA sees them: what is wrapped, its sizes, and what PEFT calls it.

A *runtime module* is one that vLLM wraps, e.g. `qkv_proj`. Its *children* are the modules of the checkpoint
that vLLM fused into it, e.g. `q_proj`, `k_proj`, `v_proj`; PEFT's names and an adapter's tensors follow the children.
All sizes are element counts of the whole model, before any tensor or expert parallelism.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lora_mem.errors import SizingError

LinearKind = Literal["column", "merged", "mamba", "qkv", "row", "replicated", "embedding", "logits"]
ExpertLayout = Literal["gated", "non_gated", "fused"]


@dataclass(frozen=True, slots=True)
class Child:
    """One module of the checkpoint: its name beside the runtime module, its output size, and what PEFT thinks of it."""

    name: str
    output_size: int
    linear: bool = True  # an nn.Linear in transformers, so that PEFT's "all-linear" takes it


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear, embedding or logits module with LoRA slots.

    `kind` is the vLLM class that is wrapped: `column` and `merged` are ColumnParallelLinear and
    MergedColumnParallelLinear, `mamba` either of the two (MambaMixer2 chooses), `qkv` QKVParallelLinear,
    `row` RowParallelLinear, `replicated` ReplicatedLinear, `embedding` VocabParallelEmbedding, `logits` the
    LogitsProcessor that stands for `lm_head`.
    `slices` are the output sizes of the wrapper's slots, `heads` the heads (or groups) in each slice: tensor
    parallelism splits those. Key and value heads are replicated where there are fewer than ranks, and so are those of
    the slices that `replicated` numbers.
    `children` are empty where no adapter can name the module: it has slots all the same.
    `tensor_parallel` is False where vLLM builds the module with `disable_tp`.
    """

    name: str
    kind: LinearKind
    input_size: int
    slices: tuple[int, ...]
    children: tuple[Child, ...]
    heads: tuple[int, ...] = ()
    tensor_parallel: bool = True
    replicated: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Experts:
    """The routed experts of one layer (vLLM's MoERunner).

    `layout`: `gated` has w1 (gate), w2 (down) and w3 (up) for each expert, `non_gated` w1 (up) and w2 (down),
    `fused` one gate_up and one down tensor with an expert dimension (vLLM's `is_3d_moe_weight`).
    `children` are the adapter's names in that order: below `experts.<i>.` for the first two, below `experts.` for
    `fused`.
    """

    name: str
    num_experts: int
    hidden_size: int
    intermediate_size: int
    layout: ExpertLayout
    children: tuple[str, ...]


Module = Linear | Experts


@dataclass(frozen=True, slots=True)
class Group:
    """Identical layers: `modules` once, and the numbers of the layers that have them.

    `prefix` is the path that comes before a module's name, with `{}` where the layer's number goes. A group without
    `layers` holds modules outside the layers, in the pipeline stages that `stage` names (`ends`: first and last).
    `peft_prefix` is the same path in the checkpoint where vLLM renames it.
    """

    prefix: str
    layers: tuple[int, ...]
    modules: tuple[Module, ...]
    stage: Literal["layers", "first", "last", "ends", "every"] = "layers"
    peft_prefix: str | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """The layers' numbers; 0 stands for modules outside the layers."""
        return self.layers if self.stage == "layers" else (0,)

    def path(self, layer: int | None, module: Module) -> str:
        """Path of a module in vLLM; `layer` None leaves the layer's number open, as `*`."""
        return join(self.prefix.replace("{}", "*" if layer is None else str(layer)), module.name)

    def peft_path(self, layer: int, module: Module) -> str:
        """Path of a module in the checkpoint, as PEFT names it."""
        return join((self.peft_prefix or self.prefix).replace("{}", str(layer)), module.name)


def join(prefix: str, name: str) -> str:
    """Join two parts of a dotted path; an empty prefix adds no dot."""
    return f"{prefix}.{name}" if prefix else name


def parse_object(text: str | bytes, what: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:  # not UTF-8, not JSON, a number of too many digits
        raise SizingError(what, where, f"is not valid JSON ({error})") from None
    except RecursionError:
        raise SizingError(what, where, "is nested too deeply to be read") from None
    if not isinstance(found, dict):
        raise SizingError(what, where, "must hold a JSON object")
    return found


def read_object(path: Path, what: str, where: str = "") -> dict[str, Any]:
    """The JSON object in a file, which errors call `where`."""
    return parse_object(read_bytes(path, what), what, where or str(path))


def read_bytes(path: Path, what: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SizingError(what, str(path), f"cannot be read ({error.strerror})") from None
