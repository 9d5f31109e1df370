"""Slots of every family against what vLLM 0.33.0 made of the same models.

`facts/slots.jsonl` has one line for each model with its layers cut and each set of options: every kind of module with
the shapes of its buffers and how many layers have it, and the bytes of all. `source` says where a line comes from:
`engine` are buffers that an engine allocated on a GPU; `model code` are vLLM's own model classes and LoRA manager, run
on torch's meta device with the view of one rank.

`facts/families.jsonl` has one line for each architecture or known model, with the number of modules and the bytes of
all buffers for some sets of options, from the same model code at max_lora_rank 16.
"""

import json
import re
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from lora_mem.errors import SizingError
from lora_mem.sizing.families import known
from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.shapes import ModelShape, known_config, known_models
from lora_mem.sizing.slots import worker_slots


def facts(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parents[1] / "facts" / name).read_text().splitlines()]


FACTS = facts("slots.jsonl")
FAMILY_FACTS = facts("families.jsonl")


def cut(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """The same model with its first layers only."""
    text = config.get("text_config", config)
    before = text["num_hidden_layers"]
    text["num_hidden_layers"] = min(layers, before)
    for name, value in text.items():
        if isinstance(value, list | str) and len(value) == before:
            text[name] = value[:layers]
    return config


def name_of(fact: dict[str, Any]) -> str:
    options = ",".join(f"{key}={value}" for key, value in fact["options"].items() if key != "max_lora_rank")
    return f"{fact['source']}:{fact['model'].rpartition('/')[2]}:{options}"


@pytest.mark.parametrize("fact", FACTS, ids=name_of)
def test_slots_are_what_vllm_made(fact: dict[str, Any]) -> None:
    config = cut(known_config(fact["model"]), fact["layers"])
    result = footprint(config, **{"rank": fact["options"]["max_lora_rank"], **fact["options"]})
    assert result.shape
    assert result.options
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for path, tensors in worker_slots(result.shape, result.options):
        kind = re.sub(r"layers\.\d+\.", "layers.*.", path)
        found[kind][" ".join(f"{tensor.name}:{'x'.join(map(str, tensor.shape))}" for tensor in tensors)] += 1
    assert found == {kind: Counter(shapes) for kind, shapes in fact["modules"].items()}
    assert result.slot_bytes == fact["bytes"]


@pytest.mark.parametrize("fact", FAMILY_FACTS, ids=lambda fact: fact.get("model") or fact["architecture"])
def test_each_family_has_the_modules_and_bytes_that_vllm_made(fact: dict[str, Any]) -> None:
    config = cut(known_config(fact["model"]), fact["layers"]) if "model" in fact else fact["config"]
    for slots in fact["slots"]:
        result = footprint(config, rank=16, max_lora_rank=16, **slots["options"])
        assert result.shape
        assert result.options
        modules = sum(1 for _ in worker_slots(result.shape, result.options))
        assert (modules, result.slot_bytes) == (slots["modules"], slots["bytes"]), slots["options"]


def test_the_facts_cover_what_they_should() -> None:
    assert sum(fact["source"] == "engine" for fact in FACTS) == 7
    options = {key for fact in FACTS for key in fact["options"]}
    assert options >= {
        "tensor_parallel_size",
        "pipeline_parallel_size",
        "enable_expert_parallel",
        "fully_sharded_loras",
        "enable_mixed_moe_lora_format",
        "enable_moe_shared_loras",
        "lora_target_modules",
    }


def test_at_least_forty_models_are_known() -> None:
    assert len(known_models()) >= 40


@pytest.mark.parametrize(
    ("model", "field"),
    [
        ("deepseek-ai/DeepSeek-V3", "q_lora_rank"),
        ("deepseek-ai/DeepSeek-V3", "n_routed_experts"),
        ("deepseek-ai/DeepSeek-V3", "first_k_dense_replace"),
        ("mistralai/Mixtral-8x7B-v0.1", "num_key_value_heads"),
        ("zai-org/GLM-4.5-Air", "n_shared_experts"),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "hybrid_override_pattern"),
        ("Qwen/Qwen1.5-MoE-A2.7B", "shared_expert_intermediate_size"),
    ],
)
def test_a_field_that_shapes_the_model_must_be_there(model: str, field: str) -> None:
    config = known_config(model)
    del config[field]
    with pytest.raises(SizingError, match=f"field {field}="):
        ModelShape.from_config(config)


