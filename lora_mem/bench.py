"""The strategies side by side, in one run of one real engine: seconds, peaks, what is left, what is page-locked."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Literal

import torch

from lora_mem import testing, vllm_hook
from lora_mem.observe.progress import progress
from lora_mem.observe.results import Bench, Held, Sync
from lora_mem.observe.watching import watched
from lora_mem.sizing.shapes import known_models
from lora_mem.sizing.tensors import slot_rank
from lora_mem.staging.counters import pinned_by_torch, resident
from lora_mem.staging.pinned import HostBlock
from lora_mem.version import __version__

Way = Literal["keep", "offload", "stage", "fill"]
"""A strategy of the hook's; "fill" is "stage" with `fill_slot`."""

WAYS: tuple[Way, ...] = ("keep", "offload", "stage", "fill")

_STREAMED: tuple[Way, ...] = ("stage", "fill")

_LINK_BYTES = 2**31
"""Bytes of the copies that the link's rate is taken from: enough for its full rate."""


def engine_config(model: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json for an engine: of the tiny model, of a model of the built-in table, or a file's.

    Args:
        model: "tiny", a name of the table, or a path to a config.json or its directory.
        layers: keep so many only.

    Raises:
        ValueError: none of these, or not so many layers.
    """
    if model == "tiny":
        config = dict(testing.TINY_MOE if torch.cuda.is_available() else testing.TINY_DENSE)
    elif model == "Qwen/Qwen3-30B-A3B":
        config = dict(testing.QWEN3_30B_A3B)
    elif model in known_models():
        config = testing.engine_config(model)
    else:
        path = Path(model)
        try:
            config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        except (OSError, ValueError):
            raise ValueError(
                f"model is {model!r}; it must be 'tiny', a name of the built-in table, such as Qwen/Qwen3-30B-A3B, or "
                "a path to a config.json"
            ) from None
    text = config.get("text_config", config)
    if layers is not None:
        if not 1 <= layers <= text["num_hidden_layers"]:
            raise ValueError(f"layers is {layers}; the model has {text['num_hidden_layers']}")
        testing.cut_layers(text, layers)
    return config


def run(
    config: dict[str, Any],
    *,
    model: str,
    rank: int = 64,
    strategies: tuple[Way, ...] = WAYS,
    syncs: int = 2,
    repeats: int = 0,
    say: Callable[[str], None] = lambda text: None,
    **engine: Any,
) -> Bench:
    """Start an engine for an adapter of this rank and bench it there; see `run_in`.

    Args:
        config: of the model, as in its config.json.
        engine: options for vLLM.
    """
    _check_syncs(syncs)
    say("starting vLLM")
    llm = start(config, max_rank=rank, **engine)
    return run_in(llm, config, model=model, rank=rank, strategies=strategies, syncs=syncs, repeats=repeats, say=say)


def start(config: dict[str, Any], *, max_rank: int, **engine: Any) -> Any:
    """An engine with dummy weights and one slot for adapters of at most this rank."""
    with tempfile.TemporaryDirectory() as directory:
        model = testing.write_model(directory, config)
        options = testing.engine_options(config) if torch.cuda.is_available() else {}
        return testing.start_engine(model, **{"max_lora_rank": slot_rank(max_rank), **options, **engine})


def run_in(
    llm: Any,
    config: dict[str, Any],
    *,
    model: str,
    rank: int,
    strategies: tuple[Way, ...] = WAYS,
    syncs: int = 2,
    repeats: int = 0,
    generate: bool = True,
    say: Callable[[str], None] = lambda text: None,
) -> Bench:
    """Sync an adapter of the routed experts (of everything, in a dense model) by each strategy in one engine.

    Args:
        llm: the one engine of this process, started with `max_loras=1, max_cpu_loras=1`.
        config: of its model, for the calculator.
        model: what to call it in the result.
        rank: of the adapter.
        strategies: to compare. One that the GPU has no room for is left out; `Bench.skipped` says why.
        syncs: versions of the adapter, one after the other; 2 or more.
        repeats: that many more syncs by "stage" or "fill", in turn where both are compared, to see that nothing grows.
        generate: compare tokens too; without it slots only, for an engine that can load adapters but not run here.
        say: told what is going on.
    """
    _check_syncs(syncs)
    vllm_hook.install("stage")
    manager = vllm_hook.manager_of()
    worker = vllm_hook.live_worker(manager)
    device, max_lora_rank = worker.device, worker.max_lora_rank
    transport = Transport(manager, rank, device)
    if generate:
        testing.generate(llm, None)  # what a first step allocates for good is not the adapter's
    transport.all_of(0)

    say(f"rank {rank}: page-locking")
    packed_bytes = vllm_hook.reserve(transport.adapter_config, generations=1, wait=True)  # reads every name, once
    vllm_hook.trim()
    with _timed() as reserving:
        vllm_hook.reserve(transport.adapter_config, generations=1, wait=True)
    if strategies[0] not in _STREAMED:
        vllm_hook.trim()  # not to be counted as held by the others
    link, slot_copy = _link(packed_bytes, device)
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
            found.append(_sync(llm, manager, strategy, number, transport, generate))
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
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        versions=_versions(),
        model=model,
        layers=int(config.get("text_config", config)["num_hidden_layers"]),
        rank=rank,
        max_lora_rank=max_lora_rank,
        tensors=transport.tensors,
        packed_bytes=packed_bytes,
        predicted=_predicted(config, rank, max_lora_rank, transport),
        slot_bytes=sum(vllm_hook.holders(manager)["slots"].values()),
        reserving=reserving(),
        link=link,
        streamed=streamed,
        slot_copy=slot_copy,
        syncs=tuple(found),
        repeats=tuple(held),
        skipped=skipped,
    )


def _check_syncs(syncs: int) -> None:
    if syncs < 2:
        raise ValueError(f"syncs is {syncs}; it must be 2 or more: the first one pays for what is reserved once")


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


class BucketTransport(Transport):
    """One that works on the device before each layer, and brings it as views of one bucket: as a trainer that gathers.

    Args:
        manager: of the engine, as for the others.
        rank: of the adapter.
        device: where.
        work: seconds that the device works for a layer; 0 where it is the host.
    """

    def __init__(self, manager: Any, rank: int, device: torch.device, work: float) -> None:
        super().__init__(manager, rank, device)
        side = 8192 if work else 1  # 1.6 ms on an H200
        self._square = torch.ones(side, side, dtype=torch.bfloat16, device=device)
        self._products = 0
        if work:
            _ = self._square @ self._square
            with _timed() as elapsed:
                for _ in range(20):
                    _ = self._square @ self._square
            self._products = max(1, round(work / (elapsed() / 20)))

    def chunks(self, version: int) -> Iterator[dict[str, torch.Tensor]]:
        """One layer's tensors after the other."""
        generator = torch.Generator(device=self.device).manual_seed(version)
        for shapes in self.shapes.values():
            for _ in range(self._products):
                _ = self._square @ self._square
            sizes = [math.prod(shape) for shape in shapes.values()]
            bucket = torch.empty(sum(sizes), dtype=torch.bfloat16, device=self.device)
            views = bucket.normal_(0, 0.02, generator=generator).split(sizes)
            yield {name: view.view(shape) for (name, shape), view in zip(shapes.items(), views, strict=True)}


def _sync(
    llm: Any,
    manager: Any,
    strategy: Way,
    number: int,
    transport: Transport,
    generate: bool,
) -> Sync:
    # What "keep" left on the GPU is not counted against the next sync.
    if strategy == "keep":
        vllm_hook.drop_adapter(1)
    vllm_hook.release_device_memory()
    transport_alone = transport.seconds(number)  # each time: a shared host is not equally fast all the time
    vllm_hook.release_device_memory()
    rest = testing.device_memory()
    marks: dict[str, float] = {}

    def on_load(event: str, lora_int_id: int) -> None:
        testing.synchronize()
        marks[event] = time.perf_counter()

    receiving = waited = transporting = 0.0
    with watched() as memory, _timed() as elapsed:
        if strategy in _STREAMED:
            how: dict[str, Any] = {"load_inplace": True, "fill_slot": strategy == "fill"}
            with vllm_hook.open_stage(1, transport.adapter_config, **how) as stage:
                chunks = transport.chunks(number)
                while True:
                    began = time.perf_counter()
                    chunk = next(chunks, None)
                    arrived = time.perf_counter()
                    transporting += arrived - began
                    if chunk is None:
                        break
                    stage.add_all(chunk)
                    receiving += time.perf_counter() - arrived
                    del chunk
                waited = stage.waited
                request = stage.commit()
            del stage
        else:
            began = time.perf_counter()
            tensors = transport.all_of(number)
            arrived = time.perf_counter()
            transporting = arrived - began
            request = vllm_hook.stage_adapter(1, tensors, transport.adapter_config, load_inplace=True)
            receiving = time.perf_counter() - arrived
            del tensors
        testing.synchronize()
        began = time.perf_counter()
        with vllm_hook.observed(on_load):
            llm.llm_engine.add_lora(request)
        testing.synchronize()
        adding = time.perf_counter() - began
    seconds = elapsed()
    peak = (memory.peak.allocated or 0) - rest[0]
    after = testing.device_memory()
    held = vllm_hook.holders(manager)
    # The request has been loaded; asked for again it is what any later step brings.
    tokens = testing.generate(llm, request)[0] if generate else []
    slots = _digest_of_slots(manager)
    _evict(llm, manager)
    testing.synchronize()
    with _timed() as rebuilding:
        llm.llm_engine.add_lora(request)
    rebuild = rebuilding()
    rebuilt_tokens = testing.generate(llm, request)[0] if generate else []
    return Sync(
        strategy=strategy,
        number=number,
        seconds=seconds,
        transport=transport_alone,
        receiving=receiving,
        adding=adding,
        offloading=marks.get("offloaded", 0.0) - marks.get("added", 0.0) if "offloaded" in marks else 0.0,
        rebuilding=rebuild,
        python=(receiving - waited) / transport.tensors * 1e6 if strategy in _STREAMED else 0.0,
        peak=peak,
        retained=after[0] - rest[0],
        retained_reserved=after[1] - rest[1],
        pinned=HostBlock.pinned_bytes,
        pinned_by_torch=pinned_by_torch() or 0,
        held=held,
        tokens=tuple(tokens),
        rebuilt_tokens=tuple(rebuilt_tokens),
        slots=slots,
        rebuilt_slots=_digest_of_slots(manager),
        transporting=transporting,
    )


def stream(
    llm: Any,
    transport: Transport,
    version: int,
    phase: Callable[[str], AbstractContextManager[Any]] = lambda name: nullcontext(),
    *,
    fill_slot: bool = False,
) -> Any:
    """One sync by "stage", chunk by chunk, under id 1; returns vLLM's request.

    Args:
        llm: the engine, with the hook installed.
        transport: makes the tensors.
        version: of the adapter.
        phase: entered with "stage", in it with "transport" and "receive" for each chunk and "wait", e.g. a profiler's.
        fill_slot: as for `open_stage`.
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
        with phase("wait"):
            request = stage.commit()
    llm.llm_engine.add_lora(request)
    testing.synchronize()
    return request


def _repeat(llm: Any, transport: Transport, version: int, fill_slot: bool) -> Held:
    stream(llm, transport, version, fill_slot=fill_slot)
    vllm_hook.release_device_memory()
    return Held(*testing.device_memory(), HostBlock.pinned_bytes, pinned_by_torch() or 0, resident())


def _digest_of_slots(manager: Any) -> str:
    digest = testing.one_digest(testing.slot_digests(manager))
    vllm_hook.release_device_memory()  # its working memory
    return digest


def _evict(llm: Any, manager: Any) -> None:
    """Push adapter 1 out of the slots and of vLLM's host cache."""
    other, config = testing.random_adapter(manager, rank=1, seed=7, wanted=lambda m: m.endswith(("o_proj", "out_proj")))
    vllm_hook.drop_adapter(2)
    llm.llm_engine.add_lora(vllm_hook.stage_adapter(2, other, config))
    if 1 in vllm_hook.registered_ids(manager):
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
    from lora_mem.errors import SizingError
    from lora_mem.sizing.footprints import footprint

    try:
        figures = footprint(
            config,
            rank=rank,
            max_lora_rank=max_lora_rank,
            target_modules=["experts"] if transport.experts else "all-linear",
        ).to_dict()
    except SizingError:
        return {}
    return {key: figures[key] for key in ("packed_bytes", "staged_bytes", "shared_bytes", "slot_bytes")}


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "vllm": str(vllm_hook.status().vllm_version),
        "lora-mem": __version__,
    }


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    """Seconds of the block, the device's work included."""
    testing.synchronize()
    began = time.perf_counter()
    ended = began
    yield lambda: ended - began
    testing.synchronize()
    ended = time.perf_counter()
