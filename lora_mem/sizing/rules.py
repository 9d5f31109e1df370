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


NO_FACTOR = "no factor (lora_A, lora_B) that this model would use"
_ALL_OR_NONE = "vLLM packs all of a layer's experts or none"
_ONE_RANK = "vLLM packs experts of one rank"

Pair = dict[bool, str]
"""The names of a module's factors: of A under True, of B under False."""


@dataclass(frozen=True)
class AdapterCheck:
    """What becomes of an adapter's tensors in vLLM.

    Attributes:
        served: the modules that are served, by vLLM's name: the names of their A and B.
        ignored: tensors that vLLM skips, or loads and never uses, with the reason.
        refused: tensors for which vLLM refuses the whole adapter, with the reason.
        refused_for: what else it refuses the adapter for: a field of its config, its value and the reason.
        ignored_bytes: of the tensors in `ignored`.
        errors: why a stage refuses the adapter, one text for each kind of problem, the most basic first. It refuses
            what vLLM refuses and what vLLM ignores, unless that is by design.
    """

    served: Mapping[str, tuple[str, str]]
    ignored: Mapping[str, str]
    refused: Mapping[str, str]
    refused_for: Mapping[str, tuple[object, str]]
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
        """Plain and stable."""
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
    found = _Findings(shapes, served)
    factors = found.read(names)
    found.know(factors)
    ranks = found.fit(factors, names, rank_of)
    found.expect_whole_experts(factors, ranks)
    bad = found.refused.keys() | found.ignored.keys()
    pairs = {module: pair for module, pair in factors.items() if len(pair) == 2 and bad.isdisjoint(pair.values())}
    return AdapterCheck(
        {module: (pair[True], pair[False]) for module, pair in pairs.items()},
        found.ignored,
        found.refused,
        {**(refused_for or {}), **found.refused_for},
        errors=tuple(found.errors),
    )


