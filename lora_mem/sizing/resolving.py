"""What the options mean for one model: checked against it, with every default filled in."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt

from lora_mem.errors import SizingError
from lora_mem.sizing.modules import Experts, Linear
from lora_mem.sizing.options import MAX_LORA_RANKS, MOE_BACKENDS, OPTIONS, Options
from lora_mem.sizing.shapes import ModelShape
from lora_mem.sizing.targets import check_targets, deployed, scaling_of

MAX_VOCAB_SIZE = 258048  # LogitsProcessorWithLoRA refuses more
# Quantizations of a checkpoint whose MoE methods leave sizes as they are, whatever computes the experts.
KEEPS_SIZES = frozenset(
    {
        *("", "auto_awq", "auto_gptq", "awq", "awq_marlin", "compressed-tensors", "experts_int8", "fbgemm_fp8", "fp8"),
        *("gptq", "gptq_marlin", "modelopt", "modelopt_fp4", "moe_wna16"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved(Options):
    """The options for one model; `resolve` makes them.

    `lora_alpha` stands for `scaling` too; `assumes` says what was chosen for the caller and why ("": nothing was).
    """

    rank_pattern: tuple[tuple[str, int], ...]
    alpha_pattern: tuple[tuple[str, float], ...]
    target_modules: str | tuple[str, ...]
    lora_target_modules: tuple[str, ...] | None
    max_lora_rank: int
    max_cpu_loras: int
    pipeline_rank: int
    moe_backend: str
    is_3d_lora_weight: bool
    workers_per_node: int
    assumes: str

    def __post_init__(self) -> None:
        pass  # the values were checked as `Options`

    @property
    def folded_scaling(self) -> float | None:
        """What is folded into B of a module that no pattern names; None where it is not known."""
        return None if self.lora_alpha is None else scaling_of(self.lora_alpha, self.rank, self.use_rslora)

    @property
    def experts_in_one_tensor(self) -> bool:
        """Whether the adapter holds each factor of a layer's routed experts in one tensor, not expert by expert."""
        return self.is_3d_lora_weight or self.enable_moe_shared_loras

    @property
    def expert_parallel_size(self) -> int:
        """Workers that the routed experts are split over."""
        return self.tensor_parallel_size * self.data_parallel_size if self.enable_expert_parallel else 1

    @property
    def expert_tensor_parallel_size(self) -> int:
        """Workers that each routed expert is sliced over: those of all data-parallel ranks, or none when split."""
        return 1 if self.enable_expert_parallel else self.tensor_parallel_size * self.data_parallel_size


def resolve(shape: ModelShape, given: Options) -> Resolved:
    """Check the options against the model and each other as vLLM would, and fill in the defaults."""
    largest = max([given.rank, *dict(given.rank_pattern or ()).values()])
    tp, pp, dp = given.tensor_parallel_size, given.pipeline_parallel_size, given.data_parallel_size
    _check_parallel(shape, given)
    mixed, outer = (shape.is_moe and on for on in (given.enable_mixed_moe_lora_format, given.enable_moe_shared_loras))
    max_cpu_loras = given.max_loras if given.max_cpu_loras is None else given.max_cpu_loras
    if max_cpu_loras < given.max_loras:
        raise SizingError(
            "max_cpu_loras", max_cpu_loras, f"must be at least max_loras={given.max_loras}, as vLLM requires"
        )
    options = Resolved(
        **{name: getattr(given, name) for name in OPTIONS}
        | {
            "rank_pattern": given.rank_pattern or (),
            "alpha_pattern": given.alpha_pattern or (),
            "lora_alpha": _alpha(given),
            "scaling": None,
            "is_3d_lora_weight": _format(shape, given.is_3d_lora_weight, mixed, outer),
            "max_lora_rank": slot_rank(largest, given.max_lora_rank),
            "max_cpu_loras": max_cpu_loras,
            "pipeline_rank": given.pipeline_rank or 0,
            "enable_expert_parallel": given.enable_expert_parallel and tp * dp > 1,
            "enable_mixed_moe_lora_format": mixed,
            "enable_moe_shared_loras": outer,
            "moe_backend": given.moe_backend or "triton",
            "lora_dtype": given.dtype if given.lora_dtype == "auto" else given.lora_dtype,
            "workers_per_node": min(tp * pp * dp, given.workers_per_node or tp * pp * dp),
            "assumes": _assumed_backend(shape) if given.moe_backend is None else "",
        },
    )
    _check_deployment(shape, options.lora_target_modules)
    check_targets(shape, options)
    return options


