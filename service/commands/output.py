"""Where commands print: standard output, flushed, so that a pipe sees each token as it comes.

A result that cannot be written fails the command; a remark for standard error is dropped instead.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import json
import os
import select
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from pageturner.service.errors import PageturnerError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Column, Table

LAST_WORD_SECONDS = 2.0
"""How long a command that ends waits for a pipe on standard error that is not read."""

_ESCAPE = "pageturner-escape"


class OutputLost(PageturnerError):
    """Standard output takes no more, as on a full disk."""


def prepare_streams() -> None:
    """Make standard streams usable, whatever the program was started with.

    A stream that was closed is opened, so that the next file opened does not get its number. A character that
    the locale's encoding lacks is printed as an escape, and input that is no text is kept until `text_of`
    refuses it.
    """
    _reopen_closed_streams()
    codecs.register_error(_ESCAPE, _escape)
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, _ESCAPE), (sys.stderr, _ESCAPE)):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors=errors)


def _reopen_closed_streams() -> None:
    """Python sets a stream to None where its descriptor was closed by whatever started the program."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is not None:
            continue
        # Opened for reading, standard output refuses each write as the closed descriptor would.
        mode = os.O_WRONLY if name == "stderr" else os.O_RDONLY
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
        setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _escape(error: UnicodeError) -> tuple[str, int]:
    r"""An error handler of codecs: \uXXXX or \UXXXXXXXX, which TOML reads back."""
    assert isinstance(error, UnicodeEncodeError)
    codes = map(ord, error.object[error.start : error.end])
    return "".join(f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}" for code in codes), error.end


@contextmanager
def standard_output() -> Iterator[None]:
    """A write to it meanwhile raises OutputLost, or BrokenPipeError where the reader went away."""
    try:
        yield
    except BrokenPipeError:
        raise  # no mistake of the user's: `head` has seen enough
    except OSError as error:
        discard_output()
        raise OutputLost(f"standard output: {error.strerror}") from error


def write(text: str = "", end: str = "\n") -> None:
    """Print a piece of the result. Raises as `standard_output`."""
    with standard_output():
        sys.stdout.write(text + end)
        sys.stdout.flush()


def write_json(document: object, indent: int | None = 2) -> None:
    """Print a document; in ASCII where the locale's encoding is not UTF-8. Raises as `standard_output`."""
    is_utf8 = codecs.lookup(sys.stdout.encoding or "ascii").name == "utf-8"
    write(json.dumps(document, indent=indent, ensure_ascii=not is_utf8))


def wrapped(start: str, text: str) -> str:
    """Lines of the terminal's width, or of 80 columns; all but the first begin where `text` does."""
    width = max(shutil.get_terminal_size().columns, len(start) + 20)
    return textwrap.fill(
        text,
        width,
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_long_words=False,
        break_on_hyphens=False,
    )


def show(renderable: RenderableType, **options: Any) -> None:
    """A table or the like. options: of rich's `Console.print`. Raises OutputLost, or SystemExit where the
    reader went away, of which rich takes care."""
    from rich.console import Console, Group

    console = Console()
    parts = renderable.renderables if isinstance(renderable, Group) else [renderable]
    with standard_output():
        for part in parts:
            for fitting in _fitting(part, console):
                console.print(fitting, **options)


def _fitting(renderable: RenderableType, console: Console) -> Iterator[RenderableType]:
    """A table whose figures would be broken over lines as several, each with the first column, that fit."""
    from rich.measure import Measurement
    from rich.table import Table

    def fits(columns: Sequence[Column]) -> bool:
        wanted = Measurement.get(
            console, console.options.update(max_width=1 << 16), _with_columns(table, columns)
        )
        return wanted.maximum <= console.width

    if not isinstance(renderable, Table):
        yield renderable
        return
    table = renderable
    is_of_figures = all(column.justify == "right" for column in table.columns[1:])
    if not is_of_figures or fits(table.columns):
        yield table
        return
    first, *rest = table.columns
    while rest:
        count = 1
        while count < len(rest) and fits([first, *rest[: count + 1]]):
            count += 1
        yield _with_columns(table, [first, *rest[:count]])
        rest = rest[count:]


def _with_columns(table: Table, columns: Sequence[Column]) -> Table:
    part = copy.copy(table)
    part.columns = [dataclasses.replace(column, _index=index) for index, column in enumerate(columns)]
    return part


def note(text: str) -> None:
    """A remark that is not part of the result: standard error. Dropped where it cannot be written."""
    try:
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr.fileno())


def last_word(text: str) -> None:
    """A remark of a command that ends: as `note`, and dropped if a pipe is full that is not read."""
    try:
        _, writable, _ = select.select([], [sys.stderr], [], LAST_WORD_SECONDS)
    except (OSError, ValueError):  # a stream without a descriptor does not block
        writable = [sys.stderr]
    if writable:
        note(text)


def discard_output() -> None:
    """Let go of what could not be written: Python would complain once more while flushing at exit."""
    _discard(sys.stdout.fileno())


def _discard(descriptor: int) -> None:
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
