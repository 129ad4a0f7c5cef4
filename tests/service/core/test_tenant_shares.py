"""Tenants share slots, blocks and the time of steps: a quiet one beside a flood, on a virtual clock."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass

import pytest
from support.core_harness import NoText

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    FinishedEvent,
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.core.scheduling.tenant_shares import LEAST_PREFILL, _max_min

A_STEP, A_TOKEN = 4e-3, 0.5e-3
"""Seconds; some ten tokens take as long as a step beside its tokens, as on a CPU."""


@dataclass
class Flood:
    """num_open: requests that the flooding tenant always has. seconds: to the deadline of each."""

    num_open: int = 60
    seconds: float | None = None
    num_prompt: int = 128
    num_output: int = 128


class Service:
    """A scheduler, and a machine on which a step takes as long as the rates say."""

    def __init__(
        self, *, shares: bool, num_blocks: int = 1024, max_num_seqs: int = 32, queue: str | None = None
    ) -> None:
        policies = {"queue": queue or "virtual-token-counter", "victim": "most-over-served"}
        self.scheduler = Scheduler(
            SchedulerOptions(max_num_seqs=max_num_seqs, share_between_tenants=shares, deadline_shedding=True),
            CacheOptions(num_blocks, 16, 256),
            registry.create_set(policies),
            NoText(),
            Rates(prefill_seconds_fixed=A_STEP, prefill_seconds_per_token=A_TOKEN),
        )
        self.now = 0.0
        self.num_submitted = 0
        self.num_flood_tokens = 0
        self.arrivals: dict[str, float] = {}
        self.latencies: dict[str, float] = {}

    def submit(
        self, tenant: str, num_prompt: int, num_output: int, at: float, seconds: float | None = None
    ) -> str:
        self.num_submitted += 1
        name, first = f"{tenant}{self.num_submitted}", self.num_submitted
        prompt = tuple(range(first, first + num_prompt))
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        deadline = None if seconds is None else at + seconds
        self.scheduler.add_request(NewRequest(name, prompt, params, 0, at, tenant=tenant, deadline=deadline))
        self.arrivals[name] = at
        return name

    def step(self) -> SchedulerOutput:
        self.scheduler.expire(self.now)
        output = self.scheduler.schedule(self.now)
        self.now += A_STEP + A_TOKEN * sum(len(part.token_ids) for part in output.scheduled)
        rows = [row for part in output.scheduled for row in part.samples]
        sampled = tuple(SampledSequence(row.seq_id, row.epoch, (SampledToken(7),)) for row in rows)
        for event in self.scheduler.update(output, sampled, self.now) if output else ():
            if isinstance(event, FinishedEvent):
                self.latencies[event.request_id] = self.now - self.arrivals[event.request_id]
            elif isinstance(event, TokenEvent) and event.request_id.startswith("flood"):
                self.num_flood_tokens += len(event.tokens)
        return output

    def quiet_latencies(self, flood: Flood | None, count: int = 5, patience: float = 60.0) -> list[float]:
        """Of requests of 64 + 64 tokens, one a second, from two seconds on; those not ended are infinite."""
        due = deque(2.0 + number for number in range(count))
        last, quiet = due[-1], list[str]()
        while self.now < last + patience:
            while due and due[0] <= self.now:
                quiet.append(self.submit("quiet", 64, 64, due.popleft()))
            if flood is not None:
                num_live = self.scheduler.state.num_live["flood"]
                for _ in range(flood.num_open - num_live):
                    self.submit("flood", flood.num_prompt, flood.num_output, self.now, flood.seconds)
            if not due and all(name in self.latencies for name in quiet):
                break
            if not self.step() and due:
                self.now = max(self.now, due[0])
        return [self.latencies.get(name, float("inf")) for name in quiet]


ALONE = Service(shares=True).quiet_latencies(None)


@pytest.mark.parametrize(
    ("flood", "num_blocks"),
    [
        (Flood(), 1024),
        (Flood(), 300),
        (Flood(num_prompt=1000, num_output=40), 1024),
        (Flood(seconds=5.0), 1024),
    ],
    ids=["slots short", "blocks short", "long prompts", "deadlines"],
)
def test_a_quiet_tenant_is_served_within_twice_its_latency(flood: Flood, num_blocks: int) -> None:
    service = Service(shares=True, num_blocks=num_blocks)
    beside = service.quiet_latencies(flood)
    service.scheduler.check_integrity()
    assert statistics.median(beside) < 2 * statistics.median(ALONE)
    assert max(beside) < 4 * max(ALONE)


def test_the_flood_goes_on_meanwhile() -> None:
    service = Service(shares=True)
    service.quiet_latencies(Flood())
    alone = Service(shares=False)
    alone.quiet_latencies(Flood(), count=1, patience=0.0)
    while alone.now < service.now:
        alone.step()
    assert service.num_flood_tokens > 0.4 * alone.num_flood_tokens


@pytest.mark.parametrize("queue", ["fcfs", "virtual-token-counter"])
def test_without_shares_a_flood_holds_the_quiet_tenant_up(queue: str) -> None:
    """What the bound above is worth: neither the former default nor a fair queue alone keeps it."""
    beside = Service(shares=False, queue=queue).quiet_latencies(Flood(), count=3, patience=20.0)
    assert statistics.median(beside) > 4 * statistics.median(ALONE)


def test_a_tenant_with_less_than_its_share_takes_a_slot_from_one_with_more_and_no_further() -> None:
    service = Service(shares=True, max_num_seqs=4)
    for _ in range(6):
        service.submit("flood", 16, 100, 0.0)
    service.step()
    for _ in range(4):
        service.submit("quiet", 16, 100, service.now)
    for _ in range(6):
        service.step()
    running = [request.new.tenant for request in service.scheduler.state.running.values()]
    assert sorted(running) == ["flood", "flood", "quiet", "quiet"]
    stats = service.scheduler.stats()
    assert stats.num_recompute_preemptions_total + stats.num_swap_preemptions_total == 2


def test_a_less_urgent_request_takes_nothing() -> None:
    service = Service(shares=True, max_num_seqs=2)
    params = SamplingParams(max_tokens=50, ignore_eos=True)
    for name in ("a", "b"):
        service.scheduler.add_request(NewRequest(name, (1, 2), params, 0, 0.0, priority=1, tenant="urgent"))
    service.step()
    service.submit("quiet", 2, 5, 0.0)
    for _ in range(5):
        service.step()
    assert {request.new.tenant for request in service.scheduler.state.running.values()} == {"urgent"}


def test_steps_with_prefill_stay_short_for_those_who_come() -> None:
    service = Service(shares=True)
    for _ in range(8):
        service.submit("flood", 500, 4, 0.0)
    num_tokens = sum(len(part.token_ids) for part in service.step().scheduled)
    assert LEAST_PREFILL <= num_tokens <= 16 * A_STEP / A_TOKEN


@pytest.mark.parametrize(
    ("demands", "supply", "given"),
    [
        ([1, 100], 10, [1, 9]),
        ([100, 1, 50], 31, [15, 1, 15]),
        ([3, 3], 10, [3, 3]),
        ([5, 5, 5], 3, [1, 1, 1]),
    ],
)
def test_small_demands_are_met_and_large_ones_get_alike(
    demands: list[int], supply: int, given: list[int]
) -> None:
    assert _max_min(demands, supply) == given
