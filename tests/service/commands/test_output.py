"""Printing: what a locale cannot print is escaped, and a remark that cannot be written is dropped."""

from __future__ import annotations

import io
import json
import sys
import tomllib

import pytest
from rich.console import Group
from rich.table import Table

from pageturner.service.commands import output

TEXT = "é 你 🙂"


def stream(encoding: str) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding=encoding)


def printed(stream: io.TextIOWrapper) -> str:
    assert isinstance(stream.buffer, io.BytesIO)
    return stream.buffer.getvalue().decode(stream.encoding)


@pytest.mark.fault("25")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_text_beyond_the_locale_is_escaped(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream(encoding))
    output.prepare_streams()
    output.write(f'text = "{TEXT}"')
    assert isinstance(sys.stdout, io.TextIOWrapper)
    assert tomllib.loads(printed(sys.stdout))["text"] == TEXT


@pytest.mark.fault("25")
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("text", [TEXT, "\ud800"])
def test_json_reads_back_in_any_locale(encoding: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream(encoding))
    output.prepare_streams()
    output.write_json({"text": text})
    assert isinstance(sys.stdout, io.TextIOWrapper)
    assert json.loads(printed(sys.stdout)) == {"text": text}


@pytest.mark.fault("K")
def test_long_lines_are_wrapped_under_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    lines = output.wrapped("  * name  ", "word " * 12).splitlines()
    assert max(map(len, lines)) <= 40
    assert lines[0].startswith("  * name  word")
    assert all(line.startswith(" " * 10 + "word") for line in lines[1:])


def figures(num_columns: int) -> Table:
    table = Table(title="figures")
    table.add_column("", no_wrap=True)
    for number in range(num_columns):
        table.add_column(f"set {number}", justify="right")
    table.add_row("tokens", *(f"{number}.123 ± 0.456" for number in range(num_columns)))
    return table


@pytest.mark.fault("K")
@pytest.mark.parametrize("num_columns", [2, 6, 7])
def test_a_table_too_wide_is_shown_in_parts_that_break_no_figure(
    num_columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output.show(Group("above", figures(num_columns), "below"))
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    for number in range(num_columns):
        assert shown.count(f"set {number}") == 1
        assert f"{number}.123 ± 0.456" in shown
    parts = 1 if num_columns == 2 else 2
    assert shown.count("tokens") == shown.count("figures") == parts
    assert shown.index("above") < shown.index("set 0") < shown.index("below")
