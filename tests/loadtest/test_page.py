"""The page: well-formed, complete in itself, with a picture of all that the runs hold, and no more."""

from __future__ import annotations

import argparse
import html
import json
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from support.fake_server import serve

from pageturner.loadtest import cli
from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.report import plots
from pageturner.loadtest.report.page import page, read_runs
from pageturner.loadtest.report.plots import NamedRun

pytest.importorskip("matplotlib")

SVG = "{http://www.w3.org/2000/svg}"
OVER_TIME: dict[str, list[float]] = {
    "seconds": [0.0, 1.0, 2.0],
    "num_running": [0, 4, 2],
    "num_waiting": [0, 9, 0],
    "num_blocks": [64, 64, 64],
    "num_blocks_used": [0, 60, 10],
    "num_blocks_evictable": [0, 4, 20],
    "num_swap_preemptions": [1, 2, 2],
    "num_recompute_preemptions": [0, 3, 3],
    "num_tail_preemptions": [0, 0, 1],
    "resident_bytes": [1 << 28, 1 << 28, 1 << 28],
    "cpu_seconds": [5.0, 6.0, 7.0],
}
KNEE = {
    "rate": 4.0,
    "options": {"share": 0.9},
    "probes": [
        {"rate": 4.0, "share": 0.95, "low": 0.91, "high": 0.98},
        {"rate": 8.0, "share": 0.2, "low": 0.1, "high": 0.3},
    ],
}


class Checked(HTMLParser):
    """Fails where a tag is not closed by its own; keeps all that points out of the page."""

    VOID = frozenset({"meta", "br", "img", "link", "use", "path"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.outward: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.outward += [
            value or ""
            for name, value in attrs
            if name in ("src", "href") and not (value or "").startswith("#")
        ]

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(words))


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run of the command against the fake, which tells no load; that is put in."""
    path = tmp_path_factory.mktemp("run") / "one.html"
    with serve() as server:
        words = (f"--target={server.address}", "--requests=8", "--prompt-tokens=4", "--output-tokens=5")
        assert run(*words, "--warmup=0", f"--report={path}") == 0
    text = path.read_text()
    assert "<h1>Load test: one</h1>" in text
    found = re.search(r"<pre>(.*?)</pre>", text, re.DOTALL)
    assert found is not None
    kept: dict[str, Any] = json.loads(html.unescape(found[1]))
    quantiles = {name: [0.0, 0.5, 2.0] for name in ("ttft", "tpot", "itl", "e2el")}
    return kept | {
        "over_time": {
            "load": OVER_TIME,
            "output": {"seconds": [0.5, 1.5], "output_tokens_per_second": [3.0, 9.0]},
        },
        "distributions": {"shares": [0.0, 0.5, 1.0]} | quantiles,
    }


def drawn_lines(svg: str) -> list[list[tuple[float, float]]]:
    """The points of each line that a run's colour draws; raises if the SVG is no XML or a point no number."""
    lines = []
    for path in ET.fromstring(svg).iter(f"{SVG}path"):  # our own
        style = path.get("style", "")
        if re.search(r"stroke: #(1f77b4|ff7f0e)", style) and path.get("clip-path"):
            pairs = re.findall(r"[ML] (\S+) (\S+)", path.get("d", ""))
            lines.append([(float(x), float(y)) for x, y in pairs])
    return lines


def test_the_page_is_well_formed_and_needs_nothing_else(document: dict[str, Any]) -> None:
    text = page([NamedRun("one <&> $x$", document), NamedRun("two", document | {"knee": KNEE})])
    checked = Checked()
    checked.feed(text)
    checked.close()
    assert checked.open == []
    assert checked.outward == []
    assert not re.search(r"@import|url\((?!#)|<script", text)
    assert "one &lt;&amp;&gt; $x$" in text
    assert "highest rate that keeps the objectives" in text


def test_every_picture_holds_a_line_for_every_run(document: dict[str, Any]) -> None:
    runs = [NamedRun("_one$", document | {"knee": KNEE}), NamedRun("two", document | {"knee": KNEE})]
    pictures = dict(plots.pictures(runs))
    assert len(pictures) == len(plots._PICTURES)
    for title, svg in pictures.items():
        lines = drawn_lines(svg)
        assert len(lines) >= 2, title
        for line in lines:
            assert len(line) >= 2, title


def test_a_line_goes_where_its_figures_go(document: dict[str, Any]) -> None:
    """Throughput of 3, then of 9: SVG's y falls as the figure rises."""
    svg = dict(plots.pictures([NamedRun("one", document)]))["Throughput"]
    ((left, right),) = [line for line in drawn_lines(svg) if len(line) == 2]
    assert left[0] < right[0]
    assert left[1] > right[1]


def test_no_line_leaves_its_axes(document: dict[str, Any]) -> None:
    """The second run's figures are ten times those of the first."""
    load = {name: [10 * each for each in column] for name, column in OVER_TIME.items()}
    more = document | {
        "over_time": {
            "load": load | {"seconds": OVER_TIME["seconds"]},
            "output": {"seconds": [0.5, 1.5], "output_tokens_per_second": [30.0, 90.0]},
        }
    }
    for title, svg in plots.pictures([NamedRun("one", document), NamedRun("two", more)]):
        height = float(ET.fromstring(svg).get("viewBox", "").split()[3])
        for line in drawn_lines(svg):
            assert all(0 <= y <= height for _, y in line), title


def test_what_no_run_has_is_not_drawn(document: dict[str, Any]) -> None:
    bare = document | {"over_time": {"load": {}, "output": document["over_time"]["output"]}, "knee": None}
    titles = [title for title, _ in plots.pictures([NamedRun("one", bare)])]
    assert [title.split()[0] for title in titles] == ["Latencies:", "Throughput"]
    assert any(
        title.startswith("KV") for title, _ in plots.pictures([NamedRun("o", bare), NamedRun("t", document)])
    )


def test_runs_are_compared_with_the_first(document: dict[str, Any]) -> None:
    faster = document | {"output_throughput": 2 * document["output_throughput"]}
    text = page([NamedRun("one", document), NamedRun("two", faster)])
    assert re.search(r"<tr><td>output tokens/s</td><td>[\d,.]+</td><td>[\d,.]+ \(2.00 x\)</td></tr>", text)


def test_documents_of_the_command_are_compared_by_the_command(
    document: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("before", "after"):
        (tmp_path / f"{name}.json").write_text(json.dumps(document))
    out = tmp_path / "both.html"
    assert run("report", str(tmp_path / "before.json"), str(tmp_path / "after.json"), f"--out={out}") == 0
    assert capsys.readouterr().out == f"{out}\n"
    assert "<h1>Load test: before, after</h1>" in out.read_text()


def test_what_is_no_document_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    with pytest.raises(OptionError, match="No such file"):
        read_runs([path])
    for text, reason in (("{", "is not JSON"), ("{}", "is not what"), ("[]", "is not what")):
        path.write_text(text)
        with pytest.raises(OptionError, match=reason):
            read_runs([path])
    assert run("report", str(path)) == 2
    assert capsys.readouterr().err.count("\n") == 1