class _Findings:
    """The problems of one adapter, and what is known of its tensors so far."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], served: ServedModel | None) -> None:
        self.shapes, self.served = shapes, served
        self.ignored: dict[str, str] = {}
        self.refused: dict[str, str] = {}
        self.refused_for: dict[str, tuple[object, str]] = {}
        self.errors: list[str] = []

    def _say(self, text: str, items: Iterable[str]) -> None:
        """An error of a stage for these items, if there are any."""
        if listed := list(items):
            self.errors.append(text.format(some(listed)))

    def _refuse(self, pair: Pair, reason: str) -> None:
        for tensor in pair.values():
            self.refused.setdefault(tensor, reason)

    def read(self, names: Mapping[str, TensorName | None]) -> dict[str, Pair]:
        """The factors by module, as far as their names can be read; without what vLLM ignores by design."""
        factors: dict[str, Pair] = {}
        twice, full = [], False
        for tensor in self.shapes:
            name = names.get(tensor)
            if name is None:
                if tensor in names:
                    self.refused[tensor] = "is no LoRA weight that vLLM can parse"
                else:
                    self.ignored[tensor] = (
                        "is skipped by vLLM: a copy of the base model's weights, or not for inference"
                    )
            elif name.is_full:
                full = True
            elif self.served is not None and self.served.ignored(name.module):
                self.ignored[tensor] = "is for a module that this worker does without, by design"
            else:
                pair = factors.setdefault(name.module, {})
                if before := pair.get(name.is_a):
                    twice.append(f"{before} and {tensor}")
                    self.ignored[before] = f"is the same factor as {tensor}, which vLLM takes"
                pair[name.is_a] = tensor
        self._say(NOT_PEFTS, compact(self.refused))
        self._say("two tensors for the same factor: {}", twice)
        if not factors and not full and not self.refused:
            self._say("the adapter has {}", [NO_FACTOR])
            self.refused_for["tensors"] = (len(self.shapes), f"has {NO_FACTOR}")
        return factors

    def know(self, factors: dict[str, Pair]) -> None:
        """Take out modules that the model does not serve: vLLM looks at the last part of a name only."""
        unknown = [] if self.served is None else [module for module in factors if module not in self.served.modules]
        if self.served is None or not unknown:
            return
        self.errors.append(self.served.unknown(unknown))
        kinds = {_kind(module) for module in self.served.modules} | ({"experts"} if self.served.experts else set())
        for module in unknown:
            pair = factors.pop(module)
            if module in self.served.experts:
                self._refuse(pair, f"holds all experts of a layer. {self.served.expert_help}")
            elif _kind(module) in kinds or ".base_layer" in module:
                reason = "names a kind of module that the model has, but none that has slots"
                self.ignored.update(dict.fromkeys(pair.values(), reason))
            else:
                self._refuse(pair, "names no module that the model serves with LoRA")

    def fit(
        self,
        factors: Mapping[str, Pair],
        names: Mapping[str, TensorName | None],
        rank_of: Callable[[str], int] | None,
    ) -> dict[str, int]:
        """Hold the shapes against what the model takes; returns the ranks."""
        shapes, model = self.shapes, self.served
        served, limit = ({}, None) if model is None else (model.modules, model.max_lora_rank)
        ranks: dict[str, int] = {}
        halves: list[str] = []
        too_high: dict[int, list[str]] = defaultdict(list)
        misfits: dict[str, list[str]] = defaultdict(list)
        for module, pair in factors.items():
            if len(pair) == 1:
                ((is_a, tensor),) = pair.items()
                halves.append(f"{tensor} has no {'B' if is_a else 'A'}")
                self._refuse(pair, f"has no lora_{'B' if is_a else 'A'} beside it")
                continue
            a, b = pair[True], pair[False]
            name = names[a]
            assert name is not None
            given = None if rank_of is None else rank_of(name.peft_module)
            rank, reason = _fit(shapes[a], shapes[b], served.get(module), given)
            ranks[module] = rank
            if reason:
                misfits[reason].append(module)
                self._refuse(pair, reason)
            if limit is not None and rank > limit:
                too_high[rank].append(module)
                self._refuse(pair, f"has rank {rank}, above max_lora_rank {limit}")
        self._say("a factor is missing: {}", halves)
        if self.served is not None and too_high:
            self.errors.append(above_max_lora_rank(too_high, self.served))
        self._say(
            "shapes that do not fit: {}",
            (f"{module} {reason}" for reason, modules in misfits.items() for module in compact(modules)),
        )
        return ranks

    def expect_whole_experts(self, factors: Mapping[str, Pair], ranks: Mapping[str, int]) -> None:
        """A layer's experts come all or not at all, in one layout, each projection in one rank."""
        if self.served is None:
            return
        takes, why = self.served.modules, dict[str, str]()  # by runtime module
        twice: list[str] = []
        missing: dict[str, str] = {}
        for name, layer in self.served.experts.items():
            used = [modules for modules in layer.complete if not modules.isdisjoint(factors)]
            if len(used) > 1:
                twice.append(name)
                why[name] = "is given in two layouts of the experts at once; vLLM takes one"
            elif used and (absent := used[0] - factors.keys()):
                missing |= dict.fromkeys(absent, name)
                why[name] = f"has no {some(compact(absent))} beside it; {_ALL_OR_NONE}"
        self._say("{}: experts are given in two layouts at once; vLLM takes one", compact(twice))
        if missing:
            some_of, those = some(compact(set(missing.values()))), some(compact(missing))
            self.errors.append(f"{some_of} has factors for some experts but not for {those}; {_ALL_OR_NONE}")
        unequal: dict[str, str] = {}
        seen: dict[tuple[str, int], int] = {}
        for module, rank in ranks.items() if len(set(ranks.values())) > 1 else ():
            one = takes[module]
            if one.expert is None or one.expert < 0:
                continue
            before = seen.setdefault((one.packed_in, one.projections[0][0]), rank)
            if before != rank:
                kind = module.rpartition(".")[2]
                unequal[one.packed_in] = f"has experts whose ranks of {kind} differ: {before} and {rank}; {_ONE_RANK}"
        self._say("{}", (f"{name} {reason}" for name, reason in unequal.items()))
        why = unequal | why
        for module, pair in factors.items() if why else ():
            if reason := why.get(takes[module].packed_in):
                self._refuse(pair, reason)


def above_max_lora_rank(modules: Mapping[int, Iterable[str]], served: ServedModel) -> str:
    """What to say of modules, by their ranks, that the engine's slots do not hold."""
    ranks = [f"rank {rank} of {some(compact(modules[rank]))}" for rank in sorted(modules)]
    return (
        f"{', '.join(ranks)} is above the engine's max_lora_rank {served.max_lora_rank}; start vLLM with max_lora_rank "
        f"of {max(modules)} or more"
    )


def _kind(module: str) -> str:
    """The part of a name by which vLLM's loader decides whether the model can have such a module."""
    _, experts, rest = module.partition(".experts")
    return f"experts{rest}" if experts else module.rpartition(".")[2]


def _fit(a: tuple[int, ...], b: tuple[int, ...], takes: ServedModule | None, rank: int | None) -> tuple[int, str]:
    """The rank of a pair of factors (by A where it is not given), and why they do not fit; "" where they do."""
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
