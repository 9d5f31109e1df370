"""What is refused before vLLM sees it, checked against brute force and by the words of each message."""

from __future__ import annotations

import dataclasses

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from lora_mem.errors import AdapterError  # noqa: E402
from lora_mem.sizing import rules  # noqa: E402
from lora_mem.sizing.peft_config import plain_config  # noqa: E402
from lora_mem.sizing.serving import ExpertLayer, ServedModel, ServedModule, TensorName  # noqa: E402
from lora_mem.sizing.targets import targeted  # noqa: E402
from lora_mem.sizing.wording import compact  # noqa: E402
from lora_mem.staging.tensors import check_tensors  # noqa: E402

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
    rules.check(shapes, names, served, lambda module: rank).require()


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
    found = rules.check(shapes, names, SERVED, lambda module: ranks.get(module, 4))
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
    rules.check(shapes, names, SERVED, lambda module: 2 if module in down else 4).require()


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


def test_tensors_of_the_wrong_kind_are_refused():
    good = torch.zeros(2, 2)
    for tensors, message in [
        ({}, "tensors is empty"),
        ([good], "tensors is a list"),
        ({1: good}, "names must be strings, got 1"),
        ({"a": [1.0]}, r"only plain dense torch tensors can be staged, got a \(list\)"),
        ({"a": good.to_sparse()}, "only plain dense torch tensors"),
        ({"a": torch.nested.nested_tensor([good])}, "only plain dense torch tensors"),
        ({"a": good.to("meta")}, r"cannot read a \(meta\); tensors must be on the host or a GPU"),
        ({"a": good.to(torch.int8)}, r"cannot cast a \(torch.int8\); allowed are torch.bfloat16"),
        ({"a": good.to(torch.complex64)}, "cannot cast a"),
        ({"a": good.to(torch.float8_e4m3fn)}, "cannot cast a"),
    ]:
        with pytest.raises(AdapterError, match=message):
            check_tensors(tensors)
    check_tensors({"a": torch.nn.Parameter(good), "b": good.half(), "c": good.double()})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_values_are_looked_at_only_when_asked(value):
    tensors = {"good": torch.zeros(2), "bad": torch.tensor([1.0, value])}
    check_tensors(tensors)
    with pytest.raises(AdapterError, match="NaN or Inf in bad"):
        check_tensors(tensors, check_finite=True)


def test_values_that_the_cast_would_make_infinite():
    tensors = {"good": torch.tensor([65504.0]), "bad": torch.tensor([1e6])}
    check_tensors(tensors, check_finite=True, cast_to=[torch.bfloat16])
    with pytest.raises(AdapterError, match=r"too large for the slots' torch.float16 in bad"):
        check_tensors(tensors, check_finite=True, cast_to=[torch.float16])


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
    for config, message in [
        (3, "adapter_config is a int"),
        ({"lora_alpha": 1}, r"adapter_config\['r'\] is None"),
        ({"r": 0, "lora_alpha": 1}, r"adapter_config\['r'\] is 0"),
        ({"r": True, "lora_alpha": 1}, r"adapter_config\['r'\] is True"),
        ({"r": 1.5, "lora_alpha": 1}, r"adapter_config\['r'\] is 1.5; it must be a positive integer"),
        ({"r": 8, "lora_alpha": float("nan")}, r"adapter_config\['lora_alpha'\] is nan; it must be a positive number"),
        ({"r": 8, "lora_alpha": 10**400}, r"adapter_config\['lora_alpha'\] is 1000"),
        ({"r": 8, "lora_alpha": 1, "modules_to_save": "score"}, r"\['modules_to_save'\] is 'score'; it must be a list"),
        ({"r": 8, "lora_alpha": float("inf")}, r"adapter_config\['lora_alpha'\] is inf"),
        (
            {"r": 8, "lora_alpha": 1, "rank_pattern": [1]},
            r"adapter_config\['rank_pattern'\] is \[1\]; it must be a dict",
        ),
        (
            {"r": 8, "lora_alpha": 1, "rank_pattern": {"(": 4}},
            r"\['rank_pattern'\] is {'\(': 4}; it must be a dict of names or regular",
        ),
        ({"r": 8, "lora_alpha": 1, "alpha_pattern": {"q": "4"}}, r"\['alpha_pattern'\]\['q'\] is '4'"),
        ({"r": 8, "lora_alpha": 1, "target_modules": 3}, r"\['target_modules'\] is 3; it must be a list of names"),
        ({"r": 8, "lora_alpha": 1, "peft_type": "IA3"}, r"\['peft_type'\] is 'IA3'; it must be LORA: vLLM serves no"),
        ({"r": 8, "lora_alpha": 1, "use_rslora": "yes"}, r"\['use_rslora'\] is 'yes'; it must be True or False"),
        ({"r": 8, "lora_alpha": 1, "exclude_modules": [3]}, r"\['exclude_modules'\] is \[3\]; it must be a list of"),
        ({"r": 8, "lora_alpha": 1, "exclude_modules": "("}, r"\['exclude_modules'\] is '\('"),
        ({"r": 8, "lora_alpha": 1, "layers_to_transform": ["1"]}, r"\['layers_to_transform'\] is \['1'\]; it must be"),
        (
            {"r": 8, "lora_alpha": 1, "target_modules": "("},
            r"\['target_modules'\] is '\('; it must be a list of names or a regular expr",
        ),
        ({"r": 8, "lora_alpha": 1, ("a",): 1}, "is not plain values"),
        ({"r": 8, "lora_alpha": -1}, r"adapter_config\['lora_alpha'\] is -1"),
    ]:
        with pytest.raises(AdapterError, match=message):
            plain_config(config)


def test_many_names_are_written_as_ranges_and_few_in_full():
    assert compact(["m.0.q", "m.1.q"]) == ["m.0.q", "m.1.q"]
    many = [f"m.{layer}.experts.{expert}.up" for layer in (0, 1, 5) for expert in range(4)]
    assert compact(many) == ["m.{0,1,5}.experts.{0-3}.up (12 modules)"]
    assert compact(["b", "a"]) == ["a", "b"]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target_modules": ["experts"]}, "all"),
        ({"target_modules": ["mlp.experts"]}, "all"),
        ({"target_modules": ["mlp.experts"], "layers_to_transform": [1]}, "none"),
        ({"target_modules": ["experts"], "exclude_modules": ["q_proj"]}, "all"),
        ({"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.down_proj"]}, "all"),
        ({"target_modules": "all-linear"}, "all"),
        ({"target_modules": ["xexperts"]}, "none"),
        ({"target_modules": ["gate_proj"]}, "m.layers.0.mlp.experts.3.gate_proj"),
    ],
)
def test_a_layer_s_experts_are_targeted_by_their_own_name(options, named):
    wanted = targeted({"r": 1, **options})
    experts = "m.layers.0.mlp.experts"
    modules = [experts, f"{experts}.base_layer", f"{experts}.w1", f"{experts}.3.gate_proj"]
    expected = {"all": modules, "none": []}.get(named, [named])
    assert [module for module in modules if wanted(module)] == expected
