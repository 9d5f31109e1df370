"""Reading adapters: names, shapes and what vLLM would do with each tensor, without torch."""

import json
import re
from itertools import product
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from adapter_files import CONFIG, PEFT, PREFIX, pair, put, whole_adapter, write
from lora_mem.errors import SizingError
from lora_mem.sizing.adapters import read_adapter
from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.modules import Linear
from lora_mem.sizing.shapes import ModelShape


def test_an_adapter_is_sized_as_its_targets_are(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, whole_adapter()))
    assert adapter.check(CONFIG).ok
    common: dict[str, Any] = {"max_loras": 2, "strategy": "offload"}
    predicted = footprint(CONFIG, rank=4, target_modules=["q_proj", "o_proj", "experts"], scaling=2, **common)
    found = adapter.footprint(CONFIG, **common)
    assert adapter.staged_bytes == predicted.staged_bytes
    assert predicted.compare(found).equal, predicted.compare(found)
    assert (adapter.rank, adapter.scaling) == (4, 2)
    assert read_adapter(tmp_path, {**PEFT, "use_rslora": True}).scaling == 4


def test_layers_of_one_name_and_two_sizes_count_once() -> None:
    """Gemma 4 has wider heads in each sixth layer."""
    shape, tensors = ModelShape.from_config("google/gemma-4-26B-A4B"), {}
    sizes = set()
    for group in shape.groups:
        for layer, module in product(group.layers, group.modules):
            if isinstance(module, Linear) and module.name == "self_attn.o_proj":
                path = f"base_model.model.{group.peft_path(layer, module)}"
                a, b = (4, module.input_size), (module.children[0].output_size, 4)
                sizes.add(module.input_size)
                for name, size in ((f"{path}.lora_A.weight", a), (f"{path}.lora_B.weight", b)):
                    tensors[name] = SimpleNamespace(shape=size, dtype="bfloat16", nbytes=2 * prod(size))
    adapter = read_adapter(tensors, PEFT)
    assert len(sizes) == 2
    assert adapter.footprint(shape, strategy="stage").packed_bytes == adapter.staged_bytes


def test_a_dense_adapter_of_a_rank_that_workers_cannot_share(tmp_path: Path) -> None:
    """Fully sharded engines take it; routed experts of such a rank they do not."""
    common: dict[str, Any] = {"tensor_parallel_size": 2, "fully_sharded_loras": True, "max_lora_rank": 8}
    dense = {name: tensor for name, tensor in whole_adapter(3).items() if "experts" not in name}
    assert read_adapter(write(tmp_path, dense), {**PEFT, "r": 3}).footprint(CONFIG, **common).slot_bytes
    assert read_adapter(write(tmp_path, whole_adapter())).footprint(CONFIG, **common).slot_bytes
    odd = read_adapter(write(tmp_path, whole_adapter(3)), {**PEFT, "r": 3})
    with pytest.raises(SizingError, match="rank=3: must be a multiple of 2"):
        odd.footprint(CONFIG, **common)


def test_each_tensor_is_served_ignored_or_refused(tmp_path: Path) -> None:
    shapes = whole_adapter()
    shapes |= {"base_model.model.model.embed_tokens.base_layer.weight": (128, 32)}
    shapes |= {"base_model.model.visual.blocks.0.q_proj.lora_A.weight": (4, 32)}
    check = read_adapter(write(tmp_path, shapes)).check(CONFIG)
    assert not check.ok
    assert not check.refused
    assert sorted(check.ignored) == [
        "base_model.model.model.embed_tokens.base_layer.weight",
        "base_model.model.visual.blocks.0.q_proj.lora_A.weight",
    ]
    assert check.ignored_bytes == 2 * (128 * 32 + 4 * 32)
    assert f"{PREFIX.removeprefix('base_model.model.')}.0.self_attn.q_proj" in check.served


