"""A simulated server: the scheduler that serves, and a model that only says how long a step would take.

It does what the engine does, step by step, and leaves the clock to its caller: `begin` a step, let time pass
`until` its end, `finish` it. Alone it is a run of `simulation`, with others it is a `fleet`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise, takewhile

from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.outputs import (
    FinishedEvent,
    SampledSequence,
    SchedulerOutput,
    SchedulerStats,
    TokenEvent,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.core.scheduling.intake import asked_work, check_deadline
from pageturner.service.errors import PageturnerError, RequestAborted
from pageturner.service.flight.step_work import work_of
from pageturner.service.simulator.acceptance import SimulatedDrafter
from pageturner.service.simulator.errors import SimulationStuck
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.null_model import NullStopCondition, sampled_tokens
from pageturner.service.simulator.outcomes import NOTHING, Outcome, Progress, SimulatedRequest
from pageturner.service.simulator.peer_tiers import PeerTier
from pageturner.service.simulator.pool_samples import PoolSamples
from pageturner.service.simulator.tenancy import TenantLedger
from pageturner.service.simulator.workload import SimulatedWorkload

EMPTY_SCHEDULE_SECONDS = 0.002
"""Virtual seconds after which the engine, too, asks again when there was work and no plan."""

MAX_EMPTY_SCHEDULES = 1 << 16


class SchedulerReplica:
    """One server. workload: of which `submit` names requests. tenants: told of what each gets. tier: the
    servers behind its host tier, if there are any.

    records: what became of those submitted, by index. samples: of its pools. rates: as it has measured
    itself. until: when what it does ends; None while it does nothing.
    """

    def __init__(
        self,
        workload: SimulatedWorkload,
        machine: SimulatedMachine,
        policies: PolicySet,
        tenants: TenantLedger | None = None,
        tier: PeerTier | None = None,
    ) -> None:
        self.records: dict[int, SimulatedRequest] = {}
        self.samples = PoolSamples(machine.cache.block_size)
        self.until: float | None = None
        self.num_scheduled_tokens = 0
        self.num_recomputed_tokens = 0
        self._requests = workload.requests
        self._model = machine.step_time
        self._options = machine.scheduler
        self._late = machine.request_seconds
        rates = (machine.measured or machine.step_time).rates(machine.block_bytes)
        if tier is not None:
            rates = replace(rates, disk_read_bytes_per_second=tier.bytes_per_second)
        speculation = machine.speculation
        if speculation.row_cost is None:
            speculation = replace(speculation, row_cost=machine.row_cost)
        self.rates = rates
        self._scheduler = Scheduler(
            machine.scheduler,
            machine.cache,
            policies,
            NullStopCondition(),
            rates,
            speculation=speculation,
            drafter=SimulatedDrafter(workload.acceptance),
            disk=tier,
        )
        self._tier = tier
        self._cancelled: list[int] = []
        self._has_deadlines = any(request.deadline_seconds for request in workload.requests)
        self._tenants = tenants
        self._high_water: dict[int, int] = {}
        self._inbox: list[tuple[int, float]] = []
        self._output: SchedulerOutput | None = None
        self._sampled: tuple[SampledSequence, ...] = ()
        self._num_empty = 0

    def stats(self) -> SchedulerStats:
        """The scheduler's own."""
        return self._scheduler.stats()

    @property
    def num_requests(self) -> int:
        """All that are there."""
        stats = self._scheduler.stats()
        return stats.num_waiting + stats.num_running + stats.num_swapped + len(self._inbox)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those that wait."""
        return self._scheduler.stats().num_queued_prompt_tokens

    @property
    def num_preemptions(self) -> int:
        """Of every kind."""
        stats = self._scheduler.stats()
        recomputed = stats.num_recompute_preemptions_total + stats.num_tail_preemptions_total
        return stats.num_swap_preemptions_total + recomputed

    def outcome(self, index: int) -> Outcome:
        """What became of a request that ended."""
        record = self.records[index]
        return Outcome(record.num_output_tokens, record.num_cached_tokens, record.error is not None)

    @property
    def num_handed_tokens(self) -> int:
        """That came into the host tier from other servers."""
        return self._scheduler.stats().num_disk_hit_tokens_total

    @property
    def num_hit_tokens(self) -> int:
        """Prompt tokens that were found, wherever."""
        return self._scheduler.stats().num_prefix_hit_tokens_total

    @property
    def num_moving_blocks(self) -> int:
        """Blocks of the host pool on their way to other servers, or from them."""
        tiers = self._scheduler.manager.tiers
        return 0 if tiers is None else tiers.num_held

    def hashes(self, token_ids: tuple[int, ...]) -> list[bytes]:
        """Of the full blocks of a prompt; none where no prefix is cached."""
        manager = self._scheduler.manager
        if manager.hasher is None:
            return []
        return manager.hasher.chain(token_ids, manager.block_size, adapter="", salt="")

    def num_held(self, hashes: Sequence[bytes]) -> int:
        """How many of a prompt's first blocks the device has cached."""
        lookup = self._scheduler.manager.device.lookup
        return sum(1 for _ in takewhile(lambda block_hash: lookup(block_hash) is not None, hashes))

    def gaps(self) -> Iterator[float]:
        """Seconds between two tokens, of requests that ended well."""
        for record in self.records.values():
            if record.error is None:
                times = record.token_times
                yield from (later - sooner for sooner, later in pairwise(times))

    def check_integrity(self) -> None:
        """As of `Scheduler.check_integrity`."""
        self._scheduler.check_integrity()

    def submit(self, index: int, at: float, now: float) -> None:
        """It is sent here, and taken before the next step, which tells if it was refused. As of `accept`."""
        self._inbox.append((index, at))

    def cancel(self, index: int) -> None:
        """Its caller left: before the next step it ends, unless it has."""
        self._cancelled.append(index)

    def new_request(self, index: int, at: float) -> NewRequest:
        """What the scheduler is given of it."""
        return self._requests[index].to_request(str(index), at)

    def accept(self, index: int, at: float, now: float) -> bool:
        """It enters the queue, between two steps; False if it is refused, and so ended.

        at: when it arrived, late by the machine's `request_seconds`, which its latencies count.
        """
        planned = self._requests[index]
        new = self.new_request(index, at)
        num_prompt = len(new.prompt_token_ids)
        record = SimulatedRequest(at - self._late, planned.tenant, num_prompt, planned.priority)
        self.records[index] = record
        try:
            if new.deadline is not None:
                work = asked_work(num_prompt, new.params, self._options)
                check_deadline(self._options, self._scheduler.state.outlook(), work, new.deadline - now)
            self._scheduler.add_request(new)
        except PageturnerError as error:
            record.error, record.ended_at = error, now
            return False
        if self._tenants:
            self._tenants.arrived(planned.tenant)
        return True

    def begin(self, now: float) -> Progress:
        """Take what was sent, expire what is late and begin the next step, if there is anything to do. Raises
        SimulationStuck if the scheduler does not advance what it holds."""
        scheduler, tier = self._scheduler, self._tier
        refused = [index for index, at in self._inbox if not self.accept(index, at, now)]
        self._inbox.clear()
        for index in self._cancelled:
            self._settle(scheduler.abort_request(str(index), RequestAborted("its caller left")), now)
        self._cancelled.clear()
        if tier is not None and (moved := tier.take_ended()):
            scheduler.end_transfers(moved, now)
        expired = self._settle(scheduler.expire(now), now).ended if self._has_deadlines else ()
        output = scheduler.schedule(now)
        if tier is not None and (transfers := scheduler.take_transfers()):
            tier.start(transfers, now)
        self._output, self.until = None, None
        if output:
            self._num_empty = 0
            self._sampled = tuple(
                SampledSequence(row.seq_id, row.epoch, sampled_tokens(part, row.seed))
                for part in output.scheduled
                for row in part.samples
            )
            self._account(output, self._sampled)
            self._output, self.until = output, now + self._model.seconds(work_of(output))
        elif scheduler.has_work():
            self._num_empty += 1
            if self._num_empty > MAX_EMPTY_SCHEDULES:
                raise SimulationStuck(f"at {now:.3f} s the scheduler plans nothing for its requests")
            self.until = now + EMPTY_SCHEDULE_SECONDS
        return Progress((), (*refused, *expired)) if refused or expired else NOTHING

    def finish(self) -> Progress:
        """What it did until `until` is done."""
        assert self.until is not None, "a step is finished that was not begun"
        now, output = self.until, self._output
        self.until = None
        if output is None:
            return NOTHING
        progress = self._settle(self._scheduler.update(output, self._sampled, now), now)
        if self.samples.is_due():
            self.samples.take(self._scheduler.stats(), now)
        return progress

    # --- inside ----------------------------------------------------------------------------

    def _account(self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...]) -> None:
        """KV of a draft counts where it comes true."""
        high_water, tenants, results = self._high_water, self._tenants, iter(sampled)
        for part in output.scheduled:
            num_outputs = sum(len(next(results).tokens) for _ in part.samples)
            num_right = num_outputs - 1 if part.num_drafts else 0
            end = part.end - part.num_drafts + num_right
            known = high_water.get(part.seq_id, 0)
            self.num_scheduled_tokens += len(part.token_ids)
            if part.start < known:
                self.num_recomputed_tokens += min(end, known) - part.start
            if end > known:
                high_water[part.seq_id] = end
            if tenants:
                record = self.records[int(part.request_id)]
                tenants.served(
                    record.tenant,
                    num_prompt=max(0, min(end, record.num_prompt_tokens) - max(known, part.start)),
                    num_output=num_outputs,
                )
        if tenants:
            scheduled = {part.request_id: self.records[int(part.request_id)] for part in output.scheduled}
            tenants.end_step(record.tenant for record in scheduled.values())

    def _settle(self, events: tuple[object, ...], now: float) -> Progress:
        started: list[int] = []
        ended: list[int] = []
        for event in events:
            if isinstance(event, TokenEvent):
                if event.index == 0:
                    index = int(event.request_id)
                    times = self.records[index].token_times
                    if not times:
                        started.append(index)
                    for _ in event.tokens:
                        times.append(now)
            elif isinstance(event, FinishedEvent):
                index = int(event.request_id)
                record = self.records[index]
                record.ended_at, record.error = now, event.error
                record.num_output_tokens = event.usage.num_output_tokens
                record.num_cached_tokens = event.usage.num_cached_prompt_tokens
                timings = event.timings
                record.num_preemptions = (
                    timings.num_swaps + timings.num_recomputes + timings.num_tail_reclaims
                )
                if self._tenants:
                    self._tenants.ended(record.tenant)
                ended.append(index)
        return Progress(started, ended)
