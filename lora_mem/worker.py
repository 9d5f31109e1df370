"""What a worker in a process of its own is asked through vLLM's `collective_rpc`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lora_mem import vllm_hook
from lora_mem.observe.measuring import measure

if TYPE_CHECKING:
    import torch
    from vllm.lora.request import LoRARequest


class WorkerExtension:
    """For `worker_extension_cls="lora_mem.WorkerExtension"`: staging, status and measuring in each worker.

    vLLM takes one extension class only. If you have one already, call `lora_mem.stage_adapter` and the others from it.
    """

    def lora_mem_stage_adapter(
        self,
        lora_int_id: int,
        tensors: Mapping[str, torch.Tensor] | bytes,
        adapter_config: Any,
        name: str | None = None,
        load_inplace: bool = False,
        fill_slot: bool = False,
    ) -> LoRARequest:
        """`stage_adapter` in this worker; installs the hook if needed.

        Between processes `collective_rpc` turns a dict's tensors into lists, and the returned request too: send
        `safetensors.torch.save(tensors)`, and make the request of the reply with `LoRARequest(*reply)`.
        """
        if not vllm_hook.status().active:
            vllm_hook.install()
        if isinstance(tensors, bytes):
            from safetensors.torch import load

            tensors = load(tensors)
        return vllm_hook.stage_adapter(
            lora_int_id, tensors, adapter_config, name, load_inplace=load_inplace, fill_slot=fill_slot
        )

    def lora_mem_drop_adapter(self, lora_int_id: int) -> bool:
        """`drop_adapter` in this worker."""
        return vllm_hook.drop_adapter(lora_int_id)

    def lora_mem_status(self) -> dict[str, Any]:
        """`status` of this worker, as plain values."""
        return vllm_hook.status().to_dict()

    def lora_mem_holders(self) -> list[dict[str, dict[str, int]]]:
        """`holders` of each LoRA manager in this worker."""
        return [vllm_hook.holders(manager) for manager in vllm_hook.live_managers()]

    def lora_mem_measure(self, lora_int_id: int | None = None) -> dict[str, Any]:
        """`measure` in this worker, as plain values for `Footprint.from_dict`."""
        return measure(None, lora_int_id).to_dict()
