"""The strategies side by side, in one run of one real engine: seconds, peaks, what is left, what is page-locked."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import lora_mem
from lora_mem import scenarios, vllm_hook
from lora_mem.buffers import slot_rank
from lora_mem.host_memory import HostBlock

STRATEGIES: tuple[vllm_hook.Strategy, ...] = ("keep", "offload", "stage")


@dataclass(frozen=True)
class Sync:
    """One sync of a new version of the adapter.

    Attributes:
        strategy: how.
        number: from 1; the first of a strategy pays for what is reserved once.
        seconds: from the first tensor made to the adapter active in its slot, transport included.
        transport: of it, what the transport alone takes (measured by itself).
        receiving: of it, taking the tensors (for "stage" at the same time as the transport).
        adding: of it, vLLM's `add_lora`: pack, register, slots, and for "offload" the offload.
        offloading: of it, the offload.
        rebuilding: seconds of `add_lora` after an eviction from slots and host cache.
        python: microseconds of Python a tensor in receiving, without waiting for copies; 0 where nothing is received.
        peak: bytes of GPU memory above rest, at most, slots not counted.
        left: bytes of allocated GPU memory more than at rest, once active.
        left_reserved: the same, reserved.
        pinned: bytes that this package has page-locked.
        pinned_by_torch: bytes in torch's cache of page-locked memory.
        tokens: greedy tokens.
        rebuilt_tokens: the same after the rebuild.
    """

    strategy: str
    number: int
    seconds: float
    transport: float
    receiving: float
    adding: float
    offloading: float
    rebuilding: float
    python: float
    peak: int
    left: int
    left_reserved: int
    pinned: int
    pinned_by_torch: int
    tokens: tuple[int, ...]
    rebuilt_tokens: tuple[int, ...]


@dataclass(frozen=True)
class Held:
    """Bytes held after one of many syncs: GPU allocated and reserved, page-locked by us and by torch, host resident."""

    allocated: int
    reserved: int
    pinned: int
    pinned_by_torch: int
    resident: int


@dataclass(frozen=True)
class Bench:
    """What `run` found.

    Attributes:
        device: name of the GPU, or "cpu".
        versions: of torch, vllm and this package.
        model: name or path, and how many layers.
        rank: of the adapter.
        tensors: that a sync transports.
        packed_bytes: of the adapter as vLLM registers it, measured.
        predicted: of the calculator: bytes by holder; empty where it does not know the model.
        slot_bytes: measured.
        reserving: seconds to page-lock one adapter's memory.
        link: bytes a second of one large copy from the device to the host.
        streamed: bytes a second from an adapter that is on the device to its place on the host, by "stage".
        slot_copy: seconds of one copy of `packed_bytes` from page-locked memory to the device.
        syncs: all.
        repeats: what is held after each of many more syncs by "stage", if asked for.
    """

    device: str
    versions: dict[str, str]
    model: str
    layers: int
    rank: int
    tensors: int
    packed_bytes: int
    predicted: dict[str, int]
    slot_bytes: int
    reserving: float
    link: float
    streamed: float
    slot_copy: float
    syncs: tuple[Sync, ...] = field(default=())
    repeats: tuple[Held, ...] = field(default=())

    @property
    def tokens_equal(self) -> bool:
        """Whether every sync of the same version gave the same tokens, before and after its rebuild."""
        by_number: dict[int, set[tuple[int, ...]]] = {}
        for sync in self.syncs:
            by_number.setdefault(sync.number, set()).update({sync.tokens, sync.rebuilt_tokens})
        return all(len(found) == 1 for found in by_number.values())

    def table(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, columns and rows for a terminal: seconds, and bytes in GiB, or in MiB where the adapter is small."""
        unit, scale = ("GiB", 2**30) if self.packed_bytes >= 2**30 else ("MiB", 2**20)
        columns = ["strategy", "sync", "total s", "add s", "offl. s", "rebuild s", f"peak {unit}", "left", "pinned"]
        rows = [
            [
                sync.strategy,
                str(sync.number),
                f"{sync.seconds:.3f}",
                f"{sync.adding:.3f}",
                f"{sync.offloading:.3f}",
                f"{sync.rebuilding:.3f}",
                f"{sync.peak / scale:.3f}",
                f"{sync.left / scale:.3f}",
                f"{(sync.pinned + sync.pinned_by_torch) / scale:.3f}",
            ]
            for sync in self.syncs
        ]
        limit = f"{self.packed_bytes / self.link:.3f}"
        rows.append(["link limit", "", limit, "", "", f"{self.slot_copy:.3f}", "", "", ""])
        predicted = {name: f"{nbytes / scale:.4f}" for name, nbytes in self.predicted.items()}
        title = (
            f"{self.model}, {self.layers} layers, rank {self.rank}, {self.tensors} tensors on {self.device}; {unit}: "
            f"packed {self.packed_bytes / scale:.4f} (predicted {predicted.get('packed_bytes', 'not')}), slots "
            f"{self.slot_bytes / scale:.4f} (predicted {predicted.get('slot_bytes', 'not')})"
        )
        return title, columns, rows

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "tokens_equal": self.tokens_equal}


