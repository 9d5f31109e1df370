"""The real engine on a GPU: every expert layout bit-equal to vLLM's own loader, and no adapter left on the GPU.

Each case is a process of its own; the small ones run side by side, those that measure memory and time run alone.
`LORA_MEM_REPORTS` names a directory for the raw results.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from lora_mem.sizing.units import MOST_UNDER_WAY

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = Path(__file__).with_name("cases.py")
LAYER_OF = {
    "gated_2d": "FusedMoEWithLoRA",
    "gated_2d_patterns": "FusedMoEWithLoRA",
    "non_gated_2d": "FusedMoEWithLoRA",
    "fused_3d_interleaved": "FusedMoE3DWithLoRA",
    "mixed_format": "FusedMoEWithLoRA",
    "shared_outer": "FusedMoEWithLoRA",
}
PACKED = 3 * 64 * (2048 + 768) * 128 * 48 * 2  # Qwen3-30B-A3B at rank 64 in bf16, bytes
LAYER = PACKED // 48
MIB = 2**20


def run(case: str, timeout: int = 400) -> dict:
    reports = os.environ.get("LORA_MEM_REPORTS")
    # Into a file, so that what was said is kept where the case is stopped.
    log = Path(reports or tempfile.mkdtemp(), f"{case}.log")
    with log.open("w") as said:
        done = subprocess.run(
            [sys.executable, CASES, case], stdout=subprocess.PIPE, stderr=said, text=True, timeout=timeout
        )
    if done.returncode:
        pytest.fail(f"{case} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{log.read_text()[-5000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if reports:
        Path(reports, f"{case}.json").write_text(json.dumps(result, indent=1))
    return result


@pytest.fixture(scope="module")
def small_cases():
    # Three at a time: vLLM refuses to start while others give much GPU memory back.
    with ThreadPoolExecutor(3) as threads:
        yield {case: threads.submit(run, case) for case in LAYER_OF}


@pytest.mark.parametrize("case", LAYER_OF)
def test_slots_and_tokens_equal_those_of_a_directory(small_cases, case):
    result = small_cases[case].result()
    assert LAYER_OF[case] in result["layers"]
    assert result["expert_tensors"] > 0
    assert {name: len(rounds) for name, rounds in result["rounds"].items()} == {"stage": 6, "offload": 6, "fill": 2}
    for name, rounds in result["rounds"].items():
        for one in rounds:
            assert (one["filled"] > 0) == (name == "fill"), one
            assert one["slots_equal"], one
            assert one["tokens_equal"], one
            assert one["logprobs_equal"], one
            assert one["retained_allocated"] <= 0, one
            assert one["retained_reserved"] <= 0, one


def test_predicted_equals_measured_where_the_tensors_are():
    found = run("measured")["differences"]
    assert set(found) == {"keep", "offload", "stage"}
    for strategy, differences in found.items():
        assert not any(differences.values()), (strategy, differences)


def test_the_bench_at_full_size():
    found = run("bench_30b")
    assert found["tokens_equal"]
    assert found["slots_equal"]
    assert found["tensors"] == 36864
    assert found["packed_bytes"] == found["predicted"]["packed_bytes"] == PACKED
    assert found["slot_bytes"] == found["predicted"]["slot_bytes"]
    by_way: dict[str, list[dict]] = {}
    for sync in found["syncs"]:
        by_way.setdefault(sync["strategy"], []).append(sync)
    assert {way: len(syncs) for way, syncs in by_way.items()} == dict.fromkeys(("keep", "offload", "stage", "fill"), 3)

    def later(way, of=lambda sync: sync["seconds"]):
        return statistics.median(of(sync) for sync in by_way[way][1:])

    for way in ("stage", "fill"):
        for sync in by_way[way]:
            assert sync["retained"] <= 0, sync
            assert sync["retained_reserved"] <= 0, sync
            assert sync["peak"] <= LAYER + MOST_UNDER_WAY, sync  # the chunk, and as much as one layer
            assert sync["pinned"] <= 2 * PACKED * 1.01, sync  # two generations
        assert later(way, lambda sync: sync["python"]) <= 3  # microseconds a tensor
        assert later(way, lambda sync: sync["rebuilding"]) <= found["slot_copy"] + 0.01
        for other in ("keep", "offload"):
            assert by_way[way][0]["seconds"] < by_way[other][0]["seconds"]
            assert later(way) < later(other)
    # Beyond the transport, once every name has been read; by "stage" the slot copy comes on top.
    assert later("fill", lambda sync: sync["seconds"] - sync["transport"]) <= 0.15
    assert later("stage", lambda sync: sync["seconds"] - sync["transport"]) <= 0.15 + found["slot_copy"]
    assert found["streamed"] >= 0.9 * found["link"]
    after_the_second = found["repeats"][1:]
    for name in ("allocated", "reserved", "pinned", "pinned_by_torch"):
        assert len({held[name] for held in after_the_second}) == 1, name
    resident = [held["resident"] for held in after_the_second]
    assert max(resident) - min(resident) < 64 * MIB
    assert found["reserving"] <= 1


def test_qwen3_30b_a3b_leaves_the_gpu():
    result = run("qwen3_30b_a3b")
    lives = {life["strategy"]: life for life in result["lives"]}
    moments = {name: {moment["name"]: moment for moment in life["moments"]} for name, life in lives.items()}
    kept = moments["keep"]
    assert kept["staged"]["allocated"] - kept["baseline"]["allocated"] >= PACKED
    assert kept["added"]["allocated"] - kept["baseline"]["allocated"] >= 2 * PACKED
    assert kept["added"]["holders"]["registered"]["cuda:0"] == PACKED
    moved = moments["offload"]
    assert moved["offloaded"]["holders"]["registered"] == {"cpu": PACKED}
    assert moved["offloaded"]["holders"]["staged"] == {"cpu": PACKED}
    staged = moments["stage"]
    assert staged["added"]["holders"]["registered"] == {"cpu": PACKED}
    for name in ("offload", "stage"):
        for moment in ("offloaded", "evicted", "rebuilt"):
            for kind in ("allocated", "reserved"):
                assert moments[name][moment][kind] <= moments[name]["baseline"][kind], (name, moment)
    keep = lives["keep"]
    for life in lives.values():
        assert life["tokens"] == keep["tokens"] == life["rebuilt_tokens"]
        assert life["logprobs"] == keep["logprobs"] == life["rebuilt_logprobs"]
        assert life["slots"] == keep["slots"] == life["rebuilt_slots"]


def test_a_profile_agrees_with_the_device_s_own_trace():
    result = run("profiles")
    packed = result["packed_bytes"]
    phases = {name: {phase["name"]: phase for phase in result[name]["phases"]} for name in ("keep", "offload", "stage")}
    for name, found in phases.items():
        assert list(found) == ["stage", "load", "build", "pack", "activate", *(["offload"] * (name != "keep"))]
        for one in found.values():
            assert one["device_seconds"] > 0, (name, one)
            assert one["device_seconds"] <= one["seconds"] * 1.01 + 1e-4, (name, one)
            assert one["traced"]["to_host"] == one["to_host"], (name, one)
            # vLLM also sets a flag or two of each layer, from ordinary memory: 4 layers of experts and of attention.
            assert 0 <= one["traced"]["to_device"] - one["to_device"] <= 256, (name, one)
    assert {name: found["activate"]["to_device"] for name, found in phases.items()} == {
        "keep": 0,
        "offload": 0,
        "stage": packed,
    }
    assert phases["keep"]["load"]["to_host"] == 0
    assert phases["offload"]["offload"]["to_host"] == 2 * packed  # what was received, and what was packed
    assert phases["offload"]["offload"]["to_host_rate"] > 20e9
    assert phases["stage"]["stage"]["to_host"] == packed
    assert phases["stage"]["load"]["to_host"] == 0
    for name, expected in (("keep", 2 * packed), ("offload", 0), ("stage", 0)):
        total = result[name]["total"]
        assert total["after"]["allocated"] - total["before"]["allocated"] == expected, name
    assert phases["stage"]["stage"]["peak"]["allocated"] - phases["stage"]["stage"]["before"]["allocated"] < packed
    # The copies run while the next layer is made and stacked.
    streamed = phases["stage"]["stage"]["traced"]
    assert streamed["overlapped"] > 0.02 * streamed["to_host_seconds"]


def test_copies_to_the_host_overlap_the_next_chunk_s_work():
    found = run("overlap")
    for name in ("stage", "fill"):
        phases = found[name]["phases"]
        counts = [sum(phase["name"] == wanted for phase in phases) for wanted in ("stage", "transport", "receive")]
        assert counts == [1, 9, 8]
        traced = next(phase["traced"] for phase in phases if phase["name"] == "stage")
        assert traced["to_host"] == 8 * LAYER
        # Nearly all of it: the work is as long as a layer's copy, and only the last layer has no next one.
        assert traced["overlapped"] > 0.6 * traced["to_host_seconds"], traced
        activate = next(phase for phase in phases if phase["name"] == "activate")
        assert activate["to_device"] == (0 if name == "fill" else 8 * LAYER)
