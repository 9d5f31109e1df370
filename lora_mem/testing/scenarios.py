"""Scenarios: a real vLLM engine with dummy weights, adapters made for it, and what one adapter's life costs by phase.

Each is an example, a test and a notebook's source at once. On a GPU run each in a process of its own.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from lora_mem import vllm_hook
from lora_mem.observe import profiles
from lora_mem.observe.profiler import phase, profile
from lora_mem.observe.profiles import Profile
from lora_mem.observe.watching import Watch, memory_and_peak, watched
from lora_mem.sizing.modules import Experts
from lora_mem.sizing.rules import ServedModule
from lora_mem.sizing.shapes import ModelShape

if TYPE_CHECKING:
    from vllm.lora.lora_model import LoRAModel


TINY_DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
"""A dense model of 3 million parameters: vLLM's CPU engine serves it with LoRA."""

TINY_MOE: dict[str, Any] = {
    **TINY_DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""The same with 16 routed experts a layer: LoRA on experts needs a GPU."""

QWEN3_30B_A3B: dict[str, Any] = {
    **TINY_MOE,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
}
"""The geometry of Qwen/Qwen3-30B-A3B."""

PROMPT = list(range(3, 27))

_DIGEST_CHUNK = 2**24
"""Elements at a time: half a GiB of working memory."""


def experts_at_hand() -> dict[str, Any]:
    """What notebooks pack and move: Qwen3-30B-A3B's geometry, whole on a GPU, else 2 layers of 16 experts of it."""
    return (
        dict(QWEN3_30B_A3B)
        if torch.cuda.is_available()
        else QWEN3_30B_A3B | {"num_hidden_layers": 2, "num_experts": 16}
    )


def engine_at_hand() -> dict[str, Any]:
    """What notebooks serve: Qwen3-30B-A3B's geometry on a GPU, else a tiny dense model, as vLLM's CPU engine takes."""
    return dict(QWEN3_30B_A3B if torch.cuda.is_available() else TINY_DENSE)


def device_at_hand() -> str:
    """Where adapters arrive: "cuda", or "cpu" without a GPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def write_model(directory: str | Path, config: dict[str, Any]) -> str:
    """A model directory that holds a config.json only: vLLM makes the weights (`load_format="dummy"`)."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def start_engine(model: str, **options: Any) -> Any:
    """A vLLM engine in this process, on the GPU where there is one, with dummy weights and LoRA.

    Args:
        model: directory with a config.json.
        options: for `vllm.LLM`, over the defaults here.
    """
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker in this process, where the hook is
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if not torch.cuda.is_available():
        # Log-probabilities go through torch.compile, also in an eager engine: it needs a C++ compiler, and seconds.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        torch.set_num_threads(1)  # for a model this small, several threads mostly wait for each other
    from vllm import LLM

    defaults: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "enable_lora": True,
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": 16,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "dtype": "bfloat16",
        "disable_log_stats": True,
    }
    if torch.cuda.is_available():
        # One backend on every NVIDIA GPU, so that a run can be repeated elsewhere.
        defaults |= {"attention_backend": "TRITON_ATTN", "moe_backend": "triton", "gpu_memory_utilization": 0.3}
    with vllm_hook.lively_weights():
        return LLM(model, **(defaults | options))


def only_manager() -> Any:
    """The worker LoRA manager of the one engine of this process."""
    managers = vllm_hook.live_managers()
    if len(managers) != 1:
        raise RuntimeError(
            f"expected one engine with LoRA in this process, found {len(managers)}; call install() first"
        )
    return managers[0]


