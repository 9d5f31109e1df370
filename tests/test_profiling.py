"""Profiles: phases nested, repeated and failed; the parts of vLLM's loads; results; trace; what it costs; the magic."""

from __future__ import annotations

import dataclasses
import json
import re
import time
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch")

import torch

import lora_mem
from lora_mem import testing
from lora_mem.observe.profiler import phase, watched
from lora_mem.observe.results import Profile, Traced
from lora_mem.observe.traces import read_trace, trace_frame

MIB = 2**20


def names(profile):
    return [(phase.depth, phase.name) for phase in profile.phases]


def test_phases_nest_repeat_and_fail():
    with lora_mem.profile() as profiler:
        with profiler.phase("outer"):
            for _ in range(2):
                with phase("inner"):
                    time.sleep(0.01)
        with pytest.raises(ZeroDivisionError), profiler.phase("broken"), profiler.phase("inside"):
            1 / 0  # noqa: B018
        with profiler.phase("after"):
            pass
        with pytest.raises(RuntimeError, match="before the profiled block has ended"):
            profiler.result  # noqa: B018
    found = profiler.result
    assert names(found) == [(0, "outer"), (1, "inner"), (1, "inner"), (0, "broken"), (1, "inside"), (0, "after")]
    outer, first, second = found.phase("outer"), found.phase("inner"), found.phase("inner", 2)
    assert first.seconds >= 0.01
    assert second.seconds >= 0.01
    assert outer.start <= first.start < first.start + first.seconds <= second.start
    assert outer.seconds >= first.seconds + second.seconds
    assert found.total.seconds >= outer.seconds
    assert found.phase("broken").error == found.phase("inside").error == "ZeroDivisionError: division by zero"
    assert found.phase("after").error == ""
    with pytest.raises(KeyError, match=r"'inner' of number 3: there are 2; phases are outer, inner, broken"):
        found.phase("inner", 3)


def test_an_error_leaves_a_result_and_a_second_run_starts_anew():
    profiler = lora_mem.profile()
    with pytest.raises(ValueError, match="mine"), profiler, profiler.phase("one"):
        raise ValueError("mine")
    assert profiler.result.total.error == "ValueError: mine"
    assert names(profiler.result) == [(0, "one")]
    with profiler:
        pass
    assert profiler.result.phases == ()
    assert profiler.result.total.error == ""
    with pytest.raises(RuntimeError, match="'late' lies outside"), profiler.phase("late"):
        pass
    with profiler, pytest.raises(RuntimeError, match="running already"), profiler:
        pass
    with phase("nobody profiles"):
        pass


def test_a_profile_inside_a_profile_sees_its_own_part():
    with lora_mem.profile() as outer, outer.phase("before"), lora_mem.profile() as inner, phase("both"):
        pass
    assert names(inner.result) == [(0, "both")]
    assert names(outer.result) == [(0, "before"), (1, "both")]


def test_it_decorates():
    @lora_mem.profile
    def bare(number):
        with phase("part"):
            return number + 1

    @lora_mem.profile(sample_every=0.002)
    def sampled():
        time.sleep(0.02)
        raise ValueError("mine")

    assert bare(1) == 2
    assert names(bare.profile) == [(0, "bare"), (1, "part")]
    with pytest.raises(ValueError, match="mine"):
        sampled()
    assert sampled.profile.phase("sampled").error == "ValueError: mine"
    assert len(sampled.profile.samples) >= 4


def test_what_cannot_be_decorated_is_refused():
    def numbers():
        yield 1

    async def later():
        yield 1

    async def waits():
        pass

    for function, where in ((numbers, "loop that iterates it"), (later, "loop that iterates it"), (waits, "await")):
        for decorate in (lora_mem.profile, lora_mem.profile(sample_every=1.0)):
            with pytest.raises(
                TypeError, match=rf"{function.__name__} is .*`with lora_mem.profile\(\):` around the {where}"
            ):
                decorate(function)
    with pytest.raises(TypeError, match=r"profile got 'trace\.json' to decorate; give it a function, and options by"):
        lora_mem.profile("trace.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is not there")
def test_host_memory_is_measured_and_what_there_is_not_is_said():
    with lora_mem.profile(sample_every=0.001) as profiler:
        with profiler.phase("take"):
            kept = torch.ones(64 * MIB, dtype=torch.uint8)
        with profiler.phase("take and give back"):
            torch.ones(64 * MIB, dtype=torch.uint8)
            time.sleep(0.02)
    take, both = profiler.result.phase("take"), profiler.result.phase("take and give back")
    assert take.after.host_resident - take.before.host_resident >= 63 * MIB
    assert both.peak.host_resident >= both.before.host_resident
    assert take.before.allocated is None
    assert take.device_seconds is None
    assert (take.to_host, take.to_host_rate, take.traced) == (0, None, None)
    assert any("no CUDA device" in reason for reason in profiler.result.missing)
    seconds = [sample.seconds for sample in profiler.result.samples]
    assert seconds == sorted(seconds)
    assert max(sample.memory.host_resident for sample in profiler.result.samples) >= take.after.host_resident
    del kept


