"""What a bench found, as plain data: read from JSON, tabulated and drawn without torch or vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lora_mem.drawing import draw, html_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_RENAMED = {"left": "retained", "left_reserved": "retained_reserved"}
"""Fields of syncs recorded before they got their present names."""


@dataclass(frozen=True)
class Sync:
    """One sync of a new version of the adapter.

    Attributes:
        strategy: how; "fill" is "stage" with `fill_slot`.
        number: from 1; the first of a strategy pays for what is reserved once.
        seconds: from the first tensor made to the adapter active in its slot, transport included.
        transport: what the transport alone takes, measured by itself just before.
        transporting: what the transport took in this sync, without waiting for its work on the device.
        receiving: taking the tensors ("stage" and "fill": in turn with the transport).
        adding: vLLM's `add_lora`: pack, register, slots, and for "offload" the offload.
        offloading: the offload.
        rebuilding: seconds of `add_lora` after an eviction from slots and host cache.
        python: microseconds of Python a tensor in receiving, without waiting for copies; 0 where nothing is received.
        peak: the most bytes of GPU memory above the baseline, which the slots are part of.
        retained: bytes of GPU memory allocated above the baseline, once active.
        retained_reserved: the same, reserved.
        pinned: bytes of host memory pinned by this package.
        pinned_by_torch: bytes in torch's cache of pinned memory.
        held: bytes by holder (slots, registered, staged) and device, once active; what two share counts for the first.
        tokens: greedy tokens; none where nothing was generated.
        rebuilt_tokens: the same after the rebuild.
        slots: a digest of the bits of all slot buffers.
        rebuilt_slots: the same after the rebuild.
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
    retained: int
    retained_reserved: int
    pinned: int
    pinned_by_torch: int
    held: dict[str, dict[str, int]]
    tokens: tuple[int, ...]
    rebuilt_tokens: tuple[int, ...]
    slots: str
    rebuilt_slots: str
    transporting: float = 0.0


