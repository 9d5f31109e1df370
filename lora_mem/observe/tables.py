"""Any JSON value as tables with units: benches and profiles by their own, other dicts and lists of dicts by fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lora_mem.observe.profiles import Profile
from lora_mem.observe.results import Bench, by_rank, is_bench
from lora_mem.sizing.units import GIB

Table = tuple[str, Sequence[str], list[list[str]]]
"""Caption, columns with units, rows."""

_MOST_CELL = 160  # characters

_BYTES = re.compile(
    r"(^|[._])(bytes|nbytes|allocated|reserved|peak|left|retained|device_used|resident|pinned|pinned_by_torch)$"
    r"|^(holders|held)\.|^memory\.|_bytes$"
)
_MILLISECONDS = re.compile(r"(^|[._])milliseconds$")
_SECONDS = re.compile(r"(^|[._])seconds([._]|$)")


def tables(value: Any, caption: str = "") -> Iterator[Table]:
    """The tables of a JSON value, the outer before the inner.

    Args:
        value: as `json.loads` gives it.
        caption: of the first table; those of inner ones say where they were found.
    """
    if _is_bench(value):
        yield Bench.from_dict(value).table()
    elif _is_profile(value):
        title, profiled, phases = Profile.from_dict(value).table()
        yield f"{caption}: {title}" if caption else title, profiled, phases
    elif _is_rows(value) and all(map(_is_bench, value)):
        benches = [Bench.from_dict(one) for one in value]
        yield by_rank(benches)
        yield from (bench.table() for bench in benches)
    elif isinstance(value, dict) or _is_rows(value):
        rows = [dict(_fields(one)) for one in (value if isinstance(value, list) else [value])]
        plain = [{key: one for key, one in row.items() if not _has_tables(one)} for row in rows]
        columns = list(dict.fromkeys(key for row in plain for key in row))
        if columns and isinstance(value, dict):
            yield caption, ("figure", "value"), [[_header(key), _cell(key, one)] for key, one in plain[0].items()]
        elif columns:
            yield caption, list(map(_header, columns)), [[_cell(key, row.get(key)) for key in columns] for row in plain]
        for number, row in enumerate(rows):
            name = row.get("name") or row.get("strategy") or row.get("case") or number
            at = [caption] if isinstance(value, dict) else [caption, str(name)]
            for key, one in row.items():
                if _has_tables(one):
                    yield from tables(one, " / ".join(filter(None, [*at, key])))


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _is_bench(value: Any) -> bool:
    return isinstance(value, dict) and is_bench(value)


def _is_profile(value: Any) -> bool:
    return isinstance(value, dict) and {"device", "versions", "total", "phases"} <= value.keys()


def _has_tables(value: Any) -> bool:
    return _is_rows(value) or _is_bench(value) or _is_profile(value)


def _fields(value: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    """Fields by dotted names, down to what is a value or has tables of its own."""
    for key, one in value.items():
        if isinstance(one, dict) and not _has_tables(one):
            yield from _fields(one, f"{before}{key}.")
        else:
            yield f"{before}{key}", one


def _header(key: str) -> str:
    words = key.replace(".", " ")  # so that a narrow column can break it
    units = ((_BYTES, "GiB"), (_MILLISECONDS, "ms"), (_SECONDS, "s"))
    return next((f"{words}, {unit}" for pattern, unit in units if pattern.search(key)), words)


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value / GIB:.4f}" if _BYTES.search(key) else f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4f}" if _SECONDS.search(key) else f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    text = ", ".join(_cell(key, one) for one in value) if isinstance(value, list) else str(value)
    return text if len(text) <= _MOST_CELL else f"{text[:_MOST_CELL]} …"
