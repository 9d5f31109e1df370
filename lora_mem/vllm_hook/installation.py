"""The hook in this process: installed, uninstalled, and what it can tell of itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from lora_mem.sizing.options import Strategy
from lora_mem.sizing.units import gib
from lora_mem.staging.offload import Moved
from lora_mem.vllm_hook import compat, loading
from lora_mem.vllm_hook.live import bytes_by_device, registered_model
from lora_mem.vllm_hook.state import StagedAdapter, process


def install(strategy: Strategy = "stage") -> None:
    """Wrap vLLM's worker LoRA managers in this process. Calling it again changes the strategy and nothing else.

    Args:
        strategy: what becomes of an in-memory adapter. "stage" lays it out in pinned host memory as vLLM packs it,
            so that vLLM packs nothing and the GPU holds its slots only; "offload" lets vLLM pack it on the GPU and
            moves everything to the host once the slots hold it; "keep" leaves it on the GPU, as other loaders do. What
            another loader built on the GPU is moved to the host under "stage" and "offload".

    Raises:
        ValueError: an unknown strategy.
        RuntimeError: this vLLM lacks what the hook needs. Nothing was changed.
    """
    if strategy not in ("stage", "offload", "keep"):
        raise ValueError(f"strategy is {strategy!r}; allowed are 'stage', 'offload' and 'keep'")
    try:
        compat.check_managers()
    except RuntimeError as error:
        process.inactive_because = str(error)
        raise
    process.strategy, process.inactive_because = strategy, ""
    for cls, name, replacement in _patched():
        # A later vLLM may define a method on one class only; the other then inherits the wrapped one.
        if name in vars(cls):
            process.patches.put(cls, name, replacement)
    process.managers.update(compat.managers_alive())


def uninstall() -> None:
    """Put vLLM's own methods back and forget every staged adapter. Adapters that vLLM has registered stay.

    Do not use requests of ours any more: one with `load_inplace` makes vLLM look for a directory, and that error leaves
    its engine unable to go on.

    A method that someone else has wrapped since is left as it is, and our wrapper inside it does nothing any more;
    `status()` says so.
    """
    process.forget("uninstall() was called")


def _patched() -> list[tuple[type, str, Callable[..., Any]]]:
    """vLLM's functions that get one of ours in front, where a class defines them."""
    tables = [(cls, loading.OF_MANAGERS) for cls in compat.manager_classes()]
    tables.append((compat.adapter_manager_class(), loading.OF_ADAPTER_MANAGERS))
    return [(cls, name, replacement) for cls, table in tables for name, replacement in table.items()]


@dataclass(frozen=True)
class AdapterStatus:
    """One staged adapter.

    Attributes:
        laid_out: whether it lies in host memory as vLLM packs it; else vLLM packs it at each load.
        why_not_laid_out: the reason, or "".
        tensors: how many are kept: as received, or parts where it is laid out.
        staged_bytes: their bytes, by device.
        pinned: whether all of them are pinned.
        unpinned_because: why not, where they lie in a block; else "".
        predicted: bytes that the calculator said it takes laid out, before it came; None where it did not.
        not_predicted_because: why not: whole adapters are sized by their tensors, and not every model is known.
        filled: modules that were in vLLM's slot before its activation (`fill_slot`).
        why_not_filled: why the activation had to copy, or "".
        loaded: whether vLLM has this version registered.
        offload: what the last offload did, or None.
    """

    lora_int_id: int
    name: str
    version: int
    laid_out: bool
    why_not_laid_out: str
    tensors: int
    staged_bytes: dict[str, int]
    pinned: bool
    unpinned_because: str
    predicted: int | None
    not_predicted_because: str
    filled: int
    why_not_filled: str
    loaded: bool
    offload: Moved | None


