"""Two workers in processes of their own: an adapter sent to each, against the same one from a directory."""

from __future__ import annotations

import json
import os
import sys
import tempfile

from lora_mem import WorkerExtension


class Extension(WorkerExtension):
    """The hook's own, and what the test looks at."""

    def digests(self):
        from lora_mem import testing

        return testing.slot_digests()

    def random(self, seed):
        from safetensors.torch import save

        from lora_mem import testing

        tensors, config = testing.random_adapter(rank=8, seed=seed)
        return save(tensors), config


def main() -> None:
    from safetensors.torch import load
    from vllm.lora.request import LoRARequest

    from lora_mem import footprint, testing
    from lora_mem.sizing.footprints import Footprint

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens", "lm_head"]
    common = {"rank": 8, "max_lora_rank": 16, "tensor_parallel_size": 2, "strategy": "stage"}
    predicted = footprint(testing.TINY_DENSE, target_modules=names, **common)
    with tempfile.TemporaryDirectory() as directory:
        llm = testing.start_engine(
            testing.write_model(f"{directory}/model", testing.TINY_DENSE),
            tensor_parallel_size=2,
            worker_extension_cls="two_workers.Extension",
        )
        payload, config = llm.collective_rpc("random", args=(1,))[0]
        path = testing.save_adapter(f"{directory}/adapter", load(payload), config)
        expected = testing.generate(llm, LoRARequest("directory", 9, path))
        slots = llm.collective_rpc("digests")
        llm.llm_engine.remove_lora(9)
        replies = llm.collective_rpc("lora_mem_stage_adapter", args=(1, payload, config))
        reply = replies[0]
        request = reply if isinstance(reply, LoRARequest) else LoRARequest(*reply)
        found = testing.generate(llm, request)
        found_slots = llm.collective_rpc("digests")
        result = {
            "workers": len(replies),
            "equal": found == expected,
            "slots_equal": found_slots == slots,
            "workers_differ": slots[0] != slots[1],
            "loaded": [status["adapters"][0]["loaded"] for status in llm.collective_rpc("lora_mem_status")],
            "laid_out": [status["adapters"][0]["laid_out"] for status in llm.collective_rpc("lora_mem_status")],
            "differences": [
                predicted.compare(Footprint.from_dict(plain)).difference
                for plain in llm.collective_rpc("lora_mem_measure")
            ],
        }
        # The next version, put into each worker's slot as it arrives.
        payload, config = llm.collective_rpc("random", args=(2,))[0]
        reply = llm.collective_rpc("lora_mem_stage_adapter", args=(1, payload, config, None, True, True))[0]
        llm.llm_engine.add_lora(reply if isinstance(reply, LoRARequest) else LoRARequest(*reply))
        filled = llm.collective_rpc("digests")
        result["filled"] = [status["adapters"][0]["filled"] for status in llm.collective_rpc("lora_mem_status")]
        result["dropped"] = llm.collective_rpc("lora_mem_drop_adapter", args=(1,))
        path = testing.save_adapter(f"{directory}/next", load(payload), config)
        llm.llm_engine.add_lora(LoRARequest("next", 9, path))
        result["filled_equal"] = llm.collective_rpc("digests") == filled != found_slots
    print(json.dumps(result), flush=True)
    sys.stdout.flush()
    os._exit(0)  # vLLM's workers need not be waited for


if __name__ == "__main__":
    main()
