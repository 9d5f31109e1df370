"""An adapter is staged: all at once, or received tensor by tensor."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

import torch

from lora_mem.errors import AdapterError, compact
from lora_mem.staging import offload
from lora_mem.staging.layout import Part, shared_parts
from lora_mem.staging.receiving import Receiver
from lora_mem.staging.tensors import check_tensors
from lora_mem.vllm_hook import compat
from lora_mem.vllm_hook.admission import (
    admit,
    announced,
    check_for_engines,
    check_not_in_use,
    check_not_less,
    engines,
    layout_of,
    only_engine,
)
from lora_mem.vllm_hook.blocks import forget, keep
from lora_mem.vllm_hook.served import check_config
from lora_mem.vllm_hook.slots import NoSlot, SlotFill
from lora_mem.vllm_hook.state import StagedAdapter, process

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

SCHEME = "lora-mem://"
"""A request of ours has this in place of a directory: `lora-mem://<lora_int_id>/<version>`.

vLLM hashes a request's name and path into its prefix cache, so a new version never meets the old one's KV blocks; an
old request, used again, would run the new weights on the old blocks.
"""


def stage_adapter(
    lora_int_id: int,
    tensors: Mapping[str, torch.Tensor],
    adapter_config: Any,
    name: str | None = None,
    *,
    load_inplace: bool = False,
    check_finite: bool = False,
    fill_slot: bool = False,
) -> LoRARequest:
    """Stage an adapter from memory; give the returned request to `LLM.generate` or `add_lora`.

    To be called in the process of vLLM's worker: in your own with `VLLM_ENABLE_V1_MULTIPROCESSING=0` and one GPU, else
    through `collective_rpc` and a worker extension (`lora_mem.WorkerExtension`), in every worker.

    Args:
        lora_int_id: 1 or more; must not be in use, unless `load_inplace`.
        tensors: by PEFT's names, `base_model.model.<module>.lora_A.weight`; A `[r, in]`, B `[out, r]`; floating point;
            on a GPU or the host. Copied at once by "stage"; kept, not copied, by "offload" and "keep": do not write to
            them until the adapter is dropped. There, on a host with a GPU, ordinary host memory is copied into
            pinned memory at once; pinned tensors are taken as they are.
        adapter_config: PEFT's `adapter_config.json` as a dict, or an object such as `peft.LoraConfig`.
        name: vLLM's `lora_name`; unique among staged adapters. Default: `lora_mem-<id>`.
        load_inplace: replace the adapter that has this id; vLLM loads it once, when the returned request is first used.
            Until then requests that run go on with the version that is loaded.
        check_finite: refuse NaN and Inf, and what the cast to the slots' dtype would make Inf; reads every value.
        fill_slot: as for `open_stage`; of no effect where vLLM has to pack the adapter.

    Raises:
        AdapterError: the adapter is refused and nothing has changed, neither vLLM's state nor what was staged. Tells
            which names, values or shapes are wrong and what is allowed.
        RuntimeError: the hook is not installed.
    """
    how: dict[str, Any] = {"load_inplace": load_inplace}
    lora_int_id, name, config = admit(lora_int_id, name, adapter_config, fill_slot=fill_slot, **how)
    managers = engines()
    check_tensors(tensors, check_finite=check_finite, cast_to={one.lora_config.lora_dtype for one in managers})
    own = {key: tensor.detach() for key, tensor in tensors.items()}
    manager, why_not = managers[0] if len(managers) == 1 else None, ""
    if manager is not None:
        check_config(manager, config)
    # What was found complete in the last sync needs no second look at its names; shapes are checked on arrival.
    if manager is None or not layout_of(manager, config).knows(own):
        manager, why_not = check_for_engines(own, config)
    if process.strategy != "stage":
        why_not = f"the strategy is {process.strategy!r}"
    if not why_not and manager is not None:
        try:
            layout = layout_of(manager, config)
            nbytes = layout.exact_nbytes(own)
        except AdapterError as error:
            why_not = str(error)
        else:
            if fill_slot:
                how |= {"fill_slot": True, "parts": layout.parts_of(own)}
            with Stage(lora_int_id, name, config, manager, nbytes, **how) as stage:
                stage.add_all(own)
                return stage.commit()
    check_not_less(lora_int_id, config, frozenset(own), laid_out=False)
    adapter = _as_received(StagedAdapter(lora_int_id, name, config, tensors=own, why_not_laid_out=why_not))
    if fill_slot:
        adapter.why_not_filled = f"vLLM has to pack it: {why_not}"
    return _enter(adapter, load_inplace, fused=any(".experts.base_layer." in key for key in own))


def _as_received(adapter: StagedAdapter) -> StagedAdapter:
    """Make an adapter that is not laid out independent of the caller's tensors, as far as the strategy promises it.

    "stage" reads everything. Otherwise GPU tensors stay the caller's, since a copy of them would be a second adapter on
    the GPU, and what is copied to pinned memory is ordinary host memory.
    """
    own, pin, everything = adapter.tensors, compat.pins_memory(), process.strategy == "stage"
    adapter.names = frozenset(own)
    if everything or pin:
        copies = offload.HostCopies()
        keys = [key for key, tensor in own.items() if everything or tensor.device.type == "cpu"]
        own.update(zip(keys, copies.of([own[key] for key in keys], pin=pin, own=everything), strict=True))
        copies.close()
    return adapter


def open_stage(
    lora_int_id: int,
    adapter_config: Any,
    name: str | None = None,
    *,
    nbytes: int | None = None,
    load_inplace: bool = False,
    generations: int = 2,
    fill_slot: bool = False,
) -> Stage:
    """Receive an adapter tensor by tensor or chunk by chunk, straight into host memory laid out as vLLM packs it.

        with lora_mem.open_stage(1, config) as stage:
            for chunk in transport:
                stage.add_all(chunk)          # a dict; the chunk's memory is free when this returns
            request = stage.commit()

    Leaving the block by an exception aborts: what was received is dropped, and what was staged, registered and active
    under this id before still is. To be called in the process of vLLM's worker, as `stage_adapter`.

    Args:
        lora_int_id: 1 or more; must not be in use, unless `load_inplace`.
        adapter_config: PEFT's, as for `stage_adapter`; says which modules will come (`target_modules`), at which rank.
        name: vLLM's `lora_name`. Default: `lora_mem-<id>`.
        nbytes: bytes of the laid-out adapter, where `target_modules` does not tell. More than that is refused when it
            arrives, less at `commit`.
        load_inplace: replace the adapter that has this id, at the request's next step.
        generations: 2 receives the new version while the old one is registered, in a second block of host memory. 1
            takes one block only: the old version is dropped first, here and in vLLM, so that until `commit` there is no
            adapter of this id, and none if the stage is aborted.
        fill_slot: put each module into vLLM's slot as soon as all of it has come, so that the activation, which
            else copies the whole adapter back over the link, has nothing left to copy. Into a free slot, or else into
            that of the adapter's last version, which leaves it meanwhile and stays registered: a step that asks for it
            finds it put back, as does whoever aborts, and the activation copies as ever. For an engine that runs no
            step in another thread while chunks arrive. What waits for the rest of its module takes as much
            of the GPU as that module at most, or 136 MiB where that is more; modules whose tensors do not come close
            together are left to the activation. `status()` says what became of it.

    Raises:
        AdapterError: the id, the name or the config is refused, another stage of this id is open, or no engine of this
            process can receive it.
        RuntimeError: the hook is not installed.
    """
    how: dict[str, Any] = {"load_inplace": load_inplace, "fill_slot": fill_slot}
    lora_int_id, name, config = admit(lora_int_id, name, adapter_config, **how)
    manager, why_not = only_engine(config)
    if manager is None:
        raise AdapterError(f"cannot receive an adapter in parts: {why_not}")
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 1):
        raise AdapterError(f"nbytes is {nbytes!r}; it must be a positive integer, or None to go by target_modules")
    if generations not in (1, 2) or isinstance(generations, bool):
        raise AdapterError(f"generations is {generations!r}; it must be 1 or 2")
    return Stage(lora_int_id, name, config, manager, nbytes, generations=generations, **how)


class Stage:
    """An adapter under way; made by `open_stage`."""

    def __init__(
        self,
        lora_int_id: int,
        name: str,
        config: dict[str, Any],
        manager: Any,
        nbytes: int | None,
        *,
        load_inplace: bool,
        generations: int = 2,
        fill_slot: bool = False,
        parts: frozenset[Part] = frozenset(),
    ) -> None:
        if lora_int_id in process.open_stages:
            raise AdapterError(f"a stage of adapter {lora_int_id} is open already; commit or leave it first")
        for other_id, other in process.open_stages.items():
            if other.name == name:
                raise AdapterError(f"name {name!r} is in use by the open stage of adapter {other_id}")
        self.lora_int_id: int = lora_int_id
        self.name: str = name
        self._adapter = StagedAdapter(lora_int_id, name, config)
        self._load_inplace = load_inplace
        self._manager = manager
        self._layout = layout_of(manager, config)
        # By bytes only where the caller gives them, else by the modules that the config names.
        if nbytes is None:
            found = self._adapter.announced = announced(manager, config)
            self._announced: int = found.nbytes
            # As the last version's experts did, this one's will share what they shared.
            nbytes = self._layout.bytes_of(found.parts, self._layout.shared)
            parts = parts or found.parts
        else:
            self._announced = nbytes
        old = process.staged.get(lora_int_id) if generations == 1 else None
        # The old version's own block, or one that is there before the old version goes.
        if old is not None and old.block is not None and old.block.nbytes == nbytes:
            old = None
            forget(lora_int_id)
        try:
            self._block = process.arena.take(nbytes, pin=compat.pins_memory())
        except MemoryError as error:
            raise AdapterError(str(error)) from None
        if old is not None:
            del old
            forget(lora_int_id)
        self._fill = self._open_fill(parts) if fill_slot else None
        self._receiver: Receiver | None = Receiver(self._layout, self._block, self._announced, self._fill)
        self._failed = ""
        process.open_stages[lora_int_id] = self

    def _open_fill(self, parts: frozenset[Part]) -> SlotFill | None:
        if not parts:
            self._adapter.why_not_filled = "by nbytes alone nobody knows which parts will come"
            return None
        try:
            return SlotFill(self._manager, self.lora_int_id, int(self._adapter.config["r"]), parts)
        except NoSlot as error:
            self._adapter.why_not_filled = str(error)
            return None

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """One tensor, by its PEFT name; see `add_all`, which is faster for many."""
        self.add_all({name: tensor})

    def add_all(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """A chunk: any of the adapter's tensors, in any order, on a GPU or the host, views and aliases too.

        When this returns the tensors have been read, or will be before any work that the current stream is given from
        now on: their memory may be written to on that stream, or freed. Experts of one projection that come in one
        chunk cross the link together; a factor that all experts share crosses it once.

        Raises:
            AdapterError: see `Receiver.add_all`. What had been taken of the chunk by then cannot be told any more, so
                that the stage is of no more use.
        """
        receiver = self._receiving()
        if not isinstance(tensors, Mapping):
            raise AdapterError(f"tensors is a {type(tensors).__name__}; it must be a dict of PEFT names to tensors")
        try:
            receiver.add_all(tensors)
        except BaseException as error:
            self._failed = str(error) or type(error).__name__
            raise

    @property
    def waited(self) -> float:
        """Seconds so far that adding was held up by copies to the host."""
        return self._receiving().waited

    def finish(self) -> None:
        """Wait for the copies and check that nothing is missing, as `commit` does first."""
        self._receiving().finish()

    def commit(self) -> LoRARequest:
        """Wait for the copies, check that nothing is missing, and stage the adapter; returns the request to use.

        Raises:
            AdapterError: a factor or an expert is missing, or less arrived than was announced. The stage stays open.
        """
        receiver = self._receiving()
        # Since the stage was opened vLLM may have got another adapter under this id or name.
        check_not_in_use(self.lora_int_id, self.name, load_inplace=self._load_inplace)
        receiver.finish()
        shared = shared_parts(receiver.parts)
        self._check_announced(receiver.parts.keys(), shared)
        check_not_less(self.lora_int_id, self._adapter.config, self._layout.checked, laid_out=True)
        if self._block.used < self._block.nbytes:
            self._block.shrink()  # experts that share a factor need less than was announced
        self._layout.shared = shared
        adapter = self._adapter
        adapter.names = self._layout.checked
        adapter.fits.add(self._manager)
        adapter.parts = receiver.parts
        adapter.block = self._block
        adapter.from_device = receiver.from_device
        self._close_fill(receiver.parts.keys())
        keep(self._block, adapter.models)
        adapter.models.add(adapter)
        self._receiver = None
        del process.open_stages[adapter.lora_int_id], self._adapter, self._block
        return _enter(adapter, self._load_inplace, fused=receiver.fused)

    def _check_announced(self, parts: Collection[Part], shared: frozenset[Part]) -> None:
        """Refuse other parts than the config announced, or where it was not asked, another number of bytes."""
        arrived, announced, missing = self._layout.bytes_of(parts), self._adapter.announced, list[str]()
        if announced is None:
            as_said = self._announced in (arrived, self._layout.bytes_of(parts, shared))
        else:
            as_said = announced.parts == parts
            missing = sorted({part.module for part in announced.parts.difference(parts)})
        if not as_said:
            which = f" (nothing for {', '.join(compact(missing))})" if missing else ""
            raise AdapterError(
                f"{self._announced} bytes were announced (by nbytes, or target_modules "
                f"{self._adapter.config['target_modules']!r}), but {arrived} arrived{which}; add what is missing, "
                f"correct the adapter_config, or pass nbytes={arrived} to open_stage"
            )

    def abort(self) -> None:
        """Drop what was received; what was staged under this id before stays. Does nothing after `commit`."""
        if self._receiver is None:
            return
        self._receiver.abort()
        self._receiver = None
        keep(self._block, weakref.WeakSet())
        del process.open_stages[self.lora_int_id], self._adapter, self._block
        if self._fill is not None:
            self._fill.abort()
            self._fill = None

    def _close_fill(self, parts: Collection[Part]) -> None:
        """Leave the filled slot to the adapter's activation."""
        fill, self._fill = self._fill, None
        if fill is None:
            return
        fill.wait()
        if fill.parts != parts:
            fill.give_up("other parts came than were announced")
        elif not fill.filled:
            fill.give_up("no module came whole and close together (experts in several chunks or scalings do not)")
        self._adapter.fill = fill

    def __enter__(self) -> Stage:
        """The stage."""
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Abort, unless committed."""
        committed = self._receiver is None
        self.abort()
        if kind is None and not committed:
            raise AdapterError(f"the stage of adapter {self.lora_int_id} was left without commit(); aborted")

    def _receiving(self) -> Receiver:
        if self._receiver is None:
            raise AdapterError(f"the stage of adapter {self.lora_int_id} is closed; open another one")
        if self._failed:
            raise AdapterError(
                f"the stage of adapter {self.lora_int_id} cannot be used after a failed add ({self._failed}); "
                "leave it and open another one"
            )
        return self._receiver


def _enter(stage: StagedAdapter, load_inplace: bool, *, fused: bool) -> LoRARequest:
    """Make a complete adapter the staged one of its id; `fused` where one tensor holds the factors of all experts."""
    from vllm.lora.request import LoRARequest

    before = process.staged.get(stage.lora_int_id)
    if before is not None:
        stage.registered_in |= before.registered_in
        before.models.discard(before)
    stage.path = f"{SCHEME}{stage.lora_int_id}/{stage.version}"
    process.staged[stage.lora_int_id] = stage
    process.offloads.pop(stage.lora_int_id, None)
    return LoRARequest(
        lora_name=stage.name,
        lora_int_id=stage.lora_int_id,
        lora_path=stage.path,
        load_inplace=load_inplace,
        is_3d_lora_weight=fused,
    )
