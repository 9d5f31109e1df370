"""One dated report folder as one HTML page that needs nothing else: its README, tables of its raw data, its plots.

Images are inlined, links into the folder lead to the file's section, and nothing is loaded from the web. Needs jinja2
and mistune, which come with the notebooks extra.
"""

from __future__ import annotations

import base64
import html
import json
import mimetypes
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from lora_mem.observe.results import Bench, by_rank, is_bench
from lora_mem.sizing.footprints import html_table
from lora_mem.sizing.units import GIB

Table = tuple[str, Sequence[str], list[list[str]]]
"""Caption, columns with units, rows."""

FACTS = ("figure", "value")
IMAGES = (".png", ".jpg", ".jpeg", ".svg")
TEXTS = (".log", ".txt", ".md", ".csv")

_MOST_TEXT = 60_000  # characters of a file that are shown as they are
_MOST_CELL = 160

_BYTES = re.compile(
    r"(^|[._])(bytes|nbytes|allocated|reserved|peak|left|device_used|resident|pinned|pinned_by_torch|file_bytes)$"
    r"|^(holders|held)\.|^memory\.|_bytes$"
)
_SECONDS = re.compile(r"(^|[._])seconds([._]|$)")
_MILLISECONDS = re.compile(r"(^|[._])milliseconds$")


class ReportError(ValueError):
    """A folder that is no report, or that lacks what its README shows."""


@dataclass
class Section:
    """One file of the folder: its path in it, and what the page shows of it."""

    path: str
    tables: list[str] = field(default_factory=list)
    image: str = ""
    text: str = ""
    note: str = ""

    @property
    def anchor(self) -> str:
        """The section's id in the page."""
        return anchor(self.path)


def anchor(path: str) -> str:
    """The id that a file of the folder has in the page."""
    return re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-")


def render(folder: str | Path) -> str:
    """The page, as text.

    Args:
        folder: with a README.md, and beside it anything: JSON (benches of `lora_mem.bench` get their own tables, all
            other values generic ones), JSON lines, PNG, JPEG or SVG images, logs; other files are listed.

    Raises:
        ReportError: no folder, no README.md in it, or the README shows or links to a file that is not there.
        ImportError: jinja2 or mistune is missing; names the extra that has them.
    """
    folder = Path(folder)
    readme = folder / "README.md"
    if not readme.is_file():
        raise ReportError(
            f"folder is {str(folder)!r}, which has no README.md; a report says there what was asked and what came out"
        )
    try:
        import jinja2
        import mistune  # noqa: F401
    except ImportError as error:
        raise ImportError(f"a report needs {error.name}: pip install 'lora-mem[notebooks]'") from None
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path != readme)
    shown, body = _markdown(readme.read_text(encoding="utf-8"), folder)
    sections = [_section(path, path.relative_to(folder).as_posix(), shown) for path in paths]
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    template = environment.from_string(files("lora_mem.observe").joinpath("report.html").read_text(encoding="utf-8"))
    title = re.search(r"^# (.+)$", readme.read_text(encoding="utf-8"), re.MULTILINE)
    page: str = template.render(
        title=title[1] if title else folder.resolve().name, body=body, sections=sections, folder=folder.resolve().name
    )
    return page


# ----------------------------------------------------------------------------------------------------------- the README


def _markdown(text: str, folder: Path) -> tuple[set[str], str]:
    """Markdown as HTML, and the images that it shows; links to files of the folder become links into the page."""
    import mistune

    shown: set[str] = set()

    class Renderer(mistune.HTMLRenderer):
        def link(self, text: str, url: str, title: str | None = None) -> str:
            if re.match(r"[a-z][a-z0-9+.-]*:|#", url):
                return super().link(text, url, title)
            path = _inside(folder, url)
            if path is None:
                return text  # what lies outside of the folder does not travel with the page
            return super().link(text, f"#{anchor(path) if path else 'raw-data'}", title)

        def image(self, text: str, url: str, title: str | None = None) -> str:
            path = None if re.match(r"[a-z][a-z0-9+.-]*:", url) else _inside(folder, url)
            if not path:
                raise ReportError(f"README.md shows {url!r}; it must be a file of the folder: nothing is loaded")
            shown.add(path)
            return f'<img src="{_data_url(folder / path)}" alt="{html.escape(mistune.util.striptags(text))}">'

    parse = mistune.create_markdown(renderer=Renderer(escape=True), plugins=["table", "strikethrough"])
    return shown, str(parse(text))


def _inside(folder: Path, url: str) -> str | None:
    """The file of the folder that a relative URL of the README means; "" for a folder in it, None for one outside."""
    path = (folder / url.partition("#")[0]).resolve()
    if not path.is_relative_to(folder.resolve()):
        return None
    if not path.exists():
        raise ReportError(f"README.md names {url!r}, which is not in the folder; correct the link or add the file")
    return "" if path.is_dir() else path.relative_to(folder.resolve()).as_posix()


def _data_url(path: Path) -> str:
    kind = mimetypes.guess_type(path.name)[0] or "application/octet-stream"
    return f"data:{kind};base64,{base64.b64encode(path.read_bytes()).decode()}"


# ------------------------------------------------------------------------------------------------------------ the files


