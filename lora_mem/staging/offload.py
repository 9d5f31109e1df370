"""Move tensors that are on a GPU to host memory: values, strides and sharing kept, every GPU byte given back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lora_mem.sizing.units import aligned
from lora_mem.staging.pinned import HostBlock
from lora_mem.staging.tensors import copied, is_dense, view_key, without_repeats

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    Place = tuple[Any, Any]
    """Where a tensor is held: (dict or list, key or index), or (object, attribute name)."""


@dataclass(frozen=True)
class Moved:
    """What an offload did.

    Attributes:
        tensors: places whose tensor was replaced.
        copies: distinct host copies made; the other places held aliases.
        nbytes: bytes copied from the device to the host.
        unpinned_because: why the host copies are not pinned, or None where they are.
    """

    tensors: int = 0
    copies: int = 0
    nbytes: int = 0
    unpinned_because: str | None = None


class HostCopies:
    """One host copy for each distinct view of device memory, remembered across calls.

    Two tensors are the same view when device, address, dtype, shape and stride are equal; two different views of one
    storage get a copy each. The sources are kept alive until `close`, so that no address can be used twice.
    """

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}  # source and copy
        self._unpinned_because: str | None = None
        self._moved = 0
        self._nbytes = 0

    def of(self, tensors: Sequence[torch.Tensor], *, pin: bool, own: bool = False) -> list[torch.Tensor]:
        """The host copy of each tensor, in order; copies may still be under way until `close`.

        A tensor that is on the host already stays as it is, unless `pin` asks for pinned memory and it is not, or `own`
        for a copy whatever it is. All new copies of one call lie in one exactly sized block.

        Raises:
            OSError, OverflowError: the system has not that much memory.
        """
        stay = [t.device.type == "cpu" and not own and (not pin or t.is_pinned()) for t in tensors]
        keys = [None if stays else view_key(tensor) for tensor, stays in zip(tensors, stay, strict=True)]
        new = {key: t for t, key in zip(tensors, keys, strict=True) if key is not None and key not in self._copies}
        if new:
            sources = {key: without_repeats(tensor) for key, tensor in new.items()}
            block = HostBlock(sum(aligned(source.nbytes) for source in sources.values()), pin=pin)
            self._unpinned_because = self._unpinned_because or block.unpinned_because
            for key, source in sources.items():
                target = block.take(source.shape, source.dtype, source.stride() if is_dense(source) else None)
                _copy(target, source)
                # Factors that were expanded from one (stride 0) are copied once and expanded again.
                self._copies[key] = new[key], target.expand(new[key].shape)
                self._nbytes += source.nbytes
                copied.to_host += source.nbytes if source.is_cuda else 0
        self._moved += sum(key is not None for key in keys)
        return [tensor if key is None else self._copies[key][1] for tensor, key in zip(tensors, keys, strict=True)]

    def close(self) -> Moved:
        """Wait for the copies and let go of the sources."""
        for device in {source.device for source, _ in self._copies.values() if source.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        moved = Moved(self._moved, len(self._copies), self._nbytes, self._unpinned_because)
        self._copies.clear()
        return moved


def move_to_host(groups: Iterable[Sequence[Place]], *, pin: bool) -> Moved:
    """Replace the tensor at each place by a host copy, then give the device memory back.

    Args:
        groups: places whose memory should live and die together; each group's new copies share one block. A view that
            two groups share is copied for the first of them.
        pin: into pinned memory, where that is possible (`Moved.unpinned_because` says when it is not).

    Afterwards nothing here refers to device memory, the allocator's cache is empty, and pending CUDA IPC imports are
    closed: `torch.cuda.memory_allocated()` and `memory_reserved()` no longer count any of it. The caller must hold no
    other reference.
    """
    copies = HostCopies()
    try:
        for places in groups:
            hosts = copies.of([read_place(place) for place in places], pin=pin)
            for place, host in zip(places, hosts, strict=True):
                _write(place, host)
            del hosts
    finally:
        # Also when an allocation fails halfway: what was replaced must be complete before anyone reads it.
        moved = copies.close()
    if moved.copies:
        release_device_memory()
    return moved


def release_device_memory() -> None:
    """Give unused device memory back to the driver: close pending CUDA IPC imports, empty the allocator's cache."""
    if not torch.cuda.is_initialized():
        return
    torch.cuda.ipc_collect()
    torch.cuda.empty_cache()


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source, non_blocking=True)


def read_place(place: Place) -> torch.Tensor:
    """The tensor that is held there."""
    holder, key = place
    tensor: torch.Tensor = holder[key] if isinstance(holder, (dict, list)) else getattr(holder, key)
    return tensor


def _write(place: Place, tensor: torch.Tensor) -> None:
    holder, key = place
    if isinstance(holder, (dict, list)):
        holder[key] = tensor
    else:
        setattr(holder, key, tensor)
