"""The rulebook: what vLLM, and what a stage, makes of an adapter's tensors in a model, by their names and shapes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from lora_mem.errors import AdapterError, compact, some
from lora_mem.sizing.serving import UNREADABLE, ServedModel, ServedModule, TensorName

NOT_PEFTS = (
    "names that are not PEFT's: {}; a factor is called 'base_model.model.<module>.lora_A.weight' or '...lora_B.weight',"
    " as peft.get_peft_model_state_dict returns it (a live model's state_dict has the adapter's name in between:"
    " 'lora_A.default.weight')"
)
# What a stage says of each kind of problem, in the order in which they are looked at.
_KINDS = {
    "name": NOT_PEFTS,
    "twice": "two tensors for the same factor: {}",
    "nothing": "{}",
    "unknown": "",  # said by `ServedModel.unknown`
    "half": "a factor is missing: {}",
    "rank": "{}",
    "shape": "shapes that do not fit: {}",
    "experts": "{}",
}
_NOTHING = "has no factor (lora_A, lora_B) that this model would use"
Factors = dict[str, str]
"""The tensors that are the A, or the B, of modules: by vLLM's name for the module."""


@dataclass(frozen=True)
class AdapterCheck:
    """What becomes of an adapter's tensors in vLLM, each with the reason.

    `errors` say why a stage refuses the adapter, one text for each kind of problem, the most basic first. It refuses
    what vLLM refuses and what vLLM ignores, unless that is by design.
    """

    a: Factors
    b: Factors
    ignored: Mapping[str, str]  # tensors that vLLM skips, or loads and never uses
    refused: Mapping[str, str]  # tensors for which vLLM refuses the whole adapter
    refused_for: Mapping[str, tuple[object, str]]  # what else it refuses it for: a field of its config and the value
    ignored_bytes: int = 0
    errors: tuple[str, ...] = ()

    @cached_property
    def served(self) -> dict[str, tuple[str, str]]:
        """The modules that are served, by vLLM's name: the names of their A and B."""
        bad = self.refused.keys() | self.ignored.keys()
        pairs = {module: (a, self.b[module]) for module, a in self.a.items() if module in self.b}
        return {module: pair for module, pair in pairs.items() if bad.isdisjoint(pair)} if bad else pairs

    @property
    def ok(self) -> bool:
        """Whether vLLM takes the adapter and uses all of it."""
        return not self.ignored and not self.refused and not self.refused_for

    def require(self) -> None:
        """Raise an `AdapterError` with the first of `errors`, if there is one."""
        if self.errors:
            raise AdapterError(self.errors[0])

    def __repr__(self) -> str:
        """Plain and stable."""
        lines = [f"AdapterCheck: {len(self.served)} modules served, {len(self.ignored)} tensors ignored,"]
        lines[0] += f" {len(self.refused)} refused"
        lines += [f"  refused for {what}={value!r}: {why}" for what, (value, why) in self.refused_for.items()]
        lines += [f"  ignored {name}: {reason}" for name, reason in list(self.ignored.items())[:10]]
        lines += [f"  refused {name}: {reason}" for name, reason in list(self.refused.items())[:10]]
        return "\n".join(lines)


