"""The script that measures a real engine's slots: every case has a config and a prediction before a GPU is asked."""

import dataclasses
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "measure_slots.py"


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


def test_what_was_recorded_on_a_gpu_is_still_predicted(script: ModuleType) -> None:
    rows = [
        json.loads(line)
        for path in sorted(ROOT.glob("reports/*/raw/slots*.jsonl"))
        for line in path.read_text().splitlines()
    ]
    measured = [row for row in rows if "modules" in row]
    assert len(measured) >= 19
    fields = {field.name for field in dataclasses.fields(script.Case)}
    for row in measured:
        case = script.Case(**{name: value for name, value in row.items() if name in fields})
        predicted, predicted_bytes = script.predict(case)
        shapes = {
            path: {name: buffer["shape"] for name, buffer in module["buffers"].items()}
            for path, module in row["modules"].items()
        }
        assert predicted == shapes, case.name
        assert predicted_bytes == row["allocated_bytes"], case.name
