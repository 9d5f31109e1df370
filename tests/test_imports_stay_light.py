"""What needs no vLLM does not load it: sizing, the command line, recorded results; `import lora_mem` takes no time."""

from __future__ import annotations

import subprocess
import sys

import pytest

SIZING = "lora_mem.footprint(lora_mem.ModelShape.from_config('Qwen/Qwen3-30B-A3B'), rank=64)"


def printed(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("code", "heavy"),
    [
        (f"import lora_mem, lora_mem.cli; {SIZING}", {"torch", "vllm", "numpy", "pandas", "IPython"}),
        ("import lora_mem; lora_mem.load_ipython_extension", {"torch", "vllm", "numpy", "pandas", "IPython"}),
        ("from lora_mem.observe import plots, report, results, traces", {"torch", "vllm"}),
    ],
)
def test_what_it_does_not_need_is_not_loaded(code, heavy):
    assert set(printed(f"{code}; import sys; print(*sys.modules)").split()).isdisjoint(heavy)


def test_the_package_is_imported_at_once():
    code = "import time; start = time.process_time(); import lora_mem; print(time.process_time() - start)"
    assert min(float(printed(code)) for _ in range(3)) < 0.05