def check(
    shapes: Mapping[str, tuple[int, ...]],
    read: Callable[[str], TensorName | None],
    served: ServedModel | None,
    rank_of: Callable[[str], int] | None = None,
    *,
    refused_for: Mapping[str, tuple[object, str]] | None = None,
) -> AdapterCheck:
    """What becomes of an adapter's tensors.

    Args:
        shapes: of the tensors, by their names.
        read: what a name says (`UNREADABLE` where it is not PEFT's), or None for a tensor that vLLM skips by design.
        served: what the model serves, or None where no model is known yet: then only the adapter itself is checked.
        rank_of: the rank that the adapter's config gives a module (`peft_module`), which its tensors must have for a
            stage. Without it their own rank counts, as in vLLM's loader.
        refused_for: what its config is refused for.

    """
    found = _Findings()
    found.sort(shapes, read, served)
    if served is not None:
        _set_aside_unknown(served, found)
    a_of, b_of = found.a, found.b
    for module in (a_of | b_of) if a_of.keys() != b_of.keys() else ():
        if (module in a_of) != (module in b_of):
            lacks = "B" if module in a_of else "A"
            found.add("half", found.tensors(module)[0], f"has no {lacks} beside it", found.tensors(module))
    ranks: dict[str, int] = {}
    for module, a in a_of.items():
        if (b := b_of.get(module)) is None:
            continue
        name = None if rank_of is None else read(a)
        rank = None if rank_of is None or name is None else rank_of(name.peft_module)
        takes = _ANYTHING if served is None else served.modules[module]
        rank, why_not = _fit(shapes[a], shapes[b], rank, *takes[:5])
        ranks[module] = rank
        if served is not None and rank > served.max_lora_rank:
            found.add("rank", module, above_max_lora_rank(rank, served), (a, b))
        if why_not:
            found.add("shape", module, why_not, (a, b))
    if served is not None:
        _expect_whole_experts(ranks, served, found)
    nothing = {"tensors": (len(shapes), _NOTHING)} if "nothing" in found.problems else {}
    refused_for = {**(refused_for or {}), **nothing}
    return AdapterCheck(a_of, b_of, found.ignored, found.refused, refused_for, errors=tuple(found.errors(served)))


class _Findings:
    """The factors of one adapter, and its problems: by kind and reason what has it."""

    def __init__(self) -> None:
        self.a: Factors = {}
        self.b: Factors = {}
        self.problems: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.ignored: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def tensors(self, module: str) -> list[str]:
        return [factors[module] for factors in (self.a, self.b) if module in factors]

    def add(self, kind: str, subject: str, reason: str, tensors: Iterable[str], *, ignored: bool = False) -> None:
        """What a stage refuses, and vLLM refuses too, unless it is `ignored` by it."""
        self.problems[kind][reason].append(subject)
        for tensor in tensors:
            (self.ignored if ignored else self.refused).setdefault(tensor, reason)

    def sort(
        self, tensors: Iterable[str], read: Callable[[str], TensorName | None], served: ServedModel | None
    ) -> None:
        """By module, as far as their names can be read; without what vLLM ignores by design."""
        full, a_of, b_of = False, self.a, self.b
        for tensor in tensors:
            name = read(tensor)
            if name is None:
                self.ignored[tensor] = "is skipped by vLLM: a copy of the base model's weights, or not for inference"
                continue
            module, _, is_a, is_full = name
            if name is UNREADABLE:
                self.add("name", tensor, "is no LoRA weight that vLLM can parse", [tensor])
            elif is_full:
                full = True
            elif served is not None and served.ignored(module):
                self.ignored[tensor] = "is for a module that this worker does without, by design"
            else:
                factors = a_of if is_a else b_of
                if module in factors:
                    before, reason = factors[module], f"is the same factor as {tensor}, which vLLM takes"
                    self.add("twice", before, reason, [before], ignored=True)
                factors[module] = tensor
        if not (self.a or self.b or full or self.refused):
            self.add("nothing", "the adapter", _NOTHING, ())

    def errors(self, served: ServedModel | None) -> Iterable[str]:
        """One text for each kind of problem."""
        for kind, text in _KINDS.items():
            if kind == "unknown" and served is not None and kind in self.problems:
                yield served.unknown([module for modules in self.problems[kind].values() for module in modules])
            elif kind in self.problems:
                items = [(one, reason) for reason, them in self.problems[kind].items() for one in compact(set(them))]
                yield text.format(some(one if kind == "name" else f"{one} {reason}" for one, reason in items))


def _set_aside_unknown(served: ServedModel, found: _Findings) -> None:
    """Take out modules that are not served: vLLM's loader looks at their `_kind` only."""
    unknown = dict.fromkeys(module for module in (*found.a, *found.b) if module not in served.modules)
    kinds = {_kind(name) for name in served.modules if unknown} | ({"experts"} if served.experts else set())
    for module in unknown:
        ignored = False
        if module in served.experts:
            reason = f"holds all experts of a layer. {served.expert_help}"
        elif ignored := _kind(module) in kinds or ".base_layer" in module:
            reason = "names a kind of module that the model has, but none that has slots"
        else:
            reason = "names no module that the model serves with LoRA"
        found.add("unknown", module, reason, found.tensors(module), ignored=ignored)
        found.a.pop(module, None)
        found.b.pop(module, None)


