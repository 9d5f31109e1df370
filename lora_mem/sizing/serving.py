"""What a model serves with LoRA: the modules that an adapter may have, and what the factors of each must look like.

It is read from a worker's live layers (`vllm_hook.served`), or made of a `ModelShape` by `serve`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

from lora_mem.errors import compact
from lora_mem.sizing.modules import Experts, Module, join
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import FUSED, expert_names


class TensorName(NamedTuple):
    """What the name of an adapter's tensor says."""

    module: str  # in the model's own naming, e.g. `model.layers.0.self_attn.q_proj`
    peft_module: str  # in the adapter's naming; PEFT's rank and alpha patterns match against this
    is_a: bool  # whether it is the A factor; meaningless for a full module
    is_full: bool = False  # a whole weight or bias (`modules_to_save`), not a factor


UNREADABLE = TensorName("", "", False)
"""For a name that is not PEFT's."""
_EVERYTHING = slice(None)
Projections = tuple[tuple[int, slice], ...]
_WHOLE: tuple[Projections, ...] = tuple(((projection, _EVERYTHING),) for projection in range(3))


class ServedModule(NamedTuple):
    """Where one module of an adapter goes, and what its factors must look like: A `[r, in]`, B `[out, r]`."""

    in_features: int | None  # columns of A, or None where they cannot be known
    out_features: int | None  # rows of B, or None where they cannot be known
    experts: int = 1  # stacked along the rank (PEFT's fused layout)
    stacked: tuple[tuple[int, ...], tuple[int, ...]] | None = None  # sizes of a leading expert dimension: (A's, B's)
    rank_multiple: int = 1  # what the rank must be a multiple of
    packed_in: str = ""  # the runtime module whose packed experts it becomes part of; "": registered by its own name
    projections: Projections = _WHOLE[0]  # those of that module that it becomes, with their rows of B
    expert: int | None = None  # its place among this worker's, where each comes by itself; -1: on another worker
    local: slice = _EVERYTHING  # this worker's experts among those in one tensor

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
    mixed: bool = False  # `enable_mixed_moe_lora_format`: fused experts are taken beside those one by one
    shared: bool = False  # `enable_moe_shared_loras`: A of w1 and w3, and B of w2, once for all experts
    interleaved: bool = False  # gate and up alternate in the rows of a fused B
    rank_multiple: int = 1
    first: int = 0  # of this worker's experts
    count: int | None = None  # of this worker's experts; None where it has all

    @property
    def local_experts(self) -> int:
        """How many experts this worker holds."""
        return self.experts if self.count is None else self.count

    @property
    def projections(self) -> int:
        """How many projections vLLM registers: w1, w2 and w3, or fused w13 and w2."""
        return 3 if self.children else 2

    @cached_property
    def layouts(self) -> tuple[dict[str, ServedModule], ...]:
        """The layouts of which an adapter may use one: what each module takes, by the name that an adapter uses."""
        if self.shared:
            return (self._shared(),)
        split = (self._split(),) if self.children else ()
        return (*split, self._fused()) if self.mixed or not split else split

    @cached_property
    def complete(self) -> tuple[frozenset[str], ...]:
        """Of each layout the modules that this worker must be given, if it is given any."""
        return tuple(frozenset(name for name, one in layout.items() if one.expert != -1) for layout in self.layouts)

    def _module(self, projections: Projections, **fields: Any) -> ServedModule:
        inputs, outputs = self.hidden, self.intermediate
        if projections[0][0] == 1:
            inputs, outputs = outputs, inputs
        common: Any = {"rank_multiple": self.rank_multiple, "packed_in": self.name, "projections": projections}
        return ServedModule(inputs, outputs, **common, **fields)

    def _split(self) -> dict[str, ServedModule]:
        """Each expert by itself."""
        kinds = [self._module(projection) for projection in _WHOLE[: 2 if self.non_gated else 3]]
        elsewhere = [kind._replace(expert=-1) for kind in kinds]
        takes: list[ServedModule] = []
        for expert in range(len(self.children) // len(kinds)):
            local = expert - self.first
            takes += [kind._replace(expert=local) for kind in kinds] if 0 <= local < self.local_experts else elsewhere
        return dict(zip(self.children, takes, strict=True))

    def _shared(self) -> dict[str, ServedModule]:
        one, each = (1,), (self.experts,)
        stacked = ((one, each), (each, one), (one, each))
        kinds = zip(self.children, _WHOLE, stacked, strict=True)
        return {name: self._module(kind, stacked=sizes, local=self._local) for name, kind, sizes in kinds}

    def _fused(self) -> dict[str, ServedModule]:
        """PEFT's fused experts: gate_up comes as `experts.base_layer` and down as `experts`, A `[experts * r, in]`."""
        gate, up = slice(0, self.intermediate), slice(self.intermediate, None)
        if self.interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        gate_up = ((0, gate), (2, up)) if self.children else _WHOLE[0]  # vLLM's 2D wrapper takes gate and up apart
        fused = {"experts": self.experts, "local": self._local}
        return {
            f"{self.name}.base_layer": self._module(gate_up, **fused)._replace(out_features=2 * self.intermediate),
            self.name: self._module(_WHOLE[1], **fused),
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
    ignored: Callable[[str], bool]  # by vLLM, by design: other pipeline ranks, `target_modules`, MTP
    max_lora_rank: int  # of the engine
    dtype: str = "bfloat16"  # torch's name of that to which vLLM casts every factor
    share: bool = True  # whether a factor that all experts share may stay one tensor on the host
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
        """What to say of routed experts that do not come as this engine takes them."""
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


Place = tuple[str, Module, int]
"""Where a served module belongs: the path of its runtime module (`*` for the layer), that module, the layer's number"""
_FACTORS = {"A.weight": True, "B.weight": False, "embedding_A": True, "embedding_B": False}
_SKIPPED = (".embed_tokens.base_layer.weight", ".lm_head.base_layer.weight")  # copies of the base model's


@dataclass(frozen=True)
class ServedShape(ServedModel):
    """What vLLM serves of a model that is known by its shape, whole."""

    places: Mapping[str, Place] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)  # modules by PEFT's names, where vLLM has others

    def read_name(self, tensor: str) -> TensorName | None:
        """What a tensor's name says, as vLLM parses it (`parse_fine_tuned_lora_name`); None where vLLM skips it."""
        path, found, factor = tensor.rpartition(".lora_")
        if not found or factor not in _FACTORS:
            return None if tensor.endswith(_SKIPPED) else UNREADABLE
        module = path.removeprefix("base_model.model.")
        return TensorName(self.renamed.get(module, module), module, _FACTORS[factor])


def serve(shape: ModelShape, max_lora_rank: int, *, mixed: bool = False, shared: bool = False) -> ServedShape:
    """What an engine serves of a model; `mixed` and `shared` are `enable_mixed_moe_lora_format` and
    `enable_moe_shared_loras`.
    """
    modules: dict[str, ServedModule] = {}
    experts: dict[str, ExpertLayer] = {}
    places: dict[str, Place] = {}
    renamed: dict[str, str] = {}
    for group in shape.groups:
        for layer, module in product(group.layers if group.stage == "layers" else (0,), group.modules):
            path, found = group.path(layer, module), {}
            if isinstance(module, Experts):
                experts[path] = _expert_layer(module, path, mixed=mixed, shared=shared)
                found = {name: takes for layout in experts[path].layouts for name, takes in layout.items()}
            else:
                parent = path.rpartition(".")[0]
                for index, child in enumerate(module.children):
                    sizes = module.input_size, child.output_size
                    found[join(parent, child.name)] = ServedModule(*sizes, projections=((index, _EVERYTHING),))
            modules |= found
            places |= dict.fromkeys(found, (group.path(None, module), module, layer))
            prefix, peft_prefix = (one.removesuffix(module.name) for one in (path, group.peft_path(layer, module)))
            if prefix != peft_prefix:
                renamed |= {peft_prefix + name.removeprefix(prefix): name for name in found}
    return ServedShape(modules, experts, lambda module: False, max_lora_rank, places=places, renamed=renamed)


def _expert_layer(module: Experts, path: str, *, mixed: bool, shared: bool) -> ExpertLayer:
    names = expert_names(module, fused=module.layout == "fused" and not mixed, shared=shared)
    inner = [path] if shared else [f"{path}.{expert}" for expert in range(module.num_experts)]
    children = [] if names == FUSED else [f"{one}.{name}" for one in inner for name in names]
    sizes = module.num_experts, module.hidden_size, module.intermediate_size
    non_gated = module.layout == "non_gated"
    return ExpertLayer(path, *sizes, children, non_gated=non_gated, mixed=mixed, shared=shared)
