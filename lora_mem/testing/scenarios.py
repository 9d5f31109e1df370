"""Scenarios: what one adapter's life costs, moment by moment, in a real vLLM engine.

Each is an example, a test and a notebook's source at once. On a GPU run each in a process of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from lora_mem import vllm_hook
from lora_mem.observe.profiler import current_memory, phase, profile, watched
from lora_mem.observe.results import Phase, Profile
from lora_mem.testing.adapters import (
    Adapter,
    everything,
    factors,
    is_expert,
    modules_named,
    random_adapter,
    save_adapter,
)
from lora_mem.testing.engines import device_at_hand, device_memory, generate, one_digest, slot_digests, synchronize


@dataclass(frozen=True)
class Moment:
    """What was in memory at one point of an adapter's life, in bytes; GPU memory is 0 without a GPU."""

    name: str  # baseline, staged, added, offloaded, evicted, rebuilt
    milliseconds: float | None  # since the moment before; None for the baseline
    holders: dict[str, dict[str, int]]  # by holder and device
    allocated: int  # by torch on the GPU
    reserved: int
    peak: int  # the most allocated since the moment before
    device_used: int  # of the GPU, by anyone
    host_resident: int


@dataclass(frozen=True)
class Output:
    """What an engine makes of an adapter: greedy tokens, their log-probabilities, and a digest of each slot buffer."""

    tokens: list[int]
    logprobs: list[float]
    slots: dict[str, int] = field(repr=False)


def output(llm: Any, request: Any) -> Output:
    """Generate with an adapter and look at the slots."""
    return Output(*generate(llm, request), slot_digests(llm))


