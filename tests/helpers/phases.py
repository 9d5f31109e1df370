"""Phases of a profile: their names, and what one costs."""

from __future__ import annotations

import time

import lora_mem


def names(profile):
    return [(phase.depth, phase.name) for phase in profile.phases]


def cost_of_a_phase(phases):
    """Seconds of an empty phase: the best of ten times so many."""
    profiler = lora_mem.profile()
    best = float("inf")
    with profiler:
        for _ in range(10):
            began = time.perf_counter()
            for _ in range(phases):
                with profiler.phase("empty"):
                    pass
            best = min(best, (time.perf_counter() - began) / phases)
    print(f"\na phase: {best * 1e6:.1f} us")
    return best
