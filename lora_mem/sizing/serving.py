"""What a model serves with LoRA: the modules that an adapter may have, and what the factors of each must look like.

It is read from a worker's live layers (`vllm_hook.served`), or made of a `ModelShape` by `serve`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lora_mem.sizing.modules import Experts, Linear, Module, join
from lora_mem.sizing.shapes import ModelShape
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
    projections: tuple[tuple[int, slice], ...] = ((0, _EVERYTHING),)
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
        non_gated: whether there is no w3.
        mixed: `enable_mixed_moe_lora_format`: fused experts are taken beside those one by one.
        shared: `enable_moe_shared_loras`: A of w1 and w3, and B of w2, once for all experts.
        interleaved: whether gate and up alternate in the rows of a fused B.
        rank_multiple: the rank must be a multiple of this.
        local: this worker's experts.
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
    local: slice = field(default_factory=lambda: _EVERYTHING)

    def layouts(self) -> list[dict[str, ServedModule]]:
        """The layouts of which an adapter may use one: what each module takes, by the name that an adapter uses."""
        if self.shared:
            return [self._shared()]
        if not self.children:
            return [self._fused()]
        return [self._split(), self._fused()] if self.mixed else [self._split()]

    def _sizes(self, projection: int) -> tuple[int, int]:
        return (self.intermediate, self.hidden) if projection == 1 else (self.hidden, self.intermediate)

    def _shared(self) -> dict[str, ServedModule]:
        one, each = (1,), (self.experts,)
        return {
            child: ServedModule(
                *self._sizes(projection),
                stacked=(each, one) if projection == 1 else (one, each),
                rank_multiple=self.rank_multiple,
                packed_in=self.name,
                projections=((projection, _EVERYTHING),),
                local=self.local,
            )
            for projection, child in enumerate(self.children)
        }

    def _split(self) -> dict[str, ServedModule]:
        count = 2 if self.non_gated else 3
        first, end, _ = self.local.indices(self.experts)
        projections = [((projection, _EVERYTHING),) for projection in range(count)]
        layout = {}
        for index, child in enumerate(self.children):
            expert, projection = divmod(index, count)
            layout[child] = ServedModule(
                *self._sizes(projection),
                rank_multiple=self.rank_multiple,
                packed_in=self.name,
                projections=projections[projection],
                expert=expert - first if first <= expert < end else -1,
            )
        return layout

    def _fused(self) -> dict[str, ServedModule]:
        """PEFT's fused experts: gate_up comes as `experts.base_layer` and down as `experts`, A `[experts * r, in]`."""
        gate_up: tuple[tuple[int, slice], ...] = ((0, _EVERYTHING),)
        if self.children:  # vLLM's 2D wrapper takes gate and up apart
            gate, up = slice(0, self.intermediate), slice(self.intermediate, None)
            if self.interleaved:
                gate, up = slice(0, None, 2), slice(1, None, 2)
            gate_up = ((0, gate), (2, up))

        def takes(inputs: int, outputs: int, projections: tuple[tuple[int, slice], ...]) -> ServedModule:
            return ServedModule(
                inputs,
                outputs,
                experts=self.experts,
                rank_multiple=self.rank_multiple,
                packed_in=self.name,
                projections=projections,
                local=self.local,
            )

        return {
            f"{self.name}.base_layer": takes(self.hidden, 2 * self.intermediate, gate_up),
            self.name: takes(self.intermediate, self.hidden, ((1, _EVERYTHING),)),
        }


