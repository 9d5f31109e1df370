"""Whether an adapter may be staged: its id and name, and whether an engine of this process can serve it."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from lora_mem.errors import AdapterError
from lora_mem.sizing import rules
from lora_mem.sizing.peft_config import plain_config
from lora_mem.vllm_hook.live import registered_model
from lora_mem.vllm_hook.served import check_config, names_for, peft_helper, served_model
from lora_mem.vllm_hook.state import process


def admit(
    lora_int_id: Any, name: Any, adapter_config: Any, *, load_inplace: bool, fill_slot: Any
) -> tuple[int, str, dict[str, Any]]:
    """The id, the name and the config of an adapter that is to be staged.

    Raises:
        AdapterError: one of them is refused, or in use by another adapter.
        RuntimeError: the hook is not installed.
    """
    check_active()
    lora_int_id = integer_id(lora_int_id)
    if name is not None and not isinstance(name, str):
        raise AdapterError(f"name is {name!r}; it must be a string, or None")
    name = name or f"lora_mem-{lora_int_id}"
    check_not_in_use(lora_int_id, name, load_inplace=load_inplace)
    if not isinstance(fill_slot, bool):
        raise AdapterError(f"fill_slot is {fill_slot!r}; it must be True or False")
    return lora_int_id, name, plain_config(adapter_config)


def check_active() -> None:
    """Refuse to do anything while the hook is not installed."""
    if process.inactive_because:
        raise RuntimeError(
            f"the hook is not active in this process: {process.inactive_because}; call lora_mem.install() first"
        )


def integer_id(lora_int_id: Any) -> int:
    """An adapter's id, where it is one."""
    if not isinstance(lora_int_id, Integral) or isinstance(lora_int_id, bool) or not 1 <= int(lora_int_id) < 2**63:
        raise AdapterError(f"lora_int_id is {lora_int_id!r}; it must be an integer of 1 or more, below 2**63")
    return int(lora_int_id)


def check_not_in_use(lora_int_id: int, name: str, *, load_inplace: bool) -> None:
    """Refuse a name or, unless the adapter is to be replaced, an id that another adapter has."""
    how = "or pass load_inplace=True to replace it"
    if not load_inplace and lora_int_id in process.staged:
        taken_by = process.staged[lora_int_id].name
        raise AdapterError(f"lora_int_id {lora_int_id} is in use by {taken_by!r}: drop_adapter, {how}")
    if not load_inplace and any(registered_model(manager, lora_int_id) is not None for manager in engines()):
        raise AdapterError(
            f"lora_int_id {lora_int_id} is in use: vLLM has an adapter registered that is not staged here; take it out "
            f"with LLM.llm_engine.remove_lora({lora_int_id}), {how}"
        )
    for other in process.staged.values():
        if other.name == name and other.lora_int_id != lora_int_id:
            raise AdapterError(
                f"name {name!r} is in use by adapter {other.lora_int_id}; vLLM tells requests apart by name"
            )


def check_not_less(lora_int_id: int, config: dict[str, Any], names: frozenset[str], *, laid_out: bool) -> None:
    """Refuse a version that lacks what the one before had, by the same config: half a sync, as far as we can know."""
    before = process.staged.get(lora_int_id)
    if before is None or before.names is names or before.config != config or bool(before.parts) != laid_out:
        return
    missing = sorted(before.names - names)
    if missing:
        raise AdapterError(
            f"{len(missing)} tensors that the version before had are missing, {missing[0]} the first; send all of "
            f"them, correct the adapter_config, or drop_adapter({lora_int_id}) before"
        )


def engines() -> list[Any]:
    """The worker LoRA managers of this process that have started."""
    return [manager for manager in process.managers if hasattr(manager, "_adapter_manager")]


def only_engine(config: dict[str, Any]) -> tuple[Any, str]:
    """The one engine of this process, or None and why there is no such one."""
    managers = engines()
    if len(managers) != 1:
        return None, f"this process has {len(managers)} vLLM engines with LoRA, and it must have one"
    check_config(managers[0], config)
    if config.get("modules_to_save"):
        return None, "it has full modules (modules_to_save), which only vLLM itself loads; use stage_adapter"
    return managers[0], ""


def check_for_engines(tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> tuple[Any, str]:
    """Refuse an adapter that no engine of this process could serve.

    Returns the one engine that can, or None and why there is no such one.
    """
    refusals: list[AdapterError] = []
    managers = engines()
    able = []
    for manager in managers:
        try:
            check_for_manager(manager, tensors, config)
            able.append(manager)
        except AdapterError as error:
            refusals.append(error)
    if managers and not able:
        raise refusals[-1]
    if not managers:
        check_for_manager(None, tensors, config)
        return None, "no vLLM engine with LoRA in this process yet"
    if config.get("modules_to_save"):
        return None, "it has full modules (modules_to_save), which only vLLM itself loads"
    if len(able) > 1:
        return None, f"{len(able)} engines of this process could serve it"
    return able[0], ""


def check_for_manager(manager: Any, tensors: Mapping[str, torch.Tensor], config: dict[str, Any]) -> None:
    """Refuse an adapter that this worker cannot serve in full, or with None for it what no worker could."""
    helper = peft_helper(config) if manager is None else check_config(manager, config)
    names = names_for(None if manager is None else manager._adapter_manager.model, tensors, helper)
    shapes = {key: tuple(tensor.shape) for key, tensor in tensors.items()}
    served = None if manager is None else served_model(manager)
    rules.check(shapes, names.get, served, lambda module: int(helper.get_rank_and_scaling(module)[0])).require()
