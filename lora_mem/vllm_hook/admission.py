"""Whether an adapter may be staged, and where it will lie: its id and name, its engine, its layout and bytes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch

from lora_mem.errors import AdapterError, SizingError
from lora_mem.sizing import footprints, rules
from lora_mem.sizing.peft_config import plain_config
from lora_mem.sizing.targets import targeted
from lora_mem.staging.layout import Announced, Layout, shared_parts
from lora_mem.vllm_hook.live import registered_model
from lora_mem.vllm_hook.served import check_config, names_for, peft_helper, served_model
from lora_mem.vllm_hook.state import StagedAdapter, process


def admit(
    lora_int_id: Any, name: Any, adapter_config: Any, *, load_inplace: Any, fill_slot: Any
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
    for argument, value in (("load_inplace", load_inplace), ("fill_slot", fill_slot)):
        if not isinstance(value, bool):
            raise AdapterError(f"{argument} is {value!r}; it must be True or False")
    check_not_in_use(lora_int_id, name, load_inplace=load_inplace)
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
            f"lora_int_id {lora_int_id} is in use: vLLM has an adapter registered that is not staged here; remove it "
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


# Fields of a PEFT config that decide where an adapter's tensors go, and how many such layouts are remembered: each
# holds what was read from every tensor's name.
_SHAPING = (
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"),
    *("target_modules", "target_parameters", "modules_to_save"),
    *("exclude_modules", "layers_to_transform", "layers_pattern"),
)
MOST_LAYOUTS = 16


def layout_of(manager: Any, config: dict[str, Any]) -> Layout:
    """Where tensors of adapters of this config go in this worker; remembered, names are read once."""
    layouts = process.layouts.setdefault(manager, {})
    key = json.dumps([config.get(name) for name in _SHAPING], sort_keys=True)
    if key not in layouts:
        while len(layouts) >= MOST_LAYOUTS:
            del layouts[next(iter(layouts))]
        helper = peft_helper(config)
        model = manager._adapter_manager.model  # held by its layout, unlike the manager, by which that is remembered
        layouts[key] = Layout(
            served_model(manager), lambda names: names_for(model, names, helper), helper.get_rank_and_scaling
        )
    return layouts[key]


def announced(manager: Any, config: dict[str, Any]) -> Announced:
    """The parts of an adapter, by the modules that its config targets.

    Raises:
        AdapterError: none is named, or the calculator knows the model and says otherwise.
    """
    layout = layout_of(manager, config)
    if layout.announced is not None:
        return layout.announced
    served = served_model(manager)
    wanted = targeted(config)
    modules = [module for module in served.modules if wanted(module) and module not in served.aliases]
    if not modules:
        raise AdapterError(
            f"adapter_config['target_modules'] is {config['target_modules']!r}, which names no module that this model "
            "serves with LoRA; correct it, or pass nbytes"
        )
    # Where a layer's experts may come in two layouts, one is meant: PEFT writes the fused one for target_parameters.
    for layouts in (layer.complete for layer in served.experts.values()):
        if len(layouts) > 1:
            other = layouts[0] if config.get("target_parameters") else layouts[1]
            modules = [module for module in modules if module not in other]
    names = [f"base_model.model.{module}.lora_{factor}.weight" for module in modules for factor in "AB"]
    parts = layout.parts_of(names)
    nbytes = layout.bytes_of(parts)
    predicted, why_not = _predicted_bytes(manager, config)
    if predicted not in (None, nbytes):
        raise AdapterError(
            f"lora_mem.footprint predicts {predicted} bytes for target_modules {config['target_modules']!r} at "
            f"rank {config['r']}, but by its layers this engine will hold {nbytes}: the calculator is wrong about "
            f"this model, please report it; nbytes={nbytes} to open_stage goes by the engine"
        )
    layout.announced = Announced(parts, nbytes, why_not)
    with contextlib.suppress(AdapterError):  # what is announced may still be completed by what is not
        layout.check_complete(set(names))
    return layout.announced


def _predicted_bytes(manager: Any, config: dict[str, Any]) -> tuple[int | None, str]:
    """What the calculator says of the block of an adapter of this config, or why it says nothing."""
    from vllm.distributed import parallel_state

    adapters, lora_config = manager._adapter_manager, manager.lora_config
    targets = config["target_modules"]
    if isinstance(targets, str) and targets != "all-linear":
        return None, "target_modules is a regular expression"
    for name in ("exclude_modules", "layers_to_transform", "modules_to_save"):
        if config.get(name) not in (None, []):
            return None, f"the adapter_config has {name}, which the calculator does not know"
    if not hasattr(adapters.model.config, "to_dict"):
        return None, "the model has no config of transformers"
    try:
        if parallel_state.get_pp_group().world_size > 1:
            return None, "with pipeline parallelism a stage is sent its own layers only"
        fused = bool(config.get("target_parameters"))
        result = footprints.footprint(
            adapters.model.config.to_dict(),
            rank=config["r"],
            rank_pattern=config.get("rank_pattern") or None,
            target_modules=targets if isinstance(targets, str) else [*targets, *(["experts"] if fused else [])],
            max_lora_rank=lora_config.max_lora_rank,
            max_loras=lora_config.max_loras,
            max_cpu_loras=lora_config.max_loras,
            tensor_parallel_size=parallel_state.get_tp_group().world_size,
            data_parallel_size=parallel_state.get_dp_group().world_size,
            enable_expert_parallel=adapters._use_ep,
            fully_sharded_loras=lora_config.fully_sharded_loras,
            enable_mixed_moe_lora_format=adapters._enable_mixed_moe_lora_format,
            enable_moe_shared_loras=adapters._enable_moe_shared_loras,
            is_3d_lora_weight=fused if adapters._enable_mixed_moe_lora_format else None,
            lora_dtype=str(lora_config.lora_dtype).removeprefix("torch."),
            strategy="stage",
        )
    except SizingError as error:
        return None, f"the calculator does not size it: {error}"
    return result.host_pinned_bytes // lora_config.max_loras, ""


def check_fits(manager: Any, stage: StagedAdapter) -> None:
    """Refuse an adapter that was laid out for another engine, unless this one would have laid it out the same way."""
    check_config(manager, stage.config)
    layout = layout_of(manager, stage.config)
    wanted = {dataclasses.astuple(part) for part in layout.parts_of(stage.names)}
    layout.check_complete(stage.names)
    parts = {dataclasses.astuple(part) for part in stage.parts}
    dtype = next(iter(stage.parts.values())).dtype
    if wanted != parts or dtype != layout.dtype or (shared_parts(stage.parts) and not layout.served.share):
        raise AdapterError(
            f"adapter {stage.lora_int_id} ({stage.name}) was laid out in {dtype} for another engine of this process, "
            f"and this one takes it otherwise (in {layout.dtype}); stage it again"
        )
    stage.fits.add(manager)
