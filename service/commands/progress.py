"""How far long work has come: a bar in a terminal, else a line for each part, with the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from pageturner.service.commands.output import note

Advance = Callable[[str, float], None]
"""Told what was done, in words, and how much of the total that is."""


@contextmanager
def progress(total: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Advance]:
    """On standard error. total: of the amounts that Advance will be told."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(total, clock)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=total)
        yield lambda text, amount: bar.update(task, description=text, advance=amount)


@contextmanager
def reading(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar while a file is read; takes the bytes read and those of the file. Nothing outside a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading {task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, size: bar.update(task, completed=done, total=size or None)


class _Lines:
    """A line for each part that is done; the time left if the rest takes as long by amount."""

    def __init__(self, total: float, clock: Callable[[], float]) -> None:
        self._total = total
        self._clock = clock
        self._started_at = clock()
        self._done = 0.0

    def __call__(self, text: str, amount: float) -> None:
        self._done += amount
        share = self._done / self._total
        left = (self._clock() - self._started_at) * (1 / share - 1) if share else None
        note(f"{text} ({share:.0%}{'' if left is None or share >= 1 else f', about {duration(left)} left'})")


def duration(seconds: float) -> str:
    """`42 s`, or `3 min` above a hundred seconds."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
