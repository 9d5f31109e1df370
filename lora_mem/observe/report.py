"""One dated report folder as one HTML page that needs nothing else: its README, tables of its raw data, its plots.

nbconvert makes it, from a notebook of the folder: images are inlined, links to files of the folder lead to the file's
section, and nothing is loaded from the web.
"""

from __future__ import annotations

import base64
import json
import mimetypes
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from lora_mem.drawing import html_table
from lora_mem.observe.results import Bench, Profile, Table
from lora_mem.sizing.units import GIB

_IMAGES = (".png", ".jpg", ".jpeg", ".svg")
_DATA = (".json", ".jsonl")
_TEXTS = (".log", ".txt", ".md", ".csv")

_MOST_TEXT = 60_000  # characters of a file that are shown as they are
_MOST_CELL = 160

# What a field's name says of its unit.
_BYTES = re.compile(
    r"(^|[._])(bytes|nbytes|allocated|reserved|peak|left|retained|device_used|resident|pinned|pinned_by_torch)$"
    r"|^(holders|held)\.|^memory\.|_bytes$"
)
_MILLISECONDS = re.compile(r"(^|[._])milliseconds$")
_SECONDS = re.compile(r"(^|[._])seconds([._]|$)")

_TEMPLATE = """{% extends 'index.html.j2' %}
{% block html_head_js %}{% endblock %}
{% block html_head_js_mathjax %}{% endblock %}
{% block html_head_js_mermaidjs %}{% endblock %}
{% block extra_css %}
<style>
main { margin: 0 auto; max-width: 76rem; }
main img { max-width: 100%; height: auto; }
main .scroll { overflow-x: auto; }
main table caption { text-align: left; font-weight: 600; }
main .jp-RenderedHTMLCommon tr > :first-child { text-align: left; white-space: pre-wrap; }
@media print { details { display: none; } }
</style>
{% endblock %}"""
"""JupyterLab's look without its scripts, which nbconvert would load from the web."""


class ReportError(ValueError):
    """A folder that is not a report, or that lacks what its README shows."""


def render(folder: str | Path) -> str:
    """The page of a folder with a README.md and beside it any JSON, JSON lines, images and logs; others are listed.

    Raises:
        ReportError: no folder, no README.md in it, or the README shows or links to a file that is not there.
        ImportError: nbconvert is missing; names the extra that has it.
    """
    folder = Path(folder)
    readme = folder / "README.md"
    if not readme.is_file():
        raise ReportError(
            f"folder is {str(folder)!r}, which has no README.md; a report says there what was asked and what came out"
        )
    try:
        from nbconvert import HTMLExporter
        from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
    except ImportError as error:
        raise ImportError(f"a report needs {error.name}: pip install 'lora-mem[notebooks]'") from None
    text = readme.read_text(encoding="utf-8")
    shown = set(re.findall(r"!\[[^]]*\]\((\S+?)[)\s]", text))
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names.remove("README.md")
    pages = [_section(folder / name, name, name in shown) for name in names]
    if names:
        links = "".join(f'<li><a href="#{quote(name)}">{escape(name)}</a></li>' for name in names)
        pages.insert(0, f'<h2 id="raw-data">Raw data</h2><ul>{links}</ul>')
    pages.append(
        f"<p>Made of the folder {escape(folder.resolve().name)} by <code>lora-mem report</code>. "
        "Sizes in GiB are bytes / 2<sup>30</sup>.</p>"
    )
    # Ids by number, so that the page is the same each time.
    cells = [new_markdown_cell(text, id="readme")]
    for number, page in enumerate(pages):
        output = new_output("display_data", {"text/html": f'<div class="jp-RenderedHTMLCommon">{page}</div>'})
        cells.append(new_code_cell(outputs=[output], id=f"section-{number}"))
    title = re.search(r"^# (.+)$", text, re.MULTILINE)
    hidden = {"exclude_input": True, "exclude_input_prompt": True, "exclude_output_prompt": True}
    exporter = HTMLExporter(raw_template=_TEMPLATE, **hidden)
    exporter.register_filter("markdown2html", partial(_markdown, folder))
    notebook = new_notebook(cells=cells, metadata={"title": title[1] if title else folder.resolve().name})
    page, _ = exporter.from_notebook_node(notebook)
    return str(page)


def _markdown(folder: Path, text: str) -> str:
    """Markdown as HTML; links to files of the folder become links into the page, its images are inlined."""
    from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

    class Renderer(IPythonRenderer):  # type: ignore[misc]
        def link(self, text: str, url: str, title: str | None = None) -> str:
            if _leads_out(url) or url.startswith("#"):
                return str(super().link(text, url, title))
            path = _inside(folder, url)
            if path is None:
                return text  # what lies outside of the folder does not travel with the page
            return str(super().link(text, f"#{quote(path) or 'raw-data'}", title))

        def image(self, text: str, url: str, title: str | None = None) -> str:
            path = None if _leads_out(url) else _inside(folder, url)
            if not path:
                raise ReportError(f"README.md shows {url!r}; it must be a file of the folder: nothing is loaded")
            return str(super().image(text, path, title))

    renderer = Renderer(escape=True, embed_images=True, exclude_anchor_links=True, path=str(folder))
    return str(MarkdownWithMath(renderer=renderer).render(text))


def _leads_out(url: str) -> bool:
    return re.match(r"[a-z][a-z0-9+.-]*:", url) is not None


