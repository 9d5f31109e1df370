"""Every option of the calculator, once: its name as vLLM or PEFT has it, type, default, help and check.

`footprint`, `plan`, the command line and the notebooks' planner all read them from here. What an option means for one
model is decided in `lora_mem.sizing.resolving`.
"""

from __future__ import annotations

import difflib
import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Annotated, Any, Literal, TypedDict, TypeVar, get_args, get_type_hints

from lora_mem.errors import SizingError

Strategy = Literal["keep", "offload", "stage"]
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4}
RECEIVED_ITEMSIZE = {**ITEMSIZE, "float64": 8}  # an adapter's own tensors, which are cast to one of `ITEMSIZE`
LORA_DTYPES = ("auto", "float16", "bfloat16")
# Multiples that a MoE backend rounds the hidden size and a worker's intermediate size up to (`maybe_roundup_sizes`);
# the backends are those that take LoRA. Whatever is not listed keeps the sizes: `triton` and `marlin` stand for it.
MOE_BACKENDS = {
    "triton": (1, 1),
    "marlin": (1, 1),
    "flashinfer_trtllm": (1, 128),
    "fp8_per_block": (128, 128),
    "mxfp4_emulation": (32, 32),
    "mxfp4_marlin": (256, 128),
    "mxfp4_triton": (1, 64),
    "mxfp4_trtllm": (256, 128),
}
Ranks = Mapping[str, int] | tuple[tuple[str, int], ...]
Alphas = Mapping[str, float] | tuple[tuple[str, float], ...]
Function = TypeVar("Function", bound=Callable[..., Any])
Value = TypeVar("Value")
Check = Callable[[str, Any], Any]
"""Returns a value as `Options` holds it, or raises a `SizingError` that names it."""


def whole_number(name: str, value: object, minimum: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise SizingError(name, value, f"must be a whole number >= {minimum}")
    return value


def positive_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= sys.float_info.max:
        raise SizingError(name, value, "must be a finite number above 0")
    return value


def true_or_false(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise SizingError(name, value, "must be True or False")
    return value


def one_of(allowed: Sequence[object], why: str = "") -> Check:
    """A check that takes what is `allowed`; `why` ends the error."""

    def check(name: str, value: object) -> object:
        if type(value) is not type(allowed[0]) or value not in allowed:
            raise SizingError(name, value, f"must be one of {', '.join(map(str, allowed))}{why}")
        return value

    return check


def module_names(name: str, value: Any) -> str | tuple[str, ...]:
    """`all-linear`, or one or more names of modules as a tuple."""
    if value == "all-linear":
        return "all-linear"
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Sequence | set) else ()
    if not names or not all(isinstance(one, str) and one for one in names):
        raise SizingError(name, value, "must be all-linear, or one or more names of modules")
    if "all-linear" in names:
        raise SizingError(name, list(names), "all-linear must stand alone")
    return names


def deployment_names(name: str, value: Any) -> tuple[str, ...]:
    """One or more names of modules as a tuple."""
    names = module_names(name, value)
    if isinstance(names, str):
        raise SizingError(name, names, "must name modules; leave it out for all of them")
    return names


def pattern(name: str, value: Any, check: Callable[[str, object], Value]) -> tuple[tuple[str, Value], ...]:
    """The entries of PEFT's `rank_pattern` or `alpha_pattern`: names or regular expressions, and allowed numbers."""
    if isinstance(value, tuple) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in value):
        value = dict(value)  # as this function returned it
    if value is not None and not isinstance(value, Mapping):
        raise SizingError(name, value, "must be a dict of names or regular expressions to numbers")
    entries = []
    for key, number in (value or {}).items():
        try:
            re.compile(rf"(.*\.)?({key})$" if isinstance(key, str) else key)
        except (re.error, TypeError) as error:
            raise SizingError(f"{name} key", key, f"must be a name or a regular expression ({error})") from None
        entries.append((key, check(f"{name}[{key!r}]", number)))
    return tuple(entries)


def _names_in(text: str) -> str | list[str]:
    """`q_proj,o_proj` as a list of names; one name alone as it is."""
    names = [name.strip() for name in text.split(",")]
    return names[0] if len(names) == 1 else names


def _json_in(text: str) -> Any:
    """A pattern as JSON; what is none is left to the check to refuse."""
    try:
        return json.loads(text)
    except ValueError:
        return text


REQUIRED = MISSING


@dataclass(frozen=True, slots=True)
class Option:
    """One option, for whoever lists options or asks for them: docs, a command line, widgets.

    `flag` is what a command line calls the option.
    `type` is int, float, bool or str; `str` also for names and patterns, which `read` takes out of text.
    `default` is `REQUIRED` where there is none, and None where the model or other options decide.
    `Options` fills in name, type and default from its fields.
    """

    help: str
    check: Check
    flag: str = ""
    choices: tuple[Any, ...] = ()
    read: Callable[[str], Any] = str
    name: str = ""
    type: type[int] | type[float] | type[bool] | type[str] = str
    default: Any = None

    def __str__(self) -> str:
        default = {REQUIRED: "required", None: "optional"}.get(self.default, f"default {self.default}")
        return f"{self.name} ({default}): {self.help}"


