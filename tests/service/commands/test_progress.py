"""Long work tells its share and the time that is left."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pageturner.service.cli import main
from pageturner.service.commands.progress import duration, progress


def ticking(*moments: float) -> Iterator[float]:
    yield from moments


@pytest.mark.fault("K")
def test_each_part_is_told_with_its_share_and_the_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    """Ten of forty took 5 s, so thirty will take 15."""
    moments = ticking(100.0, 105.0, 110.0, 200.0)
    with progress(40, lambda: next(moments)) as advance:
        advance("a", 10)
        advance("b", 10)
        advance("c", 20)
    assert capsys.readouterr().err.splitlines() == [
        "a (25%, about 15 s left)",
        "b (50%, about 10 s left)",
        "c (100%)",
    ]


def test_what_is_no_part_tells_no_time(capsys: pytest.CaptureFixture[str]) -> None:
    with progress(40, lambda: 0.0) as advance:
        advance("ready", 0)
    assert capsys.readouterr().err == "ready (0%)\n"


def test_a_long_time_is_told_in_minutes() -> None:
    assert (duration(99), duration(300)) == ("99 s", "5 min")


@pytest.mark.fault("K")
@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["startup", "--runs=0"], "--runs"),
        (["throughput", "--rounds=0"], "--rounds"),
        (["throughput", "--concurrency=-1"], "--concurrency"),
        (["preemption", "--requests=0"], "--requests"),
        (["preemption", "--tiny-blocks=0"], "--tiny-blocks"),
        (["preemption", "--temperature=nan"], "--temperature"),
        (["scheduler", "--most=0"], "--most"),
    ],
)
def test_a_bad_number_of_a_benchmark_is_refused_before_it_runs(
    words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    captured = capsys.readouterr()
    assert f"{flag}: " in captured.err
    assert captured.err.count("\n") == 1
