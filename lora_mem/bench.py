"""The strategies side by side in one real engine: seconds, peaks, what is retained, what is pinned."""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal

import torch

from lora_mem import testing, vllm_hook
from lora_mem.errors import SizingError
from lora_mem.observe.profiler import watched
from lora_mem.observe.progress import progress, say
from lora_mem.observe.results import Bench, Held, Sync
from lora_mem.sizing.footprints import footprint
from lora_mem.sizing.options import Options
from lora_mem.sizing.resolving import slot_rank
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.tensors import pinned_by_torch, resident
from lora_mem.version import __version__

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

Way = Literal["keep", "offload", "stage", "fill"]
"""A strategy of the hook's; "fill" is "stage" with `fill_slot`."""

WAYS: tuple[Way, ...] = ("keep", "offload", "stage", "fill")
_STREAMED = WAYS[2:]

_LINK_BYTES = 2**31
"""Bytes of the copies that the link's rate is taken from: enough for its full rate."""


def start(config: dict[str, Any], *, max_rank: int, **engine: Any) -> Any:
    """An engine of a config.json with dummy weights and one slot for adapters of at most this rank."""
    say("starting vLLM")
    if torch.cuda.is_available() and "kv_lora_rank" in config.get("text_config", config):
        engine = {"attention_backend": "TRITON_MLA", **engine}
    with tempfile.TemporaryDirectory() as directory:
        model = testing.write_model(directory, config)
        return testing.start_engine(model, **{"max_lora_rank": slot_rank(max_rank), **engine})


def run(
    llm: Any,
    config: dict[str, Any],
    *,
    model: str,
    rank: int,
    strategies: tuple[Way, ...] = WAYS,
    syncs: int = 2,
    repeats: int = 0,
    generate: bool = True,
) -> Bench:
    """Sync an adapter of the routed experts (of everything, in a dense model) by each strategy in one engine.

    Args:
        llm: the one engine of this process, as `start` makes it.
        config: of its model, for the calculator.
        model: what to call it in the result.
        rank: of the adapter.
        strategies: to compare. One that the GPU has no room for is left out; `Bench.skipped` says why.
        syncs: versions of the adapter, one after the other; 2 or more.
        repeats: that many more syncs by "stage" or "fill", in turn where both are compared, to see that nothing grows.
        generate: compare tokens too; without it slots only, for an engine that can load adapters but not run here.
    """
    check_syncs(syncs)
    vllm_hook.install("stage")
    manager = vllm_hook.manager_of(llm)
    worker = vllm_hook.live_worker(manager)
    transport = Transport(manager, rank, worker.device)
    if generate:
        testing.generate(llm, None)  # what a first step allocates for good is not the adapter's
    transport.all_of(0)

    say(f"rank {rank}: pinning")
    packed_bytes = vllm_hook.reserve(transport.adapter_config, generations=1, wait=True)  # reads every name, once
    vllm_hook.trim()
    seconds: dict[str, float] = {}
    with _lap(seconds, "reserving"):
        vllm_hook.reserve(transport.adapter_config, generations=1, wait=True)
    if strategies[0] not in _STREAMED:
        vllm_hook.trim()  # not to be counted as held by the others
    link, slot_copy = _link(packed_bytes, worker.device)
    found: list[Sync] = []
    held: list[Held] = []
    skipped: dict[str, str] = {}
    streamed = 0.0
    streaming = [way for way in strategies if way in _STREAMED]
    with progress(what=f"rank {rank}", total=len(strategies) * syncs + repeats * bool(streaming)) as steps:
        for strategy in strategies:
            if no_room := _no_room(strategy, packed_bytes):
                say(f"rank {rank}: {strategy} left out: {no_room}")
                skipped[strategy] = no_room
                continue
            vllm_hook.install("stage" if strategy == "fill" else strategy)
            if strategy in streaming:
                # Ahead of the first sync, as a trainer does at its start.
                vllm_hook.reserve(transport.adapter_config, wait=True)
                streamed = streamed or _streamed(transport, packed_bytes)
            for number in range(1, syncs + 1):
                say(f"rank {rank}: {strategy}, sync {number}")
                last = _sync(llm, strategy, number, transport, generate)
                say(f"{last.seconds:.3f} s, transport alone {last.transport:.3f} s, rebuild {last.rebuilding:.3f} s")
                found.append(last)
                steps.update()
            if repeats and [strategy] == streaming[-1:]:
                say(f"rank {rank}: {repeats} more syncs")
                for number in range(repeats):
                    way = streaming[number % len(streaming)]
                    held.append(_repeat(llm, transport, syncs + 1 + number, way == "fill"))
                    steps.update()
            vllm_hook.drop_adapter(1)
            vllm_hook.drop_adapter(2)
            vllm_hook.trim()
            vllm_hook.release_device_memory()
    versions = {"torch": torch.__version__, "vllm": str(vllm_hook.status().vllm_version), "lora-mem": __version__}
    return Bench(
        device=torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
        versions=versions,
        model=model,
        layers=int(config.get("text_config", config)["num_hidden_layers"]),
        rank=rank,
        max_lora_rank=worker.max_lora_rank,
        tensors=transport.tensors,
        packed_bytes=packed_bytes,
        predicted=_predicted(config, rank, worker.max_lora_rank, transport),
        slot_bytes=sum(vllm_hook.holders(manager)["slots"].values()),
        link=link,
        streamed=streamed,
        slot_copy=slot_copy,
        syncs=tuple(found),
        repeats=tuple(held),
        skipped=skipped,
        **seconds,
    )


