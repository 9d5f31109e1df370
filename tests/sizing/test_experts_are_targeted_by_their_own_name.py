"""Which modules a config's targets name where a layer's experts have names of their own."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")


from lora_mem.sizing.targets import targeted  # noqa: E402


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
