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
from lora_mem.staging.counters import pinned_by_torch, resident
from lora_mem.staging.pinned import HostBlock
from lora_mem.version import __version__

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

Way = Literal["keep", "offload", "stage", "fill"]
"""A strategy of the hook's; "fill" is "stage" with `fill_slot`."""

WAYS: tuple[Way, ...] = ("keep", "offload", "stage", "fill")

_STREAMED: tuple[Way, ...] = ("stage", "fill")

_LINK_BYTES = 2**31
"""Bytes of the copies that the link's rate is taken from: enough for its full rate."""


def start(config: dict[str, Any], *, max_rank: int, **engine: Any) -> Any:
    """An engine with dummy weights and one slot for adapters of at most this rank.

    Args:
        config: of the model, as in its config.json.
        max_rank: of the adapters.
        engine: more options for vLLM.
    """
    say("starting vLLM")
    with tempfile.TemporaryDirectory() as directory:
        model = testing.write_model(directory, config)
        options = testing.engine_options(config) if torch.cuda.is_available() else {}
        return testing.start_engine(model, **{"max_lora_rank": slot_rank(max_rank), **options, **engine})


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
    with _timed() as reserving:
        vllm_hook.reserve(transport.adapter_config, generations=1, wait=True)
    if strategies[0] not in _STREAMED:
        vllm_hook.trim()  # not to be counted as held by the others
    link, slot_copy = _link(packed_bytes, worker.device)
    found: list[Sync] = []
    held: list[Held] = []
    skipped: dict[str, str] = {}
    streamed = 0.0
    streaming = [way for way in strategies if way in _STREAMED]
    steps = progress(what=f"rank {rank}", total=len(strategies) * syncs + repeats * bool(streaming))
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
            found.append(_sync(llm, strategy, number, transport, generate))
            last = found[-1]
            say(f"{last.seconds:.3f} s, the transport alone {last.transport:.3f} s, a rebuild {last.rebuilding:.3f} s")
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
    steps.close()
    return Bench(
        device=torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else "cpu",
        versions={
            "torch": torch.__version__,
            "vllm": str(vllm_hook.status().vllm_version),
            "lora-mem": __version__,
        },
        model=model,
        layers=int(config.get("text_config", config)["num_hidden_layers"]),
        rank=rank,
        max_lora_rank=worker.max_lora_rank,
        tensors=transport.tensors,
        packed_bytes=packed_bytes,
        predicted=_predicted(config, rank, worker.max_lora_rank, transport),
        slot_bytes=sum(vllm_hook.holders(manager)["slots"].values()),
        reserving=reserving(),
        link=link,
        streamed=streamed,
        slot_copy=slot_copy,
        syncs=tuple(found),
        repeats=tuple(held),
        skipped=skipped,
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
        served = vllm_hook.served_model(manager)
        experts = any(testing.is_expert(module) for module in served.modules)
        self.device = device
        self.experts = experts
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for module, takes in served.modules.items():
            if module.rpartition(".")[2] in ("embed_tokens", "lm_head") or (experts and not testing.is_expert(module)):
                continue
            layer = next((word for word in module.split(".") if word.isdigit()), "")
            a, b = testing.factor_shapes(takes, rank)
            chunk = self.shapes.setdefault(layer, {})
            chunk[f"base_model.model.{module}.lora_A.weight"] = a
            chunk[f"base_model.model.{module}.lora_B.weight"] = b
        self.tensors = sum(len(chunk) for chunk in self.shapes.values())
        # "experts", and no more: `down_proj` would announce dense layers and shared experts too.
        names = {name.split(".")[-3] for chunk in self.shapes.values() for name in chunk}
        self.targets = ["experts"] if experts else sorted(names)
        self.adapter_config = {"r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": self.targets}

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

    def seconds(self, version: int) -> float:
        """How long making all of them takes, each chunk dropped as the next comes."""
        with _timed() as elapsed:
            for chunk in self.chunks(version):
                del chunk
        return elapsed()


def stream(
    transport: Transport,
    version: int,
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    *,
    fill_slot: bool = False,
) -> tuple[LoRARequest, float]:
    """Stage one version of the adapter under id 1, chunk by chunk.

    Args:
        transport: makes the tensors.
        version: of the adapter.
        phase: entered with "stage", in it with "transport" and "receive" for each chunk and "wait", e.g. a profiler's.
        fill_slot: as for `open_stage`.

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
    transport_alone = transport.seconds(number)  # each time: a shared host is not equally fast all the time
    vllm_hook.release_device_memory()
    seconds: dict[str, float] = defaultdict(float)
    ends: dict[str, float] = {}

    @contextmanager
    def lap(name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        seconds[name] += time.perf_counter() - began

    def on_load(span: str, lora_int_id: int) -> None:
        if span in ("activate", "offload"):
            testing.synchronize()
        ends[span] = time.perf_counter()

    waited = 0.0
    with watched() as memory, _timed() as elapsed:
        if strategy in _STREAMED:
            request, waited = stream(transport, number, lap, fill_slot=strategy == "fill")
        else:
            with lap("transport"):
                tensors = transport.all_of(number)
            with lap("receive"):
                request = vllm_hook.stage_adapter(1, tensors, transport.adapter_config, load_inplace=True)
            del tensors
        with _timed() as adding, vllm_hook.observed(on_load):
            llm.llm_engine.add_lora(request)
    held = vllm_hook.holders(vllm_hook.manager_of(llm))
    # The request has been loaded; asked for again it is what any later step brings.
    tokens = testing.generate(llm, request)[0] if generate else []
    slots = _digest_of_slots(llm)
    _evict(llm)
    with _timed() as rebuilding:
        llm.llm_engine.add_lora(request)
    rebuilt_tokens = testing.generate(llm, request)[0] if generate else []
    before = memory.before
    return Sync(
        strategy=strategy,
        number=number,
        seconds=elapsed(),
        transport=transport_alone,
        receiving=seconds["receive"],
        adding=adding(),
        offloading=ends["offload"] - ends["activate"] if "offload" in ends else 0.0,
        rebuilding=rebuilding(),
        python=(seconds["receive"] - waited) / transport.tensors * 1e6 if strategy in _STREAMED else 0.0,
        peak=(memory.peak.allocated or 0) - (before.allocated or 0),
        retained=(memory.after.allocated or 0) - (before.allocated or 0),
        retained_reserved=(memory.after.reserved or 0) - (before.reserved or 0),
        pinned=HostBlock.pinned_bytes,
        pinned_by_torch=pinned_by_torch() or 0,
        held=held,
        tokens=tuple(tokens),
        rebuilt_tokens=tuple(rebuilt_tokens),
        slots=slots,
        rebuilt_slots=_digest_of_slots(llm),
        transporting=seconds["transport"],
    )


def _repeat(llm: Any, transport: Transport, version: int, fill_slot: bool) -> Held:
    request, _ = stream(transport, version, fill_slot=fill_slot)
    llm.llm_engine.add_lora(request)
    testing.synchronize()
    vllm_hook.release_device_memory()
    return Held(*testing.device_memory(), HostBlock.pinned_bytes, pinned_by_torch() or 0, resident())


def _digest_of_slots(llm: Any) -> str:
    digest = testing.one_digest(testing.slot_digests(llm))
    vllm_hook.release_device_memory()  # its working memory
    return digest


def _evict(llm: Any) -> None:
    """Push adapter 1 out of the slots and of vLLM's host cache."""
    vllm_hook.drop_adapter(2)
    llm.llm_engine.add_lora(vllm_hook.stage_adapter(2, *testing.small_adapter(llm, seed=7)))
    if 1 in vllm_hook.registered_ids(vllm_hook.manager_of(llm)):
        raise RuntimeError("adapter 1 was not evicted: start the engine with max_loras=1, max_cpu_loras=1")


def _streamed(transport: Transport, packed_bytes: int) -> float:
    """Bytes a second of a stage whose tensors are on the device already: what the copies themselves take."""
    tensors = transport.all_of(0)
    best = float("inf")
    for _ in range(2):
        with _timed() as elapsed:
            stage = vllm_hook.open_stage(99, transport.adapter_config)
            for shapes in transport.shapes.values():
                stage.add_all({name: tensors[name] for name in shapes})
            stage.finish()
        best = min(best, elapsed())
        stage.abort()
    del tensors, stage
    vllm_hook.release_device_memory()
    return packed_bytes / best


def _link(nbytes: int, device: torch.device) -> tuple[float, float]:
    """Bytes a second of one large copy to the host, and the seconds that so many bytes take back at the link's rate."""
    size = min(nbytes, _LINK_BYTES)
    host = HostBlock(size).take((size,), torch.uint8)
    data = torch.ones(size, dtype=torch.uint8, device=device)
    down, up = [], []
    for _ in range(3):
        with _timed() as elapsed:
            host.copy_(data, non_blocking=True)
        down.append(elapsed())
        with _timed() as elapsed:
            data.copy_(host, non_blocking=True)
        up.append(elapsed())
    del host, data
    vllm_hook.release_device_memory()
    return size / min(down), min(up) * nbytes / size


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
def _timed() -> Iterator[Callable[[], float]]:
    """Seconds of the block, the device's work included."""
    testing.synchronize()
    began = time.perf_counter()
    ended = began
    yield lambda: ended - began
    testing.synchronize()
    ended = time.perf_counter()