def engine_config(model: str, layers: int | None = None) -> dict[str, Any]:
    """The config.json for an engine: of the tiny model, of Qwen3-30B-A3B's geometry, or a file's, cut to some layers.

    Raises:
        ValueError: neither of these, or not so many layers.
    """
    if model == "tiny":
        config = dict(scenarios.TINY_MOE if torch.cuda.is_available() else scenarios.TINY_DENSE)
    elif model == "Qwen/Qwen3-30B-A3B":
        config = dict(scenarios.QWEN3_30B_A3B)
    else:
        path = Path(model)
        try:
            config = json.loads((path / "config.json" if path.is_dir() else path).read_text())
        except (OSError, ValueError):
            raise ValueError(
                f"model is {model!r}; it must be 'tiny', 'Qwen/Qwen3-30B-A3B' or a path to a config.json"
            ) from None
    if layers is not None:
        if not 1 <= layers <= config["num_hidden_layers"]:
            raise ValueError(f"layers is {layers}; the model has {config['num_hidden_layers']}")
        config["num_hidden_layers"] = layers
    return config


def run(
    config: dict[str, Any],
    *,
    model: str,
    rank: int = 64,
    strategies: tuple[vllm_hook.Strategy, ...] = STRATEGIES,
    syncs: int = 2,
    repeats: int = 0,
    say: Callable[[str], None] = lambda text: None,
    **engine: Any,
) -> Bench:
    """Sync an adapter of the routed experts (of everything, in a dense model) by each strategy in one engine.

    Args:
        config: of the model, as in its config.json.
        model: what to call it in the result.
        rank: of the adapter.
        strategies: to compare.
        syncs: versions of the adapter, one after the other; 2 or more.
        repeats: that many more syncs by "stage", to see that nothing grows.
        say: told what is going on.
        engine: options for vLLM.
    """
    if syncs < 2:
        raise ValueError(f"syncs is {syncs}; it must be 2 or more: the first one pays for what is reserved once")
    say("starting vLLM")
    with tempfile.TemporaryDirectory() as directory:
        llm = scenarios.start_engine(scenarios.write_model(directory, config), max_lora_rank=slot_rank(rank), **engine)
    vllm_hook.install("stage")
    manager = scenarios.only_manager()
    device = manager.device
    transport = Transport(manager, rank, device)
    scenarios.generate(llm, None)
    transport.all_of(0)
    vllm_hook.release_device_memory()
    transport_alone = min(transport.seconds(number) for number in (1, 2))

    say("page-locking")
    with _timed() as reserving:
        packed_bytes = vllm_hook.reserve(transport.adapter_config, generations=1)
    vllm_hook.trim()
    link, slot_copy = _link(packed_bytes, device)
    found: list[Sync] = []
    held: list[Held] = []
    streamed = 0.0
    for strategy in strategies:
        vllm_hook.install(strategy)
        if strategy == "stage":
            vllm_hook.reserve(transport.adapter_config)  # ahead of the first sync, as a trainer does at its start
            streamed = _streamed(transport, packed_bytes)
        for number in range(1, syncs + 1):
            say(f"{strategy}, sync {number}")
            found.append(_sync(llm, manager, strategy, number, transport, transport_alone))
        if strategy == "stage" and repeats:
            say(f"{repeats} more syncs")
            held = [_repeat(llm, transport, syncs + 1 + number) for number in range(repeats)]
        vllm_hook.drop_adapter(1)
        vllm_hook.drop_adapter(2)
        vllm_hook.release_device_memory()
    return Bench(
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        versions=_versions(),
        model=model,
        layers=int(config["num_hidden_layers"]),
        rank=rank,
        tensors=transport.tensors,
        packed_bytes=packed_bytes,
        predicted=_predicted(config, rank, transport),
        slot_bytes=sum(vllm_hook.holders(manager)["slots"].values()),
        reserving=reserving(),
        link=link,
        streamed=streamed,
        slot_copy=slot_copy,
        syncs=tuple(found),
        repeats=tuple(held),
    )


