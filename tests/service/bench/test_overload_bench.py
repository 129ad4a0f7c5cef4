"""`bench overload`: its clients send what a phase says, and its figures are what they are called."""

from __future__ import annotations

import json

import pytest
from support.serving import capturing_logger, serving

from pageturner.service.bench import overload
from pageturner.service.bench.null_service import NullLoad, NullParts
from pageturner.service.bench.overload import (
    LoadFigures,
    OverloadPlan,
    OverloadResult,
    RetryFigures,
    capacity_of,
    document,
    load_figures,
    retry_figures,
)
from pageturner.service.bench.overload_clients import Clients, Outcome, Phase
from pageturner.service.cli import main
from pageturner.service.config import cache_directory
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.engine.metrics import Metrics
from pageturner.service.errors import ModelError

PLAN = OverloadPlan(
    prompt_tokens=8,
    output_tokens=4,
    deadline=5.0,
    seconds=8.0,
    multiples=(1.0, 5.0),
    max_num_seqs=2,
    max_waiting=2,
)


async def test_each_phase_sends_what_it_says() -> None:
    load = NullLoad(num_streams=4, prompt_tokens=8, output_tokens=4, step_seconds=0.001)
    parts = NullParts.read(load, cache_directory(), MonotonicClock(), capturing_logger()[0])
    engine, _ = parts.service(Metrics())
    await engine.start()
    async with serving(engine) as served:
        clients = Clients(served.channel)
        closed = await clients.run(Phase(0.0, 8, 4, concurrency=6))
        assert len(closed) == 6
        opened = await clients.run(Phase(0.2, 8, 4, rate=100.0, deadline=30.0, seed=1))
        assert len(opened) > 5
        assert opened[0].due == (await clients.run(Phase(0.1, 8, 4, rate=100.0, seed=1)))[0].due
        for outcome in closed + opened:
            assert outcome.is_whole
            assert outcome.num_tokens == 4
            assert outcome.accepted is not None
            assert outcome.first is not None
            assert outcome.due <= outcome.sent <= outcome.accepted <= outcome.first <= outcome.ended
        short = await clients.run(Phase(0.0, 8, 4, concurrency=1, deadline=1e-6))
        assert short[0].reason == "deadline_exceeded"
    await engine.aclose()


def whole(due: float, seconds: float) -> Outcome:
    return Outcome(due, due, due + 0.1, due + 0.2, due + seconds, num_tokens=4)


def refused(due: float, seconds: float, retry: float, reason: str = "deadline_too_close") -> Outcome:
    return Outcome(due, due, ended=due + seconds, reason=reason, retry_seconds=retry)


def test_capacity_counts_what_was_answered_while_the_loop_was_warm() -> None:
    outcomes = [
        whole(0.0, 1.0),  # before
        whole(1.8, 2.2),  # from 2.0 to 4.0: all of it
        whole(0.8, 2.2),  # from 1.0 to 3.0: half
        whole(5.8, 4.2),  # from 6.0 to 10.0: half
        refused(3.0, 0.1, 1.0),
    ]
    assert capacity_of(outcomes, 8.0) == pytest.approx(2.0 / 6.0)
    with pytest.raises(ModelError, match="seconds is too short"):
        capacity_of([whole(0.0, 1.0)], 8.0)


def test_goodput_counts_whole_answers_of_requests_that_met_the_load() -> None:
    outcomes = [
        whole(0.0, 1.0),  # before the load was there
        whole(2.0, 2.0),
        whole(3.0, 4.0),
        refused(3.0, 0.010, 1.0),
        refused(4.0, 0.030, 1.0, "queue_full"),
        Outcome(5.0, 5.002, 5.1, ended=9.0, reason="deadline_unreachable"),
    ]
    figures = load_figures(outcomes, 8.0, 5.0, 0.5)
    assert figures.goodput == pytest.approx(2 / 6.0 / 0.5)
    assert figures.outcomes == {
        "whole": 2,
        "deadline_too_close": 1,
        "queue_full": 1,
        "deadline_unreachable": 1,
    }
    assert figures.refusal_p50 == pytest.approx(30.0)
    assert figures.refusal_p99 == pytest.approx(30.0)
    assert figures.send_lag_p99 == pytest.approx(2.0)


def test_a_told_time_is_measured_against_the_start_of_a_request_that_waited() -> None:
    running = [Outcome(0.0, 0.0, 0.1, first, first + 2) for first in (0.05, 0.08)]
    waiting = [Outcome(0.0, 0.0, 0.1, first, first + 2) for first in (2.0, 4.0)]
    turned_away = [refused(0.0, 0.1, 7.9, "queue_full"), refused(0.0, 0.1, 1.9, "queue_full")]
    returned = [refused(8.0, 0.1, 1.0, "queue_full"), Outcome(2.0, 2.0, 2.1, 5.0, 7.0)]
    for outcome in returned:
        outcome.attempt = 2
    figures = retry_figures([*waiting, *turned_away, *running, *returned])
    assert figures.told == pytest.approx((2.0, 8.0))
    assert figures.true == (2.0, 4.0)
    assert figures.ratio == pytest.approx(1.5)
    assert figures.taken_in == 1


def test_the_command_prints_its_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    load = LoadFigures(5.0, 2.0, 10.0, 0.9, {"whole": 90, "deadline_too_close": 400}, 2.0, 30.0, 3.5, 4.0)
    result = OverloadResult(PLAN, (2.0, 2.1), (load,), RetryFigures((1.0, 2.0), (1.0, 1.0), 2, 20.0))
    monkeypatch.setattr(overload, "measure_overload", lambda *arguments: result)
    assert main(["bench", "overload", "--multiples", "5"]) == 0
    out = capsys.readouterr().out
    assert "90%" in out
    assert "told / true, median: 1.50" in out
    assert main(["bench", "overload", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(document(result)))
    assert main(["bench", "overload", "--multiples", "0"]) == 2
