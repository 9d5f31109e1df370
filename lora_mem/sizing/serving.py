"""What a model serves with LoRA: the modules that an adapter may have, and what the factors of each must look like.

It is read from a worker's live layers (`vllm_hook.served`), or made of a `ModelShape` by `serve`.
"""

from __future__ import annotations

import functools
import itertools
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
    """What the name of an adapter's tensor says.

    Attributes:
        module: the module in the model's own naming, e.g. `model.layers.0.self_attn.q_proj`.
        peft_module: the module in the adapter's naming; PEFT's rank and alpha patterns match against this.
        is_a: whether it is the A factor; meaningless for a full module.
        is_full: a whole weight or bias (`modules_to_save`), not a factor.
    """

    module: str
    peft_module: str
    is_a: bool
    is_full: bool = False


_EVERYTHING = slice(None)
Projections = tuple[tuple[int, slice], ...]


@functools.cache  # one object for all
def _whole(projection: int) -> Projections:
    return ((projection, _EVERYTHING),)


@dataclass(frozen=True)
class ServedModule:
    """Where one module of an adapter goes, and what its factors must look like.

    Attributes:
        in_features: columns of A, or None where they cannot be known.
        out_features: rows of B, or None where they cannot be known.
        experts: how many experts are stacked along the rank (PEFT's fused layout), or 1.
        stacked: factors carry a leading expert dimension, of one of these sizes: (A's, B's).
        rank_multiple: the rank must be a multiple of this.
        packed_in: the runtime module whose packed experts it becomes part of; "" where it is registered by its own
        name.
        projections: which of that module's projections it becomes, each with the rows of B that belong to it.
        expert: its place among this worker's experts, where each expert comes by itself; -1 on another worker.
        local: this worker's experts among those stacked in one tensor.
    """

    in_features: int | None
    out_features: int | None
    experts: int = 1
    stacked: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    rank_multiple: int = 1
    packed_in: str = ""
    projections: Projections = ((0, _EVERYTHING),)
    expert: int | None = None
    local: slice = field(default_factory=lambda: _EVERYTHING)  # one object for all

    @property
    def fused(self) -> bool:
        """Whether its factors hold all experts, stacked along the rank."""
        return bool(self.packed_in) and self.expert is None and self.stacked is None


@dataclass(frozen=True)
class ExpertLayer:
    """A layer's routed experts as vLLM serves them.

    Attributes:
        name: of the runtime module.
        experts: of the whole model.
        hidden: the model's hidden size.
        intermediate: of one expert, before tensor parallelism.
        children: the adapter's modules: expert by expert w1 (gate), w2 (down) and, where there is a gate, w3 (up); with
            `shared`, w1, w2 and w3 once. Empty where the engine takes fused experts only (vLLM's 3D wrapper).
        non_gated: whether there is no w3; vLLM registers w1's tensor for it.
        mixed: `enable_mixed_moe_lora_format`: fused experts are taken beside those one by one.
        shared: `enable_moe_shared_loras`: A of w1 and w3, and B of w2, once for all experts.
        interleaved: whether gate and up alternate in the rows of a fused B.
        rank_multiple: the rank must be a multiple of this.
        first: this worker's first expert.
        count: this worker's experts; None where it has all.
    """

    name: str
    experts: int
    hidden: int
    intermediate: int
    children: Sequence[str]
    non_gated: bool = False
    mixed: bool = False
    shared: bool = False
    interleaved: bool = False
    rank_multiple: int = 1
    first: int = 0
    count: int | None = None

    @property
    def local_experts(self) -> int:
        """How many experts this worker holds."""
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
        """Each expert by itself."""
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

    Attributes:
        modules: by the name that an adapter uses.
        experts: the layers' routed experts, by runtime module. Of a layer's local experts an adapter must have all or
            none, in one of the layouts.
        ignored: whether vLLM ignores a module of this name by design (other pipeline ranks, `target_modules`, MTP).
        max_lora_rank: of the engine.
        dtype: torch's name of that to which vLLM casts every factor.
        share: whether a factor that all experts share may stay one tensor on the host.
        aliases: names in `modules` that are second names.
    """

    modules: Mapping[str, ServedModule]
    experts: Mapping[str, ExpertLayer]
    ignored: Callable[[str], bool]
    max_lora_rank: int
    dtype: str = "bfloat16"
    share: bool = True
    aliases: frozenset[str] = frozenset()

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
    """What vLLM serves of a model that is known by its shape, whole.

    Attributes:
        served: its modules, by vLLM's names.
        places: where each belongs: the path of its runtime module (`*` for the layer), the module, the layer's number.
        renamed: modules by PEFT's names, where vLLM has others.
    """

    served: ServedModel
    places: Mapping[str, tuple[str, Module, int]]
    renamed: Mapping[str, str]

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
    for group in shape.groups:
        for layer, module in itertools.product(group.numbers, group.modules):
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