@pytest.mark.parametrize(
    ("model", "change", "message"),
    [
        ("Qwen/Qwen3.5-35B-A3B", {"layer_types": ["full_attention"]}, "layer_types.*must have 40 entries"),
        (
            "Qwen/Qwen3.5-35B-A3B",
            {"layer_types": ["mystery"] * 40},
            r"layer_types\[0\]='mystery': must be one of linear_attention",
        ),
        ("google/gemma-4-26B-A4B", {"layer_types": None}, "layer_types.*is missing"),
    ],
)
def test_layer_kinds_must_fit_the_layers(model: str, change: dict[str, Any], message: str) -> None:
    config = known_config(model)
    config["text_config"] |= change
    with pytest.raises(SizingError, match=message):
        ModelShape.from_config(config)


def test_a_text_model_and_the_same_one_inside_a_multimodal_one_have_the_same_slots() -> None:
    config = known_config("Qwen/Qwen3-VL-30B-A3B-Instruct")
    inside = footprint(config, rank=8, enable_mixed_moe_lora_format=True)
    alone = footprint("Qwen/Qwen3-30B-A3B", rank=8)
    assert inside.slot_bytes == alone.slot_bytes


def test_embeddings_that_vllm_cannot_serve_are_refused() -> None:
    config = known_config("Qwen/Qwen3-8B") | {"vocab_size": 262144}
    with pytest.raises(SizingError, match="vocab_size=262144: must be at most 258048"):
        footprint(config, rank=8)
    assert footprint(config, rank=8, lora_target_modules=["qkv_proj", "o_proj"]).slot_bytes > 0


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        (
            "MuseSparkForConditionalGeneration",
            {"mlp_layer_types": ["sparse"] * 4},
            "does not serve Muse Spark's experts",
        ),
        ("Step5ForCausalLM", {"sparse_config": None}, "sparse_config=None: must be an object"),
        ("Step5ForCausalLM", {"num_attention_groups": 2}, "sparse_config.index_tp_size=.*must be 2"),
        ("AliceAIForCausalLM", {"linear_num_value_heads": 8}, "linear_num_value_heads=8: must be 4"),
        ("Qwen4ExpForCausalLM", {"layer_types": ["mystery"] * 4}, r"layer_types\[0\]='mystery': must be one of linear"),
    ],
)
def test_what_vllm_would_not_start_is_refused(architecture: str, change: dict[str, Any], message: str) -> None:
    fact = next(fact for fact in FAMILY_FACTS if fact.get("architecture") == architecture)
    config = json.loads(json.dumps(fact["config"]))
    config.get("text_config", config).update(change)
    with pytest.raises(SizingError, match=message):
        footprint(config, rank=8)


@pytest.mark.parametrize(
    ("architecture", "workers", "message"),
    [("Step5ForCausalLM", 8, "number of heads"), ("AliceAIForCausalLM", 8, "number of heads")],
)
def test_heads_that_do_not_divide_are_refused(architecture: str, workers: int, message: str) -> None:
    fact = next(fact for fact in FAMILY_FACTS if fact.get("architecture") == architecture)
    with pytest.raises(SizingError, match=message):
        footprint(fact["config"], rank=8, tensor_parallel_size=workers)