def _inside(folder: Path, url: str) -> str | None:
    """The file of the folder that a relative URL of the README means; "" for a folder in it, None for one outside."""
    path = (folder / url.partition("#")[0]).resolve()
    if not path.is_relative_to(folder.resolve()):
        return None
    if not path.exists():
        raise ReportError(f"README.md names {url!r}, which is not in the folder; correct the link or add the file")
    return "" if path.is_dir() else path.relative_to(folder.resolve()).as_posix()


def _section(path: Path, name: str, shown: bool) -> str:
    """One file of the folder: tables, image or text, and its name, where links to it lead."""
    parts = [f'<h3 id="{quote(name)}">{escape(name)}</h3>']
    text = path.read_text(encoding="utf-8", errors="replace") if path.suffix in (*_DATA, *_TEXTS) else ""
    if path.suffix in _IMAGES:
        image = f"data:{mimetypes.guess_type(name)[0]};base64,{base64.b64encode(path.read_bytes()).decode()}"
        parts.append("<p>Shown above.</p>" if shown else f'<img src="{image}" alt="{escape(name)}">')
    elif path.suffix in _DATA:
        value: Any = [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else json.loads(text)
        parts += (f'<div class="scroll">{html_table(*table)}</div>' for table in tables(value))
    elif path.suffix not in _TEXTS:
        parts.append(f"<p>{path.stat().st_size:,} bytes; {_how_to_open(name)}</p>")
    if len(text) > _MOST_TEXT:
        parts.append(f"<p>{len(text):,} characters; the file has them all.</p>")
    elif text:
        parts.append(f"<details><summary>the file as it is</summary><pre>{escape(text)}</pre></details>")
    return "\n".join(parts)


def _how_to_open(name: str) -> str:
    if name.endswith("trace.json.gz"):
        return "a trace: open the file in Perfetto's UI, chrome://tracing or TensorBoard."
    if ".pickle" in name:
        return "a memory snapshot: read it with pickle, or open it (unpacked) in torch's memory viewer."
    return "not shown."


def tables(value: Any, caption: str = "") -> Iterator[Table]:
    """The tables of a JSON value, the outer before the inner: benches and profiles have their own, others by fields.

    The caption is the first table's; those of inner ones say where they were found.
    """
    if (result := _result(value)) is not None:
        title, columns, rows = result.table()
        yield f"{caption}: {title}" if caption and isinstance(result, Profile) else title, columns, rows
    elif _is_rows(value) and all(isinstance(_result(one), Bench) for one in value):
        yield _by_rank([Bench.from_dict(one) for one in value])
        for one in value:
            yield from tables(one)
    elif isinstance(value, dict) or _is_rows(value):
        found = [dict(_fields(one)) for one in (value if isinstance(value, list) else [value])]
        plain = [{key: one for key, one in row.items() if not _has_tables(one)} for row in found]
        keys = list(dict.fromkeys(key for row in plain for key in row))
        if keys and isinstance(value, dict):
            yield caption, ["figure", "value"], [[_header(key), _cell(key, one)] for key, one in plain[0].items()]
        elif keys:
            yield caption, list(map(_header, keys)), [[_cell(key, row.get(key)) for key in keys] for row in plain]
        for number, row in enumerate(found):
            name = row.get("name") or row.get("strategy") or row.get("case") or number
            at = [caption] if isinstance(value, dict) else [caption, str(name)]
            for key, one in row.items():
                if _has_tables(one):
                    yield from tables(one, " / ".join(filter(None, [*at, key])))


def _by_rank(benches: Sequence[Bench]) -> Table:
    """A row for each bench and strategy, measured beside predicted: the last sync, and the seconds of the first."""
    columns = ["rank", "strategy", "first sync, s", "sync, s", "add_lora, s", "rebuild, s", "GPU peak, GiB"]
    columns += ["GPU retained, GiB", "pinned by us, GiB", "registered, GiB", "by calculation, GiB", "slots, GiB"]
    columns += ["by calculation, GiB", "slots equal"]
    rows = []
    for bench in benches:
        for strategy in dict.fromkeys(sync.strategy for sync in bench.syncs):
            first, *_, last = [sync for sync in bench.syncs if sync.strategy == strategy]
            seconds = [first.seconds, last.seconds, last.adding, last.rebuilding]
            sizes: list[int | None] = [last.peak, last.retained, last.pinned]
            for holder, predicted in (("registered", "packed_bytes"), ("slots", "slot_bytes")):
                sizes += [sum(last.held[holder].values()), bench.predicted.get(predicted)]
            row = [str(bench.rank), strategy, *(f"{one:.3f}" for one in seconds)]
            rows.append([*row, *(_cell("bytes", size) for size in sizes), "yes" if bench.slots_equal else "NO"])
    one = benches[0]
    caption = f"{one.model}, {one.layers} layers, slots of rank {one.max_lora_rank}, on {one.device}"
    skipped = [(bench.rank, *skipped) for bench in benches for skipped in bench.skipped.items()]
    return caption + "".join(f"; rank {rank} by {way} left out: {why}" for rank, way, why in skipped), columns, rows


def _result(value: Any) -> Bench | Profile | None:
    for kind in (Bench, Profile):
        with suppress(ValueError):
            if isinstance(value, dict):
                return kind.from_dict(value)
    return None


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _has_tables(value: Any) -> bool:
    return _is_rows(value) or _result(value) is not None


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
