"""One run: the scheduler that serves, a virtual clock, and a model that only says how long it would take.

The loop is the engine's, with `clock.advance` in the place of the forward: take what has arrived, expire,
schedule, let the step's time pass, update.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, field, replace

from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.outputs import (
    FinishedEvent,
    SampledSequence,
    SampledToken,
    ScheduledSequence,
    SchedulerOutput,
    SchedulerStats,
    TextDelta,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.core.scheduling.intake import asked_work, check_deadline
from pageturner.service.errors import PageturnerError
from pageturner.service.flight.step_work import work_of
from pageturner.service.simulator.acceptance import SimulatedDrafter
from pageturner.service.simulator.errors import SimulationStuck
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.tenancy import TenantLedger
from pageturner.service.simulator.workload import SimulatedWorkload

EMPTY_SCHEDULE_SECONDS = 0.002
"""Virtual seconds after which the engine, too, asks again when there was work and no plan."""

MAX_EMPTY_SCHEDULES = 1 << 16
MAX_SAMPLES = 256
FIRST_SAMPLE_INTERVAL = 8
"""Steps between two samples of the pools, which cost time a block. When a run has MAX_SAMPLES, every other
one goes and they get twice as rare."""

_NO_TEXT = TextDelta("")


class NullStopCondition:
    """For requests without text."""

    def start(self, seq_id: int, request: NewRequest) -> None:
        return None

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        return _NO_TEXT

    def finish(self, seq_id: int) -> str:
        return ""


@dataclass(slots=True)
class SimulatedRequest:
    """What became of one request. Times are virtual seconds; None where it did not happen.

    token_times: of every token of its first choice.
    """

    arrived_at: float
    tenant: str
    num_prompt_tokens: int
    priority: int = 0
    ended_at: float | None = None
    token_times: array[float] = field(default_factory=lambda: array("d"))
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    error: PageturnerError | None = None


@dataclass(frozen=True, slots=True)
class PoolSample:
    """The pools at one moment."""

    at: float
    num_waiting: int
    num_running: int
    used_share: float
    wasted_share: float
    host_share: float


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """A whole run. num_recomputed_tokens: scheduled tokens at positions computed before."""

    requests: tuple[SimulatedRequest, ...]
    samples: tuple[PoolSample, ...]
    stats: SchedulerStats
    seconds: float
    num_scheduled_tokens: int
    num_recomputed_tokens: int
    fairness_gap: float


def simulate(workload: SimulatedWorkload, machine: SimulatedMachine, policies: PolicySet) -> SimulationResult:
    """Run `workload` to its end. Nothing but the arguments has a part in the result.

    Raises SimulationStuck if the scheduler does not advance what it holds.
    """
    return _Simulation(workload, machine, policies).run()


class _Simulation:
    def __init__(self, workload: SimulatedWorkload, machine: SimulatedMachine, policies: PolicySet) -> None:
        self._workload = workload
        self._model = machine.step_time
        self._cache = machine.cache
        self._options = machine.scheduler
        self._request_seconds = machine.request_seconds
        rates = (machine.measured or machine.step_time).rates(machine.block_bytes)
        speculation = machine.speculation
        if speculation.row_cost is None:
            speculation = replace(speculation, row_cost=machine.row_cost)
        self._scheduler = Scheduler(
            machine.scheduler,
            machine.cache,
            policies,
            NullStopCondition(),
            rates,
            speculation=speculation,
            drafter=SimulatedDrafter(workload.acceptance),
        )
        self._now = 0.0
        self._records: dict[str, SimulatedRequest] = {}
        self._followers: dict[int, list[int]] = {}
        # (when, index): what is known to arrive. Of a closed loop, `_unsent` follows as others end.
        self._arrivals: list[tuple[float, int]] = []
        self._unsent: list[int] = []
        self._has_deadlines = any(request.deadline_seconds for request in workload.requests)
        self._high_water: dict[int, int] = {}
        self._num_recomputed = 0
        self._num_scheduled = 0
        tenants = sorted({request.tenant for request in workload.requests})
        self._tenants = TenantLedger(tenants) if len(tenants) > 1 else None
        self._samples: list[PoolSample] = []
        self._sample_interval = FIRST_SAMPLE_INTERVAL
        self._num_steps = 0
        self._plan_arrivals()

    def run(self) -> SimulationResult:
        scheduler = self._scheduler
        num_empty = 0
        while True:
            self._receive()
            if self._has_deadlines:
                self._settle(scheduler.expire(self._now))
            output = scheduler.schedule(self._now)
            if output:
                num_empty = 0
                self._step(output)
            elif scheduler.has_work():
                num_empty += 1
                if num_empty > MAX_EMPTY_SCHEDULES:
                    raise SimulationStuck(
                        f"at {self._now:.3f} s the scheduler plans nothing for its requests"
                    )
                self._now += EMPTY_SCHEDULE_SECONDS
            elif self._arrivals:
                self._now = max(self._now, self._arrivals[0][0])
            else:
                break
        self._sample()
        return SimulationResult(
            requests=tuple(self._records[str(index)] for index in range(len(self._workload.requests))),
            samples=tuple(self._samples),
            stats=scheduler.stats(),
            seconds=self._now,
            num_scheduled_tokens=self._num_scheduled,
            num_recomputed_tokens=self._num_recomputed,
            fairness_gap=self._tenants.largest_gap if self._tenants else 0.0,
        )

    # --- arrivals --------------------------------------------------------------------------

    def _plan_arrivals(self) -> None:
        first: list[int] = []
        for index, request in enumerate(self._workload.requests):
            if request.follows is None:
                first.append(index)
            else:
                self._followers.setdefault(request.follows, []).append(index)
        if self._workload.concurrency is None:
            self._arrivals = [(self._workload.requests[index].at_seconds, index) for index in first]
        else:
            self._arrivals = [(0.0, index) for index in first[: self._workload.concurrency]]
            self._unsent = first[self._workload.concurrency :][::-1]
        heapq.heapify(self._arrivals)

    def _receive(self) -> None:
        """What has arrived enters the queue, as commands do between two steps. It is late by
        `request_seconds`, which its latencies count."""
        arrivals, late = self._arrivals, self._request_seconds
        while arrivals and arrivals[0][0] <= self._now:
            at, index = heapq.heappop(arrivals)
            self._submit(index, at, late)

    def _submit(self, index: int, at: float, late: float) -> None:
        planned = self._workload.requests[index]
        new = planned.to_request(str(index), at)
        record = SimulatedRequest(at - late, planned.tenant, len(new.prompt_token_ids), planned.priority)
        self._records[new.request_id] = record
        try:
            if new.deadline is not None:
                work = asked_work(len(new.prompt_token_ids), new.params, self._options)
                check_deadline(self._options, self._scheduler.state.outlook(), work, new.deadline - self._now)
            self._scheduler.add_request(new)
        except PageturnerError as error:
            record.error, record.ended_at = error, self._now
            self._after_end(index)
            return
        if self._tenants:
            self._tenants.arrived(planned.tenant)

    def _after_end(self, index: int) -> None:
        """The conversation goes on, and a closed loop sends its next."""
        for follower in self._followers.get(index, ()):
            think = self._workload.requests[follower].at_seconds
            heapq.heappush(self._arrivals, (self._now + think + self._request_seconds, follower))
        if self._unsent and index not in self._followers:
            heapq.heappush(self._arrivals, (self._now + self._request_seconds, self._unsent.pop()))

    # --- steps -----------------------------------------------------------------------------

    def _step(self, output: SchedulerOutput) -> None:
        sampled = tuple(
            SampledSequence(row.seq_id, row.epoch, _sampled_tokens(part, row.seed))
            for part in output.scheduled
            for row in part.samples
        )
        self._account(output, sampled)
        self._now += self._model.seconds(work_of(output))
        self._settle(self._scheduler.update(output, sampled, self._now))
        self._num_steps += 1
        if self._num_steps % self._sample_interval == 0:
            self._sample()

    def _account(self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...]) -> None:
        """KV of a draft counts where it comes true."""
        high_water, tenants, results = self._high_water, self._tenants, iter(sampled)
        for part in output.scheduled:
            num_outputs = sum(len(next(results).tokens) for _ in part.samples)
            num_right = num_outputs - 1 if part.num_drafts else 0
            end = part.end - part.num_drafts + num_right
            known = high_water.get(part.seq_id, 0)
            self._num_scheduled += len(part.token_ids)
            if part.start < known:
                self._num_recomputed += min(end, known) - part.start
            if end > known:
                high_water[part.seq_id] = end
            if tenants:
                record = self._records[part.request_id]
                tenants.served(
                    record.tenant,
                    num_prompt=max(0, min(end, record.num_prompt_tokens) - max(known, part.start)),
                    num_output=num_outputs,
                )
        if tenants:
            scheduled = {part.request_id: self._records[part.request_id].tenant for part in output.scheduled}
            tenants.end_step(scheduled.values())

    def _settle(self, events: tuple[object, ...]) -> None:
        records, now = self._records, self._now
        for event in events:
            if isinstance(event, TokenEvent):
                if event.index == 0:
                    times = records[event.request_id].token_times
                    for _ in event.tokens:
                        times.append(now)
            elif isinstance(event, FinishedEvent):
                record = records[event.request_id]
                record.ended_at, record.error = now, event.error
                record.num_output_tokens = event.usage.num_output_tokens
                record.num_cached_tokens = event.usage.num_cached_prompt_tokens
                timings = event.timings
                record.num_preemptions = (
                    timings.num_swaps + timings.num_recomputes + timings.num_tail_reclaims
                )
                if self._tenants:
                    self._tenants.ended(record.tenant)
                self._after_end(int(event.request_id))

    def _sample(self) -> None:
        stats = self._scheduler.stats()
        num_slots = max(1, stats.num_blocks_used * self._cache.block_size)
        self._samples.append(
            PoolSample(
                at=self._now,
                num_waiting=stats.num_waiting,
                num_running=stats.num_running,
                used_share=stats.num_blocks_used / stats.num_blocks,
                wasted_share=stats.num_wasted_slots / num_slots,
                host_share=stats.num_host_blocks_used / max(1, stats.num_host_blocks),
            )
        )
        if len(self._samples) >= MAX_SAMPLES:
            self._samples = self._samples[::2]
            self._sample_interval *= 2


def _sampled_tokens(part: ScheduledSequence, seed: int) -> tuple[SampledToken, ...]:
    """The drafts that come true, and the token behind them; one token where there are none."""
    first = part.end - part.num_drafts
    tokens = [seed + first]
    for draft in part.token_ids[len(part.token_ids) - part.num_drafts :]:
        if draft != tokens[-1]:
            break
        tokens.append(tokens[-1] + 1)
    return tuple(map(SampledToken, tokens))
