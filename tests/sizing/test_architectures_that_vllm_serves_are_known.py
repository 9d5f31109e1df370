"""Architectures that the installed vLLM serves with LoRA are sized: no gap grows silently.

vLLM's registry and model files are read as text, not imported: that takes a second instead of minutes.
"""

import ast
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from lora_mem.errors import SizingError
from lora_mem.sizing.families import known
from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.shapes import ModelShape

GENERATION = ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS")
CLASS = re.compile(r"^class (\w+)\(([^)]*)\)", re.MULTILINE)


@cache
def implementing(interface: str) -> frozenset[str]:
    """The generating architectures whose class has an interface of vLLM among its bases; all of them for ''."""
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    root = Path(spec.submodule_search_locations[0])
    models = root / "model_executor" / "models"
    files = {path: path.read_text(encoding="utf-8") for path in [*models.glob("*.py"), *root.glob("models/**/*.py")]}
    bases = {name: re.findall(r"[\w.]+", inside) for text in files.values() for name, inside in CLASS.findall(text)}

    def has_it(name: str) -> bool:
        return any(base == interface or (base != name and has_it(base)) for base in bases.get(name, ()))

    return frozenset(name for name, own in registry(models / "registry.py") if not interface or has_it(own))


def registry(path: Path) -> list[tuple[str, str]]:
    """Architecture and class of each entry of the dictionaries in `GENERATION`."""
    entries = []
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if any(isinstance(target, ast.Name) and target.id in GENERATION for target in targets):
            assert isinstance(value, ast.Dict)
            for key, entry in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(entry, ast.Tuple):
                    entries.append((str(key.value), str(ast.literal_eval(entry.elts[-1]))))
    return entries


def test_what_vllm_serves_with_lora_is_known() -> None:
    served = implementing("SupportsLoRA")
    assert len(served) > 100
    assert not served - set(known().architectures)


def test_a_model_without_lora_gets_an_error_and_no_number() -> None:
    # A model that is known may be served by another version of vLLM only.
    without = implementing("") - implementing("SupportsLoRA") - set(known().architectures)
    assert len(without) > 50
    assert {"GPT2LMHeadModel", "MiMoV2FlashForCausalLM"} <= without
    for architecture in without:
        with pytest.raises(
            SizingError, match=r"is not known to be served with LoRA.*docs/families\.md.*Known: .*LlamaFor"
        ):
            ModelShape.from_config({"architectures": [architecture], "hidden_size": 64, "num_hidden_layers": 2})


def test_pipeline_parallelism_is_refused_where_vllm_has_none() -> None:
    served = implementing("SupportsLoRA") & set(known().architectures)
    without = {architecture for architecture in served if not known().supports_pipeline(architecture)}
    assert without == served - implementing("SupportsPP")
    whisper = {
        **{
            f"{side}_{field}": 2
            for side in ("encoder", "decoder")
            for field in ("layers", "attention_heads", "ffn_dim")
        },
        "architectures": ["WhisperForConditionalGeneration"],
        "d_model": 64,
    }
    with pytest.raises(SizingError, match="pipeline_parallel_size=2: must be 1"):
        footprint(whisper, rank=8, pipeline_parallel_size=2)
    with pytest.raises(
        SizingError, match=r"num_hidden_layers=3: must be 2 \(encoder_layers\): two names for one number"
    ):
        footprint(whisper | {"num_hidden_layers": 3}, rank=8)
