"""One page of one report folder: complete, self-contained, with units."""

from __future__ import annotations

import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote

import pytest

pytest.importorskip("nbconvert")

from a_bench import GIB, bench
from lora_mem.observe.report import ReportError, render, tables

REPORTS = sorted(path for path in (Path(__file__).parents[2] / "reports").iterdir() if path.is_dir())


PNG = b"\x89PNG\r\n\x1a\n" + b"\0" * 16


VOID = ("meta", "img", "br", "link", "hr")


class Page(HTMLParser):
    """What a browser would load, where links lead, and whether tags are balanced."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        if "src" in found or tag == "link":
            self.loads.append(str(found.get("src") or found.get("href")))
        if tag == "a":
            self.links.append(str(found["href"]))
        if "id" in found:
            self.ids.append(str(found["id"]))

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another tag"


def folder(tmp_path: Path, readme: str = "# A title\n\nText.\n") -> Path:
    (tmp_path / "raw").mkdir(parents=True)
    (tmp_path / "README.md").write_text(readme)
    return tmp_path


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.name)
def test_the_committed_reports(path):
    text = render(path)
    assert not [word for word in ("@import", "url(http", "url(//") if word in text]
    page = Page(text)
    assert page.open == []
    assert len(set(page.ids)) == len(page.ids)
    assert all(load.startswith("data:image/") for load in page.loads)
    inside = [link for link in page.links if link.startswith("#")]
    assert {link[1:] for link in inside} <= set(page.ids)
    assert all(link.startswith(("#", "https://")) for link in page.links)
    for one in path.rglob("*"):
        if one.is_file() and one.name != "README.md":
            assert f"#{quote(one.relative_to(path).as_posix())}" in inside
    assert page.tags.count("script") == 0


def test_images_are_inlined_once(tmp_path):
    at = folder(tmp_path, "# T\n\n![a plot](raw/shown.png) and [it again](raw/shown.png)\n")
    for name in ("shown", "other"):
        (at / "raw" / f"{name}.png").write_bytes(PNG + name.encode())
    page = Page(render(at))
    assert len(page.loads) == 2
    assert len(set(page.loads)) == 2
    assert all(load.startswith("data:image/png;base64,") for load in page.loads)
    assert "#raw/shown.png" in page.links


def test_text_is_text(tmp_path):
    at = folder(tmp_path, "# <b>T</b>\n\n<script>alert(1)</script>\n")
    (at / "raw" / "x.json").write_text(json.dumps({"name": "<i>x</i>", "rows": [{"name": "<i>y</i>"}]}))
    (at / "raw" / "x.log").write_text("</pre><script>")
    page = Page(render(at))
    assert "script" not in page.tags
    assert "i" not in page.tags
    assert page.open == []


def test_links_stay_in_the_page(tmp_path):
    at = folder(
        tmp_path, "# T\n\n[all](raw), [one](raw/x.log), [code](../../scripts/x.py), [web](https://example.org)\n"
    )
    (at / "raw" / "x.log").write_text("x")
    page = Page(render(at))
    assert page.links[:3] == ["#raw-data", "#raw/x.log", "https://example.org"]
    assert {"raw-data", "raw/x.log"} <= set(page.ids)


@pytest.mark.parametrize(
    ("readme", "message"),
    [
        ("[raw](raw/gone.json)", "names 'raw/gone.json', which is not in the folder"),
        ("![plot](https://example.org/plot.png)", "nothing is loaded"),
        ("![plot](gone.png)", "names 'gone.png'"),
    ],
)
def test_a_readme_that_shows_what_is_not_there(tmp_path, readme, message):
    with pytest.raises(ReportError, match=message):
        render(folder(tmp_path, readme))


def test_no_report():
    with pytest.raises(ReportError, match="which has no README"):
        render("nowhere")


def test_benches_by_rank_and_strategy():
    (caption, columns, rows), first, second = tables([bench(8).to_dict(), bench(64).to_dict()])
    assert caption.startswith(
        "a model, 2 layers, slots of rank 64, on a GPU; rank 8 by keep left out: no room; rank 64"
    )
    assert [row[:2] for row in rows] == [["8", "stage"], ["64", "stage"]]
    shown = dict(zip(columns[:9], rows[0], strict=False))
    assert shown["sync, s"] == "1.250"
    assert shown["GPU peak, GiB"] == "0.2500"
    assert shown["pinned by us, GiB"] == "2.0000"
    assert rows[0][9:] == ["1.0000", "1.0000", "3.0000", "3.0000", "yes"]
    assert "keep left out: no room" in first[0]
    assert "rank 64" in second[0]


def test_values_have_units():
    values = {
        "seconds": {"touch": 0.5},
        "milliseconds": 1500.0,
        "slot_bytes": 3 * GIB // 2,
        "holders": {"slots": {"cuda:0": GIB}},
        "count": 12345,
        "good": True,
        "nothing": None,
        "tokens": [1, 2],
    }
    ((_, _, rows),) = tables(values)
    assert rows == [
        ["seconds touch, s", "0.5000"],
        ["milliseconds, ms", "1,500.0"],
        ["slot_bytes, GiB", "1.5000"],
        ["holders slots cuda:0, GiB", "1.0000"],
        ["count", "12,345"],
        ["good", "yes"],
        ["nothing", ""],
        ["tokens", "1, 2"],
    ]
    nested = {"lives": [{"strategy": "keep", "phases": [{"name": "baseline", "allocated": GIB}]}]}
    assert [caption for caption, _, _ in tables(nested)] == ["lives", "lives / keep / phases"]


def test_a_profile_by_phase():
    pytest.importorskip("torch")
    from lora_mem.observe.results import Memory, Phase, Profile, Traced

    before, peak = Memory(0, 0, 0, 0, 0, 0), Memory(3 * 2**20, 0, 0, 0, 0, 0)
    after = Memory(2**20, 0, 0, 5 * 2**20, 2**20, 0)
    traced = Traced(0.002, 2**20, 0.001, 0, 0.0, 0.0005)
    stage = Phase("stage", 0, 0.0, 0.25, None, before, peak, after, 2**20, 0, traced=traced)
    inner = Phase("receive", 1, 0.0, 0.125, None, Memory(None, None, None, 0, None, 0), after, after, 0, 2**21)
    profile = Profile("a GPU", {}, stage, (stage, inner), missing=("peaks",))
    ((caption, columns, rows),) = tables({"trace": json.loads(profile.to_json())})
    assert caption == "trace: Profile on a GPU; not measured: peaks"
    assert dict(zip(columns, rows[0], strict=True)) == {
        "phase": "stage",
        "ms": "250.000",
        "device ms": "",
        "GPU peak MiB": "+3.00",
        "GPU retained MiB": "+1.00",
        "reserved retained MiB": "+0.00",
        "pinned MiB": "+6.00",
        "host MiB": "+0.00",
        "to host MiB": "1.00",
        "to GPU MiB": "0.00",
        "kernels ms": "2.000",
        "copying to host ms": "1.000",
        "beside kernels ms": "0.500",
    }
    assert rows[1][:4] == ["  receive", "125.000", "", ""]


def test_the_command(tmp_path):
    at, page = folder(tmp_path / "report"), tmp_path / "page.html"
    command = [sys.executable, "-m", "lora_mem", "report", str(at), "--output", str(page)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{page}\n"
    text = page.read_text()
    assert "<h1>A title</h1>" in text
    assert "<title>A title</title>" in text
    assert render(at) == text  # the same each time
    done = subprocess.run([*command[:4], "nowhere"], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == (
        "lora-mem: folder is 'nowhere', which has no README.md; a report says there what was asked and what came out\n"
    )
