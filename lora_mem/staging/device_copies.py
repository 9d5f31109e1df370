"""Copies from GPU to host memory, beside the work of the current stream."""

from __future__ import annotations

import time
from collections import deque

import torch

from lora_mem.sizing.units import allowed_under_way
from lora_mem.staging.tensors import copied


class DeviceCopies:
    """Copies from device memory of our own to the host, on a stream of their own, with a bounded amount under way.

    Attributes:
        waited: seconds spent waiting for copies.
    """

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._bytes = 0
        self.waited = 0.0
        self._worked_on: dict[torch.device, torch.cuda.Stream] = {}
        self._also: set[torch.device] = set()

    def make_room(self, nbytes: int) -> None:
        """Let go of what has arrived on the host; wait while `nbytes` more of device memory would be too much."""
        most = allowed_under_way(nbytes)
        while self._under_way and (self._bytes + nbytes > most or self._under_way[0][0].query()):
            self._wait_for_oldest()

    def start(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy once the current stream's work on `source` is done."""
        device = source.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        stream.wait_stream(self._current_stream(device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
        # Held until the copy is done: the allocator would hand the memory to the current stream's next tensor.
        self._under_way.append((stream.record_event(), source))
        self._bytes += source.nbytes
        copied.to_host += source.nbytes

    def also_wait_for(self, device: torch.device) -> None:
        """Copies were issued on the current stream of a device."""
        self._current_stream(device)
        self._also.add(device)

    def finish(self) -> None:
        """Wait for all copies."""
        while self._under_way:
            self._wait_for_oldest()
        for device in self._also:
            self._worked_on[device].synchronize()
        self._also.clear()

    def _current_stream(self, device: torch.device) -> torch.cuda.Stream:
        """The current stream, which comes after the one that was current before, where that was another."""
        current = torch.cuda.current_stream(device)
        before = self._worked_on.setdefault(device, current)
        if before == current:
            return current
        current.wait_stream(before)
        self._worked_on[device] = current
        return current

    def _wait_for_oldest(self) -> None:
        event, source = self._under_way.popleft()
        began = time.perf_counter()
        event.synchronize()
        self.waited += time.perf_counter() - began
        self._bytes -= source.nbytes