@pytest.mark.parametrize(
    ("shapes", "reason"),
    [
        (pair("0.mlp.mystery", 32, 32), "no module that the model serves"),
        (pair("0.self_attn.q_proj", 32, 60), "B is [60, 4], expected [64, 4] (rank 4 by A)"),
        (pair("0.self_attn.q_proj", 33, 64), "A is [4, 33], expected [4, 32] (rank 4 by A)"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_A.weight": (4, 32)}, "has no B beside it"),
        ({f"{PREFIX}.0.self_attn.q_proj.lora_B.weight": (64, 4)}, "has no A beside it"),
        ({f"{PREFIX}.0.self_attn.q_proj.magnitude": (4, 32)}, "no LoRA weight that vLLM can parse"),
        (
            {
                f"{PREFIX}.0.self_attn.q_proj.lora_A.weight": (4, 32),
                f"{PREFIX}.0.self_attn.q_proj.lora_B.weight": (64, 5),
            },
            "B is [64, 5], expected [64, 4] (rank 4 by A)",
        ),
    ],
)
def test_what_vllm_would_refuse(shapes: dict[str, tuple[int, ...]], reason: str, tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, shapes))
    assert all(reason in found for found in adapter.check(CONFIG).refused.values())
    assert set(adapter.check(CONFIG).refused) == set(shapes)
    with pytest.raises(SizingError, match=re.escape(reason)):
        adapter.footprint(CONFIG)


@pytest.mark.parametrize(
    ("left_out", "reason"),
    [
        (
            "up_proj",
            ".mlp.experts.{0-3}.up_proj (4 modules); vLLM packs all of a layer's experts or none",
        ),
        ("experts.3.up_proj", ".mlp.experts.3.up_proj; vLLM packs all of a layer's experts or none"),
    ],
)
def test_a_routed_expert_must_be_whole(left_out: str, reason: str, tmp_path: Path) -> None:
    shapes = {name: shape for name, shape in whole_adapter().items() if left_out not in name}
    adapter = read_adapter(write(tmp_path, shapes))
    refused = adapter.check(CONFIG).refused
    assert refused
    assert all("experts" in name and reason in found for name, found in refused.items())
    with pytest.raises(SizingError, match=re.escape(reason)):
        adapter.footprint(CONFIG)


def test_experts_of_one_projection_have_one_rank(tmp_path: Path) -> None:
    shapes = whole_adapter() | pair("0.mlp.experts.2.up_proj", 32, 16, 2)
    refused = read_adapter(write(tmp_path, shapes)).check(CONFIG).refused
    assert all(".layers.0.mlp.experts." in name and "ranks of up_proj differ" in why for name, why in refused.items())
    assert len(refused) == 2 * 3 * 4


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("r", 600, "rank=600: the config's largest, is more than max_lora_rank=512"),
        ("rank_pattern", {"q_proj": 513}, "rank=513"),
        ("use_dora", True, "config use_dora=True: vLLM has no DoRA"),
        ("bias", "all", "config bias='all': must be 'none'"),
        ("modules_to_save", ["lm_head"], r"config modules_to_save=\['lm_head'\]: vLLM takes none but"),
        ("init_lora_weights", "pissa", "config init_lora_weights='pissa': changes the base model's weights"),
    ],
)
def test_a_config_that_vllm_refuses(field: str, value: object, reason: str, tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, whole_adapter(), {**PEFT, field: value}))
    check = adapter.check(CONFIG)
    assert not check.ok
    assert not check.refused
    assert f"refused for {reason.partition('=')[0]}" in repr(check)
    with pytest.raises(SizingError, match=reason):
        adapter.footprint(CONFIG)


def test_tensors_must_fit_the_slots_whatever_the_config_says(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, whole_adapter(32), {**PEFT, "r": 8}))
    assert "has rank 32, above the engine's max_lora_rank 8; start vLLM with max_lora_rank of 32 or more" in repr(
        adapter.check(CONFIG)
    )
    assert not adapter.check(CONFIG, max_lora_rank=16).ok
    assert adapter.check(CONFIG, max_lora_rank=32).ok
    assert read_adapter(write(tmp_path, whole_adapter(8))).check(CONFIG).ok  # r is 4: vLLM takes it all the same