def test_every_family_has_a_fact_from_vllm() -> None:
    configs = [known_config(fact["model"]) if "model" in fact else fact["config"] for fact in FACTS + FAMILY_FACTS]
    assert set(known().architectures) == {ModelShape.from_config(config).architecture for config in configs}


CEDAR: dict[str, Any] = {
    "model_type": "cedar",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_dense_layers": 1,
    "num_attention_heads": 4,
    "num_experts": 8,
    "vocab_size": 512,
}


def added(monkeypatch: pytest.MonkeyPatch, path: Path, text: str) -> None:
    path.write_text(text)
    monkeypatch.setenv("LORA_MEM_FAMILIES", str(path))


def test_the_documented_family_is_added_without_a_change_to_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "families.md").read_text()
    (snippet,) = re.findall(r"```toml\n(.*?)```", page, flags=re.DOTALL)
    assert len(snippet.splitlines()) == 5
    with pytest.raises(SizingError, match="model_type='cedar': is not known"):
        footprint(CEDAR, rank=8)
    added(monkeypatch, tmp_path / "cedar.toml", snippet)
    shape = ModelShape.from_config(CEDAR)
    assert shape.architecture == "CedarForCausalLM"
    assert [path for path, _ in shape.modules()] == [
        "model.embed_tokens",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.self_attn.dense",
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.1.self_attn.qkv_proj",
        "model.layers.1.self_attn.dense",
        "model.layers.1.mlp.gate",
        "model.layers.1.mlp.experts",
        "model.layers.2.self_attn.qkv_proj",
        "model.layers.2.self_attn.dense",
        "model.layers.2.mlp.gate",
        "model.layers.2.mlp.experts",
        "lm_head",
    ]
    assert footprint(CEDAR, rank=8).slot_bytes > 0
    with pytest.raises(SizingError, match="field num_dense_layers=None: is missing"):
        ModelShape.from_config({**CEDAR, "num_dense_layers": None})


LIKE_LLAMA = '[family.cedar]\narchitectures = ["CedarForCausalLM: cedar"]\nlike = "llama"\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[family.cedar", "LORA_MEM_FAMILIES=.*is not valid TOML"),
        (LIKE_LLAMA.replace("llama", "lama"), "like='lama': is not a family; known: .*llama"),
        (LIKE_LLAMA + 'layer = "atention"', "block='atention': is not a block; known: .*attention"),
        (LIKE_LLAMA + 'layer = "row o_proj hidden_size -> 1"', "module='row o_proj.*: must be like KIND NAME: INPUT"),
        (LIKE_LLAMA + 'layer = "row o_proj: hidden_size -> 2 **"', r"expression='2 \*\*': cannot be read"),
        (LIKE_LLAMA + 'layer = "row o_proj: hidden_size -> 2 ** 9"', r"expression='2 \*\* 9': is not in the language"),
        (LIKE_LLAMA + "layer = \"row o_proj: hidden_size -> open('x')\"", "field open=None: is missing"),
        (
            LIKE_LLAMA + 'layer = "row o_proj: hidden_size -> raw(model_type)"',
            "raw.model_type.='cedar': must be a whole",
        ),
        (LIKE_LLAMA + 'layer = "row o_proj: hidden_size -> 1, 2 = a, b, c"', "family='cedar': cannot be worked out"),
        (LIKE_LLAMA + 'width = "height"\nheight = "width"\nlayer = "row o: width -> 1"', "family='cedar': cannot be"),
    ],
)
def test_a_family_that_makes_no_sense_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, message: str
) -> None:
    added(monkeypatch, tmp_path / "cedar.toml", text)
    with pytest.raises(SizingError, match=message):
        ModelShape.from_config(CEDAR)


def test_a_file_of_families_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LORA_MEM_FAMILIES", str(tmp_path / "none.toml"))
    with pytest.raises(SizingError, match=r"LORA_MEM_FAMILIES=.*none\.toml.*cannot be read"):
        ModelShape.from_config(CEDAR)