@dataclass(frozen=True)
class Held:
    """Bytes held after one of many syncs: GPU allocated and reserved, pinned by us and by torch, host resident."""

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
        max_lora_rank: of the engine's slots.
        tensors: how many a sync transports.
        packed_bytes: of the adapter as vLLM registers it, measured.
        predicted: of the calculator: bytes by holder; empty where it does not know the model.
        slot_bytes: measured.
        reserving: seconds to pin one adapter's memory.
        link: bytes a second of one large copy from the device to the host.
        streamed: bytes a second from an adapter that is on the device to its place on the host, by "stage".
        slot_copy: seconds of one copy of `packed_bytes` from pinned memory to the device.
        syncs: all.
        repeats: what is held after each of many more syncs by "stage" and "fill", if asked for.
        skipped: strategies that were not run, and why.
    """

    device: str
    versions: dict[str, str]
    model: str
    layers: int
    rank: int
    max_lora_rank: int
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
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def tokens_equal(self) -> bool | None:
        """Whether every sync of the same version gave the same tokens, before and after its rebuild.

        None where nothing was generated.
        """
        if not any(sync.tokens or sync.rebuilt_tokens for sync in self.syncs):
            return None
        return self._equal(lambda sync: {sync.tokens, sync.rebuilt_tokens})

    @property
    def slots_equal(self) -> bool:
        """Whether every sync of the same version left the same bits in the slots, before and after its rebuild."""
        return self._equal(lambda sync: {sync.slots, sync.rebuilt_slots})

    def _equal(self, values: Callable[[Sync], set[Any]]) -> bool:
        by_number: dict[int, set[Any]] = {}
        for sync in self.syncs:
            by_number.setdefault(sync.number, set()).update(values(sync))
        return all(len(found) == 1 for found in by_number.values())

    def table(self) -> tuple[str, list[str], list[list[str]]]:
        """Title, columns and rows for a terminal: seconds, and bytes in GiB, or in MiB where the adapter is small."""
        unit, scale = ("GiB", 2**30) if self.packed_bytes >= 2**30 else ("MiB", 2**20)
        columns = ["strategy", "total s", "recv", "add", "offl.", "rebuild", "peak", "retained", "resv.", "pinned"]
        rows = []
        for sync in self.syncs:
            figures = [sync.seconds, sync.receiving, sync.adding, sync.offloading, sync.rebuilding]
            sizes = [sync.peak, sync.retained, sync.retained_reserved, sync.pinned + sync.pinned_by_torch]
            figures += [size / scale for size in sizes]
            rows.append([f"{sync.strategy} {sync.number}", *(f"{figure:.3f}" for figure in figures)])
        limit = f"{self.packed_bytes / self.link:.3f}"
        rows.append(["link limit", limit, "", "", "", f"{self.slot_copy:.3f}", "", "", "", ""])
        predicted = {name: f"{nbytes / scale:.4f}" for name, nbytes in self.predicted.items()}
        title = (
            f"{self.model}, {self.layers} layers, rank {self.rank}, {self.tensors} tensors on {self.device}; "
            f"seconds, then {unit}. "
            f"Packed {self.packed_bytes / scale:.4f} (predicted {predicted.get('packed_bytes', 'not')}), slots "
            f"{self.slot_bytes / scale:.4f} (predicted {predicted.get('slot_bytes', 'not')})"
            + "".join(f"; {strategy} left out: {reason}" for strategy, reason in self.skipped.items())
        )
        return title, columns, rows

    def plot(self, ax: Axes | None = None) -> Axes:
        """Bars by strategy, in seconds: first and last sync, and the rebuild."""
        return draw(self, ax)

    def _repr_html_(self) -> str:
        return html_table(*self.table())

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {**dataclasses.asdict(self), "tokens_equal": self.tokens_equal, "slots_equal": self.slots_equal}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Bench:
        """Read what `to_dict` gave, after JSON too; what it does not know is left out.

        Raises:
            ValueError: a field is missing, by name.
        """
        plain = _fields(cls, values)
        plain["syncs"] = tuple(Sync(**_fields(Sync, _present(sync))) for sync in values["syncs"])
        plain["repeats"] = tuple(Held(**_fields(Held, held)) for held in values.get("repeats", ()))
        return cls(**plain)


def is_bench(value: Mapping[str, Any]) -> bool:
    """Whether `Bench.from_dict` can read this."""
    return not _missing(Bench, value) and not any(_missing(Sync, _present(sync)) for sync in value["syncs"])


def by_rank(benches: Sequence[Bench]) -> tuple[str, list[str], list[list[str]]]:
    """Caption, columns and rows: one row for each bench and strategy, measured beside predicted; GiB and seconds.

    Of several syncs the last, but for "first sync", which pays for what is reserved and read once.
    """
    columns = ["rank", "strategy", "first sync, s", "sync, s", "add_lora, s", "rebuild, s", "GPU peak, GiB"]
    columns += ["GPU retained, GiB", "pinned by us, GiB", "registered, GiB", "by calculation, GiB", "slots, GiB"]
    columns += ["by calculation, GiB", "slots equal"]
    rows = []
    for bench in benches:
        predicted = [_gib(bench.predicted.get(name)) for name in ("packed_bytes", "slot_bytes")]
        equal = "yes" if bench.slots_equal else "NO"
        for strategy in dict.fromkeys(sync.strategy for sync in bench.syncs):
            first, *_, last = [sync for sync in bench.syncs if sync.strategy == strategy]
            seconds = [first.seconds, last.seconds, last.adding, last.rebuilding]
            sizes = [last.peak, last.retained, last.pinned, sum(last.held["registered"].values())]
            slots = _gib(sum(last.held["slots"].values()))
            row = [str(bench.rank), strategy, *(f"{one:.3f}" for one in seconds), *map(_gib, sizes)]
            rows.append([*row, predicted[0], slots, predicted[1], equal])
    one = benches[0]
    caption = f"{one.model}, {one.layers} layers, slots of rank {one.max_lora_rank}, on {one.device}"
    left_out = [
        f"; rank {bench.rank} by {strategy} left out: {reason}"
        for bench in benches
        for strategy, reason in bench.skipped.items()
    ]
    return caption + "".join(left_out), columns, rows


def _gib(nbytes: int | None) -> str:
    return "" if nbytes is None else f"{nbytes / 2**30:.4f}"


def _present(sync: Mapping[str, Any]) -> dict[str, Any]:
    """A sync as JSON has it, by the present names of its fields."""
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in sync.items()}
    return {_RENAMED.get(name, name): value for name, value in plain.items()}


def _fields(cls: type, values: Mapping[str, Any]) -> dict[str, Any]:
    if missing := _missing(cls, values):
        raise ValueError(f"this is no {cls.__name__}: it has no {', '.join(missing)}; write it with to_dict()")
    return {one.name: values[one.name] for one in dataclasses.fields(cls) if one.name in values}


def _missing(cls: type, values: Mapping[str, Any]) -> list[str]:
    needed = [one.name for one in dataclasses.fields(cls) if one.default is one.default_factory is dataclasses.MISSING]
    return [name for name in needed if name not in values]
