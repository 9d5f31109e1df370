"""The rulebook: what vLLM, and what a stage, makes of an adapter's tensors in a model.

It needs names and shapes only, and knows neither vLLM nor torch: `sizing.serving` says what a model serves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from lora_mem.errors import AdapterError
from lora_mem.sizing.serving import ServedModel, ServedModule, TensorName
from lora_mem.sizing.wording import compact, some

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
Pair = dict[bool, str]
"""The names of a module's factors: of A under True, of B under False."""


@dataclass(frozen=True)
class AdapterCheck:
    """What becomes of an adapter's tensors in vLLM, each with the reason.

    `errors` say why a stage refuses the adapter, one text for each kind of problem, the most basic first. It refuses
    what vLLM refuses and what vLLM ignores, unless that is by design.
    """

    served: Mapping[str, tuple[str, str]]  # by vLLM's name of a module: the names of its A and B
    ignored: Mapping[str, str]  # tensors that vLLM skips, or loads and never uses
    refused: Mapping[str, str]  # tensors for which vLLM refuses the whole adapter
    refused_for: Mapping[str, tuple[object, str]]  # what else it refuses it for: a field of its config and the value
    ignored_bytes: int = 0
    errors: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether vLLM takes the adapter and uses all of it."""
        return not self.ignored and not self.refused and not self.refused_for

    def require(self) -> None:
        """Raise the first of `errors`, if there is one.

        Raises:
            AdapterError: all problems of one kind, with the values and what is allowed.
        """
        if self.errors:
            raise AdapterError(self.errors[0])

    def __repr__(self) -> str:
        lines = [f"AdapterCheck: {len(self.served)} modules served, {len(self.ignored)} tensors ignored,"]
        lines[0] += f" {len(self.refused)} refused"
        lines += [f"  refused for {what}={value!r}: {why}" for what, (value, why) in self.refused_for.items()]
        lines += [f"  ignored {name}: {reason}" for name, reason in list(self.ignored.items())[:10]]
        lines += [f"  refused {name}: {reason}" for name, reason in list(self.refused.items())[:10]]
        return "\n".join(lines)


def check(
    shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, TensorName | None],
    served: ServedModel | None,
    rank_of: Callable[[str], int] | None = None,
    *,
    refused_for: Mapping[str, tuple[object, str]] | None = None,
) -> AdapterCheck:
    """What becomes of an adapter's tensors.

    Args:
        shapes: of the tensors, by their names.
        names: what each name says, None where it is not PEFT's; without the tensors that vLLM skips by design.
        served: what the model serves, or None where no model is known yet: then only the adapter itself is checked.
        rank_of: the rank that the adapter's config gives a module (`peft_module`), which its tensors must have for a
            stage. Without it their own rank counts, as in vLLM's loader.
        refused_for: what its config is refused for.
    """
    found = _Findings()
    factors = _read(shapes, names, served, found)
    ranks: dict[str, int] = {}
    if served is not None:
        _know(factors, served, found)
    for module, pair in factors.items():
        if len(pair) == 1:
            lacks = "B" if True in pair else "A"
            found.add("half", next(iter(pair.values())), f"has no {lacks} beside it", pair.values())
            continue
        takes, name = None if served is None else served.modules[module], names[pair[True]]
        rank = None if rank_of is None or name is None else rank_of(name.peft_module)
        ranks[module], why_not = _fit(shapes[pair[True]], shapes[pair[False]], takes, rank)
        if served is not None and ranks[module] > served.max_lora_rank:
            found.add("rank", module, above_max_lora_rank(ranks[module], served), pair.values())
        if why_not:
            found.add("shape", module, why_not, pair.values())
    if served is not None:
        _expect_whole_experts(factors, ranks, served, found)
    bad = found.refused.keys() | found.ignored.keys()
    both = {
        module: (pair[True], pair[False])
        for module, pair in factors.items()
        if len(pair) == 2 and (not bad or bad.isdisjoint(pair.values()))
    }
    nothing = dict.fromkeys(["tensors"] if found.problems["nothing"] else [], (len(shapes), _NOTHING))
    return AdapterCheck(
        both,
        found.ignored,
        found.refused,
        {**(refused_for or {}), **nothing},
        errors=found.errors(served),
    )


class _Findings:
    """The problems of one adapter: by kind, reason and what has it, and the tensors that are refused or ignored."""

    def __init__(self) -> None:
        self.problems: dict[str, dict[str, list[str]]] = {kind: defaultdict(list) for kind in _KINDS}
        self.ignored: dict[str, str] = {}
        self.refused: dict[str, str] = {}

    def add(self, kind: str, subject: str, reason: str, tensors: Iterable[str], *, ignored: bool = False) -> None:
        """What a stage refuses, and vLLM refuses too, unless it is `ignored` by it."""
        self.problems[kind][reason].append(subject)
        for tensor in tensors:
            (self.ignored if ignored else self.refused).setdefault(tensor, reason)

    def errors(self, served: ServedModel | None) -> tuple[str, ...]:
        """One text for each kind of problem."""
        texts = []
        for kind, text in _KINDS.items():
            found = self.problems[kind]
            if found and kind == "unknown" and served is not None:
                texts.append(served.unknown([one for modules in found.values() for one in modules]))
            elif found:
                items = [(one, reason) for reason in found for one in compact(set(found[reason]))]
                texts.append(text.format(some(one if kind == "name" else f"{one} {reason}" for one, reason in items)))
        return tuple(texts)


def _read(
    shapes: Iterable[str], names: Mapping[str, TensorName | None], served: ServedModel | None, found: _Findings
) -> dict[str, Pair]:
    """The factors by module, as far as their names can be read; without what vLLM ignores by design."""
    factors: dict[str, Pair] = {}
    full = False
    for tensor in shapes:
        name = names.get(tensor)
        if name is None and tensor in names:
            found.add("name", tensor, "is no LoRA weight that vLLM can parse", [tensor])
        elif name is None:
            found.ignored[tensor] = "is skipped by vLLM: a copy of the base model's weights, or not for inference"
        elif name.is_full:
            full = True
        elif served is not None and served.ignored(name.module):
            found.ignored[tensor] = "is for a module that this worker does without, by design"
        else:
            pair = factors.setdefault(name.module, {})
            if before := pair.get(name.is_a):
                found.add("twice", before, f"is the same factor as {tensor}, which vLLM takes", [before], ignored=True)
            pair[name.is_a] = tensor
    if not factors and not full and not found.refused:
        found.add("nothing", "the adapter", _NOTHING, ())
    return factors


def _know(factors: dict[str, Pair], served: ServedModel, found: _Findings) -> None:
    """Take out modules that are not served: vLLM's loader looks at their `_kind` only."""
    unknown = [module for module in factors if module not in served.modules]
    kinds = {_kind(name) for name in served.modules if unknown} | ({"experts"} if served.experts else set())
    for module in unknown:
        ignored = False
        if module in served.experts:
            reason = f"holds all experts of a layer. {served.expert_help}"
        elif ignored := _kind(module) in kinds or ".base_layer" in module:
            reason = "names a kind of module that the model has, but none that has slots"
        else:
            reason = "names no module that the model serves with LoRA"
        found.add("unknown", module, reason, factors.pop(module).values(), ignored=ignored)