def test_a_watch_and_phases_see_the_most_in_each_other():
    with lora_mem.profile() as profiler, profiler.phase("outer"), watched() as memory:
        with profiler.phase("inner"):
            kept = torch.ones(64 * MIB, dtype=torch.uint8)
        with watched() as later:
            del kept
    outer = profiler.result.phase("outer")
    for peak in (memory.peak, outer.peak):
        assert peak.host_resident - outer.before.host_resident >= 63 * MIB
    assert memory.peak.host_resident == later.before.host_resident
    assert outer.after.host_resident <= memory.peak.host_resident - 63 * MIB


def test_torch_s_peak_counters_are_read_and_reset_in_one_place():
    package = Path(lora_mem.__file__).parent
    names = re.compile(r"torch\.cuda\.(reset_peak_memory_stats|max_memory_\w+)\(")
    assert [path.name for path in package.rglob("*.py") if names.search(path.read_text())] == ["profiler.py"]


def test_what_a_result_shows(tmp_path):
    with lora_mem.profile(sample_every=0.001) as profiler, profiler.phase("<one>"):
        pass
    found = profiler.result
    assert json.loads(found.to_json(tmp_path / "profile.json")) == json.loads((tmp_path / "profile.json").read_text())
    assert json.loads(found.to_json())["phases"][0]["name"] == "<one>"
    assert Profile.from_dict(json.loads(found.to_json())) == found
    frame = found.to_frame()
    assert list(frame["phase"]) == ["<one>"]
    assert {"seconds", "allocated_peak", "reserved_after", "device_used_before", "pinned_after", "to_host_rate"} <= set(
        frame.columns
    )
    assert frame.host_resident_before[0] == found.phases[0].before.host_resident
    assert "&lt;one&gt;" in found._repr_html_()
    assert found._repr_html_() == found._repr_html_()
    lines = repr(found).splitlines()
    assert lines[0].startswith("Profile on ")
    assert lines[2].startswith("<one>")
    assert lines[3].startswith("total")
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.device = "other"
    bars = found.plot()
    assert [label.get_text() for label in bars.get_yticklabels()] == ["<one>"]
    assert bars.get_xlabel() == "milliseconds since the profile began"
    lines = found.plot_memory()
    assert lines.get_ylabel().endswith("above the beginning")
    assert found.plot(ax=bars) is bars


def test_options_that_are_not_allowed():
    with pytest.raises(ValueError, match=r"trace is 'trace\.txt'; it must end in \.json or \.json\.gz, or be a dir"):
        lora_mem.profile(trace="trace.txt")
    for seconds in (0, -1, "x", True, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"sample_every is {seconds!r}; it must be a number of seconds above 0"):
            lora_mem.profile(sample_every=seconds)
    for option in ("trace", "snapshot"):
        with pytest.raises(ValueError, match=f"{option} is 5; it must be a path, or None"):
            lora_mem.profile(**{option: 5})


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


def cost_of_a_phase(phases):
    """Seconds of an empty phase: the best of ten times so many."""
    profiler = lora_mem.profile()
    best = float("inf")
    with profiler:
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(phases):
                with profiler.phase("empty"):
                    pass
            best = min(best, (time.perf_counter() - began) / phases)
    print(f"\na phase: {best * 1e6:.1f} us")
    return best


def test_a_phase_costs_little():
    # 50 here; ten phases a sync are then a thousandth of a sync of half a second.
    assert cost_of_a_phase(200) < 500e-6


# ------------------------------------------------------------------------------------------------- the parts of a load


def evict(llm, hook, manager):
    hook.drop_adapter(2)
    llm.llm_engine.add_lora(hook.stage_adapter(2, *testing.random_adapter(manager, rank=2, seed=2)))
    hook.drop_adapter(2)


@pytest.mark.parametrize("strategy", ["keep", "offload", "stage"])
def test_the_parts_of_a_load_show_by_themselves(llm, hook, manager, strategy):
    hook.install(strategy)
    offload = [] if strategy == "keep" else [(1, "offload")]
    parts = [(1, "build"), (1, "pack"), (1, "activate"), *offload]
    with lora_mem.profile() as profiler:
        with profiler.phase("stage"):
            request = hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1))
        llm.llm_engine.add_lora(request)
        llm.llm_engine.add_lora(request)  # is there already
        testing.generate(llm, request)
    assert names(profiler.result) == [(0, "stage"), (0, "load"), *parts]
    assert profiler.result.versions["vllm"] == hook.status().vllm_version
    load = profiler.result.phase("load")
    inside = [profiler.result.phase(name) for _, name in parts]
    assert sum(phase.seconds for phase in inside) <= load.seconds
    evict(llm, hook, manager)
    with lora_mem.profile() as profiler:
        llm.llm_engine.add_lora(request)
    assert names(profiler.result) == [(0, "rebuild"), *parts]


