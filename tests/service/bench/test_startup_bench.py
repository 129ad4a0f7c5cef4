"""The parts of a start, as a server logs them and the bench sums them up."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from pageturner.service.bench import startup
from pageturner.service.bench.startup import measure_startup, parts_of
from pageturner.service.client.server_process import RunningServer
from pageturner.service.startup.stages import STARTED, Stages


def test_each_part_lasts_from_the_end_of_the_one_before() -> None:
    times = iter((12.0, 12.5, 16.0))
    stages = Stages(lambda: next(times), started_at=10.0)
    for name in ("imports", "bind", "weights"):
        stages.end(name)
    assert list(stages.seconds.items()) == [("imports", 2.0), ("bind", 0.5), ("weights", 3.5)]


def log_of(**parts: float) -> str:
    lines = [{"event": "threads"}, {"event": STARTED, "level": "info", **parts}]
    return "\n".join(["a warning", "[1]", *map(json.dumps, lines)])


def test_what_came_before_the_clock_is_a_part_too() -> None:
    parts = parts_of(2.0, log_of(imports=1.0, weights=0.25))
    assert parts == {"interpreter and command line": 0.75, "imports": 1.0, "weights": 0.25}
    assert parts_of(2.0, "a warning\n") == {}


def test_runs_are_summed_up_by_medians_and_the_first_counts_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seconds = iter((9.0, 2.0, 4.0, 3.0))
    given: list[Sequence[str]] = []

    @contextmanager
    def server(arguments: Sequence[str]) -> Iterator[RunningServer]:
        given.append(arguments)
        each = next(seconds)
        # The log's writer is behind at first.
        logs = iter(("", log_of(imports=each - 1.0)))
        yield RunningServer("here:1", 1, each, lambda: next(logs))

    monkeypatch.setattr(startup, "running_server", server)
    result = measure_startup(3, ["--device=cpu"])
    assert (result.first_seconds, result.seconds, result.median_seconds) == (9.0, (2.0, 4.0, 3.0), 3.0)
    assert result.median_parts() == {"interpreter and command line": 1.0, "imports": 2.0}
    assert set(given[0]) >= {"--device=cpu", "--log-level=info", "--log-format=json"}
