"""Where adapters of one config lie in host memory, and how many bytes they take: as announced and as predicted."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import Any

from lora_mem.errors import AdapterError, SizingError
from lora_mem.sizing import footprints
from lora_mem.sizing.targets import targeted
from lora_mem.staging.layout import Announced, Layout, shared_parts
from lora_mem.vllm_hook.served import check_config, names_for, peft_helper, served_model
from lora_mem.vllm_hook.staged import StagedAdapter
from lora_mem.vllm_hook.state import process

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