def _section(path: Path, name: str, shown: set[str]) -> Section:
    section = Section(name)
    size = path.stat().st_size
    if path.suffix in IMAGES:
        if name in shown:
            section.note = "Shown above."
        else:
            section.image = _data_url(path)
    elif path.suffix in (".json", ".jsonl"):
        text = path.read_text(encoding="utf-8")
        value = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        section.tables = [_html(table) for table in tables(value)]
        section.text = text
    elif path.suffix in TEXTS:
        section.text = path.read_text(encoding="utf-8", errors="replace")
    else:
        section.note = f"{size:,} bytes; {_how_to_open(path.name)}"
    if len(section.text) > _MOST_TEXT:
        section.note = f"{len(section.text):,} characters; the file has them all."
        section.text = ""
    return section


def _html(table: Table) -> str:
    page = html_table(*table)
    return page.replace("<table>", '<table class="facts">', 1) if table[1] == FACTS else page


def _how_to_open(name: str) -> str:
    if name.endswith((".trace.json.gz", "trace.json.gz")):
        return "a trace: open the file in Perfetto's UI, chrome://tracing or TensorBoard."
    if ".pickle" in name:
        return "a memory snapshot: read it with pickle, or open it (unpacked) in torch's memory viewer."
    return "not shown."


def tables(value: Any, caption: str = "") -> Iterator[Table]:
    """Tables of any JSON value: benches by strategy and rank, other dicts and lists of dicts by their fields."""
    if isinstance(value, dict) and is_bench(value):
        yield Bench.from_dict(value).table()
    elif isinstance(value, dict) and "phases" in value and _is_profile(value["phases"]):
        yield _profile(value, caption)
    elif isinstance(value, dict):
        flat = _flat(value)
        if flat:
            yield caption, FACTS, [[_header(key), _cell(key, one)] for key, one in flat.items()]
        for key, one in value.items():
            if _is_rows(one) or (isinstance(one, dict) and (_has_rows(one) or "phases" in one)):
                yield from tables(one, f"{caption} / {key}".strip(" /"))
    elif _is_rows(value) and all(is_bench(one) for one in value):
        benches = [Bench.from_dict(one) for one in value]
        yield by_rank(benches)
        for bench in benches:
            yield bench.table()
    elif _is_rows(value):
        rows = [_flat(one) for one in value]
        columns = list(dict.fromkeys(key for row in rows for key in row))
        if columns:
            cells = [[_cell(key, row.get(key)) for key in columns] for row in rows]
            yield caption, [_header(key) for key in columns], cells
        for number, one in enumerate(value):
            name = one.get("name") or one.get("strategy") or one.get("case") or number
            for key, inner in one.items():
                if _is_rows(inner):
                    yield from tables(inner, f"{caption} / {name} / {key}".strip(" /"))


def _is_profile(phases: Any) -> bool:
    return _is_rows(phases) and {"name", "depth", "seconds", "before", "peak", "after"} <= set(phases[0])


def _profile(profile: dict[str, Any], caption: str) -> Table:
    """The phases of a `lora_mem.profile`: milliseconds and MiB, peak and left above what a phase began with."""

    def mib(value: int | None) -> str:
        return "" if value is None else f"{value / 2**20:.2f}"

    def change(phase: dict[str, Any], when: str, *names: str) -> str:
        found = [(phase[when][name], phase["before"][name]) for name in names]
        known = [after - before for after, before in found if after is not None and before is not None]
        return mib(sum(known)) if known else ""

    columns = ["phase", "ms", "GPU peak, MiB", "GPU left, MiB", "page-locked left, MiB", "to host, MiB", "to GPU, MiB"]
    columns += ["kernels, ms", "copying to host, ms", "of it beside kernels, ms"]
    rows = []
    for phase in (*profile["phases"], profile["total"]):
        row = ["\u00a0\u00a0" * phase["depth"] + phase["name"], f"{phase['seconds'] * 1e3:.3f}"]
        row += [change(phase, "peak", "allocated"), change(phase, "after", "allocated")]
        row += [change(phase, "after", "pinned", "pinned_by_torch"), mib(phase["to_host"]), mib(phase["to_device"])]
        traced = phase.get("traced") or {}
        for name in ("kernels", "to_host_seconds", "overlapped"):
            row.append(f"{traced[name] * 1e3:.3f}" if name in traced else "")
        rows.append(row)
    missing = "".join(f"; not measured: {reason}" for reason in profile.get("missing", ()))
    return f"{caption or 'profile'} on {profile['device']}{missing}", columns, rows


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _has_rows(value: dict[str, Any]) -> bool:
    return any(_is_rows(one) or (isinstance(one, dict) and _has_rows(one)) for one in value.values())


def _flat(value: dict[str, Any], before: str = "") -> dict[str, Any]:
    """Fields by dotted names; without lists of dicts, which are tables of their own."""
    found: dict[str, Any] = {}
    for key, one in value.items():
        name = f"{before}{key}"
        if isinstance(one, dict):
            if not _has_rows(one):
                found |= _flat(one, f"{name}.")
        elif not _is_rows(one):
            found[name] = one
    return found


def _header(key: str) -> str:
    words = key.replace(".", " ")  # so that a narrow column can break it
    for pattern, unit in ((_BYTES, "GiB"), (_MILLISECONDS, "ms"), (_SECONDS, "s")):
        if pattern.search(key):
            return f"{words}, {unit}"
    return words


def _cell(key: str, value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value / GIB:.4f}" if _BYTES.search(key) else f"{value:,}"
    if isinstance(value, float) and _SECONDS.search(key):
        return f"{value:.4f}"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.1f}"
    text = ", ".join(_cell(key, one) for one in value) if isinstance(value, list) else str(value)
    return text if len(text) <= _MOST_CELL else f"{text[:_MOST_CELL]} …"
