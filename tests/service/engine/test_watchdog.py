"""For how long an engine has made no progress, told from what its thread shows."""

from __future__ import annotations

import pytest

from pageturner.service.engine.options import EngineOptions
from pageturner.service.engine.watchdog import Progress, ProgressTimer, stall_reason
from pageturner.service.errors import ConfigError


def _seconds(*seen: tuple[float, Progress]) -> list[float]:
    timer = ProgressTimer(now=0.0)
    return [timer.note(progress, now) for now, progress in seen]


def test_an_idle_engine_is_never_late() -> None:
    idle = Progress(None, 0.0, has_work=False)
    assert _seconds((10.0, idle), (1e6, idle)) == [0.0, 0.0]


def test_a_step_under_way_is_timed_from_its_beginning() -> None:
    assert _seconds((105.0, Progress(100.0, 20.0, has_work=True))) == [5.0]


def test_a_step_under_way_counts_without_a_request() -> None:
    """As one that changes policies does, which nobody waits for in a stream."""
    assert _seconds((105.0, Progress(100.0, 20.0, has_work=False))) == [5.0]


def test_work_that_comes_after_a_rest_is_not_late_at_once() -> None:
    idle, waiting = Progress(None, 0.0, has_work=False), Progress(None, 0.0, has_work=True)
    assert _seconds((1000.0, idle), (1001.0, waiting), (1011.0, waiting)) == [0.0, 0.0, 10.0]


def test_each_end_of_a_step_begins_anew() -> None:
    before, after = Progress(None, 1.0, has_work=True), Progress(None, 9.0, has_work=True)
    assert _seconds((5.0, before), (10.0, after), (12.0, after)) == [0.0, 1.0, 3.0]


def test_the_reason_says_what_hangs() -> None:
    assert "no step has begun for 31 s" in stall_reason(Progress(None, 0.0, True), 31.2)
    assert stall_reason(Progress(1.0, 0.0, True), 31.2) == "the step under way has taken 31 s"
    assert stall_reason(Progress(1.0, 0.0, True), 31.2, "queue policy x").endswith(
        "queue policy x has not answered"
    )


@pytest.mark.parametrize("seconds", [30.0, 0.0, -1.0, 86401.0])
def test_an_engine_is_given_up_only_after_it_stalled(seconds: float) -> None:
    with pytest.raises(ConfigError, match=r"engine\.dead_after_seconds"):
        EngineOptions(stall_seconds=30.0, dead_after_seconds=seconds)
