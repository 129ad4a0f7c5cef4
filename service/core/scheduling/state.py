"""What the scheduler's parts share: one record, one owner (the scheduler) for each field."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from pageturner.policies.queue import Fcfs
from pageturner.policies.views import LoadView, Rates
from pageturner.service.core.decisions import Decision
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.window import num_dropped
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outlook import Outlook
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.forecast import concurrency, next_end
from pageturner.service.core.scheduling.pace import SHORT, TYPICAL, Pace
from pageturner.service.core.scheduling.tier_figures import with_tiers
from pageturner.service.core.scheduling.waiting_queue import WaitingQueue
from pageturner.service.policy_host.host import PolicyHost


@dataclass(slots=True)
class SchedulerState:
    """requests, sequences: all that live, by id. num_live: requests by tenant, none of 0. num_scoring: those
    requests that sample nothing. searching: those of a beam search, by Request.order. running: likewise, in
    the order of their start. waiting: everything else that lives.

    producing: hashes of blocks that requests scheduled in the last step are about to compute.
    holders: waiting requests that hold blocks (their tail was reclaimed).
    fetching: requests (orders) that wait for blocks from disk; they may not run yet.
    suspects: while a failed step is being searched, the requests that may run (orders); None otherwise.
    watermark_blocks: blocks that admissions leave available while anything runs.
    last_ended_step: the last step whose results are in.
    pending_clears: blocks to be zeroed at the head of the next step. counters: totals for SchedulerStats.
    pace: how fast requests are served. is_full: some wait, and none could start in the last step.
    is_sweep_due: the queue is to be searched for requests that come too late.
    guarded: the request that no policy could hold back in the last step. unfinished_steps: ids of steps
    scheduled and not updated. next_...: numbers to be given next.
    decisions: where to note them; None without a listener. found_drafts: of sequences of the step that was
    planned last, by their ids: how many drafts were found, and whether behind a whole match.
    """

    options: SchedulerOptions
    manager: BlockManager
    policy_host: PolicyHost
    rates: Rates
    waiting: WaitingQueue
    watermark_blocks: int
    pace: Pace
    now: float = 0.0
    is_full: bool = False
    is_sweep_due: bool = False
    last_ended_step: int = 0
    requests: dict[str, Request] = field(default_factory=dict)
    searching: set[int] = field(default_factory=set)
    num_live: Counter[str] = field(default_factory=Counter)
    num_scoring: int = 0
    sequences: dict[int, Sequence] = field(default_factory=dict)
    running: dict[int, Request] = field(default_factory=dict)
    holders: dict[int, Request] = field(default_factory=dict)
    producing: dict[bytes, Request] = field(default_factory=dict)
    fetching: set[int] = field(default_factory=set)
    suspects: frozenset[int] | None = None
    pending_clears: list[int] = field(default_factory=list)
    counters: Counter[str] = field(default_factory=Counter)
    guarded: Request | None = None
    unfinished_steps: deque[int] = field(default_factory=deque)
    next_order: int = 0
    next_seq_id: int = 0
    next_step_id: int = 1
    decisions: list[Decision] | None = None
    found_drafts: dict[int, tuple[int, bool]] = field(default_factory=dict)

    def enlist(self, request: Request) -> None:
        """It lives from now on."""
        self.requests[request.request_id] = request
        self.num_live[request.new.tenant] += 1
        if request.beams is not None:
            self.searching.add(request.order)
        self.num_scoring += request.new.is_scoring

    def forget(self, request: Request) -> None:
        """It lives no more."""
        self.fetching.discard(request.order)
        del self.requests[request.request_id]
        self.searching.discard(request.order)
        self.num_live[request.new.tenant] -= 1
        self.num_scoring -= request.new.is_scoring
        if not self.num_live[request.new.tenant]:
            del self.num_live[request.new.tenant]

    def may_run(self, request: Request) -> bool:
        is_allowed = self.suspects is None or request.order in self.suspects
        return is_allowed and request.order not in self.fetching

    def load(self, running: list[Request] | None = None, num_available: int | None = None) -> LoadView:
        """The load now, or as it would be with `running` and `num_available` device blocks planned."""
        return views.load_view(
            self.now,
            list(self.running.values()) if running is None else running,
            len(self.waiting),
            self.options.max_num_seqs,
            self.manager,
            self.manager.device.num_available if num_available is None else num_available,
        )

    def outlook(self) -> Outlook:
        """What a newcomer has to expect; costs time in proportion to the running, not to the waiting."""
        running = list(self.running.values())
        company = concurrency(self.pace, running)
        pace, waiting, longest = self.pace, self.waiting, self.options.max_model_len
        return Outlook(
            num_queued=waiting.num_unstarted,
            num_queued_prompt_tokens=waiting.num_unstarted_tokens,
            queue=waiting.work,
            drain_rate=pace.drain_rate,
            is_full=self.is_full and len(waiting) > 0,
            is_in_order=self.policy_host.names["queue"] == Fcfs.name
            and not self.options.share_between_tenants,
            concurrency=company,
            next_end=next_end(pace, company, running),
            short_answer=pace.outputs_left(0, longest, SHORT),
            typical_answer=pace.outputs_left(0, longest, TYPICAL),
        )

    def uncached_hashes(self, sequence: Sequence) -> list[bytes]:
        """Hashes of the full known blocks of a sequence that are still to be computed or cached."""
        if not self.manager.caches_prefixes:
            return []
        num_full = len(sequence.tokens) // self.manager.block_size
        return [self.manager.block_hash(sequence, i) for i in range(sequence.num_cached_blocks, num_full)]

    def stats(self) -> SchedulerStats:
        """Counters and gauges of this moment; costs time in proportion to live requests and blocks in use."""
        manager, counters, outlook = self.manager, self.counters, self.outlook()
        device, host = manager.device, manager.host
        running = list(self.running.values())
        stats = SchedulerStats(
            num_waiting=len(self.waiting),
            num_running=len(running),
            num_swapped=sum(request.status is RequestStatus.SWAPPED for request in self.waiting),
            num_running_sequences=sum(request.num_slots for request in running),
            num_queued_prompt_tokens=self.waiting.work.num_prompt_tokens,
            num_blocks=device.num_blocks,
            num_blocks_free=device.num_free,
            num_blocks_evictable=device.num_evictable,
            num_blocks_used=device.num_live,
            num_host_blocks=host.num_blocks,
            num_host_blocks_used=host.num_live,
            num_wasted_slots=manager.num_wasted_slots(s for r in running for s in r.unfinished),
            num_steps_total=counters["steps"],
            num_scheduled_tokens_total=counters["scheduled_tokens"],
            num_prefix_query_tokens_total=counters["prefix_query_tokens"],
            num_prefix_hit_tokens_total=counters["prefix_hit_tokens"],
            num_resume_hit_tokens_total=counters["resume_hit_tokens"],
            num_swap_preemptions_total=counters["swap_preemptions"],
            num_recompute_preemptions_total=counters["recompute_preemptions"],
            num_tail_preemptions_total=counters["tail_preemptions"],
            num_bypasses_total=counters["bypasses"],
            num_policy_faults_total=sum(self.policy_host.faults.values()),
            num_step_failures_total=counters["step_failures"],
            num_evictions_total=device.num_evictions,
            num_swapped_out_blocks_total=counters["swapped_out_blocks"],
            num_swapped_in_blocks_total=counters["swapped_in_blocks"],
            num_copied_blocks_total=counters["copied_blocks"],
            num_drafted_tokens_total=counters["drafted_tokens"],
            num_accepted_drafts_total=counters["accepted_drafts"],
            num_requests_fetching=len(self.fetching),
            num_beam_selections_total=counters["beam_selections"],
            num_beam_table_entries_total=counters["beam_table_entries"],
            num_beam_blocks_total=counters["beam_blocks"],
            num_window_blocks_total=manager.num_dropped_blocks,
            queue_seconds=outlook.queue_seconds,
            drain_tokens_per_second=outlook.drain_rate,
            outlook=outlook,
        )
        return with_tiers(stats, manager)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, unless the whole state is consistent."""
        self.manager.check_integrity()
        num_live = Counter(request.new.tenant for request in self.requests.values())
        assert self.num_live == num_live, "tenants: the count of live requests disagrees"
        num_scoring = sum(request.new.is_scoring for request in self.requests.values())
        assert self.num_scoring == num_scoring, "scoring: the count of live requests disagrees"
        for request in self.requests.values():
            is_waiting, is_running = request in self.waiting, request.order in self.running
            assert is_waiting != is_running, f"status: {request.request_id} is in both lists or in none"
            assert is_running == (request.status is RequestStatus.RUNNING), "status: running list disagrees"
            if request.status is RequestStatus.SWAPPED:
                assert not self.manager.holds_device_blocks(request), "swapped: device blocks are held"
            if request.status is RequestStatus.WAITING:
                holds = self.manager.holds_device_blocks(request)
                assert holds == (request.order in self.holders), "holders: list and tables disagree"
        for sequence in self.sequences.values():
            num_cached = sequence.num_cached_blocks * self.manager.block_size
            assert num_cached <= sequence.num_kv_tokens, (
                f"cached: sequence {sequence.seq_id} counts {num_cached} tokens of {sequence.num_kv_tokens}"
            )
            table = self.manager.table(sequence)
            num_slots = len(table) * self.manager.block_size
            num_used = sequence.num_kv_tokens + sequence.num_drafts
            assert num_slots < num_used + self.manager.block_size, (
                f"lookahead: sequence {sequence.seq_id} holds {num_slots} slots for {num_used} tokens"
            )
            assert sequence.next_scored >= sequence.num_computed_tokens or self.unfinished_steps, (
                f"scored: row {sequence.next_scored} of sequence {sequence.seq_id} was passed over"
            )
            dropped = num_dropped(table or self.manager.host_table(sequence))
            window, position = self.manager.window, sequence.num_computed_tokens
            assert not dropped or (window is not None and dropped <= window.num_hidden_blocks(position)), (
                f"window: sequence {sequence.seq_id} gave back a block that position {position} sees"
            )
        searching = [request for request in self.requests.values() if request.beams is not None]
        assert self.searching == {request.order for request in searching}, "beams: who searches is not known"
        for request in searching:
            _check_beams(request)
        slots = sum(request.num_slots for request in self.running.values())
        assert slots <= self.options.max_num_seqs, f"slots: {slots} sequences run"


def _check_beams(request: Request) -> None:
    """All beams have equally many tokens, and all sequences but those of the prompt's one beam are beams."""
    group, sequences = request.beams, request.sequences
    assert group is not None
    beams = [sequences[place] for place in group.beams]
    assert len(group.beams) == len(group.scores) == len(set(group.beams)), "beams: two of one sequence"
    assert len({len(beam.tokens) for beam in beams}) == 1, "beams: one is ahead of the others"
    has_begun = beams[0].num_output_tokens > 0
    assert len(beams) == (len(sequences) if has_begun else 1), "beams: a sequence is none"
    shared = {tuple(beam.tokens[: request.num_shared_tokens]) for beam in beams}
    assert len(shared) == 1, "beams: what all share is not what all have"