def _kind(module: str) -> str:
    _, experts, rest = module.partition(".experts")
    return f"experts{rest}" if experts else module.rpartition(".")[2]


def _expect_whole_experts(ranks: Mapping[str, int], served: ServedModel, found: _Findings) -> None:
    """A layer's experts come all or not at all, in one layout, and those of one projection in one rank."""
    why: dict[str, str] = {}  # by runtime module
    given = found.a.keys() | found.b.keys()
    if len(set(ranks.values())) > 1:
        before: dict[tuple[str, int], int] = {}
        for module, rank in ranks.items():
            takes = served.modules[module]
            if takes.expert is not None and takes.expert >= 0:
                other = before.setdefault((takes.packed_in, takes.projections[0][0]), rank)
                if other != rank:
                    kind = module.rpartition(".")[2]
                    why[takes.packed_in] = (
                        f"has experts whose ranks of {kind} differ: {other} and {rank}; vLLM packs experts of one rank"
                    )
    for name, layer in served.experts.items():
        used = [modules for modules in layer.complete if not given.isdisjoint(modules)]
        if len(used) > 1:
            why[name] = "is given in two layouts at once; vLLM takes one"
        elif used and not used[0] <= given:
            those = some(compact(used[0] - given))
            why[name] = f"has factors for some experts but not for {those}; vLLM packs all of a layer's experts or none"
    for module in found.a | found.b if why else ():
        name = served.modules[module].packed_in
        if name in why:
            found.add("experts", name, why[name], found.tensors(module))


def above_max_lora_rank(rank: int, served: ServedModel) -> str:
    """What to say of a module that the engine's slots do not hold."""
    limit = served.max_lora_rank
    return f"has rank {rank}, above the engine's max_lora_rank {limit}; start vLLM with max_lora_rank of {rank} or more"


# Without a model PEFT's fused experts cannot be told from a wrong rank; both factors must still agree.
_ANYTHING = ServedModule(None, None, experts=0)


@lru_cache(1024)  # experts are alike by the thousand
def _fit(
    a: tuple[int, ...],
    b: tuple[int, ...],
    rank: int | None,
    in_features: int | None,
    out_features: int | None,
    experts: int,
    stacked: tuple[tuple[int, ...], tuple[int, ...]] | None,
    rank_multiple: int,
) -> tuple[int, str]:
    """The rank of a pair of factors (by A where it is not given), and why they do not fit; "" where they do."""
    dimensions = 2 if stacked is None else 3
    for letter, shape, allowed in zip("AB", (a, b), stacked or (), strict=False):
        if len(shape) != 3 or shape[0] not in allowed:
            return rank or 0, f"{letter} is {list(shape)}, its first dimension must be one of {list(allowed)}"
    if len(a) != dimensions or len(b) != dimensions:
        return rank or 0, f"A is {list(a)} and B is {list(b)}, each must have {dimensions} dimensions"
    experts = experts or (a[0] // rank if rank and a[0] % rank == 0 else 1)
    by = "its config"
    if rank is None:
        rank, by = a[-2] // experts, "A"
    inner = experts * rank
    inputs = a[-1] if in_features is None else in_features
    outputs = b[-2] if out_features is None else out_features
    expected = ((*a[:-2], inner, inputs), (*b[:-2], outputs, inner))
    problems = [
        f"{letter} is {list(shape)}, expected {list(right)} (rank {rank} by {by})"
        for letter, shape, right in zip("AB", (a, b), expected, strict=True)
        if shape != right
    ]
    if rank % rank_multiple:
        multiple = f"tensor_parallel_size {rank_multiple}"
        problems.append(f"has rank {rank}, with fully_sharded_loras it must be a multiple of {multiple}")
    return rank, " and ".join(problems)
