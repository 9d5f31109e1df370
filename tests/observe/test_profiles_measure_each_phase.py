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
from lora_mem.observe.profiler import phase, watched
from lora_mem.observe.results import Profile
from phases import cost_of_a_phase, names

MIB = 2**20


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


def test_a_phase_costs_little():
    # 50 here; ten phases a sync are then a thousandth of a sync of half a second.
    assert cost_of_a_phase(200) < 500e-6