def test_dtypes_may_differ_from_tensor_to_tensor() -> None:
    sizes = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}

    def of(**dtypes: str) -> Any:
        tensors = {}
        for name, shape in whole_adapter().items():
            factor = "A" if "lora_A" in name else "B"
            dtype = next((kind for part, kind in dtypes.items() if part in f"{name} {factor}"), "bfloat16")
            tensors[name] = SimpleNamespace(shape=shape, dtype=dtype, nbytes=prod(shape) * sizes[dtype])
        return read_adapter(tensors, {**PEFT, "lora_alpha": 4})

    other = of(q_proj="float64", o_proj="float32", experts="float16")
    plain, mixed = of().footprint(CONFIG, strategy="offload"), other.footprint(CONFIG, strategy="offload")
    assert mixed.packed_bytes == plain.packed_bytes
    assert mixed.staged_bytes == plain.staged_bytes + 2 * (6 * 4 * (32 + 64) + 2 * 4 * (64 + 32))
    assert plain.shared_bytes == 2 * 2 * 2 * 4 * (32 + 64)  # all of q_proj and o_proj
    assert mixed.shared_bytes == 0
    half = of(B="float32").footprint(CONFIG, strategy="offload")
    assert half.shared_bytes == 2 * 2 * 4 * (32 + 64)  # A of both
    assert half.to_dict()["options"]["dtype"] == "bfloat16 and float32"
    assert sum(row["bytes"] for row in half.rows("staged")) == half.staged_bytes
    assert sum(row["bytes"] for row in half.rows("packed")) == half.packed_bytes
    with pytest.raises(SizingError, match="lora_dtype='auto': must be named for an adapter of bfloat16 and float32"):
        of(B="float32").footprint(CONFIG, lora_dtype="auto")
    with pytest.raises(SizingError, match="rank=8: must be left out"):
        of().footprint(CONFIG, rank=8)


def test_a_worker_is_given_its_own_experts(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, whole_adapter()))
    options: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "strategy": "offload"}
    rule = footprint(CONFIG, rank=4, target_modules=["q_proj", "o_proj", "experts"], lora_alpha=8, **options)
    assert rule.compare(adapter.footprint(CONFIG, **options)).equal


def test_tensors_of_one_memory_count_once() -> None:
    def tensor(address: int, *shape: int) -> Any:
        return SimpleNamespace(shape=shape, dtype="bfloat16", nbytes=2 * shape[0] * shape[1], data_ptr=lambda: address)

    names = list(pair("0.self_attn.q_proj", 32, 64)) + list(pair("1.self_attn.q_proj", 32, 64))
    tensors = [tensor(100, 4, 32), tensor(900, 64, 4), tensor(100, 4, 32), tensor(2000, 64, 4)]
    adapter = read_adapter(dict(zip(names, tensors, strict=True)), PEFT)
    assert adapter.staged_bytes == 2 * (4 * 32 + 2 * 64 * 4)


@pytest.mark.parametrize(("kind", "dtype"), [("F8_E4M3", "float8_e4m3fn"), ("I8", "int8")])
def test_dtypes_that_cannot_be_staged_are_named(kind: str, dtype: str, tmp_path: Path) -> None:
    """vLLM's own loader casts them as they are, without a scale."""
    write(tmp_path, {})
    q_proj = f"{PREFIX}.0.self_attn.q_proj"
    header = {
        f"{q_proj}.lora_A.weight": {"dtype": kind, "shape": [4, 32], "data_offsets": [0, 128]},
        f"{q_proj}.lora_B.weight": {"dtype": kind, "shape": [64, 4], "data_offsets": [128, 384]},
    }
    adapter = read_adapter(put(tmp_path, json.dumps(header).encode(), 384))
    assert adapter.check(CONFIG).ok
    assert adapter.staged_bytes == 384
    with pytest.raises(SizingError, match=rf"dtype of .*lora_A\.weight='{dtype}': cannot be staged; allowed"):
        adapter.footprint(CONFIG)


def test_an_adapter_without_tensors_is_refused_by_name(tmp_path: Path) -> None:
    adapter = read_adapter(write(tmp_path, {}))
    assert not adapter.check(CONFIG).ok
    with pytest.raises(SizingError, match="tensors=0: has no factor"):
        adapter.footprint(CONFIG)


