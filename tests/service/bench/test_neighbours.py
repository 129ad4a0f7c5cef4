"""The benchmark of busy neighbours: its parts that need no server, and once the whole with a fake loop."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from pageturner.service.bench import neighbours
from pageturner.service.bench.neighbours import busy_programs, measure_neighbours, processor_seconds
from pageturner.service.bench.throughput import ThroughputLoad
from pageturner.service.client.server_process import RunningServer
from pageturner.service.errors import PageturnerError


def test_processor_time_is_read_behind_a_name_that_holds_spaces_and_brackets(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = " ".join(str(number) for number in range(4, 40))
    (tmp_path / "7/stat").write_text(f"7 (a ) b) S {fields}")  # field 14 and 15 are user and system ticks
    assert processor_seconds(7, tmp_path) == (14 + 15) / os.sysconf("SC_CLK_TCK")
    with pytest.raises(PageturnerError, match="processor time of process 8"):
        processor_seconds(8, tmp_path)


def test_busy_programs_end_with_the_block() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

    before = children()
    with busy_programs(2):
        assert len(children() - before) == 2
    assert children() <= before


def test_rounds_take_turns_and_idleness_comes_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def server(arguments: Sequence[str]) -> Iterator[RunningServer]:
        told.append(f"serve {' '.join(arguments)}")
        yield RunningServer("here:1", os.getpid(), 0.5)

    @contextmanager
    def busy(count: int) -> Iterator[None]:
        told.append(f"{count} busy")
        yield
        told.append("alone")

    def serve_round(target: str, workload: ThroughputLoad, seed: int) -> float:
        told.append(f"round {seed}")
        return 10.0 if told[-2].endswith("busy") else 20.0

    times = iter((1.0, 1.1))
    monkeypatch.setattr(neighbours, "running_server", server)
    monkeypatch.setattr(neighbours, "busy_programs", busy)
    monkeypatch.setattr(neighbours, "serve_round", serve_round)
    monkeypatch.setattr(neighbours, "processor_seconds", lambda pid: next(times))
    said: list[str] = []
    result = measure_neighbours(
        ThroughputLoad(1, 2, 3),
        2,
        1,
        10,
        ["--device=cpu"],
        said.append,
        lambda seconds: told.append(f"sleep {seconds}"),
    )
    assert told == [
        *("serve --device=cpu", "round 0", "round 1", "1 busy", "round 1", "alone"),
        *("round 2", "1 busy", "round 2", "alone", "sleep 1.0", "sleep 10"),
    ]
    assert result.medians() == {
        "quiet_tokens_per_second": 20.0,
        "beside_tokens_per_second": 10.0,
        "ratio": 0.5,
    }
    assert result.idle_core_share == pytest.approx(0.01)
    assert len(said) == 3