def check_syncs(syncs: int) -> None:
    """Refuse what would show only the first sync, with a `SizingError`."""
    if syncs < 2:
        raise SizingError("syncs", syncs, "must be 2 or more: the first one pays for what is reserved once")


def _no_room(strategy: Way, packed_bytes: int) -> str:
    """Why a strategy does not fit the GPU now, or ""."""
    if strategy in _STREAMED or not torch.cuda.is_available():
        return ""
    free, _ = torch.cuda.mem_get_info()
    # Staged and packed, 1/16 of both and 1 GiB for what torch's allocator loses between blocks and for generating.
    needed = 2 * packed_bytes + packed_bytes // 8 + 2**30
    if needed <= free:
        return ""
    return f"it needs {needed} bytes of GPU memory (twice the adapter's {packed_bytes}, and room), {free} are free"


class Transport:
    """A stand-in for what brings the tensors: makes them on the device, one layer at a time."""

    def __init__(self, manager: Any, rank: int, device: torch.device) -> None:
        served = vllm_hook.served_model(manager).modules
        self.device = device
        self.experts = any(map(testing.is_expert, served))
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)  # by layer
        targets = set()
        for module, takes in served.items():
            name = module.rpartition(".")[2]
            if name not in ("embed_tokens", "lm_head") and self.experts == testing.is_expert(module):
                layer = next((word for word in module.split(".") if word.isdigit()), "")
                self.shapes[layer] |= testing.factor_shapes(module, takes, rank)
                targets.add(name)
        self.tensors = sum(map(len, self.shapes.values()))
        # "experts", and no more: `down_proj` would announce dense layers and shared experts too.
        names = ["experts"] if self.experts else sorted(targets)
        self.adapter_config = {"r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": names}

    def chunks(self, version: int) -> Iterator[dict[str, torch.Tensor]]:
        """One layer's tensors after the other; the same values for the same version."""
        generator = torch.Generator(device=self.device).manual_seed(version)
        for shapes in self.shapes.values():
            yield {
                name: torch.empty(shape, dtype=torch.bfloat16, device=self.device).normal_(0, 0.02, generator=generator)
                for name, shape in shapes.items()
            }

    def all_of(self, version: int) -> dict[str, torch.Tensor]:
        """All tensors at once."""
        return {name: tensor for chunk in self.chunks(version) for name, tensor in chunk.items()}


def stream(
    transport: Transport,
    version: int,
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    *,
    fill_slot: bool = False,
) -> tuple[LoRARequest, float]:
    """Stage one version of the adapter under id 1, chunk by chunk.

    `phase` is entered with "stage", in it with "transport" and "receive" for each chunk and "wait".

    Returns:
        vLLM's request, for `add_lora`, and the seconds that receiving was held up by copies to the host.
    """
    how: dict[str, Any] = {"load_inplace": True, "fill_slot": fill_slot}
    with phase("stage"), vllm_hook.open_stage(1, transport.adapter_config, **how) as stage:
        chunks = transport.chunks(version)
        while True:
            with phase("transport"):
                chunk = next(chunks, None)
            if chunk is None:
                break
            with phase("receive"):
                stage.add_all(chunk)
            del chunk
        waited = stage.waited
        with phase("wait"):
            return stage.commit(), waited