def random_adapter(
    manager: Any,
    *,
    rank: int,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    alpha: float | None = None,
    wanted: Callable[[str], bool] = lambda module: True,
    **config: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Random factors, by PEFT's names, for the modules that an engine serves with LoRA, and the adapter's config.

    Args:
        manager: the engine's worker LoRA manager.
        rank: of every module.
        seed: of the values.
        device: where to make them.
        dtype: of the factors.
        alpha: `lora_alpha`; default 2 * rank, so that the scaling is not 1.
        wanted: which modules, by their name in the model.
        config: more fields of PEFT's config.
    """
    served = vllm_hook.served_model(manager)
    factor = _factors(seed, device, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for module, takes in served.modules.items():
        if not wanted(module) or takes.in_features is None or takes.out_features is None:
            continue
        a, b = factor_shapes(takes, rank)
        embedding = module.rpartition(".")[2] == "embed_tokens"
        prefix = f"base_model.model.{module}."
        tensors[prefix + ("lora_embedding_A" if embedding else "lora_A.weight")] = factor(a)
        tensors[prefix + ("lora_embedding_B" if embedding else "lora_B.weight")] = factor(b)
    return tensors, _adapter_config(tensors, rank, alpha, config)


def experts_adapter(
    shape: ModelShape,
    *,
    rank: int,
    seed: int,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    alpha: float | None = None,
    **config: Any,
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Random factors for a model's routed experts, by PEFT's names, and the adapter's config: without an engine.

    Arguments as for `random_adapter`.

    Raises:
        ValueError: an expert layer that is not gated.
    """
    factor = _factors(seed, device, dtype)
    tensors: dict[str, torch.Tensor] = {}
    for path, module in shape.modules():
        if not isinstance(module, Experts):
            continue
        if module.layout != "gated":
            raise ValueError(f"the experts of {path} are {module.layout}; here they must be gated")
        for expert in range(module.num_experts):
            for index, child in enumerate(module.children):  # w1, w2, w3
                sizes = (module.hidden_size, module.intermediate_size)
                inputs, outputs = reversed(sizes) if index == 1 else sizes
                name = f"base_model.model.{path}.{expert}.{child}"
                tensors[f"{name}.lora_A.weight"] = factor((rank, inputs))
                tensors[f"{name}.lora_B.weight"] = factor((outputs, rank))
    return tensors, _adapter_config(tensors, rank, alpha, config)


def _factors(seed: int, device: str | torch.device, dtype: torch.dtype) -> Callable[[tuple[int, ...]], torch.Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)

    def factor(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).mul_(0.05).to(dtype)

    return factor


def _adapter_config(
    tensors: dict[str, torch.Tensor], rank: int, alpha: float | None, more: dict[str, Any]
) -> dict[str, Any]:
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank if alpha is None else alpha, "bias": "none"}
    targets = sorted({name.split(".lora_")[0].rpartition(".")[2] for name in tensors})
    return {**plain, "target_modules": targets, **more}