@dataclass(frozen=True)
class HookStatus:
    """What `status()` found.

    Attributes:
        active: whether the hook handles requests in this process.
        inactive_because: why not, or "".
        strategy: what `install` was asked for.
        vllm_version: found in this process, or None where vLLM is not installed.
        in_tested_range: whether the tests ran against a release between `tested_vllm`'s two.
        wrapped: for each class or object of vLLM's that the hook patches, what became of each function: "wrapped";
            "wrapped, then wrapped by <who>", which still gets to ours; "wrapped, then replaced by <who>", which does
            not; both with "in an engine" where one engine's manager has a function of its own; "unwrapped, but inside
            <who>", where ours only passes calls on; "not wrapped"; "absent"; "inherits the wrapped one" or "inherits
            the unwrapped one".
        engines: worker LoRA managers alive in this process.
        adapters: staged in this process.
        free_block_bytes: host memory that no adapter uses now, kept for next versions; `trim` gives it back.
    """

    active: bool
    inactive_because: str
    strategy: Strategy
    vllm_version: str | None
    in_tested_range: bool
    tested_vllm: tuple[str, str]
    wrapped: dict[str, dict[str, str]] = field(default_factory=dict)
    engines: int = 0
    adapters: tuple[AdapterStatus, ...] = ()
    free_block_bytes: int = 0

    def __str__(self) -> str:
        """A line for the hook, one for each function of which ours is not what a call meets first, one an adapter."""
        state = "active" if self.active else f"inactive ({self.inactive_because})"
        lines = [f"lora_mem is {state}: strategy {self.strategy}, vLLM {self.vllm_version}, {self.engines} engines"]
        lines += [
            f"  {cls}.{name}: {found}"
            for cls, functions in self.wrapped.items()
            for name, found in functions.items()
            if self.active and found not in ("wrapped", "inherits the wrapped one", "absent")
        ]
        for one in self.adapters:
            where = ", ".join(f"{gib(size)} on {device}" for device, size in one.staged_bytes.items())
            lines.append(
                f"  adapter {one.lora_int_id} {one.name!r}, version {one.version}, "
                f"{'loaded' if one.loaded else 'not loaded'}: {where}, {'pinned' if one.pinned else 'not pinned'}"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def status() -> HookStatus:
    """Whether the hook is active in this process, on what, and if not why. Changes nothing and imports vLLM at most."""
    version = compat.vllm_version()
    places = [] if version is None else [(cls, name) for cls, name, _ in _patched()]
    wrapped: dict[str, dict[str, str]] = {}
    for owner, name in dict.fromkeys([*places, *((patch.owner, patch.name) for patch in process.patches)]):
        cls = owner if isinstance(owner, type) else type(owner)
        wrapped.setdefault(cls.__name__, {})[name] = process.patches.state(owner, name)
    for manager in process.managers:
        for name in vars(manager).keys() & loading.OF_MANAGERS.keys():
            wrapped.setdefault(type(manager).__name__, {})[name] = process.patches.instance_state(manager, name)
    because = process.inactive_because if version else "vllm is not installed: pip install 'lora-mem[vllm]'"
    return HookStatus(
        active=not because,
        inactive_because=because,
        strategy=process.strategy,
        vllm_version=version,
        in_tested_range=compat.in_tested_range(version),
        tested_vllm=compat.TESTED_VLLM,
        wrapped=wrapped,
        engines=len(process.managers),
        adapters=tuple(_status_of(stage) for stage in process.staged.values()),
        free_block_bytes=process.arena.free_bytes,
    )


def _status_of(stage: StagedAdapter) -> AdapterStatus:
    held, announced, fill, block = stage.held(), stage.announced, stage.fill, stage.block
    return AdapterStatus(
        lora_int_id=stage.lora_int_id,
        name=stage.name,
        version=stage.version,
        laid_out=bool(stage.parts),
        why_not_laid_out=stage.why_not_laid_out,
        tensors=len(held),
        staged_bytes=bytes_by_device(held),
        pinned=all(tensor.is_pinned() for tensor in held),
        unpinned_because=(block.unpinned_because or "") if block is not None else "",
        predicted=announced.predicted if announced is not None else None,
        not_predicted_because=announced.not_predicted_because if announced is not None else "",
        filled=0 if fill is None or fill.given_up_because else len(fill.filled),
        why_not_filled=stage.why_not_filled if fill is None else fill.given_up_because,
        loaded=any(registered_model(manager, stage.lora_int_id) in stage.models for manager in stage.loaded_in),
        offload=process.offloads.get(stage.lora_int_id),
    )
