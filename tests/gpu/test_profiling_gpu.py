"""Profiles of known work on a GPU: bytes exact, device seconds, what snapshot and trace hold, what a phase costs."""

from __future__ import annotations

import pickle
import time

import pytest

torch = pytest.importorskip("torch")

import lora_mem  # noqa: E402
from lora_mem.observe.profiler import watched  # noqa: E402
from lora_mem.staging.offload import move_to_host, release_device_memory  # noqa: E402
from lora_mem.staging.pinned import HostBlock  # noqa: E402
from phases import cost_of_a_phase  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

MIB = 2**20


@pytest.fixture(autouse=True)
def empty_cache():
    torch.cuda.init()
    torch.ones(1, device="cuda")
    release_device_memory()


def gpu_bytes(mib):
    return torch.empty(mib * MIB, dtype=torch.uint8, device="cuda")


def test_a_watch_in_a_phase_and_phases_in_a_watch_keep_their_peaks():
    with lora_mem.profile() as profiler, profiler.phase("outer"):
        gpu_bytes(512)
        with watched() as memory:
            with profiler.phase("inner"):
                gpu_bytes(256)
            gpu_bytes(64)
    assert memory.peak.allocated - memory.before.allocated == 256 * MIB
    change = {phase.name: phase.peak.allocated - phase.before.allocated for phase in profiler.result.phases}
    assert change == {"outer": 512 * MIB, "inner": 256 * MIB}


def test_allocations_of_known_size():
    with lora_mem.profile() as profiler:
        with profiler.phase("outer"):
            kept = gpu_bytes(256)
            with profiler.phase("inner"):
                gpu_bytes(512)
            with profiler.phase("small"):
                gpu_bytes(64)
        with profiler.phase("free"):
            del kept
            release_device_memory()
    change = {
        phase.name: {
            when: getattr(phase, when).allocated - phase.before.allocated for when in ("before", "peak", "after")
        }
        for phase in profiler.result.phases
    }
    assert change["outer"] == {"before": 0, "peak": 768 * MIB, "after": 256 * MIB}
    assert change["inner"] == {"before": 0, "peak": 512 * MIB, "after": 0}
    assert change["small"] == {"before": 0, "peak": 64 * MIB, "after": 0}
    assert change["free"] == {"before": 0, "peak": 0, "after": -256 * MIB}
    total, outer = profiler.result.total, profiler.result.phase("outer")
    assert total.peak.allocated - total.before.allocated == 768 * MIB
    assert outer.after.reserved - outer.before.reserved == 768 * MIB  # the cache keeps what inner gave back
    assert total.after.reserved == total.before.reserved
    used = outer.after.device_used - outer.before.device_used
    assert abs(used - 768 * MIB) < 64 * MIB
    assert not any("GPU" in reason for reason in profiler.result.missing)
    assert "H200" in profiler.result.device or profiler.result.device == torch.cuda.get_device_name()


def test_pinned_memory():
    torch._C._host_emptyCache()
    with lora_mem.profile() as profiler:
        with profiler.phase("block"):
            block = HostBlock(96 * MIB)
        with profiler.phase("torch"):
            pinned = torch.empty(96 * MIB, dtype=torch.uint8, pin_memory=True)
        with profiler.phase("free"):
            del block
    block, by_torch, free = profiler.result.phases
    assert block.after.pinned - block.before.pinned == 96 * MIB
    assert block.after.pinned_by_torch == block.before.pinned_by_torch
    assert block.after.host_resident - block.before.host_resident >= 95 * MIB
    assert by_torch.after.pinned_by_torch - by_torch.before.pinned_by_torch == 128 * MIB  # rounded to a power of two
    assert by_torch.after.pinned == by_torch.before.pinned
    assert free.after.pinned - free.before.pinned == -96 * MIB
    del pinned


