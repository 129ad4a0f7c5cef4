"""Where commands print: standard output, flushed, so that a pipe sees each token as it comes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pageturner.service.errors import PageturnerError

if TYPE_CHECKING:
    from rich.console import RenderableType


class OutputLost(PageturnerError):
    """Standard output takes no more, as on a full disk."""


@contextmanager
def standard_output() -> Iterator[None]:
    """Whoever writes to it meanwhile raises OutputLost, or BrokenPipeError where the reader went away."""
    try:
        yield
    except BrokenPipeError:
        raise  # no mistake of anybody's: `head` has seen enough
    except OSError as error:
        discard_output()
        raise OutputLost(f"standard output: {error.strerror}") from error


def write(text: str = "", end: str = "\n") -> None:
    """Raises as `standard_output`."""
    with standard_output():
        sys.stdout.write(text + end)
        sys.stdout.flush()


def show(renderable: RenderableType, **options: Any) -> None:
    """A table or the like. options: of rich's `Console.print`. Raises OutputLost, or SystemExit where the
    reader went away, of which rich takes care."""
    from rich.console import Console

    with standard_output():
        Console().print(renderable, **options)


def note(text: str) -> None:
    """A remark that is not part of the result: standard error."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def discard_output() -> None:
    """Let go of what could not be written: Python would complain once more while flushing at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
