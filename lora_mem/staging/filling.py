"""Parts that are made use of while others still arrive."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import torch

from lora_mem.sizing.units import MOST_UNDER_WAY
from lora_mem.staging.layout import Part


class Filler:
    """Takes the parts of a module together, as soon as all of them have come: a slot is filled while they arrive.

    Parts are held until then: of one module, or of several whose parts together take `MOST_UNDER_WAY` bytes. Where
    modules come more mixed up than that, the oldest one is given up.

    Args:
        module_of: the module of each part that will come.

    Attributes:
        filled: the modules that `fill` made use of.
    """

    def __init__(self, module_of: Mapping[Part, str]) -> None:
        self.filled: set[str] = set()
        self._module_of = module_of
        self._parts_in = Counter(module_of.values())
        self._held: dict[str, dict[Part, torch.Tensor]] = {}
        self._bytes = 0

    def fill(self, module: str, parts: dict[Part, torch.Tensor]) -> bool:
        """Make use of a module's parts, on the GPU or in the block, the scaling in them; returns whether it did."""
        raise NotImplementedError

    def take(self, part: Part, value: torch.Tensor) -> None:
        """A part that has arrived as a whole; of no use where its module is not known."""
        module = self._module_of.get(part)
        if module is None:
            return
        held = self._held.setdefault(module, {})
        held[part] = value
        self._bytes += value.nbytes
        if len(held) == self._parts_in[module]:
            self._let_go(module)
            if self.fill(module, held):
                self.filled.add(module)
        while self._bytes > MOST_UNDER_WAY and len(self._held) > 1:
            self._let_go(next(iter(self._held)))

    def clear(self) -> None:
        """Let go of what is held."""
        self._held.clear()
        self._bytes = 0

    def _let_go(self, module: str) -> None:
        self._bytes -= sum(value.nbytes for value in self._held.pop(module).values())