def test_vllm_refuses_experts_that_the_model_does_not_have(tmp_path: Path) -> None:
    """Its loader compares `experts.<i>.<projection>`, and the last part only of other names."""
    shapes = pair("0.mlp.experts.4.up_proj", 32, 16) | pair("7.self_attn.q_proj", 32, 64)
    check = read_adapter(write(tmp_path, shapes)).check(CONFIG)
    assert all(".experts.4.up_proj." in name for name in check.refused)
    assert all("names no module" in reason for reason in check.refused.values())
    assert all("none that has slots" in reason for reason in check.ignored.values())
    assert len(check.refused) == len(check.ignored) == 2


def fused_experts(rank: int = 4) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        path = f"{PREFIX}.{layer}.mlp.experts"
        shapes |= {
            f"{path}.base_layer.lora_A.weight": (4 * rank, 32),
            f"{path}.base_layer.lora_B.weight": (32, 4 * rank),
        }
        shapes |= {f"{path}.lora_A.weight": (4 * rank, 16), f"{path}.lora_B.weight": (32, 4 * rank)}
    return shapes


def test_fused_experts_need_the_mixed_format_where_the_model_has_them_one_by_one(tmp_path: Path) -> None:
    """As vLLM's `_validate_moe_lora_format` has it; what a stage takes with the mixed format is sized, too."""
    adapter = read_adapter(write(tmp_path, fused_experts()))
    refused = adapter.check(CONFIG).refused
    assert {name.rpartition("experts.")[2] for name in refused} == {"lora_A.weight", "lora_B.weight"}
    assert all("start vLLM with enable_mixed_moe_lora_format=True" in reason for reason in refused.values())
    with pytest.raises(SizingError, match="holds all experts of a layer"):
        adapter.footprint(CONFIG)
    mixed: dict[str, Any] = {"enable_mixed_moe_lora_format": True}
    assert adapter.check(CONFIG, **mixed).ok
    rule = footprint(CONFIG, rank=4, lora_alpha=8, target_modules=["experts"], is_3d_lora_weight=True, **mixed)
    assert rule.compare(adapter.footprint(CONFIG, **mixed)).equal
    both = read_adapter(write(tmp_path, fused_experts() | whole_adapter())).check(CONFIG, **mixed)
    assert all("two layouts" in reason for reason in both.refused.values())
    assert len(both.refused) == 8 + 2 * 2 * 3 * 4


def test_shared_outer_experts_are_sized_where_the_engine_takes_them(tmp_path: Path) -> None:
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in range(2):
        path = f"{PREFIX}.{layer}.mlp.experts"
        for name, inputs, outputs, a, b in (("w1", 32, 16, 1, 4), ("w2", 16, 32, 4, 1), ("w3", 32, 16, 1, 4)):
            shapes |= {f"{path}.{name}.lora_A.weight": (a, 4, inputs), f"{path}.{name}.lora_B.weight": (b, outputs, 4)}
    adapter = read_adapter(write(tmp_path, shapes))
    shared: dict[str, Any] = {"enable_moe_shared_loras": True}
    assert adapter.check(CONFIG, **shared).ok
    assert not adapter.check(CONFIG).ok
    rule = footprint(CONFIG, rank=4, lora_alpha=8, target_modules=["experts"], **shared)
    assert rule.compare(adapter.footprint(CONFIG, **shared)).equal


def test_of_two_tensors_for_one_factor_vllm_takes_the_later(tmp_path: Path) -> None:
    q_proj = f"{PREFIX}.0.self_attn.q_proj"
    again = {f"{q_proj}.lora_embedding_A": (4, 32)}
    check = read_adapter(write(tmp_path, pair("0.self_attn.q_proj", 32, 64) | again)).check(CONFIG)
    assert check.ignored == {
        f"{q_proj}.lora_A.weight": f"is the same factor as {q_proj}.lora_embedding_A, which vLLM takes"
    }
    assert len(check.served) == 1
    assert not check.refused
