"""Tiny models, random adapters and whole scenarios, for tests, notebooks and benchmarks."""