def _sync(llm: Any, strategy: Way, number: int, transport: Transport, generate: bool) -> Sync:
    if strategy == "keep":
        vllm_hook.drop_adapter(1)  # what it retains on the GPU is not counted against the next sync
    vllm_hook.release_device_memory()
    seconds: dict[str, float] = defaultdict(float)  # by the names of Sync's fields
    with _lap(seconds, "transport"):  # each time: a shared host is not equally fast all the time
        for chunk in transport.chunks(number):
            del chunk
    vllm_hook.release_device_memory()
    phases = {"transport": "transporting", "receive": "receiving"}
    ends: dict[str, float] = {}

    def phase(name: str) -> AbstractContextManager[None]:
        return _lap(seconds, phases[name], wait=False) if name in phases else nullcontext()

    def on_load(span: str, lora_int_id: int) -> None:
        if span in ("activate", "offload"):
            testing.synchronize()
        ends[span] = time.perf_counter()

    waited = 0.0
    with watched() as memory, _lap(seconds, "seconds"):
        if strategy in _STREAMED:
            request, waited = stream(transport, number, phase, fill_slot=strategy == "fill")
        else:
            with phase("transport"):
                tensors = transport.all_of(number)
            with phase("receive"):
                request = vllm_hook.stage_adapter(1, tensors, transport.adapter_config, load_inplace=True)
            del tensors
        with _lap(seconds, "adding"), vllm_hook.observed(on_load):
            llm.llm_engine.add_lora(request)
    held = vllm_hook.holders(vllm_hook.manager_of(llm))

    def look() -> tuple[tuple[int, ...], str]:
        # The request has been loaded; asked for again it is what any later step brings.
        tokens = tuple(testing.generate(llm, request)[0]) if generate else ()
        slots = testing.one_digest(testing.slot_digests(llm))
        vllm_hook.release_device_memory()  # the digest's working memory
        return tokens, slots

    tokens, slots = look()
    _evict(llm)
    with _lap(seconds, "rebuilding"):
        llm.llm_engine.add_lora(request)
    rebuilt_tokens, rebuilt_slots = look()
    before, after = memory.before, memory.after
    return Sync(
        strategy=strategy,
        number=number,
        offloading=ends["offload"] - ends["activate"] if "offload" in ends else 0.0,
        python=(seconds["receiving"] - waited) / transport.tensors * 1e6 if strategy in _STREAMED else 0.0,
        peak=(memory.peak.allocated or 0) - (before.allocated or 0),
        retained=(after.allocated or 0) - (before.allocated or 0),
        retained_reserved=(after.reserved or 0) - (before.reserved or 0),
        pinned=HostBlock.pinned_bytes,
        pinned_by_torch=pinned_by_torch() or 0,
        held=held,
        tokens=tokens,
        rebuilt_tokens=rebuilt_tokens,
        slots=slots,
        rebuilt_slots=rebuilt_slots,
        **seconds,
    )


def _repeat(llm: Any, transport: Transport, version: int, fill_slot: bool) -> Held:
    request, _ = stream(transport, version, fill_slot=fill_slot)
    llm.llm_engine.add_lora(request)
    testing.synchronize()
    vllm_hook.release_device_memory()
    return Held(*testing.device_memory(), HostBlock.pinned_bytes, pinned_by_torch() or 0, resident())


def _evict(llm: Any) -> None:
    """Push adapter 1 out of the slots and of vLLM's host cache."""
    vllm_hook.drop_adapter(2)
    llm.llm_engine.add_lora(vllm_hook.stage_adapter(2, *testing.small_adapter(llm, seed=7)))
    if 1 in vllm_hook.registered_ids(vllm_hook.manager_of(llm)):
        raise RuntimeError("adapter 1 was not evicted: start the engine with max_loras=1, max_cpu_loras=1")


def _streamed(transport: Transport, packed_bytes: int) -> float:
    """Bytes a second of a stage whose tensors are on the device already: what the copies themselves take."""
    tensors = transport.all_of(0)
    seconds: dict[str, float] = {}
    for nth in ("first", "second"):
        with _lap(seconds, nth):
            stage = vllm_hook.open_stage(99, transport.adapter_config)
            for shapes in transport.shapes.values():
                stage.add_all({name: tensors[name] for name in shapes})
            stage.finish()
        stage.abort()
    del tensors, stage
    vllm_hook.release_device_memory()
    return packed_bytes / min(seconds.values())


def _link(nbytes: int, device: torch.device) -> tuple[float, float]:
    """Bytes a second of one large copy to the host, and the seconds that so many bytes take back at the link's rate."""
    size = min(nbytes, _LINK_BYTES)
    host = HostBlock(size).take((size,), torch.uint8)
    data = torch.ones(size, dtype=torch.uint8, device=device)
    best = []
    for target, source in ((host, data), (data, host)):
        seconds: dict[str, float] = {}
        for nth in range(3):
            with _lap(seconds, str(nth)):
                target.copy_(source, non_blocking=True)
        best.append(min(seconds.values()))
    del host, data, target, source
    vllm_hook.release_device_memory()
    return size / best[0], best[1] * nbytes / size


def _predicted(config: dict[str, Any], rank: int, max_lora_rank: int, transport: Transport) -> dict[str, int]:
    targets = ["experts"] if transport.experts else "all-linear"
    try:
        # By offload, whose staged tensors are as received: stage has the packed ones only.
        asked = Options(rank=rank, max_lora_rank=max_lora_rank, target_modules=targets, strategy="offload")
        figures = footprint(config, asked).to_dict()
    except SizingError:
        return {}
    return {key: figures[key] for key in ("packed_bytes", "staged_bytes", "shared_bytes", "slot_bytes")}


@contextmanager
def _lap(seconds: dict[str, float], name: str, *, wait: bool = True) -> Iterator[None]:
    """Add the seconds of the block, with `wait` the device's work included."""
    if wait:
        testing.synchronize()
    began = time.perf_counter()
    yield
    if wait:
        testing.synchronize()
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - began