def test_bytes_copied_and_the_rate():
    tensors = {"a": gpu_bytes(512), "b": gpu_bytes(256), "host": torch.ones(8)}
    tensors["alias of a"] = tensors["a"]
    with lora_mem.profile() as profiler, profiler.phase("offload"):
        move_to_host([[(tensors, name) for name in tensors]], pin=True)
    offload = profiler.result.phase("offload")
    assert offload.to_host == 768 * MIB
    assert offload.to_device == 0
    assert offload.to_host_rate == offload.to_host / offload.seconds
    assert offload.after.allocated - offload.before.allocated == -768 * MIB


def test_seconds_of_the_host_and_of_the_device():
    a = torch.randn(8192, 8192, device="cuda")
    a @ a
    for synchronize in (True, False):
        with lora_mem.profile(synchronize=synchronize) as profiler:
            with profiler.phase("multiply"):
                for _ in range(20):
                    a @ a
            with profiler.phase("sleep"):
                time.sleep(0.05)
            torch.cuda.synchronize()
        multiply, sleep = profiler.result.phases
        assert multiply.device_seconds > 0.01
        assert sleep.seconds >= 0.05
        if synchronize:
            assert multiply.device_seconds <= multiply.seconds * 1.01
        else:
            assert multiply.seconds < multiply.device_seconds


def test_a_trace_sees_the_copies_that_nobody_counts(tmp_path):
    a = torch.randn(4096, 4096, device="cuda")
    host = HostBlock(64 * MIB).take((16 * MIB,), torch.float32).view(4096, 4096)
    with lora_mem.profile(trace=tmp_path / "trace.json.gz") as profiler:
        with profiler.phase("one after the other"):
            a @ a
            host.copy_(a)
        with profiler.phase("side by side"):
            side = torch.cuda.Stream()
            with torch.cuda.stream(side):
                host.copy_(a, non_blocking=True)
            for _ in range(10):
                a @ a
    alone, beside = (phase.traced for phase in profiler.result.phases)
    assert [phase.to_host for phase in profiler.result.phases] == [0, 0]
    assert alone.to_host == beside.to_host == 64 * MIB
    assert alone.kernels > 0
    assert alone.overlapped < 0.1 * alone.to_host_seconds
    assert beside.overlapped > 0.5 * beside.to_host_seconds
    assert profiler.result.phases[0].to_host_rate == alone.to_host / alone.to_host_seconds


def test_a_snapshot_shows_both_sides(tmp_path):
    with lora_mem.profile(snapshot=tmp_path / "sub" / "memory.pickle") as profiler:
        tensors = {"a": gpu_bytes(512)}
        move_to_host([[(tensors, "a")]], pin=True)
        del tensors
    with open(profiler.result.snapshot, "rb") as file:
        snapshot = pickle.load(file)
    *gpus, host = snapshot["device_traces"]
    sizes = [(entry["action"], entry["size"]) for entries in gpus for entry in entries]
    assert ("alloc", 512 * MIB) in sizes
    assert ("free_completed", 512 * MIB) in sizes
    assert [(entry["action"], entry["size"]) for entry in host][-2:] == [
        ("alloc", 512 * MIB),
        ("free_completed", 512 * MIB),
    ]
    assert host[-1]["addr"] == host[-2]["addr"]
    from torch.cuda import _memory_viz

    assert "512.0MiB" in _memory_viz.trace(snapshot)


def test_samples_are_a_timeline_of_both_memories():
    with lora_mem.profile(sample_every=0.002) as profiler, profiler.phase("hold"):
        held = gpu_bytes(512)
        time.sleep(0.1)
        del held
        release_device_memory()
        time.sleep(0.1)
    hold, baseline = profiler.result.phase("hold"), profiler.result.total.before
    assert hold.peak.device_used - hold.before.device_used >= 512 * MIB
    allocated = [sample.memory.allocated - baseline.allocated for sample in profiler.result.samples]
    assert len(allocated) > 20
    assert max(allocated) == 512 * MIB
    assert allocated[-1] == 0


def test_a_phase_costs_little():
    assert cost_of_a_phase(100) < 2e-3
