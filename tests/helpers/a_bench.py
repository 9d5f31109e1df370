"""A bench as if it had been measured."""

from __future__ import annotations

from lora_mem.observe.results import Bench, Sync

GIB = 2**30


def bench(rank: int = 64, **changes: object) -> Bench:
    sync = Sync(
        strategy="stage",
        number=1,
        seconds=1.25,
        transport=0.5,
        receiving=0.25,
        adding=0.125,
        offloading=0.0,
        rebuilding=0.0625,
        python=20.0,
        peak=GIB // 4,
        retained=0,
        retained_reserved=0,
        pinned=2 * GIB,
        pinned_by_torch=GIB // 2,
        held={"slots": {"cuda:0": 3 * GIB}, "registered": {"cpu": GIB}, "staged": {}},
        tokens=(1, 2),
        rebuilt_tokens=(1, 2),
        slots="0a",
        rebuilt_slots="0a",
    )
    values = {
        "device": "a GPU",
        "versions": {},
        "model": "a model",
        "layers": 2,
        "rank": rank,
        "max_lora_rank": 64,
        "tensors": 12,
        "packed_bytes": GIB,
        "predicted": {"packed_bytes": GIB, "slot_bytes": 3 * GIB + 1},
        "slot_bytes": 3 * GIB,
        "reserving": 0.5,
        "link": 1e9,
        "streamed": 1e9,
        "slot_copy": 0.1,
        "syncs": (sync, sync),
        "skipped": {"keep": "no room"},
    }
    return Bench(**{**values, **changes})
