"""What a model serves with LoRA: the modules that an adapter may have, and what the factors of each must look like.

It is read from a worker's live layers (`vllm_hook.served`), or made of a `ModelShape` by `serve`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lora_mem.sizing.modules import Experts, Module, join
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import FUSED, expert_names
from lora_mem.sizing.wording import compact


@dataclass(frozen=True)
class TensorName:
    """What the name of an adapter's tensor says."""

    module: str  # in the model's own naming, e.g. `model.layers.0.self_attn.q_proj`
    peft_module: str  # in the adapter's naming, which PEFT's rank and alpha patterns match
    is_a: bool  # of the two factors; means nothing for a full module
    is_full: bool = False  # a whole weight or bias (`modules_to_save`), not a factor


_EVERYTHING = slice(None)
Projections = tuple[tuple[int, slice], ...]


@functools.cache  # one object for all
def _whole(projection: int) -> Projections:
    return ((projection, _EVERYTHING),)


@dataclass(frozen=True)
class ServedModule:
    """Where one module of an adapter goes, and what its factors must look like."""

    in_features: int | None  # columns of A, or None where they cannot be known
    out_features: int | None  # rows of B, or None where they cannot be known
    experts: int = 1  # stacked along the rank (PEFT's fused layout)
    stacked: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # sizes of a leading expert dimension: (A's, B's)
    rank_multiple: int = 1  # what the rank must be a multiple of
    packed_in: str = ""  # the runtime module whose packed experts it becomes part of; "": registered by its own name
    projections: Projections = ((0, _EVERYTHING),)  # those of that module that it becomes, with their rows of B
    expert: int | None = None  # its place among this worker's, where each comes by itself; -1: on another worker
    local: slice = field(default_factory=lambda: _EVERYTHING)  # this worker's experts among those in one tensor

    @property
    def fused(self) -> bool:
        """Whether its factors hold all experts, stacked along the rank."""
        return bool(self.packed_in) and self.expert is None and self.stacked is None


@dataclass(frozen=True)
class ExpertLayer:
    """A layer's routed experts as vLLM serves them.

    `children` are the adapter's modules: expert by expert w1 (gate), w2 (down) and, where there is a gate, w3 (up);
    with `shared`, w1, w2 and w3 once. Empty where the engine takes fused experts only (vLLM's 3D wrapper).
    """

    name: str  # of the runtime module
    experts: int  # of the whole model
    hidden: int
    intermediate: int  # of one expert, before tensor parallelism
    children: Sequence[str]
    non_gated: bool = False  # there is no w3; vLLM registers w1's tensor for it
    mixed: bool = False  # enable_mixed_moe_lora_format: fused experts are taken beside those one by one
    shared: bool = False  # enable_moe_shared_loras: A of w1 and w3, and B of w2, once for all experts
    interleaved: bool = False  # gate and up alternate in the rows of a fused B
    rank_multiple: int = 1
    first: int = 0  # this worker's first expert
    count: int | None = None  # this worker's experts; None: all

    @property
    def local_experts(self) -> int:
        return self.experts if self.count is None else self.count

    @property
    def projections(self) -> int:
        """How many projections vLLM registers: w1, w2 and w3, or fused w13 and w2."""
        return 3 if self.children else 2

    @functools.cached_property
    def layouts(self) -> tuple[dict[str, ServedModule], ...]:
        """The layouts of which an adapter may use one: what each module takes, by the name that an adapter uses."""
        if self.shared or not self.children:
            return (self._shared() if self.shared else self._fused(),)
        return (self._split(), self._fused()) if self.mixed else (self._split(),)

    @functools.cached_property
    def complete(self) -> tuple[frozenset[str], ...]:
        """Of each layout the modules that this worker must be given, if it is given any."""
        return tuple(frozenset(name for name, one in layout.items() if one.expert != -1) for layout in self.layouts)

    def _module(self, projections: Projections, **fields: Any) -> ServedModule:
        sizes = (self.intermediate, self.hidden) if projections[0][0] == 1 else (self.hidden, self.intermediate)
        fields = {"in_features": sizes[0], "out_features": sizes[1], "rank_multiple": self.rank_multiple, **fields}
        return ServedModule(packed_in=self.name, projections=projections, **fields)

    def _split(self) -> dict[str, ServedModule]:
        count = 2 if self.non_gated else 3
        takes = [
            [self._module(_whole(kind), expert=expert) for kind in range(count)]
            for expert in (-1, *range(self.local_experts))
        ]
        places = (divmod(index, count) for index in range(len(self.children)))
        local = range(self.first, self.first + self.local_experts)
        found = (takes[expert - self.first + 1 if expert in local else 0][kind] for expert, kind in places)
        return dict(zip(self.children, found, strict=True))

    def _shared(self) -> dict[str, ServedModule]:
        one, each = (1,), (self.experts,)
        stacked = ((one, each), (each, one), (one, each))
        kinds = enumerate(zip(self.children, stacked, strict=True))
        return {name: self._module(_whole(kind), stacked=sizes, local=self._local) for kind, (name, sizes) in kinds}

    def _fused(self) -> dict[str, ServedModule]:
        """PEFT's fused experts: gate_up comes as `experts.base_layer` and down as `experts`, A `[experts * r, in]`."""
        gate, up = slice(0, self.intermediate), slice(self.intermediate, None)
        if self.interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        gate_up = ((0, gate), (2, up)) if self.children else _whole(0)  # vLLM's 2D wrapper takes gate and up apart
        fused = {"experts": self.experts, "local": self._local}
        return {
            f"{self.name}.base_layer": self._module(gate_up, out_features=2 * self.intermediate, **fused),
            self.name: self._module(_whole(1), **fused),
        }

    @property
    def _local(self) -> slice:
        return slice(self.first, self.first + self.local_experts)


