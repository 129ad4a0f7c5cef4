"""Runs as one HTML page that needs no other file and no network."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.report.plots import NamedRun, check_matplotlib, pictures

_STYLE = """body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 }
td, th { padding: .2em .8em; text-align: right; border-bottom: 1px solid #ddd; vertical-align: top }
td:first-child, th:first-child { text-align: left }
svg { max-width: 100%; height: auto } pre { overflow: auto }
.warning { color: #a40; font-weight: bold }"""

_FIGURES: tuple[tuple[str, str], ...] = (
    ("completed", "requests that ended well"),
    ("failed", "requests that did not"),
    ("duration", "duration, s"),
    ("request_throughput", "requests/s"),
    ("request_goodput", "good requests/s"),
    ("output_throughput", "output tokens/s"),
    ("total_token_throughput", "tokens/s"),
    *(
        (f"{figure}_{name}_ms", f"{said} {figure}, ms")
        for name, said in (("ttft", "TTFT"), ("tpot", "TPOT"), ("itl", "ITL"), ("e2el", "last token"))
        for figure in ("mean", "median", "p90", "p99")
    ),
)
_RESULTS: tuple[tuple[str, str], ...] = (
    ("num_prompt_tokens", "prompt tokens"),
    ("num_cached_prompt_tokens", "of them from the cache"),
    ("num_swaps", "preemptions by swapping"),
    ("num_recomputes", "preemptions by recomputing"),
    ("num_tail_reclaims", "preemptions of tails"),
)


def read_runs(paths: Sequence[Path]) -> list[NamedRun]:
    """Documents of `pageturner loadtest --json`, named by their files. Raises OptionError."""
    runs = []
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise OptionError("report", f"{path}: {error.strerror or error}") from error
        except ValueError as error:
            raise OptionError("report", f"{path} is not JSON: {error}") from error
        if not isinstance(document, dict) or not {"settings", "results", "over_time"} <= document.keys():
            raise OptionError("report", f"{path} is not what `pageturner loadtest --json` writes")
        runs.append(NamedRun(path.stem, document))
    return runs


def check_page(path: Path) -> None:
    """Before a long run: a page can be drawn, and has a folder to lie in. Raises OptionError."""
    if not path.parent.is_dir():
        raise OptionError("report", f"there is no folder {path.parent}")
    check_matplotlib()


def write_page(runs: Sequence[NamedRun], path: Path) -> None:
    """All runs beside each other. Raises OptionError where the file cannot be written."""
    try:
        path.write_text(page(runs), encoding="utf-8")
    except OSError as error:
        raise OptionError("report", f"{path}: {error.strerror or error}") from error


def page(runs: Sequence[NamedRun]) -> str:
    """HTML. One run, or several to be compared."""
    title = f"Load test: {', '.join(run.name for run in runs)}"
    drawn = "\n".join(f"<h2>{html.escape(name)}</h2>\n{svg}" for name, svg in pictures(runs))
    documents = "\n".join(
        f"<details><summary>All of {html.escape(run.name)}</summary>"
        f"<pre>{html.escape(json.dumps(_without_series(run.document), indent=1))}</pre></details>"
        for run in runs
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style></head>
<body><h1>{html.escape(title)}</h1>
{_warnings(runs)}
<h2>Figures</h2>
{_table(runs, _figure_rows(runs))}
<h2>Configuration and machine</h2>
{_table(runs, _setting_rows(runs))}
{drawn}
{documents}
</body></html>
"""


def _table(runs: Sequence[NamedRun], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    heads = "".join(f"<th>{html.escape(run.name)}</th>" for run in runs)
    lines = "\n".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
        for name, cells in rows
    )
    return f"<table><tr><th></th>{heads}</tr>\n{lines}\n</table>"


def _figure_rows(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    rows = [(said, [_compared(runs, run, (name,)) for run in runs]) for name, said in _FIGURES]
    rows += [(said, [_compared(runs, run, ("results", name)) for run in runs]) for name, said in _RESULTS]
    knees = [run.document.get("knee") for run in runs]
    if any(knees):
        rows.append(("highest rate that keeps the objectives", [_knee(knee) for knee in knees]))
    return rows


def _compared(runs: Sequence[NamedRun], run: NamedRun, keys: tuple[str, ...]) -> str:
    """The figure, and its ratio to the first run's where there are several."""
    own, first = _number(run.document, keys), _number(runs[0].document, keys)
    if own is None:
        return "-"
    text = f"{own:,.0f}" if own == int(own) else f"{own:,.2f}"
    return text if run is runs[0] or not first else f"{text} ({own / first:.2f} x)"


def _number(document: Mapping[str, Any], keys: tuple[str, ...]) -> float | None:
    found: Any = document
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    return None if found is None else float(found)


def _knee(knee: Mapping[str, Any] | None) -> str:
    if not knee:
        return "-"
    return "none" if knee["rate"] is None else f"{knee['rate']:,.2f}/s"


def _setting_rows(runs: Sequence[NamedRun]) -> list[tuple[str, list[str]]]:
    rows = []
    for part in ("settings", "server", "client"):
        sections = [run.document.get(part) or {} for run in runs]
        names = dict.fromkeys(name for section in sections for name in section)
        rows += [
            (f"{part}: {name}".replace("_", " "), [_said(section.get(name)) for section in sections])
            for name in names
        ]
    return rows


def _said(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key}={_said(each)}" for key, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_said, value))
    return "-" if value in (None, "") else f"{value:g}" if isinstance(value, float) else str(value)


def _warnings(runs: Sequence[NamedRun]) -> str:
    said = [
        f"{run.name}: {text}"
        for run in runs
        for text in (
            "" if run.document["results"]["is_complete"] else "ended early",
            (run.document.get("client") or {}).get("warning", ""),
        )
        if text
    ]
    return "\n".join(f'<p class="warning">{html.escape(text)}</p>' for text in said)


def _without_series(document: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: value for name, value in document.items() if name not in ("over_time", "distributions")}