def _whole(help: str, flag: str = "", minimum: int = 1) -> Option:
    return Option(help, partial(whole_number, minimum=minimum), flag)


def _flag(help: str, flag: str = "") -> Option:
    return Option(help, true_or_false, flag)


def _pattern(help: str, number: Check) -> Option:
    return Option(help, partial(pattern, check=number), read=_json_in)


def _choice(help: str, choices: Sequence[Any], why: str = "") -> Option:
    return Option(help, one_of(choices, why), choices=tuple(choices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the engine runs and what the adapter is, as the user gives it; each value by itself is checked.

    None leaves the choice to the model or to the other options.

    Raises:
        SizingError: a value is not what vLLM or PEFT allows.
    """

    rank: Annotated[int, _whole("The adapter's rank.")]
    target_modules: Annotated[
        str | Sequence[str],
        Option(
            "What the adapter targets: PEFT's names (q_proj, or longer ends of a path such as self_attn.q_proj),"
            " 'experts' for the routed experts, or 'all-linear': every linear layer that vLLM serves but lm_head,"
            " routed experts included (PEFT leaves experts out where they are parameters; then name what the adapter"
            " has). Slots do not depend on it: vLLM allocates them for every module that it can serve.",
            module_names,
            read=_names_in,
        ),
    ] = "all-linear"
    max_lora_rank: Annotated[
        int | None, _choice("Rank of the slots; default the smallest that fits.", MAX_LORA_RANKS, ", as vLLM allows")
    ] = None
    max_loras: Annotated[int, _whole("Slots.")] = 1
    max_cpu_loras: Annotated[int | None, _whole("Registered adapters; default max_loras.")] = None
    strategy: Annotated[
        Strategy,
        _choice(
            "Where an adapter is after a sync. keep: staged and packed on the GPU. offload: both moved to pinned host"
            " memory once it is active. stage: packed in pinned host memory from the start.",
            STRATEGIES,
        ),
    ] = "stage"
    tensor_parallel_size: Annotated[int, _whole("Workers that slots are sliced over.", "--tp")] = 1
    pipeline_parallel_size: Annotated[int, _whole("Pipeline ranks that the layers are split over.", "--pp")] = 1
    pipeline_rank: Annotated[
        int | None,
        _whole("Pipeline rank of the worker; default the one with the most slot bytes.", minimum=0),
    ] = None
    data_parallel_size: Annotated[int, _whole("Replicas; they share the routed experts, split or sliced.", "--dp")] = 1
    enable_expert_parallel: Annotated[
        bool, _flag("Routed experts are split over the workers instead of sliced.", "--ep")
    ] = False
    fully_sharded_loras: Annotated[
        bool, _flag("Slots are sliced over the workers wherever vLLM can.", "--fully-sharded")
    ] = False
    enable_mixed_moe_lora_format: Annotated[bool, _flag("The 2D wrapper for experts of any layout.")] = False
    enable_moe_shared_loras: Annotated[bool, _flag("A of gate and up and B of down once for all experts.")] = False
    lora_target_modules: Annotated[
        Sequence[str] | None,
        Option(
            "vLLM's deployment-wide target_modules: slots for these only. Runtime names (qkv_proj), whole paths, or"
            " packed children (q_proj); default every module that vLLM can serve.",
            deployment_names,
            read=_names_in,
        ),
    ] = None
    moe_backend: Annotated[
        str | None,
        _choice(
            "What computes the routed experts. triton and marlin keep their sizes, the others round the slots' sizes"
            " up, e.g. mxfp4_marlin for gpt-oss as published, on Hopper; default triton, which Footprint.assumes says"
            " where the checkpoint is quantized so that it matters.",
            [*MOE_BACKENDS],
        ),
    ] = None
    dtype: Annotated[
        str, _choice("Dtype of the model, and of the adapter's tensors as they are received.", [*ITEMSIZE])
    ] = "bfloat16"
    lora_dtype: Annotated[
        str,
        _choice(
            "Dtype of slots and packed tensors; auto is dtype. vLLM's GPU kernels stop at start-up where it is not the"
            " model's.",
            LORA_DTYPES,
            ", as vLLM allows",
        ),
    ] = "auto"
    rank_pattern: Annotated[
        Ranks | None,
        _pattern("PEFT's ranks by name or regular expression; each must match a module.", whole_number),
    ] = None
    lora_alpha: Annotated[
        float | None,
        Option(
            "PEFT's alpha; with the ranks, alpha_pattern and use_rslora it decides the scaling of each module. Where"
            " that is 1 nothing is folded into B, so that vLLM keeps the staged B of dense modules as it is; where it"
            " is not known it counts as another number.",
            positive_number,
        ),
    ] = None
    scaling: Annotated[
        float | None, Option("alpha / rank (or by rsLoRA's rule), in place of lora_alpha.", positive_number)
    ] = None
    alpha_pattern: Annotated[
        Alphas | None,
        _pattern("PEFT's alphas by name or regular expression; each must match a module.", positive_number),
    ] = None
    use_rslora: Annotated[bool, _flag("PEFT's rsLoRA: the scaling is alpha / sqrt(rank).")] = False
    is_3d_lora_weight: Annotated[
        bool | None, _flag("Experts come as one tensor for all; default as the model has them.")
    ] = None
    workers_per_node: Annotated[int | None, _whole("Workers that share a host; default all workers of the engine.")] = (
        None
    )

    def __post_init__(self) -> None:
        for name, option in OPTIONS.items():
            value = getattr(self, name)
            if value is not None or option.default is not None:
                object.__setattr__(self, name, option.check(name, value))

    def to_dict(self) -> dict[str, Any]:
        """Ready for JSON: each option by its name."""
        plain = {item.name: getattr(self, item.name) for item in fields(self)}
        patterns = {name: plain[name] for name in ("rank_pattern", "alpha_pattern")}
        plain |= {name: None if value is None else dict(value) for name, value in patterns.items()}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in plain.items()}


class OptionKeywords(TypedDict, total=False):
    """The options as keywords, for type checkers and editors: names and types as in `Options`."""

    rank: int
    target_modules: str | Sequence[str]
    max_lora_rank: int | None
    max_loras: int
    max_cpu_loras: int | None
    strategy: Strategy
    tensor_parallel_size: int
    pipeline_parallel_size: int
    pipeline_rank: int | None
    data_parallel_size: int
    enable_expert_parallel: bool
    fully_sharded_loras: bool
    enable_mixed_moe_lora_format: bool
    enable_moe_shared_loras: bool
    lora_target_modules: Sequence[str] | None
    moe_backend: str | None
    dtype: str
    lora_dtype: str
    rank_pattern: Ranks | None
    lora_alpha: float | None
    scaling: float | None
    alpha_pattern: Alphas | None
    use_rslora: bool
    is_3d_lora_weight: bool | None
    workers_per_node: int | None


def _options() -> dict[str, Option]:
    found, hints = {}, get_type_hints(Options, include_extras=True)
    for item in fields(Options):
        declared, option = hints[item.name].__origin__, hints[item.name].__metadata__[0]
        kind = next((one for one in (bool, int, float) if one in (declared, *get_args(declared))), str)
        flag = option.flag or f"--{item.name.replace('_', '-')}"
        found[item.name] = replace(option, name=item.name, type=kind, default=item.default, flag=flag)
    return found


OPTIONS = _options()
"""Every option by its name, in the order of `Options`."""
Options.__doc__ = f"{Options.__doc__}Options:\n\n- " + "\n- ".join(map(str, OPTIONS.values())) + "\n"


def gather(options: Options | None, changes: Mapping[str, Any]) -> Options:
    """`options` with `changes`, or the changes alone where there are no options.

    Raises:
        TypeError: a name is not an option, or the rank is missing.
        SizingError: a value is not what vLLM or PEFT allows.
    """
    for name, value in changes.items():
        if name not in OPTIONS:
            by_flag = [option.name for option in OPTIONS.values() if option.flag == f"--{name.replace('_', '-')}"]
            near = by_flag or difflib.get_close_matches(name, OPTIONS)
            hint = f" Did you mean {' or '.join(near)}?" if near else ""
            raise TypeError(f"{name}={value!r}: is not an option.{hint} Options are {', '.join(OPTIONS)}")
    if options is not None:
        if not isinstance(options, Options):
            raise SizingError("options", options, "must be lora_mem.Options, or be given as keywords")
        changes = {name: getattr(options, name) for name in OPTIONS} | dict(changes)
    if "rank" not in changes:
        raise TypeError("rank: is missing; it must be a whole number >= 1, the adapter's rank")
    return Options(**changes)


def takes_options(function: Function) -> Function:
    """Show the options in the signature of a function that takes them as `**options`, for help and completion."""
    signature = inspect.signature(function)
    own = [one for one in signature.parameters.values() if one.kind is not inspect.Parameter.VAR_KEYWORD]
    default = {REQUIRED: inspect.Parameter.empty}
    names = [
        inspect.Parameter(
            option.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default.get(option.default, option.default),
            annotation=OptionKeywords.__annotations__[option.name],
        )
        for option in OPTIONS.values()
    ]
    function.__signature__ = signature.replace(parameters=[*own, *names])  # type: ignore[attr-defined]
    return function
