"""The footprint of a live worker, from its tensors: the same object as a prediction, to be held against it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from lora_mem import vllm_hook
from lora_mem.sizing.counting import HOLDERS
from lora_mem.sizing.footprints import PADDING, Footprint, evaluate
from lora_mem.sizing.options import Strategy
from lora_mem.sizing.units import most_under_way, power_of_two
from lora_mem.staging.tensors import memory
from lora_mem.vllm_hook import LiveAdapter


def measure(engine: Any = None, lora_int_id: int | None = None) -> Footprint:
    """What one adapter costs a live worker, from the tensors that it holds now.

        predicted = lora_mem.footprint(config, rank=64, max_lora_rank=64, strategy="stage")
        predicted.compare(lora_mem.measure(llm))

    Each figure is the bytes of real tensors, memory that several of them show counted once; `why` tells how many
    tensors, on which devices, and how much of it is pinned. To be called in the worker's process; from outside by
    `collective_rpc` (see `lora_mem.WorkerExtension`).

    Args:
        engine: an `LLM` or `LLMEngine` whose worker is in this process, a worker, its LoRA manager, or None for the
            only one of this process.
        lora_int_id: the adapter; None for the only one that is registered or staged. Where there is none, the slots.

    Returns:
        A `Footprint`, its figures as in a prediction (`footprint`), with these differences:

        - All adapters that are registered or staged count, by where they are; a prediction counts `max_cpu_loras`.
        - `host_pinned_bytes`: the blocks of laid-out adapters, and every other tensor on the host rounded up to a power
          of two, as torch's pinned cache takes it.
        - `gpu_sync_peak_bytes`: a sum of the sizes, since tensors do not tell of their past; the allocator's peak is
          for a profile.

        On a worker without a GPU all memory is the host's: adapters count as where the hook's strategy has them.

    Raises:
        LookupError: no engine, no such adapter, or several of which none was named.
    """
    manager = vllm_hook.manager_of(engine)
    worker, adapters = vllm_hook.live_worker(manager), vllm_hook.live_adapters(manager)
    adapter = _chosen(adapters, lora_int_id)
    strategy: Strategy = vllm_hook.status().strategy  # type: ignore[assignment]
    layers = vllm_hook.lora_layers(manager)
    slots = {name: list(vllm_hook.slot_buffers(layer).values()) for name, layer in layers.items()}

    def on_host(device: str) -> bool:
        return strategy != "keep" if worker.device.type == "cpu" else device == "cpu"

    packed, staged, buffers = (memory(_all(modules)) for modules in (adapter.packed, adapter.staged, slots))
    alive = memory(tensor for one in adapters.values() for tensor in _all(one.packed) + _all(one.staged))
    resident = sum(size for (device, _), size in alive.items() if not on_host(device))
    host = {key: size for key, size in alive.items() if on_host(key[0])}
    blocks = memory(tensor for one in adapters.values() if one.block_bytes for tensor in _all(one.staged))
    pinned = sum(power_of_two(size) for key, size in host.items() if key not in blocks)
    if strategy != "keep":
        pinned += sum(one.block_bytes for one in adapters.values())
    slot_bytes, host_bytes, packed_bytes = (sum(sizes.values()) for sizes in (buffers, host, packed))
    under_way = most_under_way(packed_bytes, max(packed.values(), default=0))
    brought_in = {"keep": resident, "offload": sum((packed | staged).values()), "stage": under_way}[strategy]
    workers = worker.workers_per_node
    tensors = "sum over distinct tensors of their bytes"
    empty = {"slots": slot_bytes, "max_lora_rank": worker.max_lora_rank, "rank": adapter.rank}
    on_the_gpu = {"slots": slot_bytes, "adapters": len(adapters)}
    on_the_host = "sum over all adapters' distinct tensors on the host"
    blocks_and_others = "blocks of laid-out adapters + next power of two of every other tensor's bytes"
    shared = sum(size for key, size in packed.items() if key in staged)
    per_node = {"workers_per_node": workers}
    # Bytes, formula and inputs of each figure.
    figures: dict[str, tuple[int, str, Mapping[str, Any]]] = {
        "packed_bytes": (packed_bytes, tensors, _where(_all(adapter.packed))),
        "staged_bytes": (sum(staged.values()), tensors, _where(_all(adapter.staged))),
        "shared_bytes": (shared, "sum over packed tensors that are staged ones", {}),
        "slot_bytes": (slot_bytes, tensors, _where(_all(slots))),
        "slot_padding_bytes": (evaluate(PADDING, empty), PADDING, empty),
        "host_bytes": (host_bytes, on_the_host, {"adapters": len(adapters)}),
        "host_pinned_bytes": (pinned, blocks_and_others, {}),
        "node_host_bytes": (workers * host_bytes, "workers_per_node * host", per_node),
        "node_host_pinned_bytes": (workers * pinned, "workers_per_node * host_pinned", per_node),
        "gpu_resident_bytes": (slot_bytes + resident, "slots + adapters on the GPU", on_the_gpu),
        "gpu_sync_peak_bytes": (
            slot_bytes + brought_in,
            "slots + what bringing it in takes",
            {"slots": slot_bytes, "brought_in": brought_in},
        ),
    }
    by_holder = zip(HOLDERS, (adapter.packed, adapter.staged, slots), strict=True)
    sizes: dict[str, Any] = {name: size for name, (size, _, _) in figures.items()}
    return Footprint(
        **sizes,
        model=worker.model,
        strategy=strategy,
        found={name: (formula, inputs) for name, (_, formula, inputs) in figures.items()},
        found_rows=tuple(row for holder, modules in by_holder for row in _rows(holder, modules)),
    )


def _chosen(adapters: Mapping[int, LiveAdapter], lora_int_id: int | None) -> LiveAdapter:
    known = ", ".join(map(str, adapters)) or "none"
    if lora_int_id is not None and lora_int_id not in adapters:
        raise LookupError(f"lora_int_id is {lora_int_id}; registered or staged in this worker: {known}")
    if lora_int_id is not None:
        return adapters[lora_int_id]
    if len(adapters) > 1:
        raise LookupError(f"lora_int_id is None, and this worker has several adapters; name one of {known}")
    return next(iter(adapters.values()), LiveAdapter(0, {}, {}, 0))


def _all(modules: Mapping[str, list[torch.Tensor]]) -> list[torch.Tensor]:
    return [tensor for tensors in modules.values() for tensor in tensors]


def _where(tensors: list[torch.Tensor]) -> dict[str, int]:
    """How many tensors show distinct memory, their bytes by device, and of these the pinned ones."""
    every = memory(tensors)
    by_device: Counter[str] = Counter()
    for (device, _), size in every.items():
        by_device[device] += size
    return {
        "tensors": len(every),
        **by_device,
        "pinned": sum(memory(tensor for tensor in tensors if tensor.is_pinned()).values()),
    }


def _rows(holder: str, modules: Mapping[str, list[torch.Tensor]]) -> Iterator[dict[str, Any]]:
    """Each kind of module of one holder, as `Footprint.rows` has it: the layers' numbers left open."""
    kinds: dict[str, list[int]] = defaultdict(list)
    for name, tensors in modules.items():
        kinds[re.sub(r"\.\d+\.", ".*.", name, count=1)].append(sum(memory(tensors).values()))
    for kind, sizes in kinds.items():
        row = {"holder": holder, "module": kind, "count": len(sizes)}
        yield {**row, "formula": "sum over the layers' distinct tensors of their bytes", "bytes": sum(sizes)}
