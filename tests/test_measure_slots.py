"""The script that measures a real engine's slots: every case has a config and a prediction before a GPU is asked."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "measure_slots.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("measure_slots", SCRIPT)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name.
    sys.modules["measure_slots"] = module
    spec.loader.exec_module(module)
    return module


def test_cases_have_names_of_their_own_and_layers_that_were_cut(script: ModuleType) -> None:
    names = [case.name for case in script.CASES]
    assert len(names) == len(set(names)) >= 10
    for case in script.CASES:
        config = script.config_of(case)
        json.dumps(config)
        assert config.get("text_config", config)["num_hidden_layers"] == case.layers


def test_each_prediction_is_the_sum_of_its_buffers(script: ModuleType) -> None:
    for case in script.CASES:
        modules, size = script.predict(case)
        elements = 0
        for buffers in modules.values():
            for shape in buffers.values():
                product = 1
                for length in shape:
                    product *= length
                elements += product
        assert size == 2 * elements > 0, case.name


def test_gpus_are_counted(script: ModuleType) -> None:
    by_name = {case.name: case for case in script.CASES}
    assert by_name["tp2-qwen3-30b-ep"].gpus == 2
    assert by_name["phi-4"].gpus == 1