@dataclass(frozen=True)
class ServedModel:
    """What one vLLM worker serves with LoRA.

    Of a layer's local experts an adapter must have all or none, in one of the layouts.
    """

    modules: Mapping[str, ServedModule]  # by the name that an adapter uses
    experts: Mapping[str, ExpertLayer]  # by runtime module
    ignored: Callable[[str], bool]  # by design, modules of such a name: other pipeline ranks, target_modules, MTP
    max_lora_rank: int
    dtype: str = "bfloat16"  # torch's name of that to which vLLM casts every factor
    share: bool = True  # a factor that all experts share may stay one tensor on the host
    aliases: frozenset[str] = frozenset()  # names in `modules` that are second names

    def unknown(self, modules: Collection[str]) -> str:
        """What to say of modules that are not served: all of them, and what is."""
        known = sorted({module.rpartition(".")[2] for module in self.modules})
        message = (
            f"{len(modules)} module{'s' if len(modules) > 1 else ''} that this model does not serve with LoRA: "
            f"{', '.join(compact(modules))}. It serves modules named {', '.join(known)}"
        )
        if any(".experts" in module for module in modules):
            message += f". {self.expert_help}"
        return message

    @property
    def expert_help(self) -> str:
        """How routed experts must come, for who brings them otherwise."""
        layer = next(iter(self.experts.values()), None)
        if layer is None:
            return "This model has no routed experts"
        if layer.shared:
            how = "experts as 'experts.w1', 'experts.w2' and 'experts.w3' (enable_moe_shared_loras=True)"
        elif layer.mixed:
            how = "a layer's experts one by one, or fused as 'experts.base_layer' and 'experts'"
        else:
            how = "experts one by one; for fused 'experts.base_layer' and 'experts'"
            if not layer.children:
                how = "a layer's experts fused, as 'experts.base_layer' and 'experts'; for per-expert adapters"
            how += " start vLLM with enable_mixed_moe_lora_format=True"
        return f"This engine takes {how}"


@dataclass(frozen=True)
class ServedShape:
    """What vLLM serves of a model that is known by its shape, whole."""

    served: ServedModel
    places: Mapping[str, tuple[str, Module, int]]  # path of the runtime module (`*` for the layer), module, layer
    renamed: Mapping[str, str]  # modules by PEFT's names, where vLLM has others

    def read_name(self, tensor: str) -> TensorName | None:
        """What a tensor's name says, as vLLM parses it (`parse_fine_tuned_lora_name`); None where it cannot."""
        if found := re.fullmatch(r"(?:base_model\.model\.)?(.*)\.lora_(?:([AB])\.weight|embedding_([AB]))", tensor):
            module = found[1]
            return TensorName(self.renamed.get(module, module), module, "A" in found.groups()[1:])
        return None


def serve(shape: ModelShape, max_lora_rank: int, *, mixed: bool = False, shared: bool = False) -> ServedShape:
    """What an engine serves of a model; `mixed` and `shared` are `enable_mixed_moe_lora_format` and
    `enable_moe_shared_loras`.
    """
    modules: dict[str, ServedModule] = {}
    experts: dict[str, ExpertLayer] = {}
    places: dict[str, tuple[str, Module, int]] = {}
    renamed: dict[str, str] = {}
    for group, module, layer in shape.places():
        path, found = group.path(layer, module), {}
        if isinstance(module, Experts):
            experts[path] = _expert_layer(module, path, mixed=mixed, shared=shared)
            found = {name: takes for layout in experts[path].layouts for name, takes in layout.items()}
        else:
            parent = path.rpartition(".")[0]
            for index, child in enumerate(module.children):
                found[join(parent, child.name)] = ServedModule(
                    module.input_size, child.output_size, projections=_whole(index)
                )
        prefix, peft_prefix = (one.removesuffix(module.name) for one in (path, group.peft_path(layer, module)))
        for name in found:
            places[name] = (group.path(None, module), module, layer)
            if prefix != peft_prefix:
                renamed[peft_prefix + name.removeprefix(prefix)] = name
        modules |= found
    return ServedShape(ServedModel(modules, experts, lambda module: False, max_lora_rank), places, renamed)


def _expert_layer(module: Experts, path: str, *, mixed: bool, shared: bool) -> ExpertLayer:
    names = expert_names(module, fused=module.layout == "fused" and not mixed, shared=shared)
    inner = [path] if shared else [f"{path}.{expert}" for expert in range(module.num_experts)]
    children = [] if names == FUSED else [f"{one}.{name}" for one in inner for name in names]
    sizes = module.num_experts, module.hidden_size, module.intermediate_size
    non_gated = module.layout == "non_gated"
    return ExpertLayer(path, *sizes, children, non_gated=non_gated, mixed=mixed, shared=shared)