class Transport:
    """A stand-in for what brings the tensors: makes them on the device, one layer at a time."""

    def __init__(self, manager: Any, rank: int, device: torch.device) -> None:
        served = vllm_hook.served_model(manager)
        experts = any(scenarios.is_expert(module) for module in served.modules)
        self.device = device
        self.experts = experts
        self.shapes: dict[str, dict[str, tuple[int, ...]]] = {}
        for module, takes in served.modules.items():
            if module.rpartition(".")[2] in ("embed_tokens", "lm_head") or (
                experts and not scenarios.is_expert(module)
            ):
                continue
            layer = next((word for word in module.split(".") if word.isdigit()), "")
            a, b = scenarios.factor_shapes(takes, rank)
            chunk = self.shapes.setdefault(layer, {})
            chunk[f"base_model.model.{module}.lora_A.weight"] = a
            chunk[f"base_model.model.{module}.lora_B.weight"] = b
        self.tensors = sum(len(chunk) for chunk in self.shapes.values())
        names = {name.split(".")[-3] for chunk in self.shapes.values() for name in chunk}
        self.targets = sorted(names)
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
            for _ in self.chunks(version):
                pass
        return elapsed()


def _sync(
    llm: Any, manager: Any, strategy: vllm_hook.Strategy, number: int, transport: Transport, transport_alone: float
) -> Sync:
    gpu = transport.device.type == "cuda"
    # What "keep" left on the GPU is not counted against the next sync.
    if strategy == "keep":
        vllm_hook.drop_adapter(1)
    vllm_hook.release_device_memory()
    rest = scenarios.device_memory()
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    marks: dict[str, float] = {}

    def on_load(event: str, lora_int_id: int) -> None:
        scenarios.synchronize()
        marks[event] = time.perf_counter()

    receiving = waited = 0.0
    with _timed() as elapsed:
        if strategy == "stage":
            with vllm_hook.open_stage(1, transport.adapter_config, load_inplace=True) as stage:
                for chunk in transport.chunks(number):
                    began = time.perf_counter()
                    stage.add_all(chunk)
                    receiving += time.perf_counter() - began
                    del chunk
                waited = stage.waited
                request = stage.commit()
            del stage
        else:
            tensors = transport.all_of(number)
            began = time.perf_counter()
            request = vllm_hook.stage_adapter(1, tensors, transport.adapter_config, load_inplace=True)
            receiving = time.perf_counter() - began
            del tensors
        scenarios.synchronize()
        began = time.perf_counter()
        with vllm_hook.observed(on_load):
            llm.llm_engine.add_lora(request)
        scenarios.synchronize()
        adding = time.perf_counter() - began
    seconds = elapsed()
    peak = (torch.cuda.max_memory_allocated() if gpu else 0) - rest[0]
    after = scenarios.device_memory()
    # The request has been loaded; asked for again it is what any later step brings.
    tokens, _ = scenarios.generate(llm, request)
    _evict(llm, manager)
    scenarios.synchronize()
    with _timed() as rebuilding:
        llm.llm_engine.add_lora(request)
    rebuild = rebuilding()
    rebuilt_tokens, _ = scenarios.generate(llm, request)
    return Sync(
        strategy=strategy,
        number=number,
        seconds=seconds,
        transport=transport_alone,
        receiving=receiving,
        adding=adding,
        offloading=marks.get("offloaded", 0.0) - marks.get("added", 0.0) if "offloaded" in marks else 0.0,
        rebuilding=rebuild,
        python=(receiving - waited) / transport.tensors * 1e6 if strategy == "stage" else 0.0,
        peak=peak,
        left=after[0] - rest[0],
        left_reserved=after[1] - rest[1],
        pinned=HostBlock.pinned_bytes,
        pinned_by_torch=_pinned_by_torch(),
        tokens=tuple(tokens),
        rebuilt_tokens=tuple(rebuilt_tokens),
    )