@dataclass(frozen=True)
class Life:
    """One adapter's life under one strategy: its moments in order, and what it gives as loaded and as rebuilt."""

    strategy: vllm_hook.Strategy
    moments: tuple[Moment, ...]
    loaded: Output
    rebuilt: Output

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; slots as one digest for all."""
        values: dict[str, Any] = {"strategy": self.strategy, "moments": [asdict(moment) for moment in self.moments]}
        for prefix, found in (("", self.loaded), ("rebuilt_", self.rebuilt)):
            plain = asdict(found) | {"slots": one_digest(found.slots)}
            values |= {f"{prefix}{name}": value for name, value in plain.items()}
        return values


def adapter_life(
    llm: Any,
    strategy: vllm_hook.Strategy,
    *,
    rank: int,
    seed: int = 1,
    wanted: Callable[[str], bool] = everything,
) -> Life:
    """Stage an adapter, load it, evict it from slots and host cache with another one, and have vLLM rebuild it.

    Args:
        llm: an engine started with `max_loras=1, max_cpu_loras=1`.
        strategy: for `install`; "keep" is what there is without the hook.
        rank: of the adapter.
        seed: of its values.
        wanted: which modules it has.
    """
    vllm_hook.install(strategy)
    manager = vllm_hook.manager_of(llm)
    moments: list[Moment] = []
    began = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal began
        synchronize()
        milliseconds = (time.perf_counter() - began) * 1e3 if moments else None
        now = current_memory()
        most, memory.peak = memory.peak, now  # the next moment's peak counts from here
        gpu = (now.allocated or 0, now.reserved or 0, most.allocated or 0, now.device_used or 0)
        moments.append(Moment(name, milliseconds, vllm_hook.holders(manager), *gpu, now.host_resident))
        began = time.perf_counter()

    def on_load(span: str, lora_int_id: int) -> None:
        if span in ("activate", "offload"):
            mark("added" if span == "activate" else "offloaded")

    with watched() as memory:
        _drop(1, 2)
        other = small_adapter(llm, seed=seed + 1)
        output(llm, None)  # what a first step allocates for good is not the adapter's
        vllm_hook.release_device_memory()
        mark("baseline")
        tensors, config = random_adapter(llm, rank=rank, seed=seed, device=device_at_hand(), wanted=wanted)
        request = vllm_hook.stage_adapter(1, tensors, config)
        del tensors
        mark("staged")
        with vllm_hook.observed(on_load):
            llm.llm_engine.add_lora(request)
        loaded = output(llm, request)
        other_request = vllm_hook.stage_adapter(2, *other)
        vllm_hook.release_device_memory()  # the working memory of these steps and digests
        began = time.perf_counter()
        llm.llm_engine.add_lora(other_request)
        mark("evicted")
        llm.llm_engine.add_lora(request)
        mark("rebuilt")
        rebuilt = output(llm, request)
    _drop(1, 2)
    return Life(strategy, tuple(moments), loaded, rebuilt)


def small_adapter(llm: Any, *, seed: int) -> Adapter:
    """An adapter that another one is evicted with; tensors and config."""
    return random_adapter(llm, rank=1, seed=seed, wanted=modules_named("o_proj", "out_proj"))


def _drop(*lora_int_ids: int) -> None:
    for lora_int_id in lora_int_ids:
        vllm_hook.drop_adapter(lora_int_id)


@dataclass(frozen=True)
class Round:
    """One load of one adapter from memory, against the same adapter loaded from a directory."""

    adapter: int
    tokens_equal: bool
    logprobs_equal: bool
    slots_equal: bool
    retained_allocated: int
    retained_reserved: int
    filled: int = 0


def memory_against_directory(
    llm: Any,
    directory: str | Path,
    adapters: list[Adapter],
    *,
    rounds: int = 3,
    strategy: vllm_hook.Strategy = "stage",
    fill_slot: bool = False,
) -> list[Round]:
    """Load adapters from directories, then the same ones from memory in turn, so that each evicts the one before.

    Args:
        llm: an engine started with `max_loras=1, max_cpu_loras=1`.
        directory: where to write them.
        adapters: tensors and config of each.
        rounds: how often each is loaded from memory; every time after the first is a rebuild.
        strategy: for `install`.
        fill_slot: stage each adapter anew before each load, into the free slot.
    """
    from vllm.lora.request import LoRARequest

    vllm_hook.install(strategy)
    expected = []
    for number, (tensors, config) in enumerate(adapters):
        path = save_adapter(Path(directory) / str(number), tensors, config)
        fused = any(".experts.base_layer." in name for name in tensors)
        expected.append(output(llm, LoRARequest(f"directory-{number}", 1000 + number, path, is_3d_lora_weight=fused)))
        llm.llm_engine.remove_lora(1000 + number)
    vllm_hook.release_device_memory()
    before = device_memory()
    ids = range(1, 1 + len(adapters))
    requests = [vllm_hook.stage_adapter(number, *adapter) for number, adapter in zip(ids, adapters, strict=True)]
    if not fill_slot:
        adapters.clear()  # the stage is the only holder now
    results = []
    for number, request in [*enumerate(requests)] * rounds:
        if fill_slot:
            _drop(*ids)
            request = vllm_hook.stage_adapter(1 + number, *adapters[number], fill_slot=True)
        found, right = output(llm, request), expected[number]
        vllm_hook.release_device_memory()
        allocated, reserved = device_memory()
        filled = next(one.filled for one in vllm_hook.status().adapters if one.lora_int_id == 1 + number)
        equal = (found.tokens == right.tokens, found.logprobs == right.logprobs, found.slots == right.slots)
        results.append(Round(number, *equal, allocated - before[0], reserved - before[1], filled))
    _drop(*ids)
    return results


@dataclass(frozen=True)
class Returns:
    """How an adapter comes back that was evicted."""

    # "load", then each time "activate" alone (evicted from its slot only) and "rebuild" (from the host cache too)
    profile: Profile
    slots: tuple[dict[str, int], ...] = field(repr=False)  # digests of the buffers: loaded, then after each return
    registered_b: tuple[float, ...]  # sums of the absolute values of the registered B factors, at the same times

    def returns(self, name: str) -> list[Phase]:
        """Each "activate" or "rebuild" that brought the adapter back."""
        return [found for found in self.profile.phases if found.name == name and found.depth == 0]


def evict_and_return(llm: Any, strategy: vllm_hook.Strategy, *, rank: int, times: int = 2, seed: int = 1) -> Returns:
    """Load an adapter; then push it out of its slot, and out of vLLM's host cache, and ask for it again, in turns.

    Args:
        llm: an engine started with `max_loras=1, max_cpu_loras=2`.
        strategy: for `install`.
        rank: of the adapter, which has the routed experts, or everything in a dense model.
        times: how often each.
        seed: of its values.
    """
    vllm_hook.install(strategy)
    manager = vllm_hook.manager_of(llm)
    experts = any(map(is_expert, vllm_hook.served_model(manager).modules))
    wanted = is_expert if experts else everything
    tensors, config = random_adapter(manager, rank=rank, seed=seed, device=device_at_hand(), wanted=wanted)
    others = [small_adapter(llm, seed=seed + number) for number in (1, 2)]
    slots: list[dict[str, int]] = []
    registered: list[float] = []

    def look() -> None:
        slots.append(slot_digests(manager))
        found = factors(vllm_hook.registered_model(manager, 1)).items()
        registered.append(sum(float(t.abs().sum(dtype=torch.float64)) for name, t in found if "lora_b" in name))

    with profile() as profiler:
        with phase("stage"):
            request = vllm_hook.stage_adapter(1, tensors, config)
            del tensors
        llm.llm_engine.add_lora(request)
        look()
        with phase("stage others"):
            first, second = (vllm_hook.stage_adapter(2 + n, *other) for n, other in enumerate(others))
        for evicting in [[first], [first, second]] * times:
            with phase("evict"):
                for other in evicting:
                    llm.llm_engine.add_lora(other)
            llm.llm_engine.add_lora(request)
            look()
    _drop(1, 2, 3)
    vllm_hook.release_device_memory()
    return Returns(profiler.result, tuple(slots), tuple(registered))
