"""The real engine on a GPU: every expert layout bit-equal to vLLM's own loader, and no adapter left on the GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

CASES = Path(__file__).with_name("cases.py")
GIB = 2**30


def run(case: str) -> dict:
    done = subprocess.run([sys.executable, CASES, case], capture_output=True, text=True, timeout=540)
    if done.returncode:
        pytest.fail(f"{case} ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    result = json.loads(done.stdout.splitlines()[-1])
    if reports := os.environ.get("LORA_MEM_REPORTS"):
        Path(reports, f"{case}.json").write_text(json.dumps(result, indent=1))
    return result


@pytest.mark.parametrize(
    ("case", "layer"),
    [
        ("gated_2d", "FusedMoEWithLoRA"),
        ("gated_2d_patterns", "FusedMoEWithLoRA"),
        ("non_gated_2d", "FusedMoEWithLoRA"),
        ("fused_3d_interleaved", "FusedMoE3DWithLoRA"),
        ("mixed_format", "FusedMoEWithLoRA"),
        ("shared_outer", "FusedMoEWithLoRA"),
    ],
)
def test_slots_and_tokens_equal_those_of_a_directory(case, layer):
    result = run(case)
    assert layer in result["layers"]
    assert result["expert_tensors"] > 0
    assert len(result["rounds"]) == 6
    for one in result["rounds"]:
        assert one["slots_equal"], one
        assert one["tokens_equal"], one
        assert one["logprobs_equal"], one
        assert one["left_allocated"] <= 0, one
        assert one["left_reserved"] <= 0, one


def test_qwen3_30b_a3b_leaves_the_gpu():
    result = run("qwen3_30b_a3b")
    keep, first, later = result["lives"]
    packed = 3 * 64 * (2048 + 768) * 128 * 48 * 2
    phases = {
        life["strategy"] + str(number): {phase["name"]: phase for phase in life["phases"]}
        for number, life in enumerate(result["lives"])
    }
    kept = phases["keep0"]
    assert kept["staged"]["allocated"] - kept["rest"]["allocated"] >= packed
    assert kept["added"]["allocated"] - kept["rest"]["allocated"] >= 2 * packed
    assert kept["added"]["holders"]["registered"]["cuda:0"] == packed
    for name in ("offload1", "offload2"):
        moved = phases[name]
        for phase in ("offloaded", "evicted", "rebuilt"):
            assert moved[phase]["allocated"] <= moved["rest"]["allocated"], phase
            assert moved[phase]["reserved"] <= moved["rest"]["reserved"], phase
        assert moved["offloaded"]["holders"]["registered"] == {"cpu": packed}
        assert moved["offloaded"]["holders"]["staged"] == {"cpu": packed}
    for life in (keep, first, later):
        assert life["tokens"] == keep["tokens"] == life["rebuilt_tokens"]
        assert life["logprobs"] == keep["logprobs"] == life["rebuilt_logprobs"]
        assert life["slots"] == keep["slots"] == life["rebuilt_slots"]
