"""The scheduler: accepts requests, plans steps, takes their results, and ends every request exactly once.

    schedule   decide one step on a scratch ledger (planner), then carry it out (committer)
    update     take a step's tokens: publish its blocks, stop what is done, emit events
    fail_step  take a step's failure: nothing of it counts, the culprit is searched by halves

There is no prefill phase and no decode phase: every sequence has `num_computed_tokens` and catches up
with its tokens. `schedule` may run one step ahead of `update` (depth 1).
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque

from pageturner.policies import registry
from pageturner.policies.interfaces import KeyChange, PolicySet, Reclaim, SortKey
from pageturner.policies.views import Rates
from pageturner.service.core import views
from pageturner.service.core.admission_checks import checked_max_tokens
from pageturner.service.core.block_manager import BlockManager
from pageturner.service.core.block_pool import BlockPool, Release
from pageturner.service.core.committer import Committer
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    SchedulerStats,
    StopCondition,
    TokenEvent,
    Usage,
)
from pageturner.service.core.planner import Planner
from pageturner.service.core.policy_guard import PolicyGuard
from pageturner.service.core.prefix_cache import PrefixHasher
from pageturner.service.core.request import NewRequest, Request, RequestStatus, Sequence
from pageturner.service.core.state import SchedulerState
from pageturner.service.core.suspects import Suspects
from pageturner.service.core.waiting_queue import WaitingQueue
from pageturner.service.errors import (
    DeadlineExceeded,
    DuplicateRequest,
    PageturnerError,
    QueueFull,
    StepFailed,
)


class Scheduler:
    """One engine's scheduler; not thread-safe, one thread owns it.

    depth: how many steps may be scheduled before the first of them is updated, less one (0 or 1).
    hash_key: secret of the prefix cache's digests.
    """

    def __init__(
        self,
        options: SchedulerOptions,
        cache: CacheOptions,
        policies: PolicySet,
        stop_condition: StopCondition,
        rates: Rates,
        *,
        depth: int = 0,
        hash_key: bytes = b"",
    ) -> None:
        self._options = options
        self._depth = depth
        self._stop_condition = stop_condition
        self.guard = PolicyGuard(policies, registry.default_policies())
        device = BlockPool(cache.num_blocks, cache.block_size, self.guard.eviction_score)
        host = BlockPool(cache.num_host_blocks, cache.block_size)
        hasher = PrefixHasher(hash_key) if cache.enable_prefix_caching else None
        self.manager = BlockManager(device, host, hasher)
        self.state = SchedulerState(
            options,
            self.manager,
            self.guard,
            rates,
            WaitingQueue(self._queue_key),
            watermark_blocks=math.ceil(options.watermark * cache.num_blocks),
        )
        self._counters: Counter[str] = Counter()
        self._planner = Planner(self.state)
        self._committer = Committer(self.state, self._counters)
        self._suspects = Suspects()
        self._requests: dict[str, Request] = {}
        self._by_order: dict[int, Request] = {}
        self._sequences: dict[int, Sequence] = {}
        self._deadlines: list[tuple[float, int]] = []
        self._champion: Request | None = None
        self._unfinished_steps: deque[int] = deque()
        self._pending_clears: list[int] = []
        self._next_order = 0
        self._next_seq_id = 0
        self._next_step_id = 1
        self._next_resort = 0.0

    # --- requests in and out ---------------------------------------------------------------

    def add_request(self, new: NewRequest) -> int:
        """Queue a request; returns the max_tokens in force.

        Raises InvalidArgument for one that can never be served, DuplicateRequest, or QueueFull; nothing
        is changed then.
        """
        if new.request_id in self._requests:
            raise DuplicateRequest(new.request_id)
        max_tokens = checked_max_tokens(
            new, self._options, self.manager.device.num_blocks, self.manager.block_size
        )
        waiting = self.state.waiting
        if len(waiting) >= self._options.max_waiting:
            raise QueueFull(f"{len(waiting)} requests are waiting already", retry_after_seconds=1.0)
        num_queued = waiting.num_prompt_tokens + len(new.prompt_token_ids)
        if len(waiting) and num_queued > self._options.max_queued_tokens:
            raise QueueFull(f"{num_queued} prompt tokens would be waiting", retry_after_seconds=1.0)
        root = self.manager.root_digest(adapter=new.adapter, salt=new.cache_salt)
        request = Request(new, self._next_order, max_tokens, root)
        request.num_blocks_peak = views.num_peak_blocks(
            request.num_prompt_tokens, max_tokens, new.params.n, self.manager.block_size
        )
        self._next_order += 1
        for index in range(new.params.n):
            sequence = Sequence(self._next_seq_id, request, index)
            self._next_seq_id += 1
            request.sequences.append(sequence)
            self._sequences[sequence.seq_id] = sequence
            self._stop_condition.start(sequence.seq_id, new)
        self._requests[new.request_id] = request
        self._by_order[request.order] = request
        if new.deadline is not None:
            heapq.heappush(self._deadlines, (new.deadline, request.order))
        waiting.add(request)
        return max_tokens

    def abort_request(self, request_id: str, error: PageturnerError) -> tuple[Event, ...]:
        """End a request with `error`; unknown ids are no error, they may have ended a moment ago."""
        request = self._requests.get(request_id)
        return () if request is None else (self._end(request, error),)

    def expire(self, now: float) -> tuple[Event, ...]:
        """End every request whose deadline has passed."""
        self.state.now = now
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            _, order = heapq.heappop(self._deadlines)
            request = self._by_order.get(order)
            if request is not None:
                events.append(self._end(request, DeadlineExceeded("the deadline passed")))
        return tuple(events)

    def pause_request(self, request_id: str) -> None:
        """Stop computing for a client that does not read; its blocks are the first to be taken."""
        if request_id in self._requests:
            self._requests[request_id].is_paused = True

    def resume_request(self, request_id: str) -> None:
        if request_id in self._requests:
            self._requests[request_id].is_paused = False

    def has_work(self) -> bool:
        """Whether any live request could be advanced by `schedule`, now or once a step in flight ends."""
        return any(not request.is_paused for request in self._requests.values())

    # --- one step --------------------------------------------------------------------------

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step and commit to it. Falsy if there is nothing to do now.

        Every truthy output must be answered by `update` or `fail_step`, in order.
        """
        assert len(self._unfinished_steps) <= self._depth, "schedule ran too far ahead of update"
        state = self.state
        state.now = now
        self._suspects.keep(self._can_run)
        state.suspects = self._suspects.running_alone
        if self.guard.key_change is KeyChange.WITH_TIME and now >= self._next_resort:
            state.waiting.resort()
            self._next_resort = now + self._options.resort_interval_seconds
        plan = self._planner.plan(self._choose_champion())
        clears, self._pending_clears = tuple(self._pending_clears), []
        output = self._committer.commit(plan, self._next_step_id, clears)
        if output:
            self._unfinished_steps.append(self._next_step_id)
            self._next_step_id += 1
            self._counters["steps"] += 1
        return output

    def update(
        self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...], now: float
    ) -> tuple[Event, ...]:
        """Take the results of a step that succeeded. Results of an older epoch are dropped."""
        self._end_step(output, now)
        events: list[Event] = []
        for result in sampled:
            sequence = self._current(result.seq_id, result.epoch)
            if sequence is not None and result.error is not None:
                events.append(self._end_poisoned(sequence.request, result.error))
        for part in output.scheduled:
            sequence = self._current(part.seq_id, part.epoch)
            if sequence is not None:
                sequence.num_accepted_tokens = max(sequence.num_accepted_tokens, part.end)
                self.manager.publish(sequence)
        for result in sampled:
            sequence = self._current(result.seq_id, result.epoch)
            if sequence is not None:
                self._suspects.cleared(sequence.request.order)
                self._accept(sequence, result.tokens, events)
        return tuple(events)

    def fail_step(self, output: SchedulerOutput, error: Exception, now: float) -> tuple[Event, ...]:
        """Take a step's failure: whoever it computed or copied for starts over, its tokens kept."""
        self._end_step(output, now)
        self._counters["step_failures"] += 1
        scheduled = {part.request_id for part in output.scheduled}
        members = [
            request
            for request in self._requests.values()
            if request.request_id in scheduled
            or any(sequence.last_step == output.step_id for sequence in request.sequences)
        ]
        for request in members:
            self._committer.drop_kv(request)
            self._committer.requeue(request, RequestStatus.WAITING)
        self.state.producing = {}
        computed = [request for request in members if request.request_id in scheduled]
        for request in computed:
            request.num_step_failures += 1
        culprit = self._suspects.failed(request.order for request in computed) if computed else None
        return tuple(
            self._end(request, StepFailed(f"the model failed on this request: {error}"))
            for request in computed
            if request.order == culprit or request.num_step_failures > self._options.max_step_failures
        )

    # --- figures ---------------------------------------------------------------------------

    def stats(self) -> SchedulerStats:
        """Gauges and totals; costs time in proportion to the blocks in use."""
        state, device, host = self.state, self.manager.device, self.manager.host
        running = list(state.running.values())
        counters = self._counters
        return SchedulerStats(
            num_waiting=len(state.waiting),
            num_running=len(running),
            num_swapped=sum(request.status is RequestStatus.SWAPPED for request in state.waiting),
            num_running_sequences=sum(request.num_slots for request in running),
            num_queued_prompt_tokens=state.waiting.num_prompt_tokens,
            num_blocks=device.num_blocks,
            num_blocks_free=device.num_free,
            num_blocks_evictable=device.num_evictable,
            num_blocks_used=device.num_live,
            num_host_blocks=host.num_blocks,
            num_host_blocks_used=host.num_live,
            num_wasted_slots=self.manager.num_wasted_slots(s for r in running for s in r.unfinished),
            num_steps_total=counters["steps"],
            num_scheduled_tokens_total=counters["scheduled_tokens"],
            num_prefix_query_tokens_total=counters["prefix_query_tokens"],
            num_prefix_hit_tokens_total=counters["prefix_hit_tokens"],
            num_resume_hit_tokens_total=counters["resume_hit_tokens"],
            num_swap_preemptions_total=counters["swap_preemptions"],
            num_recompute_preemptions_total=counters["recompute_preemptions"],
            num_tail_preemptions_total=counters["tail_preemptions"],
            num_bypasses_total=counters["bypasses"],
            num_policy_faults_total=sum(self.guard.faults.values()),
            num_step_failures_total=counters["step_failures"],
            num_evictions_total=device.num_evictions,
            num_swapped_out_blocks_total=counters["swapped_out_blocks"],
            num_swapped_in_blocks_total=counters["swapped_in_blocks"],
            num_copied_blocks_total=counters["copied_blocks"],
        )

    @property
    def champion_id(self) -> str | None:
        """The request that no policy can hold back at present."""
        return None if self._champion is None else self._champion.request_id

    # --- order -----------------------------------------------------------------------------

    def _queue_key(self, request: Request) -> SortKey:
        return self.guard.queue_key(views.request_view(request), self.state.load())

    def _can_run(self, order: int) -> bool:
        request = self._by_order.get(order)
        return request is not None and not request.is_paused

    def _choose_champion(self) -> Request | None:
        """The request that no policy can hold back: it stays champion until it ends.

        The next one is whoever waited longest past the bound, else the head of the running in the order
        of the queue policy, else the head of the queue.
        """

        def eligible(request: Request) -> bool:
            return not request.is_paused and self.state.may_run(request)

        champion = self._champion
        if champion is not None and champion.status is not RequestStatus.FINISHED and eligible(champion):
            return champion
        state = self.state
        waiting = [request for request in state.waiting if eligible(request)]
        oldest = min(waiting, key=lambda request: request.queued_since, default=None)
        if oldest is not None and state.now - oldest.queued_since <= self._options.starvation_seconds:
            oldest = None
        running = [request for request in state.running.values() if eligible(request)]
        head = min(running, key=lambda request: request.queue_entry, default=None)
        self._champion = oldest or head or (waiting[0] if waiting else None)
        return self._champion

    # --- results ---------------------------------------------------------------------------

    def _end_step(self, output: SchedulerOutput, now: float) -> None:
        assert self._unfinished_steps, "no step is in flight"
        expected = self._unfinished_steps.popleft()
        assert output.step_id == expected, f"step {output.step_id} ended before step {expected}"
        self.state.now = now
        self.state.last_ended_step = output.step_id
        release = Release(0, now)
        self.manager.device.complete(output.step_id, release)
        self.manager.host.complete(output.step_id, release)

    def _current(self, seq_id: int, epoch: int) -> Sequence | None:
        """The sequence a result is meant for, if that work is still wanted."""
        sequence = self._sequences.get(seq_id)
        return sequence if sequence is not None and sequence.epoch == epoch else None

    def _accept(self, sequence: Sequence, tokens: tuple[SampledToken, ...], events: list[Event]) -> None:
        request = sequence.request
        new = request.new
        if request.first_token_at is None:
            request.first_token_at = self.state.now
        sequence.num_in_flight -= 1
        accepted: list[SampledToken] = []
        text = ""
        reason = FinishReason.UNSPECIFIED
        matched: str | int | None = None
        for token in tokens:
            sequence.tokens.append(token.token_id)
            accepted.append(token)
            may_stop = sequence.num_output_tokens >= new.params.min_tokens
            is_stop = token.token_id in new.stop_ids
            delta = self._stop_condition.append(
                sequence.seq_id, token.token_id, may_stop=may_stop, is_stop_token=is_stop
            )
            text += delta.text
            if delta.matched_stop is not None:
                reason, matched = FinishReason.STOP, delta.matched_stop
            elif is_stop and may_stop:
                reason, matched = FinishReason.STOP, token.token_id
            elif sequence.num_output_tokens >= request.max_tokens:
                reason = FinishReason.LENGTH
            if reason is not FinishReason.UNSPECIFIED:
                text += self._stop_condition.finish(sequence.seq_id)
                break
        events.append(TokenEvent(request.request_id, sequence.index, tuple(accepted), text))
        if reason is not FinishReason.UNSPECIFIED:
            events.append(ChoiceFinishedEvent(request.request_id, sequence.index, reason, matched))
            self._retire(sequence)
            if not request.unfinished:
                events.append(self._forget(request, None))

    # --- ends ------------------------------------------------------------------------------

    def _retire(self, sequence: Sequence) -> None:
        """A sequence is done: its blocks go back, its results in flight are void."""
        self.manager.free(sequence, self._committer.release(sequence.request))
        sequence.is_finished = True
        sequence.epoch += 1
        del self._sequences[sequence.seq_id]

    def _end(self, request: Request, error: PageturnerError) -> FinishedEvent:
        """End a request early, wherever it stands."""
        for sequence in request.unfinished:
            self._stop_condition.finish(sequence.seq_id)
            self._retire(sequence)
        return self._forget(request, error)

    def _end_poisoned(self, request: Request, error: PageturnerError) -> FinishedEvent:
        """End a request whose KV is not to be trusted: what it computed leaves cache and memory."""
        suspect = {
            block_id
            for sequence in request.unfinished
            for block_id in self.manager.forget_content(sequence, sequence.num_claimed_blocks)
        }
        event = self._end(request, error)
        self._pending_clears += sorted(b for b in suspect if self.manager.device.ref_count(b) == 0)
        return event

    def _forget(self, request: Request, error: PageturnerError | None) -> FinishedEvent:
        state, now = self.state, self.state.now
        self.manager.drop_host(request, self._committer.release(request))
        if request in state.waiting:
            state.waiting.remove(request)
            request.queue_seconds += now - request.queued_since
        state.running.pop(request.order, None)
        state.holders.pop(request.order, None)
        request.status = RequestStatus.FINISHED
        del self._requests[request.request_id], self._by_order[request.order]
        if self._champion is request:
            self._champion = None
        admitted = now if request.admitted_at is None else request.admitted_at
        first_token = now if request.first_token_at is None else request.first_token_at
        by_kind = request.num_preemptions_by_kind
        return FinishedEvent(
            request.request_id,
            Usage(
                request.num_prompt_tokens,
                request.num_cached_prompt_tokens,
                sum(sequence.num_output_tokens for sequence in request.sequences),
            ),
            RequestTimings(
                queue_seconds=request.queue_seconds,
                prefill_seconds=max(0.0, first_token - admitted),
                decode_seconds=now - first_token,
                num_swaps=by_kind[Reclaim.SWAP],
                num_recomputes=by_kind[Reclaim.RECOMPUTE],
                num_tail_reclaims=by_kind[Reclaim.TAIL],
            ),
            error,
        )

    # --- proof -----------------------------------------------------------------------------

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, unless the whole state is consistent."""
        self.manager.check_integrity()
        state = self.state
        for request in self._requests.values():
            is_waiting, is_running = request in state.waiting, request.order in state.running
            assert is_waiting != is_running, f"status: {request.request_id} is in both lists or in none"
            assert is_running == (request.status is RequestStatus.RUNNING), "status: running list disagrees"
            if request.status is RequestStatus.SWAPPED:
                assert not self.manager.holds_device_blocks(request), "swapped: device blocks are held"
            if request.status is RequestStatus.WAITING:
                holds = self.manager.holds_device_blocks(request)
                assert holds == (request.order in state.holders), "holders: list and tables disagree"
        slots = sum(request.num_slots for request in state.running.values())
        assert slots <= self._options.max_num_seqs, f"slots: {slots} sequences run"
