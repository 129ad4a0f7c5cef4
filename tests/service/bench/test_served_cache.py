"""The cases of `bench cache`: two servers in turns, and by how much the first is better."""

from __future__ import annotations

import pytest

from pageturner.loadtest.client import Arrival, Outcome, RequestRecord
from pageturner.loadtest.statistics import RunSummary, summarize_run
from pageturner.loadtest.workload import plan_conversations
from pageturner.service.bench import served_cache
from pageturner.service.bench.served_cache import CacheCase, cache_cases, measure_case


def summary_of(num_cached: int, first_token_at: float, ended_at: float) -> RunSummary:
    record = RequestRecord(
        0,
        Outcome.OK,
        "",
        scheduled_at=0.0,
        sent_at=0.0,
        ended_at=ended_at,
        num_prompt_tokens=1000,
        arrivals=(Arrival(first_token_at, 10), Arrival(ended_at, 10)),
        num_cached_prompt_tokens=num_cached,
    )
    return summarize_run([record])


def test_servers_take_turns_and_medians_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    case = cache_cases(4, 64, 0)[0]
    served: list[tuple[str, int]] = []
    with_cache = iter([summary_of(800, 1.0, 2.0), summary_of(900, 0.5, 4.0), summary_of(800, 2.0, 2.0)])

    def serve(case: CacheCase, flags: list[str], number: int) -> RunSummary:
        served.append((flags[-1], number))
        assert flags[0] == "--dtype=float32"
        return next(with_cache) if flags[-1] == case.flags[0] else summary_of(0, 4.0, 5.0)

    monkeypatch.setattr(served_cache, "_serve", serve)
    told: list[str] = []
    result = measure_case(case, 3, ["--dtype=float32"], told.append)
    assert served == [(flags[0], n) for n in range(3) for flags in (case.flags, case.other_flags)]
    assert len(told) == 6
    assert result.gains == {
        "computed_prompt_tokens": 5.0,
        "ttft_p50": 4.0,
        "output_tokens_per_second": pytest.approx(2.5),
    }


def test_cases_are_what_they_say() -> None:
    prefix, chat, pressure = cache_cases(64, 1024, 0)
    prompts = [conversation.first.prompt_token_ids for conversation in plan_conversations(prefix.workload)]
    assert len(prompts) == 64
    assert len({prompt[:1024] for prompt in prompts}) == 1
    assert sum(c.num_requests for c in plan_conversations(chat.workload)) == 64
    assert any(conversation.follow_ups for conversation in plan_conversations(chat.workload))
    assert pressure.flags == ("--num-blocks=256",)
    assert pressure.other_flags == ("--num-blocks=2048",)
