"""Tiny models, random adapters and whole scenarios, for tests, notebooks and benchmarks: all names of its rooms."""

from lora_mem.testing.adapters import *
from lora_mem.testing.engines import *
from lora_mem.testing.scenarios import *
