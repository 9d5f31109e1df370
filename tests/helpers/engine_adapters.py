"""Adapters for the tests' engine."""

from __future__ import annotations

from lora_mem import testing

RANK = 8

LINEAR = testing.modules_named("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

ATTENTION = testing.modules_named("q_proj", "k_proj", "v_proj", "o_proj")


def adapter(manager, seed=1, rank=RANK, **options):
    return testing.random_adapter(manager, rank=rank, seed=seed, **options)


def chunks_of(tensors, size=5):
    names = list(tensors)
    for start in range(0, len(names), size):
        yield {name: tensors[name] for name in names[start : start + size]}