@dataclass(frozen=True)
class ServedModel:
    """What one vLLM worker serves with LoRA.

    Attributes:
        modules: by the name that an adapter uses.
        complete: sets of modules of which an adapter must have all or none: a layer's local experts. By runtime module;
            where there are several sets, an adapter may use one only.
        ignored: whether vLLM ignores a module of this name by design (other pipeline ranks, `target_modules`, MTP).
        max_lora_rank: of the engine.
        dtype: torch's name of that to which vLLM casts every factor.
        local_experts: how many experts this worker holds, by runtime module.
        projections: how many projections vLLM registers, by runtime module (3: w1, w2, w3; 2: fused w13, w2).
        repeated: projections that are another one's tensor, by runtime module: {2: 0} for w3 of a non-gated MoE.
        share: whether a factor that all experts share may stay one tensor on the host.
        aliases: names in `modules` that are second names.
    """

    modules: Mapping[str, ServedModule]
    complete: Mapping[str, tuple[frozenset[str], ...]]
    ignored: Callable[[str], bool]
    max_lora_rank: int
    dtype: str = "bfloat16"
    local_experts: Mapping[str, int] = field(default_factory=dict)
    projections: Mapping[str, int] = field(default_factory=dict)
    repeated: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
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
        layouts = next(iter(self.complete.values()), ())
        takes = [self.modules[next(iter(layout))] for layout in layouts if layout]
        if not takes:
            return "This model has no routed experts"
        mixed = "start vLLM with enable_mixed_moe_lora_format=True"
        if takes[0].stacked:
            how = "experts as 'experts.w1', 'experts.w2' and 'experts.w3' (enable_moe_shared_loras=True)"
        elif takes[0].fused:
            how = "a layer's experts fused, as 'experts.base_layer' (gate_up) and 'experts' (down); to serve "
            how += f"per-expert adapters {mixed}"
        elif len(takes) > 1:
            how = "a layer's experts one by one, or fused as 'experts.base_layer' and 'experts'"
        else:
            how = f"experts one by one; for fused 'experts.base_layer' and 'experts' {mixed}"
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
        for end, is_a in _FACTORS.items():
            if tensor.endswith(end):
                module = tensor.removeprefix("base_model.model.").removesuffix(end)
                return TensorName(self.renamed.get(module, module), module, is_a)
        return None


_FACTORS = {
    ".lora_A.weight": True,
    ".lora_B.weight": False,
    ".lora_embedding_A": True,
    ".lora_embedding_B": False,
}


def serve(shape: ModelShape, max_lora_rank: int, *, mixed: bool = False, shared: bool = False) -> ServedShape:
    """What an engine of `max_lora_rank` serves of a model.

    Args:
        shape: the model.
        max_lora_rank: of the engine.
        mixed: `enable_mixed_moe_lora_format`.
        shared: `enable_moe_shared_loras`.

    """
    modules: dict[str, ServedModule] = {}
    complete: dict[str, tuple[frozenset[str], ...]] = {}
    places: dict[str, tuple[str, Module, int]] = {}
    renamed: dict[str, str] = {}
    for group in shape.groups:
        for layer, module in itertools.product(group.layers if group.stage == "layers" else (0,), group.modules):
            path = group.path(layer, module)
            if isinstance(module, Experts):
                layouts = _expert_layer(module, path, mixed=mixed, shared=shared).layouts()
                complete[path] = tuple(map(frozenset, layouts))
            else:
                layouts = [_linear(module, path)]
            prefix, peft_prefix = (one.removesuffix(module.name) for one in (path, group.peft_path(layer, module)))
            for name in itertools.chain(*layouts):
                places[name] = (group.path(None, module), module, layer)
                if prefix != peft_prefix:
                    renamed[peft_prefix + name.removeprefix(prefix)] = name
            modules.update(*layouts)
    return ServedShape(ServedModel(modules, complete, lambda module: False, max_lora_rank), places, renamed)


def _linear(module: Linear, path: str) -> dict[str, ServedModule]:
    parent = path.rpartition(".")[0]
    return {
        join(parent, child.name): ServedModule(
            module.input_size, child.output_size, projections=((index, _EVERYTHING),)
        )
        for index, child in enumerate(module.children)
    }


def _expert_layer(module: Experts, path: str, *, mixed: bool, shared: bool) -> ExpertLayer:
    if shared:
        children = [f"{path}.{name}" for name in ("w1", "w2", "w3")]
    elif module.layout == "fused" and not mixed:
        children = []
    else:
        names = ("gate_proj", "down_proj", "up_proj") if module.layout == "fused" else module.children
        children = [f"{path}.{expert}.{name}" for expert in range(module.num_experts) for name in names]
    return ExpertLayer(
        path,
        module.num_experts,
        module.hidden_size,
        module.intermediate_size,
        children,
        non_gated=module.layout == "non_gated",
        mixed=mixed,
        shared=shared,
    )
