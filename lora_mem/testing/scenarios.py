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
from lora_mem.observe.profiler import Watch, current_memory, phase, profile, watched
from lora_mem.observe.results import Phase, Profile
from lora_mem.testing.adapters import factors, is_expert, modules_named, random_adapter, save_adapter
from lora_mem.testing.engine import device_memory, generate, one_digest, slot_digests, synchronize
from lora_mem.testing.models import device_at_hand


@dataclass(frozen=True)
class Moment:
    """What was in memory at one point of an adapter's life.

    Attributes:
        name: baseline, staged, added, offloaded, evicted, rebuilt.
        milliseconds: since the moment before; None for the baseline.
        holders: bytes by holder and device.
        allocated: bytes that torch's GPU allocator counts; 0 without a GPU.
        reserved: bytes that it keeps from the driver.
        peak: the most that was allocated since the moment before.
        device_used: bytes of the GPU in use by anyone.
        host_resident: bytes of host memory of this process.
    """

    name: str
    milliseconds: float | None
    holders: dict[str, dict[str, int]]
    allocated: int
    reserved: int
    peak: int
    device_used: int
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
    """One adapter's life under one strategy.

    Attributes:
        strategy: "keep" (kept on the GPU), "offload" or "stage".
        moments: in order.
        loaded: what the adapter gives as first loaded.
        rebuilt: the same after eviction and rebuild.
    """

    strategy: str
    moments: tuple[Moment, ...]
    loaded: Output
    rebuilt: Output

    def moment(self, name: str) -> Moment:
        """The moment of this name."""
        return next(moment for moment in self.moments if moment.name == name)

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
    device: str | None = None,
    seed: int = 1,
    wanted: Callable[[str], bool] = lambda module: True,
) -> Life:
    """Stage an adapter, load it, evict it from slots and host cache with another one, and have vLLM rebuild it.

    Args:
        llm: an engine started with `max_loras=1, max_cpu_loras=1`.
        strategy: for `install`; "keep" is what there is without the hook.
        rank: of the adapter.
        device: where its tensors are made; default the GPU where there is one.
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
        milliseconds = (time.perf_counter() - began) * 1e3
        moments.append(_snapshot(name, None if name == "baseline" else milliseconds, manager, memory))
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
        tensors, config = random_adapter(llm, rank=rank, seed=seed, device=device or device_at_hand(), wanted=wanted)
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


def small_adapter(llm: Any, *, seed: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """An adapter that another one is evicted with; tensors and config."""
    return random_adapter(llm, rank=1, seed=seed, wanted=modules_named("o_proj", "out_proj"))


def _drop(*lora_int_ids: int) -> None:
    for lora_int_id in lora_int_ids:
        vllm_hook.drop_adapter(lora_int_id)


def _snapshot(name: str, milliseconds: float | None, manager: Any, memory: Watch) -> Moment:
    now = current_memory()
    most, memory.peak = memory.peak, now  # the next moment's peak counts from here
    return Moment(
        name=name,
        milliseconds=milliseconds,
        holders=vllm_hook.holders(manager),
        allocated=now.allocated or 0,
        reserved=now.reserved or 0,
        peak=most.allocated or 0,
        device_used=now.device_used or 0,
        host_resident=now.host_resident,
    )


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
    adapters: list[tuple[dict[str, torch.Tensor], dict[str, Any]]],
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
    fused = [any(".experts.base_layer." in name for name in tensors) for tensors, _ in adapters]
    for number, (tensors, config) in enumerate(adapters):
        path = save_adapter(Path(directory) / str(number), tensors, config)
        request = LoRARequest(f"directory-{number}", 1000 + number, path, is_3d_lora_weight=fused[number])
        expected.append(output(llm, request))
        llm.llm_engine.remove_lora(1000 + number)
    vllm_hook.release_device_memory()
    before = device_memory()
    ids = range(1, 1 + len(adapters))
    requests = [vllm_hook.stage_adapter(number, *adapter) for number, adapter in zip(ids, adapters, strict=True)]
    if not fill_slot:
        adapters.clear()  # the stage is the only holder now
    results = []
    for _ in range(rounds):
        for number, request in enumerate(requests):
            if fill_slot:
                _drop(*ids)
                request = vllm_hook.stage_adapter(1 + number, *adapters[number], fill_slot=True)
            found = output(llm, request)
            vllm_hook.release_device_memory()
            after = device_memory()
            results.append(
                Round(
                    number,
                    found.tokens == expected[number].tokens,
                    found.logprobs == expected[number].logprobs,
                    found.slots == expected[number].slots,
                    after[0] - before[0],
                    after[1] - before[1],
                    next(one.filled for one in vllm_hook.status().adapters if one.lora_int_id == 1 + number),
                )
            )
    _drop(*ids)
    return results


@dataclass(frozen=True)
class Returns:
    """How an adapter comes back that was evicted.

    Attributes:
        strategy: for `install`.
        profile: of all steps: "load", then each time "activate" alone (evicted from its slot only) and "rebuild" (from
            vLLM's host cache too).
        slots: digests of the slot buffers: loaded, then after each return.
        registered_b: sum of the absolute values of the registered B factors, at the same times.
    """

    strategy: str
    profile: Profile
    slots: tuple[dict[str, int], ...] = field(repr=False)
    registered_b: tuple[float, ...]

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
    modules = vllm_hook.served_model(manager).modules
    experts = any(is_expert(module) for module in modules)
    tensors, config = random_adapter(
        manager, rank=rank, seed=seed, device=device_at_hand(), wanted=lambda m: is_expert(m) or not experts
    )
    others = [small_adapter(llm, seed=seed + number) for number in (1, 2)]
    slots: list[dict[str, int]] = []
    registered: list[float] = []

    def look() -> None:
        slots.append(slot_digests(manager))
        model = vllm_hook.registered_model(manager, 1)
        registered.append(
            sum(float(t.abs().sum(dtype=torch.float64)) for n, t in factors(model).items() if "lora_b" in n)
        )

    with profile() as profiler:
        with phase("stage"):
            request = vllm_hook.stage_adapter(1, tensors, config)
            del tensors
        llm.llm_engine.add_lora(request)
        look()
        with phase("stage others"):
            first, second = (vllm_hook.stage_adapter(2 + n, *other) for n, other in enumerate(others))
        for _ in range(times):
            for evicting in ([first], [first, second]):
                with phase("evict"):
                    for other in evicting:
                        llm.llm_engine.add_lora(other)
                llm.llm_engine.add_lora(request)
                look()
    _drop(1, 2, 3)
    vllm_hook.release_device_memory()
    return Returns(strategy, profiler.result, tuple(slots), tuple(registered))