def slot_rank(rank: int, given: int | None = None) -> int:
    """`max_lora_rank` for adapters of `rank`: as given, or the smallest that vLLM allows."""
    if rank > MAX_LORA_RANKS[-1]:
        allowed = ", ".join(map(str, MAX_LORA_RANKS))
        raise SizingError(
            "rank", rank, f"must be at most {MAX_LORA_RANKS[-1]}: vLLM's max_lora_rank is one of {allowed}"
        )
    if given is None:
        return next(value for value in MAX_LORA_RANKS if value >= rank)
    if OPTIONS["max_lora_rank"].check("max_lora_rank", given) < rank:
        raise SizingError("max_lora_rank", given, f"must be at least the adapter's rank, which is {rank}")
    return given


def _check_parallel(shape: ModelShape, given: Options) -> None:
    """What vLLM refuses of the parallel sizes, whatever the modules' sizes."""
    pp, ep = given.pipeline_parallel_size, given.enable_expert_parallel
    if pp > shape.num_hidden_layers:
        raise SizingError("pipeline_parallel_size", pp, f"must be at most the {shape.num_hidden_layers} layers")
    if pp > 1 and not shape.supports_pipeline:
        raise SizingError("pipeline_parallel_size", pp, f"must be 1: vLLM has none for {shape.architecture}")
    if (given.pipeline_rank or 0) >= pp:
        raise SizingError("pipeline_rank", given.pipeline_rank, f"must be below pipeline_parallel_size={pp}")
    if ep and not shape.is_moe:
        raise SizingError("enable_expert_parallel", ep, f"needs a model with routed experts; {shape.name} has none")
    if ep and given.fully_sharded_loras and given.tensor_parallel_size * given.data_parallel_size > 1:
        raise SizingError(
            "fully_sharded_loras", True, "cannot go together with enable_expert_parallel; vLLM refuses it. Drop one"
        )


def _alpha(given: Options) -> float | None:
    """The alpha of all modules that no pattern names: `lora_alpha`, or the one that `scaling` stands for."""
    if given.scaling is not None:
        if given.lora_alpha is not None:
            reason = f"must be left out where lora_alpha={given.lora_alpha!r} decides it"
            raise SizingError("scaling", given.scaling, reason)
        return given.scaling * (sqrt(given.rank) if given.use_rslora else given.rank)
    if given.lora_alpha is None:
        for name, value in (("alpha_pattern", dict(given.alpha_pattern or ())), ("use_rslora", given.use_rslora)):
            if value:
                raise SizingError(name, value, "needs lora_alpha, the alpha of all other modules")
    return given.lora_alpha


def _format(shape: ModelShape, given: bool | None, mixed: bool, outer: bool) -> bool:
    """Whether the adapter holds its experts as vLLM's `is_3d_lora_weight` says, by default as the model does."""
    layouts = {module.layout for _, module in shape.kinds if isinstance(module, Experts)}
    fused = "fused" in layouts
    if outer and "non_gated" in layouts:
        raise SizingError(
            "enable_moe_shared_loras", True, f"needs experts with a gate; those of {shape.name} have none"
        )
    if given is None:
        return fused and not outer
    if given != fused and not mixed:
        kind = "3D" if fused else "2D"
        raise SizingError(
            "is_3d_lora_weight", given, f"needs enable_mixed_moe_lora_format: {shape.name} takes {kind} adapters"
        )
    if given and outer:
        raise SizingError("is_3d_lora_weight", given, "cannot go together with enable_moe_shared_loras")
    return given


def _assumed_backend(shape: ModelShape) -> str:
    """What it means that no backend was named, where the checkpoint's experts are quantized so that it matters."""
    if not shape.is_moe or shape.quantization in KEEPS_SIZES:
        return ""
    own = [name for name in MOE_BACKENDS if name.startswith(f"{shape.quantization}_")]
    others = ", ".join(own or [name for name in MOE_BACKENDS if name != "triton"])
    return (
        f"moe_backend=triton, which keeps the experts' sizes: {shape.name} has them in {shape.quantization}, and what"
        f" computes these may need larger slots. Name the one that vLLM's log says it takes (--moe-backend): {others}"
    )


def _check_deployment(shape: ModelShape, targets: tuple[str, ...] | None) -> None:
    """Refuse a name in `lora_target_modules` that no module matches, and a vocabulary too large for lm_head's slots."""
    for name in targets or ():
        if not any(deployed(group.path(layer, module), module, (name,)) for group, module, layer in shape.places()):
            raise SizingError("lora_target_modules", name, f"is not a module of {shape.name} that has slots")
    for group, module in shape.kinds:
        if not isinstance(module, Linear) or module.kind != "logits" or module.slices[0] <= MAX_VOCAB_SIZE:
            continue
        if deployed(group.path(0, module), module, targets):
            reason = f"must be at most {MAX_VOCAB_SIZE} where lm_head has slots, as vLLM requires; leave lm_head out"
            raise SizingError("vocab_size", module.slices[0], f"{reason} of lora_target_modules")
