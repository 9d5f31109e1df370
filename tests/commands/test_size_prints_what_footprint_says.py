"""The command line, as a user calls it."""

import json
from pathlib import Path

import pytest
from typer.main import get_command

from command_line import lora_mem
from lora_mem import __version__, cli
from lora_mem.sizing.options import OPTIONS


def test_size_as_json() -> None:
    done = lora_mem("size", "Qwen/Qwen3-30B-A3B", "--rank", "64", "--target-modules", "experts", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    data = json.loads(done.stdout)
    assert data["packed_bytes"] == 6_643_777_536
    for name in ("staged_bytes", "slot_bytes", "host_bytes", "gpu_resident_bytes", "gpu_sync_peak_bytes"):
        assert type(data[name]) is int


def test_size_as_a_table() -> None:
    done = lora_mem("size", "Qwen/Qwen3-30B-A3B", "--rank", "64", "--target-modules", "experts")
    assert done.returncode == 0
    assert "6,643,777,536" in done.stdout
    assert "6.1875" in done.stdout


def test_tables_fit_80_columns_with_each_figure_on_one_line() -> None:
    plan = ("plan", "Qwen/Qwen3-30B-A3B", "--rank", "64", "--gpu", "H200", "--weights", "57")
    for command in (("size", "Qwen/Qwen3-30B-A3B", "--rank", "64"), plan):
        done = lora_mem(*command)
        lines = done.stdout.splitlines()
        assert done.returncode == 0
        assert max(map(len, lines)) <= 80
        assert len(lines) == 6 + sum(line.startswith("│") for line in lines)
        explained = lora_mem(*command, "--why")
        assert "gpu_resident" in explained.stdout
        assert "[" in explained.stdout


def test_json_has_every_why() -> None:
    command = ("size", "Qwen/Qwen3-8B", "--rank", "8", "--json")
    plain, why = lora_mem(*command), lora_mem(*command, "--why")
    assert plain.stdout == why.stdout
    found = json.loads(why.stdout)["why"]
    assert {line["name"] for line in found} >= {"packed_bytes", "slot_bytes"}
    assert all(line["formula"] for line in found)
    assert "--json has them always" in " ".join(lora_mem("size", "--help").stdout.replace("│", "").split())


def test_a_gpu_is_named_in_any_case() -> None:
    command = ("plan", "Qwen/Qwen3-8B", "--rank", "8", "--weights", "16", "--gpu")
    upper, lower = lora_mem(*command, "A100-80GB"), lora_mem(*command, "a100-80gb")
    assert upper.returncode == lower.returncode == 0
    assert upper.stdout == lower.stdout
    assert "one of A100-40GB" in lora_mem(*command, "a100").stderr


def test_version() -> None:
    done = lora_mem("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"lora-mem {__version__}\n", "")


def test_a_config_file_that_cannot_be_read_is_one_plain_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for text in (b"\xff\xfe\x00", b"[" * 100_000):
        path.write_bytes(text)
        done = lora_mem("size", str(path), "--rank", "8")
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


def test_phases_of_a_colocated_run() -> None:
    command = ("size", "Qwen/Qwen3-30B-A3B", "--rank", "64", "--target-modules", "experts", "--strategy", "keep")
    shown = lora_mem(*command, "--phases").stdout.splitlines()
    assert [line.split()[0] for line in shown[-4:]] == ["baseline", "sync", "generation", "training"]
    assert shown[-1].split()[1:] == ["0", "13,287,555,072", "12.3750", "GiB"]
    assert json.loads(lora_mem(*command, "--json").stdout)["phases"]["training"] == {
        "slots": 0,
        "adapters": 13_287_555_072,
    }


def test_what_is_assumed_of_quantized_experts_is_said() -> None:
    model = ("openai/gpt-oss-20b", "--rank", "16")
    for command in (("size", *model), ("plan", *model, "--gpu", "H200", "--weights", "13")):
        bare = lora_mem(*command, "--json")
        assert bare.returncode == 0
        assert bare.stderr.startswith("lora-mem: assumed: moe_backend=triton, which keeps the experts' sizes")
        assert bare.stderr.count("\n") == 1
        json.loads(bare.stdout)
        named = lora_mem(*command, "--json", "--moe-backend", "mxfp4_marlin")
        assert (named.returncode, named.stderr) == (0, "")
        assert named.stdout != bare.stdout


def test_every_option_arrives() -> None:
    adapter = ("--rank", "8", "--target-modules", "q_proj,o_proj", "--dtype", "float32")
    slots = ("--max-lora-rank", "32", "--max-loras", "2", "--max-cpu-loras", "4", "--tp", "2", "--fully-sharded")
    done = lora_mem("size", "Qwen/Qwen3-8B", *adapter, *slots, "--json")
    given = json.loads(done.stdout)["options"]
    assert given["target_modules"] == ["q_proj", "o_proj"]
    assert (given["max_lora_rank"], given["max_loras"], given["max_cpu_loras"]) == (32, 2, 4)
    assert (given["tensor_parallel_size"], given["fully_sharded_loras"], given["dtype"]) == (2, True, "float32")
    split = lora_mem("size", "Qwen/Qwen3-30B-A3B", "--rank", "8", "--tp", "2", "--ep", "--json")
    assert json.loads(split.stdout)["options"]["enable_expert_parallel"] is True


def test_every_option_is_on_the_command_line_under_both_its_names() -> None:
    for name in ("size", "plan"):
        flags = {option.name: option.opts for option in get_command(cli.app).commands[name].params}
        for option in OPTIONS.values():
            assert {option.flag, f"--{option.name.replace('_', '-')}"} == set(flags[option.name])
    patterns = ("--rank-pattern", '{"q_proj": 4}', "--lora-alpha", "8", "--no-is-3d-lora-weight")
    done = lora_mem("size", "Qwen/Qwen3-8B", "--rank", "8", "--tensor-parallel-size", "2", *patterns, "--json")
    given = json.loads(done.stdout)["options"]
    assert (given["rank_pattern"], given["lora_alpha"]) == ({"q_proj": 4}, 8.0)
    assert (given["tensor_parallel_size"], given["is_3d_lora_weight"]) == (2, False)


def test_size_of_a_config_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama"}', encoding="utf-8")
    done = lora_mem("size", str(path), "--rank", "8")
    assert done.returncode == 2
    assert "num_hidden_layers" in done.stderr or "hidden_size" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("size", "Qwen/Qwen3-8B", "--rank", "0"), "rank=0"),
        (("size", "Qwen/Qwen3-8B", "--rank", "many"), "--rank"),
        (("size", "Qwen/Qwen3-8B"), "rank"),
        (("size", "nowhere", "--rank", "8"), "model='nowhere'"),
        (("size", "Qwen/Qwen3-8B", "--rank", "8", "--tp", "3"), "tensor_parallel_size=3"),
        (("size", "Qwen/Qwen3-8B", "--rank", "8", "--target-modules", "q_proj,x"), "target_modules='x'"),
        (("size", "Qwen/Qwen3-8B", "--rank", "8", "--nonsense"), "--nonsense"),
        (("size", "Qwen/Qwen3-8B", "--rank", "8", "--rank-pattern", "{"), "rank_pattern='{'"),
        (("bench", "--syncs", "1"), "syncs=1: must be 2 or more"),
        (("nonsense",), "nonsense"),
    ],
)
def test_errors_are_one_plain_line(arguments: tuple[str, ...], message: str) -> None:
    done = lora_mem(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.stderr
