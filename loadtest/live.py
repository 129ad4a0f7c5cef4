"""The display of a run while it lasts: how far it is, the figures so far, and the server's queue and pool."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.monitor import LoadSample
from pageturner.loadtest.statistics import percentile

_REFRESH_SECONDS = 0.25
_WINDOW_SECONDS = 10.0
"""Rates are those of the last so many seconds."""


class FiguresSoFar:
    """Counts what ends. Cheap for each record; `text` is what is shown."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._began = now()
        self._recent: deque[tuple[float, int, float | None]] = deque()
        self._outcomes: Counter[Outcome] = Counter()
        self._sample: LoadSample | None = None

    def add(self, record: RequestRecord) -> None:
        """A request that has ended."""
        self._outcomes[record.outcome] += 1
        at = self._now()
        self._recent.append((at, record.num_output_tokens, record.time_to_first_token))
        while self._recent[0][0] < at - _WINDOW_SECONDS:
            self._recent.popleft()

    def observe(self, sample: LoadSample) -> None:
        """What the server tells of itself."""
        self._sample = sample

    @property
    def text(self) -> str:
        """One line."""
        parts = [f"{count} {outcome.value}" for outcome, count in self._outcomes.items()]
        seconds = min(_WINDOW_SECONDS, self._now() - self._began)
        if self._recent and seconds > 0:
            parts.append(f"{sum(tokens for _, tokens, _ in self._recent) / seconds:,.0f} tokens/s")
        firsts = sorted(first for _, _, first in self._recent if first is not None)
        if firsts:
            parts.append(f"TTFT p50 {1e3 * percentile(firsts, 0.5):,.0f} ms")
        if (sample := self._sample) is not None:
            parts.append(f"{sample.num_running} run, {sample.num_waiting} wait")
            parts.append(f"{sample.used_share:.0%} of blocks")
        return " · ".join(parts)


class LiveDisplay:
    """Told of records and samples, from any thread; draws on a terminal and says nothing elsewhere."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress, self._task = progress, task
        self._figures = FiguresSoFar()
        self._drawn_at = 0.0

    def on_record(self, record: RequestRecord) -> None:
        """A request that has ended."""
        self._figures.add(record)
        self._progress.advance(self._task)
        self._draw()

    def on_sample(self, sample: LoadSample) -> None:
        """What the server tells of itself."""
        self._figures.observe(sample)
        self._draw()

    def _draw(self) -> None:
        now = time.monotonic()
        if now - self._drawn_at >= _REFRESH_SECONDS:
            self._drawn_at = now
            self._progress.update(self._task, figures=self._figures.text)


@contextmanager
def live_display(title: str, num_requests: int, console: Console | None = None) -> Iterator[LiveDisplay]:
    """On standard error, gone when it is over."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[figures]}"),
    )
    with Progress(*columns, console=console or Console(stderr=True), transient=True) as progress:
        yield LiveDisplay(progress, progress.add_task(title, total=num_requests, figures=""))
