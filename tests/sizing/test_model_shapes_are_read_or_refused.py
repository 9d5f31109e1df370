"""Shapes: every way in, and every way to be wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lora_mem.errors import SizingError
from lora_mem.sizing.modules import Experts, Linear
from lora_mem.sizing.shapes import ModelShape, known_models

TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "vocab_size": 100,
    "mlp_only_layers": [1],
}


def without(field: str) -> dict[str, Any]:
    return {key: value for key, value in TINY.items() if key != field}


def test_dict_path_directory_and_name_give_the_same_shape(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(TINY), encoding="utf-8")
    groups = ModelShape.from_config(TINY).groups
    assert ModelShape.from_config(path).groups == groups
    assert ModelShape.from_config(str(path)).groups == groups
    assert ModelShape.from_config(str(tmp_path)).groups == groups
    shape = ModelShape.from_config("Qwen/Qwen3-30B-A3B")
    assert ModelShape.from_config(shape) is shape


def test_modules_are_listed_as_vllm_names_them() -> None:
    assert [path for path, _ in ModelShape.from_config(TINY).modules()] == [
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.o_proj",
        "model.layers.0.mlp.gate",
        "model.layers.0.mlp.experts",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.o_proj",
        "model.layers.1.mlp.gate_up_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.2.self_attn.qkv_proj",
        "model.layers.2.self_attn.o_proj",
        "model.layers.2.mlp.gate",
        "model.layers.2.mlp.experts",
        "lm_head",
    ]


def test_sizes_and_peft_names_of_each_kind() -> None:
    modules = dict(ModelShape.from_config(TINY).modules())
    qkv = modules["model.layers.0.self_attn.qkv_proj"]
    assert isinstance(qkv, Linear)
    assert (qkv.kind, qkv.input_size, qkv.slices) == ("qkv", 32, (32, 16, 16))
    assert [child.name for child in qkv.children] == ["q_proj", "k_proj", "v_proj"]
    experts = modules["model.layers.0.mlp.experts"]
    assert isinstance(experts, Experts)
    assert (experts.num_experts, experts.hidden_size, experts.intermediate_size) == (8, 32, 16)
    assert (experts.layout, experts.children) == ("gated", ("gate_proj", "down_proj", "up_proj"))


def test_a_text_model_may_keep_its_fields_in_text_config() -> None:
    nested = {"architectures": TINY["architectures"], "text_config": TINY}
    assert ModelShape.from_config(nested).groups == ModelShape.from_config(TINY).groups


def test_a_hub_name_is_read_from_the_hubs_cache_without_a_network(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    repository = tmp_path / "hub" / "models--someone--tiny-moe"
    commit = "0" * 40
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit, encoding="utf-8")
    (repository / "snapshots" / commit / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    code = (
        "from lora_mem import ModelShape, SizingError\n"
        "print(ModelShape.from_config('someone/tiny-moe'))\n"
        "try: ModelShape.from_config('someone/else')\n"
        "except SizingError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    shape, error = done.stdout.splitlines()
    assert shape == "ModelShape('someone/tiny-moe', Qwen3MoeForCausalLM, layers=3, modules=14)"
    assert error.startswith("model='someone/else': is not in the built-in table and could not be read from the hub")


def test_a_hub_that_cannot_be_reached_is_given_up_at_once(tmp_path: Path) -> None:
    pytest.importorskip("huggingface_hub")
    code = "from lora_mem.sizing.shapes import ModelShape; ModelShape.from_config('someone/else')"
    environment = {**os.environ, "HF_HOME": str(tmp_path), "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=15)
    assert "could not be read from the hub" in done.stderr


def test_architecture_comes_from_model_type_where_it_is_missing() -> None:
    assert ModelShape.from_config(without("architectures")).architecture == "Qwen3MoeForCausalLM"


def test_mistral_and_qwen2_have_no_slots_for_the_vocabulary() -> None:
    config = {**TINY, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    paths = [path for path, _ in ModelShape.from_config(config).modules()]
    assert "lm_head" not in paths
    assert "model.embed_tokens" not in paths


@pytest.mark.parametrize("name", known_models())
def test_every_known_model_has_a_shape(name: str) -> None:
    shape = ModelShape.from_config(name)
    assert shape.name == name
    layers = {int(path.split(".layers.")[1].split(".")[0]) for path, _ in shape.modules() if ".layers." in path}
    assert layers == set(range(shape.num_hidden_layers))


@pytest.mark.parametrize("field", ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_experts"])
@pytest.mark.parametrize("value", ["missing", 0, -4, 1.5, "32", True, [32]])
def test_a_bad_field_is_named(field: str, value: object) -> None:
    config = without(field) if value == "missing" else {**TINY, field: value}
    with pytest.raises(SizingError, match=rf"field {field}=.*whole number >= 1"):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_key_value_heads": 3}, r"num_key_value_heads=3: must divide num_attention_heads=4"),
        ({"head_dim": None, "hidden_size": 30, "architectures": ["LlamaForCausalLM"]}, r"must divide hidden_size=30"),
        ({"mlp_only_layers": 3}, r"mlp_only_layers=3: must be a list"),
        ({"architectures": ["NoSuchModel"]}, r"architectures=\['NoSuchModel'\].*Known: .*Qwen3MoeForCausalLM"),
        ({"architectures": None, "model_type": "no_such"}, r"model_type='no_such'.*Known: .*Qwen3MoeForCausalLM"),
        ({"architectures": None, "model_type": None}, r"architectures.*missing"),
    ],
)
def test_a_contradiction_is_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(SizingError, match=message):
        ModelShape.from_config({**TINY, **change})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/config.json", "is not a file"),
        ("no-slash", "is not a file, nor a hub name"),
        ("", "must be a dict, a path"),
        (7, "must be a dict, a path"),
        ("a" * 5000, "is not a name or a path"),
        (Path("b" * 5000), "is not a name or a path"),
        ("~nobody-of-this-name/model", "is not a name or a path"),
    ],
)
def test_a_source_that_is_not_found(source: Any, message: str) -> None:
    with pytest.raises(SizingError, match=message):
        ModelShape.from_config(source)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(SizingError, match="not valid JSON"):
        ModelShape.from_config(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(SizingError, match="JSON object"):
        ModelShape.from_config(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SizingError, match="not valid JSON"):
        ModelShape.from_config(path)
    path.write_text("[" * 100_000, encoding="utf-8")
    with pytest.raises(SizingError, match="nested too deeply"):
        ModelShape.from_config(path)


def test_repr_is_plain_and_stable() -> None:
    text = repr(ModelShape.from_config(TINY))
    assert text == "ModelShape('config', Qwen3MoeForCausalLM, layers=3, modules=14)"