def factor_shapes(takes: ServedModule, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of A and B for a module that says what it takes."""
    assert takes.in_features is not None
    assert takes.out_features is not None
    a, b = (takes.experts * rank, takes.in_features), (takes.out_features, takes.experts * rank)
    if takes.stacked is None:
        return a, b
    return (takes.stacked[0][0], *a), (takes.stacked[1][0], *b)


def save_adapter(directory: str | Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> str:
    """Write an adapter as PEFT does, for vLLM's own loader."""
    from safetensors.torch import save_file

    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    # clone: safetensors refuses tensors that share memory
    save_file({name: t.cpu().clone().contiguous() for name, t in tensors.items()}, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps(config))
    return str(path)


def generate(llm: Any, request: Any, max_tokens: int = 8) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities for a fixed prompt."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=0, detokenize=False, ignore_eos=True)
    output = llm.generate({"prompt_token_ids": PROMPT}, sampling, lora_request=request, use_tqdm=False)[0].outputs[0]
    tokens = list(output.token_ids)
    return tokens, [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]


def slot_digests(manager: Any) -> dict[str, int]:
    """A 64-bit digest of the bits of each slot buffer: equal digests, equal slots."""
    return {
        f"{module}.{name}": digest(buffer)
        for module, layer in vllm_hook.lora_layers(manager).items()
        for name, buffer in vllm_hook.slot_buffers(layer).items()
    }


def one_digest(digests: dict[str, int]) -> str:
    """One digest for all buffers, in hexadecimal."""
    return f"{sum(digests.values()) % 2**64:016x}"


def digest(tensor: torch.Tensor) -> int:
    """A 64-bit digest of a contiguous tensor's bits and their order, computed where the tensor is."""
    bits = tensor.contiguous().view(-1).view(torch.int16 if tensor.element_size() == 2 else torch.int32)
    total = 0
    for start in range(0, bits.numel(), _DIGEST_CHUNK):
        part = bits[start : start + _DIGEST_CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64)
        # Odd multipliers keep every bit; int64 overflow wraps.
        total += int(((part + 40503) * (places * 2654435761 + 1) * 2862933555777941757).sum())
    return total % 2**64


@dataclass(frozen=True)
class Phase:
    """What was in memory at one point of an adapter's life.

    Attributes:
        name: rest, staged, added, offloaded, evicted, rebuilt.
        milliseconds: since the phase began; None for rest.
        holders: bytes by holder and device.
        allocated: bytes that torch's GPU allocator counts; 0 without a GPU.
        reserved: bytes that it keeps from the driver.
        peak: the most that was allocated since the phase before.
        device_used: bytes of the GPU in use by anyone.
        host_resident: bytes of host memory of this process.
    """

    name: str
    milliseconds: float | None
    holders: dict[str, dict[str, int]]
    allocated: int
    reserved: int
    peak: int
    device_used: int
    host_resident: int


@dataclass(frozen=True)
class Life:
    """One adapter's life under one strategy.

    Attributes:
        strategy: "keep" (left on the GPU), "offload" or "stage".
        phases: in order.
        tokens: greedy tokens, with the adapter as first loaded.
        logprobs: of these tokens.
        rebuilt_tokens: the same after eviction and rebuild.
        rebuilt_logprobs: of these.
        slots: digests as first loaded.
        rebuilt_slots: digests after eviction and rebuild.
    """

    strategy: str
    phases: tuple[Phase, ...]
    tokens: list[int]
    logprobs: list[float]
    rebuilt_tokens: list[int]
    rebuilt_logprobs: list[float]
    slots: dict[str, int] = field(repr=False)
    rebuilt_slots: dict[str, int] = field(repr=False)

    def phase(self, name: str) -> Phase:
        """The phase of this name."""
        return next(phase for phase in self.phases if phase.name == name)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; slots as one digest for all."""
        values = asdict(self)
        for key in ("slots", "rebuilt_slots"):
            values[key] = one_digest(values[key])
        return values


def adapter_life(
    llm: Any,
    strategy: vllm_hook.Strategy,
    *,
    rank: int,
    device: str | None = None,
    seed: int = 1,
    wanted: Callable[[str], bool] = lambda module: True,
) -> Life:
    """Stage an adapter, load it, evict it from slots and host cache with another one, and have vLLM rebuild it.

    Args:
        llm: an engine started with `max_loras=1, max_cpu_loras=1`.
        strategy: for `install`; "keep" is what there is without the hook.
        rank: of the adapter.
        device: where its tensors are made; default the GPU where there is one.
        seed: of its values.
        wanted: which modules it has.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    vllm_hook.install(strategy)
    manager = only_manager()
    phases: list[Phase] = []
    began = time.perf_counter()

    def mark(name: str) -> None:
        nonlocal began
        synchronize()
        milliseconds = (time.perf_counter() - began) * 1e3
        phases.append(_snapshot(name, None if name == "rest" else milliseconds, manager, memory))
        began = time.perf_counter()

    def on_load(event: str, lora_int_id: int) -> None:
        if lora_int_id == 1 and event in ("added", "offloaded") and not any(p.name == "evicted" for p in phases):
            mark(event)

    with watched() as memory:
        vllm_hook.drop_adapter(1)
        vllm_hook.drop_adapter(2)
        other, other_config = random_adapter(
            manager, rank=1, seed=seed + 1, wanted=lambda module: module.endswith(("o_proj", "out_proj"))
        )
        generate(llm, None)  # what a first step allocates for good is not the adapter's
        slot_digests(manager)
        vllm_hook.release_device_memory()
        mark("rest")
        tensors, config = random_adapter(manager, rank=rank, seed=seed, device=device, wanted=wanted)
        request = vllm_hook.stage_adapter(1, tensors, config)
        del tensors
        mark("staged")
        with vllm_hook.observed(on_load):
            llm.llm_engine.add_lora(request)
        tokens, logprobs = generate(llm, request)
        slots = slot_digests(manager)
        other_request = vllm_hook.stage_adapter(2, other, other_config)
        vllm_hook.release_device_memory()  # the working memory of these steps and digests
        began = time.perf_counter()
        llm.llm_engine.add_lora(other_request)
        mark("evicted")
        llm.llm_engine.add_lora(request)
        mark("rebuilt")
        rebuilt_tokens, rebuilt_logprobs = generate(llm, request)
    life = Life(
        strategy, tuple(phases), tokens, logprobs, rebuilt_tokens, rebuilt_logprobs, slots, slot_digests(manager)
    )
    vllm_hook.drop_adapter(1)
    vllm_hook.drop_adapter(2)
    return life


def _snapshot(name: str, milliseconds: float | None, manager: Any, memory: Watch) -> Phase:
    now, _ = memory_and_peak()
    most, memory.peak = memory.peak, now  # the next phase's peak counts from here
    return Phase(
        name=name,
        milliseconds=milliseconds,
        holders=vllm_hook.holders(manager),
        allocated=now.allocated or 0,
        reserved=now.reserved or 0,
        peak=most.allocated or 0,
        device_used=now.device_used or 0,
        host_resident=now.host_resident,
    )


def synchronize() -> None:
    """Wait for the device, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def modules_named(*suffixes: str) -> Callable[[str], bool]:
    """For `wanted`: modules whose last name is one of these; `experts` means all of the routed experts."""
    chosen = set(suffixes)

    def wanted(module: str) -> bool:
        return module.rpartition(".")[2] in chosen or ("experts" in chosen and is_expert(module))

    return wanted


def everything(module: str) -> bool:
    """For `wanted`: all modules."""
    return True


def is_expert(module: str) -> bool:
    """Whether a module belongs to the routed experts of a layer."""
    return ".experts." in module or module.endswith(".experts")


@dataclass(frozen=True)
class Round:
    """One load of one adapter from memory, against the same adapter loaded from a directory."""

    adapter: int
    tokens_equal: bool
    logprobs_equal: bool
    slots_equal: bool
    left_allocated: int
    left_reserved: int
    filled: int = 0


def memory_against_directory(
    llm: Any,
    directory: str | Path,
    adapters: list[tuple[dict[str, torch.Tensor], dict[str, Any]]],
    *,
    rounds: int = 3,
    strategy: vllm_hook.Strategy = "stage",
    fill_slot: bool = False,
) -> list[Round]:
    """Load adapters from directories, then the same ones from memory in turn, so that each evicts the one before.

    Args:
        llm: an engine started with `max_loras=1, max_cpu_loras=1`.
        directory: where to write them.
        adapters: tensors and config of each.
        rounds: how often each is loaded from memory; every time after the first is a rebuild.
        strategy: for `install`.
        fill_slot: stage each adapter anew before each load, into the free slot.
    """
    from vllm.lora.request import LoRARequest

    vllm_hook.install(strategy)
    manager = only_manager()
    expected = []
    fused = [any(".experts.base_layer." in name for name in tensors) for tensors, _ in adapters]
    for number, (tensors, config) in enumerate(adapters):
        path = save_adapter(Path(directory) / str(number), tensors, config)
        request = LoRARequest(f"directory-{number}", 1000 + number, path, is_3d_lora_weight=fused[number])
        expected.append((*generate(llm, request), slot_digests(manager)))
        llm.llm_engine.remove_lora(1000 + number)
    vllm_hook.release_device_memory()
    before = device_memory()
    requests = [
        vllm_hook.stage_adapter(1 + number, tensors, config) for number, (tensors, config) in enumerate(adapters)
    ]
    if not fill_slot:
        adapters.clear()  # the stage is the only holder now
    results = []
    for _ in range(rounds):
        for number, request in enumerate(requests):
            if fill_slot:
                for other in range(len(requests)):
                    vllm_hook.drop_adapter(1 + other)
                request = vllm_hook.stage_adapter(1 + number, *adapters[number], fill_slot=True)
            tokens, logprobs = generate(llm, request)
            slots = slot_digests(manager)
            vllm_hook.release_device_memory()
            after = device_memory()
            results.append(
                Round(
                    number,
                    tokens == expected[number][0],
                    logprobs == expected[number][1],
                    slots == expected[number][2],
                    after[0] - before[0],
                    after[1] - before[1],
                    next(one.filled for one in vllm_hook.status().adapters if one.lora_int_id == 1 + number),
                )
            )
    for number in range(len(requests)):
        vllm_hook.drop_adapter(1 + number)
    return results


def device_memory() -> tuple[int, int]:
    """Bytes of GPU memory that torch has allocated and reserved; 0 without a GPU."""
    if not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


build_with_vllm = vllm_hook.build_model


def pack_with_vllm(shape: ModelShape, model: LoRAModel) -> LoRAModel:
    """Pack an adapter as vLLM does when it registers it, in place and by vLLM's own code, but without an engine.

    Args:
        shape: of the model that would serve it.
        model: as `LoRAModel.from_lora_tensors` returns it.
    """
    packed_modules: dict[str, list[str]] = {}
    for path, module in shape.modules():
        if isinstance(module, Experts):
            names = [f"{path}.{expert}.{child}" for expert in range(module.num_experts) for child in module.children]
            packed_modules[path] = names
        elif len(module.children) > 1:
            parent = path.rpartition(".")[0]
            packed_modules[path] = [f"{parent}.{child.name}" for child in module.children]
    vllm_hook.pack_without_engine(model, packed_modules)
    return model


def factors(model: LoRAModel) -> dict[str, torch.Tensor]:
    """The tensors of a `LoRAModel`, packed or not, by module and factor."""
    found: dict[str, torch.Tensor] = {}
    for module, lora in model.loras.items():
        for factor in ("lora_a", "lora_b"):
            value = getattr(lora, factor)
            for index, tensor in enumerate(value if isinstance(value, list) else [value]):
                found[f"{module}.{factor}[{index}]" if isinstance(value, list) else f"{module}.{factor}"] = tensor
    return found


def copy_one_by_one(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Host copies as a loader makes them that moves one tensor at a time: each in memory of its own, page-locked by
    torch where there is a GPU.
    """
    pin = torch.cuda.is_available()
    copies = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pin).copy_(tensor, non_blocking=True)
        for name, tensor in tensors.items()
    }
    synchronize()
    return copies


