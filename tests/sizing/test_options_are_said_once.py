"""Options: said once, read everywhere; each is checked by itself, and against the model where it is used."""

import inspect
import json
from dataclasses import FrozenInstanceError, fields
from typing import Any, get_type_hints

import pytest

import lora_mem
from lora_mem.errors import SizingError
from lora_mem.sizing.footprints import FIGURES, footprint
from lora_mem.sizing.options import OPTIONS, REQUIRED, OptionKeywords, Options
from lora_mem.sizing.resolving import resolve
from lora_mem.sizing.shapes import ModelShape

QWEN = "Qwen/Qwen3-30B-A3B"


def test_keywords_for_type_checkers_are_the_options() -> None:
    assert get_type_hints(OptionKeywords) == get_type_hints(Options)
    assert list(get_type_hints(OptionKeywords)) == [item.name for item in fields(Options)] == list(OPTIONS)


def test_stage_is_the_default() -> None:
    assert Options(rank=8).strategy == footprint(QWEN, rank=8).strategy == "stage"


def test_an_object_and_keywords_say_the_same() -> None:
    given = lora_mem.Options(rank=16, max_loras=2, tensor_parallel_size=4)
    by_object, by_name = footprint(QWEN, given), footprint(QWEN, rank=16, max_loras=2, tensor_parallel_size=4)
    assert [getattr(by_object, name) for name in FIGURES] == [getattr(by_name, name) for name in FIGURES]
    assert footprint(QWEN, given, rank=32).packed_bytes == 2 * by_object.packed_bytes
    resolved = by_object.options
    assert resolved
    assert footprint(QWEN, resolved).to_dict() == by_object.to_dict()
    with pytest.raises(SizingError, match="options=7: must be"):
        footprint(QWEN, 7)  # type: ignore[arg-type]


def test_what_is_given_is_told_from_what_is_resolved() -> None:
    given = Options(rank=20, rank_pattern={"q_proj": 40}, scaling=2)
    assert (given.max_lora_rank, given.max_cpu_loras, given.is_3d_lora_weight, given.moe_backend) == (None,) * 4
    resolved = resolve(ModelShape.from_config(QWEN), given)
    assert (resolved.max_lora_rank, resolved.max_cpu_loras, resolved.moe_backend) == (64, 1, "triton")
    assert (resolved.is_3d_lora_weight, resolved.lora_alpha, resolved.workers_per_node) == (False, 40, 1)
    assert hash(given) == hash(Options(rank=20, rank_pattern={"q_proj": 40}, scaling=2))
    with pytest.raises(FrozenInstanceError):
        given.rank = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_lora_ranks": 8}, "max_lora_ranks=8: is not an option. Did you mean max_lora_rank or max_loras"),
        ({"tp": 2}, r"tp=2: is not an option. Did you mean tensor_parallel_size\? Options are rank, target_modules, "),
        ({"zzz": None}, "zzz=None: is not an option. Options are rank, "),
        ({}, "rank: is missing"),
    ],
)
def test_wrong_names_are_refused(options: dict[str, Any], message: str) -> None:
    rank = {"rank": 8} if options else {}
    for function in (footprint, lora_mem.plan):
        room = {} if function is footprint else {"gpu_bytes": 1, "weights_bytes": 1}
        with pytest.raises(TypeError, match=message):
            function(QWEN, **rank, **options, **room)


def test_a_value_is_checked_where_it_is_given() -> None:
    for options in ({"rank": 0}, {"rank": 8, "strategy": "hope"}, {"rank": 8, "rank_pattern": (1,)}):
        with pytest.raises(SizingError, match=f"{list(options)[-1]}="):
            Options(**options)
    with pytest.raises(SizingError, match="lora_target_modules='all-linear': must name modules"):
        Options(rank=8, lora_target_modules="all-linear")
    with pytest.raises(SizingError, match=r"max_lora_rank=8\.0: must be one of 1, 8"):
        Options(rank=8, max_lora_rank=8.0)  # type: ignore[arg-type]


def test_signatures_and_help_name_every_option() -> None:
    for function in (footprint, lora_mem.plan):
        shown = inspect.signature(function).parameters
        assert {name: shown[name].default for name in OPTIONS} == {
            name: inspect.Parameter.empty if option.default is REQUIRED else option.default
            for name, option in OPTIONS.items()
        }
    assert all(f"- {option}" in str(Options.__doc__) for option in OPTIONS.values())


def test_a_command_line_has_what_it_needs() -> None:
    assert [OPTIONS[name].type for name in ("rank", "use_rslora", "scaling", "dtype")] == [int, bool, float, str]
    assert [OPTIONS[name].flag for name in ("tensor_parallel_size", "max_loras")] == ["--tp", "--max-loras"]
    assert len({option.flag for option in OPTIONS.values()}) == len(OPTIONS)
    assert OPTIONS["strategy"].choices == ("keep", "offload", "stage")
    assert OPTIONS["target_modules"].read("q_proj, o_proj") == ["q_proj", "o_proj"]
    assert OPTIONS["target_modules"].read("all-linear") == "all-linear"
    assert OPTIONS["rank_pattern"].read('{"q_proj": 4}') == {"q_proj": 4}
    with pytest.raises(SizingError, match="rank_pattern='q_proj=4': must be a dict"):
        Options(rank=8, rank_pattern=OPTIONS["rank_pattern"].read("q_proj=4"))


def test_options_are_json() -> None:
    options = Options(rank=8, target_modules=["q_proj"], rank_pattern={"q_proj": 4})
    plain = json.loads(json.dumps(options.to_dict()))
    assert (plain["target_modules"], plain["rank_pattern"], plain["strategy"]) == (["q_proj"], {"q_proj": 4}, "stage")
    assert Options(**plain) == options