def test_a_new_version_is_loaded_not_rebuilt_and_a_directory_is_loaded_too(llm, hook, manager, tmp_path):
    from vllm.lora.request import LoRARequest

    tensors, config = testing.random_adapter(manager, rank=4, seed=1)
    llm.llm_engine.add_lora(hook.stage_adapter(1, tensors, config))
    path = testing.save_adapter(tmp_path, tensors, config)
    with lora_mem.profile() as profiler:
        llm.llm_engine.add_lora(hook.stage_adapter(1, tensors, config, load_inplace=True))
        llm.llm_engine.add_lora(LoRARequest("directory", 5, path))
    parts = [(1, "build"), (1, "pack"), (1, "activate")]
    assert names(profiler.result) == [(0, "load"), *parts, (1, "offload"), (0, "load"), *parts]


def test_vllm_is_as_it_was_afterwards(llm, hook, manager):
    from vllm.lora.model_manager import LoRAModelManager

    hook.uninstall()
    before = dict(vars(LoRAModelManager))
    with lora_mem.profile() as outer:
        assert dict(vars(LoRAModelManager)) == before
        hook.install()  # in the block
        assert dict(vars(LoRAModelManager)) != before
        with lora_mem.profile() as inner:
            request = hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1))
            llm.llm_engine.add_lora(request)
        assert dict(vars(LoRAModelManager)) != before
    hook.uninstall()
    assert dict(vars(LoRAModelManager)) == before
    assert names(inner.result) == names(outer.result) != []


def test_a_load_that_fails_is_a_phase_with_an_error(llm, hook, manager):
    request = hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1))
    hook.drop_adapter(1)
    with lora_mem.profile() as profiler, pytest.raises(Exception, match="is not staged in process"):
        llm.llm_engine.add_lora(request)
    assert names(profiler.result) == [(0, "load"), (1, "build")]
    assert "is not staged" in profiler.result.phase("load").error
    assert profiler.result.total.error == ""


# ------------------------------------------------------------------------------------------------------------ the magic


@pytest.fixture
def shell():
    from IPython.core.interactiveshell import InteractiveShell

    found = InteractiveShell()
    found.run_line_magic("load_ext", "lora_mem")
    return found


def test_the_magic_profiles_a_cell(shell, tmp_path):
    cell = "from lora_mem.observe.profiler import phase\nwith phase('mine'):\n    x = !echo 1\n"
    found = shell.run_cell_magic("lora_mem", f"kept --trace {tmp_path / 'trace.json'}", cell)
    assert names(found) == [(0, "mine")]
    assert shell.user_ns["kept"] is found
    assert shell.user_ns["x"] == ["1"]
    assert found.trace == str(tmp_path / "trace.json")


def test_the_magic_keeps_what_a_failing_cell_has_shown(shell):
    with pytest.raises(ZeroDivisionError):
        shell.run_cell_magic("lora_mem", "kept", "1 / 0")
    assert shell.user_ns["kept"].total.error == "ZeroDivisionError: division by zero"
    from IPython.core.error import UsageError

    with pytest.raises(UsageError, match="unrecognized arguments: --fast"):
        shell.run_cell_magic("lora_mem", "--fast", "1")


def test_the_magic_refuses_what_it_cannot_do(shell):
    from IPython.core.error import UsageError

    for name in ("5x", "class", "a.b"):
        with pytest.raises(UsageError, match=f"name is '{name}'; it must be a name for a Python variable"):
            shell.run_cell_magic("lora_mem", name, "ran = True")
    with pytest.raises(UsageError, match=r"cannot await.*`with lora_mem\.profile"):
        shell.run_cell_magic("lora_mem", "kept", "import asyncio\nran = True\nawait asyncio.sleep(0)")
    assert not {"ran", "kept", "5x", "class", "a.b"} & shell.user_ns.keys()


def test_what_the_magic_says_to_do_instead_awaits(shell):
    block = "with lora_mem.profile() as profiler, profiler.phase('mine'):\n    await asyncio.sleep(0.02)"
    shell.run_cell(f"import asyncio, lora_mem\n{block}").raise_error()
    assert shell.user_ns["profiler"].result.phase("mine").seconds >= 0.02