def _kind(module: str) -> str:
    _, experts, rest = module.partition(".experts")
    return f"experts{rest}" if experts else module.rpartition(".")[2]


def _expect_whole_experts(
    factors: Mapping[str, Pair], ranks: Mapping[str, int], served: ServedModel, found: _Findings
) -> None:
    """A layer's experts come all or not at all, in one layout, and those of one projection in one rank."""
    why: dict[str, str] = {}  # by runtime module
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
        used = [modules for modules in layer.complete if not modules.isdisjoint(factors)]
        if len(used) > 1:
            why[name] = "is given in two layouts at once; vLLM takes one"
        elif used and (absent := used[0] - factors.keys()):
            those = some(compact(absent))
            why[name] = f"has factors for some experts but not for {those}; vLLM packs all of a layer's experts or none"
    for module, pair in factors.items() if why else ():
        name = served.modules[module].packed_in
        if name in why:
            found.add("experts", name, why[name], pair.values())


def above_max_lora_rank(rank: int, served: ServedModel) -> str:
    """What to say of a module that the engine's slots do not hold."""
    limit = served.max_lora_rank
    return f"has rank {rank}, above the engine's max_lora_rank {limit}; start vLLM with max_lora_rank of {rank} or more"


def _fit(a: tuple[int, ...], b: tuple[int, ...], takes: ServedModule | None, rank: int | None) -> tuple[int, str]:
    """The rank of a pair of factors (by A where it is not given), and why they do not fit; "" where they do."""
    if takes is not None and rank is not None and rank % takes.rank_multiple == 0 and len(a) == 2:
        inner = takes.experts * rank
        if takes.stacked is None and a == (inner, takes.in_features) and b == (takes.out_features, inner):
            return rank, ""  # as all of 18,432 pairs do, mostly
    stacked = takes.stacked if takes is not None else None
    dimensions = 2 if stacked is None else 3
    for letter, shape, allowed in zip("AB", (a, b), stacked or (), strict=False):
        if len(shape) != 3 or shape[0] not in allowed:
            return rank or 0, f"{letter} is {list(shape)}, its first dimension must be one of {list(allowed)}"
    if len(a) != dimensions or len(b) != dimensions:
        return rank or 0, f"A is {list(a)} and B is {list(b)}, each must have {dimensions} dimensions"
    by = "its config"
    if takes is None:
        # Without a model PEFT's fused experts cannot be told from a wrong rank; both factors must still agree.
        takes = ServedModule(None, None, experts=a[0] // rank if rank and a[0] % rank == 0 else 1)
    if rank is None:
        rank, by = a[-2] // takes.experts, "A"
    width = takes.experts * rank
    inputs = a[-1] if takes.in_features is None else takes.in_features
    outputs = b[-2] if takes.out_features is None else takes.out_features
    expected = ((*a[:-2], width, inputs), (*b[:-2], outputs, width))
    problems = []
    if (a, b) != expected:
        problems = [
            f"{letter} is {list(shape)}, expected {list(right)} (rank {rank} by {by})"
            for letter, shape, right in zip("AB", (a, b), expected, strict=True)
            if shape != right
        ]
    if rank % takes.rank_multiple:
        multiple = f"tensor_parallel_size {takes.rank_multiple}"
        problems.append(f"has rank {rank}, with fully_sharded_loras it must be a multiple of {multiple}")
    return rank, " and ".join(problems)
