"""Traces of torch's profiler: the phases are in them, and device time by phase is read from them."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

import lora_mem
from lora_mem.observe.results import Traced
from lora_mem.observe.traces import read_trace, trace_frame


@pytest.mark.parametrize("ops", [True, False])
@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz", "traces"])
def test_a_trace_names_the_phases(tmp_path, name, ops):
    with lora_mem.profile(trace=tmp_path / name, trace_ops=ops) as profiler, profiler.phase("one"):
        with profiler.phase("two"):
            torch.ones(8).sum()
        with pytest.raises(RuntimeError, match="a torch profiler is running already"), lora_mem.profile(trace="x.json"):
            pass
    phases = read_trace(profiler.result.trace)
    assert [phase.name for phase in phases] == ["total", "one", "two"]
    assert phases[1].start <= phases[2].start
    measured = profiler.result.phase("two").seconds
    assert phases[2].seconds == pytest.approx(measured, abs=0.005)
    frame = trace_frame(profiler.result.trace)
    sums = frame[frame.name == "aten::sum"]
    assert list(zip(sums.phase, sums.kind, sums.calls, strict=True)) == ([("two", "op", 1)] if ops else [])
    assert "aten::fill_" not in set(frame.name)  # inside aten::ones
    if name == "traces":
        assert [path.name.endswith(".pt.trace.json.gz") for path in (tmp_path / name).iterdir()] == [True]


def test_tensorboard_s_plugin_reads_a_trace(tmp_path):
    pytest.importorskip("torch_tb_profiler", reason="needs torch-tb-profiler")
    from torch_tb_profiler.profiler.data import RunProfileData

    with lora_mem.profile(trace=tmp_path) as profiler, profiler.phase("one"):
        torch.ones(8).sum()
    seen = RunProfileData.parse("worker", "1", profiler.result.trace, None)
    assert "aten::sum" in {operator.name for operator in seen.op_list_groupby_name}


def test_device_time_and_overlap_are_read_from_a_trace(tmp_path):
    """A trace as torch's profiler writes it on a GPU, in microseconds."""

    def event(category, name, begin, end, **args):
        return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": end - begin, "args": args}

    events = [
        event("cpu_op", "aten::randn", 1000, 1010),
        event("user_annotation", "lora_mem: total", 1000, 2000),
        event("user_annotation", "lora_mem: stage", 1000, 1500),
        event("user_annotation", "lora_mem: activate", 1600, 2000),
        event("user_annotation", "someone else's", 1600, 1700),
        event("kernel", "normal", 1000, 1200),
        event("kernel", "on another stream", 1100, 1300),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1250, 1450, bytes=4096),
        event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1400, 1500, bytes=1024),
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1650, 1950, bytes=5120),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "x"}, *events]}))
    total, stage, activate = read_trace(tmp_path / "trace.json")
    assert stage.traced == Traced(
        kernels=pytest.approx(300e-6),
        to_host=5120,
        to_host_seconds=pytest.approx(250e-6),
        to_device=0,
        to_device_seconds=0,
        overlapped=pytest.approx(50e-6),
    )
    assert activate.traced.to_device == 5120
    assert activate.traced.to_device_seconds == pytest.approx(300e-6)
    assert total.traced.to_host == 5120
    assert (activate.name, activate.start, activate.seconds) == ("activate", 600e-6, 400e-6)
