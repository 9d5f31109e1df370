"""What is refused before vLLM sees it, checked against brute force and by the words of each message."""

from __future__ import annotations

import dataclasses
import re

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lora_mem.errors import AdapterError, SizingError, compact  # noqa: E402
from lora_mem.sizing import rules  # noqa: E402
from lora_mem.sizing.adapters import read_adapter  # noqa: E402
from lora_mem.sizing.peft_config import plain_config  # noqa: E402
from lora_mem.sizing.serving import ExpertLayer, ServedModel, ServedModule, TensorName  # noqa: E402

EXPERTS = [f"m.experts.{e}.{p}" for e in range(3) for p in ("gate_proj", "down_proj", "up_proj")]


LAYER = ExpertLayer("m.experts", experts=3, hidden=16, intermediate=8, children=EXPERTS)


SERVED = ServedModel(
    modules={
        "m.q_proj": ServedModule(16, 32),
        "m.o_proj": ServedModule(32, 16),
        **LAYER.layouts[0],
        "m.fused": ServedModule(16, 8, experts=3),
        "m.stacked": ServedModule(16, 8, stacked=((1,), (3,))),
    },
    experts={"m.experts": LAYER},
    ignored=lambda module: module.startswith("mtp."),
    max_lora_rank=8,
)


def adapter(modules, rank=4):
    """Shapes and names of factors that fit."""
    shapes, names = {}, {}
    for module in modules:
        takes = SERVED.modules.get(module, ServedModule(16, 16))
        stacked = takes.stacked or ((), ())
        shapes[module + ".A"] = (*stacked[0], takes.experts * rank, takes.in_features)
        shapes[module + ".B"] = (*stacked[1], takes.out_features, takes.experts * rank)
        names[module + ".A"] = TensorName(module, module, True)
        names[module + ".B"] = TensorName(module, module, False)
    return shapes, names


def check(shapes, names, rank=4, served=SERVED):
    rules.check(shapes, names.get, served, lambda module: rank).require()


@pytest.mark.parametrize("rank", [1, 4, 8])
def test_what_fits_is_taken(rank):
    check(*adapter(SERVED.modules, rank), rank)
    check(*adapter(["m.q_proj", "mtp.anything"], rank), rank)


@given(
    changes=st.dictionaries(
        st.sampled_from([f"{m}.{f}" for m in ("m.q_proj", "m.fused", "m.stacked") for f in "AB"]),
        st.tuples(st.integers(0, 2), st.integers(-2, 2)),
        max_size=3,
    )
)
@settings(max_examples=200)
def test_any_other_shape_is_refused(changes):
    shapes, names = adapter(["m.q_proj", "m.fused", "m.stacked"])
    fitting = dict(shapes)
    for name, (dimension, by) in changes.items():
        shape = list(shapes[name])
        shape[dimension % len(shape)] += by
        shapes[name] = tuple(shape)
    if shapes == fitting:
        check(shapes, names)
    else:
        with pytest.raises(AdapterError, match="shapes that do not fit"):
            check(shapes, names)


@given(st.sets(st.sampled_from(EXPERTS)))
def test_experts_come_all_or_none(present):
    shapes, names = adapter(["m.q_proj", *sorted(present)])
    if present in (set(), set(EXPERTS)):
        check(shapes, names)
    else:
        with pytest.raises(AdapterError) as error:
            check(shapes, names)
        missing = sorted(set(EXPERTS) - present)
        assert "m.experts has factors for some experts but not for" in str(error.value)
        assert all(name in str(error.value) for name in missing)


def test_experts_that_vllm_stacks_have_one_rank():
    shapes, names = adapter(EXPERTS)
    ranks = {"m.experts.1.up_proj": 2, "m.experts.2.up_proj": 4}
    for module, rank in ranks.items():
        shapes |= {f"{module}.A": (rank, 16), f"{module}.B": (8, rank)}
    found = rules.check(shapes, names.get, SERVED, lambda module: ranks.get(module, 4))
    with pytest.raises(
        AdapterError, match=r"m\.experts has experts whose ranks of up_proj differ: 4 and 2; vLLM packs"
    ):
        found.require()
    assert found.refused.keys() == shapes.keys()
    # Each projection may have a rank of its own.
    shapes, names = adapter(EXPERTS)
    down = {f"m.experts.{expert}.down_proj" for expert in range(3)}
    for module in down:
        shapes |= {f"{module}.A": (2, 8), f"{module}.B": (16, 2)}
    rules.check(shapes, names.get, SERVED, lambda module: 2 if module in down else 4).require()