def _repeat(llm: Any, transport: Transport, version: int) -> Held:
    with vllm_hook.open_stage(1, transport.adapter_config, load_inplace=True) as stage:
        for chunk in transport.chunks(version):
            stage.add_all(chunk)
            del chunk
        request = stage.commit()
    llm.llm_engine.add_lora(request)
    scenarios.synchronize()
    vllm_hook.release_device_memory()
    return Held(*scenarios.device_memory(), HostBlock.pinned_bytes, _pinned_by_torch(), scenarios.resident())


def _pinned_by_torch() -> int:
    if not torch.cuda.is_available() or not hasattr(torch.cuda, "host_memory_stats"):
        return 0
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0))


def _evict(llm: Any, manager: Any) -> None:
    """Push adapter 1 out of the slots and of vLLM's host cache."""
    other, config = scenarios.random_adapter(
        manager, rank=1, seed=7, wanted=lambda m: m.endswith(("o_proj", "out_proj"))
    )
    vllm_hook.drop_adapter(2)
    llm.llm_engine.add_lora(vllm_hook.stage_adapter(2, other, config))
    if 1 in manager.list_adapters():
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
    """Bytes a second of one large copy to the host, and seconds of one back."""
    host = HostBlock(nbytes).take((nbytes,), torch.uint8)
    data = torch.ones(nbytes, dtype=torch.uint8, device=device)
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
    return nbytes / min(down), min(up)


def _predicted(config: dict[str, Any], rank: int, transport: Transport) -> dict[str, int]:
    from lora_mem.footprints import footprint
    from lora_mem.layers import SizingError

    try:
        figures = footprint(
            config,
            rank=rank,
            max_lora_rank=slot_rank(rank),
            target_modules=["experts"] if transport.experts else "all-linear",
        ).to_dict()
    except SizingError:
        return {}
    return {key: figures[key] for key in ("packed_bytes", "staged_bytes", "slot_bytes")}


def _versions() -> dict[str, str]:
    return {
        "torch": torch.__version__,
        "vllm": str(vllm_hook.status().vllm_version),
        "lora-mem": lora_mem.__version__,
    }


@contextmanager
def _timed() -> Iterator[Callable[[], float]]:
    """Seconds of the block, the device's work included."""
    scenarios.synchronize()
    began = time.perf_counter()
    ended = began
    yield lambda: ended - began
    scenarios.synchronize()
    ended = time.perf_counter()