@dataclass(frozen=True)
class Returns:
    """How an adapter comes back that was evicted.

    Attributes:
        strategy: for `install`.
        profile: of it all: "load", then each time "activate" alone (evicted from its slot only) and "rebuild" (from
            vLLM's host cache too).
        slots: digests of the slot buffers: loaded, then after each return.
        registered_b: sum of the absolute values of the registered B factors, at the same times.
    """

    strategy: str
    profile: Profile
    slots: tuple[dict[str, int], ...] = field(repr=False)
    registered_b: tuple[float, ...]

    def returns(self, name: str) -> list[profiles.Phase]:
        """Each "activate" or "rebuild" that brought the adapter back."""
        return [found for found in self.profile.phases if found.name == name and found.depth == 0]


def evict_and_return(llm: Any, strategy: vllm_hook.Strategy, *, rank: int, times: int = 2, seed: int = 1) -> Returns:
    """Load an adapter; then push it out of its slot, and out of vLLM's host cache, and ask for it again, in turns.

    Args:
        llm: an engine started with `max_loras=1, max_cpu_loras=2`.
        strategy: for `install`.
        rank: of the adapter, which has the routed experts, or everything in a dense model.
        times: how often each.
        seed: of its values.
    """
    vllm_hook.install(strategy)
    manager = only_manager()
    modules = vllm_hook.served_model(manager).modules
    experts = any(is_expert(module) for module in modules)
    tensors, config = random_adapter(
        manager, rank=rank, seed=seed, device=device_at_hand(), wanted=lambda m: is_expert(m) or not experts
    )
    others = [
        random_adapter(manager, rank=1, seed=seed + number, wanted=modules_named("o_proj", "out_proj"))
        for number in (1, 2)
    ]
    slots: list[dict[str, int]] = []
    registered: list[float] = []

    def look() -> None:
        slots.append(slot_digests(manager))
        model = vllm_hook.registered_model(manager, 1)
        registered.append(
            sum(float(t.abs().sum(dtype=torch.float64)) for n, t in factors(model).items() if "lora_b" in n)
        )

    with profile() as profiler:
        with phase("stage"):
            request = vllm_hook.stage_adapter(1, tensors, config)
            del tensors
        llm.llm_engine.add_lora(request)
        look()
        with phase("stage others"):
            first, second = (vllm_hook.stage_adapter(2 + n, *other) for n, other in enumerate(others))
        for _ in range(times):
            for evicting in ([first], [first, second]):
                with phase("evict"):
                    for other in evicting:
                        llm.llm_engine.add_lora(other)
                llm.llm_engine.add_lora(request)
                look()
    for lora_int_id in (1, 2, 3):
        vllm_hook.drop_adapter(lora_int_id)
    vllm_hook.release_device_memory()
    return Returns(strategy, profiler.result, tuple(slots), tuple(registered))