def test_each_refusal_says_what_is_wrong_and_what_is_allowed():
    shapes, names = adapter(["m.q_proj", "m.x_proj", "n.y_proj"])
    with pytest.raises(AdapterError, match=r"2 modules .*m\.x_proj, n\.y_proj.*It serves modules named .*q_proj"):
        check(shapes, names)

    shapes, names = adapter(["m.q_proj"])
    del names["m.q_proj.B"]
    with pytest.raises(AdapterError, match=r"m\.q_proj\.A has no B"):
        check(shapes, names)

    shapes, names = adapter(["m.q_proj"], rank=9)
    with pytest.raises(AdapterError, match=r"m\.q_proj has rank 9, above the engine's max_lora_rank 8"):
        check(shapes, names, rank=9)

    shapes, names = adapter(["m.q_proj"], rank=4)
    with pytest.raises(AdapterError, match=r"m\.q_proj A is \[4, 16\], expected \[8, 16\] \(rank 8 by its config\)"):
        check(shapes, names, rank=8)

    names["again"] = TensorName("m.q_proj", "m.q_proj", True)
    with pytest.raises(
        AdapterError, match=r"two tensors for the same factor: m\.q_proj\.A is the same factor as again"
    ):
        check({**shapes, "again": (4, 16)}, names)

    with pytest.raises(AdapterError, match="no factor"):
        check(*adapter(["mtp.only"]))

    sharded = dataclasses.replace(SERVED, modules={"m.q_proj": ServedModule(16, 32, rank_multiple=4)})
    with pytest.raises(AdapterError, match="must be a multiple of tensor_parallel_size 4"):
        check(*adapter(["m.q_proj"], rank=2), 2, sharded)


def test_without_a_model_only_the_adapter_itself_is_checked():
    check(*adapter(["m.q_proj", "unheard.of"]), served=None)
    shapes, names = adapter(["m.q_proj"])
    shapes["m.q_proj.B"] = (32, 3)
    with pytest.raises(AdapterError, match="shapes that do not fit"):
        check(shapes, names, served=None)


def test_a_config_may_be_a_dict_or_an_object():
    @dataclasses.dataclass
    class Config:
        r: int = 8
        lora_alpha: int = 16
        target_modules: set = dataclasses.field(default_factory=lambda: {"v_proj", "q_proj"})

    class WithToDict:
        def to_dict(self):
            return dataclasses.asdict(Config())

    expected = {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]}
    for config in (dataclasses.asdict(Config()), Config(), WithToDict()):
        assert plain_config(config) == expected
    assert plain_config({"r": 1, "lora_alpha": 0.5})["target_modules"] == []
    for config, message in [(3, "adapter_config is a int"), (PEFT | {("a",): 1}, "is not plain values")]:
        with pytest.raises(AdapterError, match=message):
            plain_config(config)


PEFT = {"r": 8, "lora_alpha": 1}


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("r", (None, 0, -1, 8.5, INF, NAN, "8", True), "must be a positive integer"),
        ("lora_alpha", (None, 0, -1, INF, NAN, "8", True, 10**400), "must be a positive number"),
        ("rank_pattern", ([1], "x", {"[": 4}, {"(": 4}), "must be a dict of names or regular expressions"),
        ("rank_pattern", ({"q_proj": "x"}, {"q_proj": 0}, {"q_proj": 2.5}), "must be a positive integer"),
        ("alpha_pattern", ([1], "x", {"(": 4}), "must be a dict of names or regular expressions"),
        ("alpha_pattern", ({"q_proj": "x"}, {"q_proj": NAN}), "must be a positive number"),
        ("target_modules", (3, "("), "must be a list of names or a regular expression, or 'all-linear'"),
        ("exclude_modules", ([3], "("), "must be a list of names or a regular expression"),
        ("modules_to_save", (5, "lm_head", [5]), "must be a list of names, or null"),
        ("layers_to_transform", (["1"],), "must be the number of a layer, or a list of them"),
        ("peft_type", ("IA3",), "must be LORA: vLLM serves no other"),
        ("use_rslora", ("yes",), "must be True or False"),
    ],
)
def test_a_field_of_the_config_that_is_not_as_peft_has_it(field, values, allowed):
    for value in values:
        config = PEFT | {field: value}
        of_an_entry = isinstance(value, dict) and "dict" not in allowed
        found = re.escape(repr(value["q_proj"] if of_an_entry else value))
        with pytest.raises(AdapterError, match=rf"adapter_config\['{field}'\].* is {found}; it {allowed}"):
            plain_config(config)
        with pytest.raises(SizingError, match=rf"config field {field}.*: {allowed}"):
            read_adapter({}, config)


def test_many_names_are_written_as_ranges_and_few_in_full():
    assert compact(["m.0.q", "m.1.q"]) == ["m.0.q", "m.1.q"]
    many = [f"m.{layer}.experts.{expert}.up" for layer in (0, 1, 5) for expert in range(4)]
    assert compact(many) == ["m.{0,1,5}.experts.{0-3}.up (12 modules)"]
    assert compact(["b", "a"]) == ["a", "b"]
