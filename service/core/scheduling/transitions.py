"""How a request begins to run, gives way, and goes back to the queue: the moves between its states.

Nothing is decided here, and no move falls short: what is moved was planned on a ledger.
"""

from __future__ import annotations

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.memory.block import Release
from pageturner.service.core.outlook import Work
from pageturner.service.core.outputs import BlockCopy
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.policy_events import tell_queued, tell_started
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import PlannedAdmission, Preemption


class Transitions:
    """state: changed here, by `Committer`, by what ends requests, and by the scheduler only."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._manager = state.manager

    # --- preempting --------------------------------------------------------------------------

    def preempt(self, preemption: Preemption, step_id: int) -> tuple[BlockCopy, ...]:
        """Take the request out of the running, with its blocks; returns the copies to be made."""
        request = preemption.request
        copies: tuple[BlockCopy, ...] = ()
        if preemption.how is Reclaim.SWAP:
            copies = self._manager.swap_out(request, self.release(request))
            for sequence in request.unfinished:
                sequence.reset(sequence.num_kv_tokens, self._manager.block_size)
                sequence.last_step = step_id  # its host blocks are being written until this step ends
            status = RequestStatus.SWAPPED
        elif preemption.how is Reclaim.TAIL:
            self._cut_tail(preemption)
            status = RequestStatus.WAITING
        else:
            self.drop_kv(request)
            status = RequestStatus.WAITING
        request.num_preemptions_by_kind[preemption.how] += 1
        self._state.counters[f"{preemption.how.value}_preemptions"] += 1
        self.requeue(request, status)
        return copies

    def _cut_tail(self, preemption: Preemption) -> None:
        request, block_size = preemption.request, self._manager.block_size
        for sequence, num_kept in preemption.cuts:
            self._manager.truncate(sequence, num_kept, self.release(request))
            sequence.num_kv_tokens = min(sequence.num_kv_tokens, num_kept * block_size)
        for sequence in request.unfinished:
            sequence.reset(sequence.num_kv_tokens, block_size)
        if self._manager.holds_device_blocks(request):
            self._state.holders[request.order] = request
        elif len(request.unfinished) > 1:
            self.drop_kv(request)  # nothing is left: its prompt is computed once again, then forked

    def drop_kv(self, request: Request) -> None:
        """Give back every block on either side; all known tokens are computed again one day."""
        release = self.release(request)
        for sequence in request.sequences:
            self._manager.free(sequence, release)
        self._manager.drop_host(request, release)
        request.is_forked = len(request.unfinished) == 1
        for sequence in request.unfinished:
            sequence.reset(0, self._manager.block_size)
        self._state.holders.pop(request.order, None)

    def requeue(self, request: Request, status: RequestStatus) -> None:
        """The request takes its place among those that do not run."""
        state = self._state
        if state.running.pop(request.order, None) is not None:
            request.queued_since = state.now
            tell_queued(state, request, is_first=False)
        if request in state.waiting:
            state.waiting.remove(request)
        request.status = status
        state.waiting.add(request)

    def release(self, request: Request) -> Release:
        """How this request lets go of blocks now: fenced by the last step that has to do with it."""
        return Release(request.last_step, self._state.now, request.new.tenant, request.priority)

    # --- admitting --------------------------------------------------------------------------

    def admit_all(self, admissions: tuple[PlannedAdmission, ...], step_id: int) -> list[BlockCopy]:
        """Let the requests run, with the cached blocks they claim; returns the copies to be made."""
        for admission in admissions:
            self._manager.pin(admission.host_hits.values())
            for blocks in admission.claims.values():
                self._manager.pin(blocks)
        copies: list[BlockCopy] = []
        for admission in admissions:
            request = admission.request
            release = Release(step_id, self._state.now, request.new.tenant, request.priority)
            if request.status is RequestStatus.SWAPPED:
                copies += self._manager.swap_in(request, admission.host_hits, release)
                for sequence in request.unfinished:
                    sequence.last_step = step_id
            else:
                for sequence in request.computing:
                    self._claim(sequence, admission)
            self._note_admission(request, admission.num_hit_tokens(self._manager.block_size))
        unfenced = Release(0, self._state.now)
        for admission in admissions:
            self._manager.unpin(admission.host_hits.values(), unfenced)
            for blocks in admission.claims.values():
                self._manager.unpin(blocks, unfenced)
        return copies

    def _claim(self, sequence: Sequence, admission: PlannedAdmission) -> None:
        seq_id = sequence.seq_id
        num_full = admission.num_full_claims(seq_id)
        self._manager.claim(sequence, admission.claims[seq_id], num_full)
        if admission.restores:
            assert self._manager.tiers is not None, "blocks are restored from no tier"
            self._manager.tiers.restore(self._manager.restore(sequence, admission.restores))
            num_full += len(admission.restores)
        num_tokens = num_full * self._manager.block_size + admission.partial_tokens.get(seq_id, 0)
        sequence.set_kv(sequence.num_kv_tokens + num_tokens)

    def _note_admission(self, request: Request, num_hit_tokens: int) -> None:
        state, now = self._state, self._state.now
        is_first, was_swapped = request.admitted_at is None, request.status is RequestStatus.SWAPPED
        state.waiting.remove(request)
        if request.admitted_at is None:
            request.admitted_at = now
            skippable = min(request.num_prompt_tokens - 1, request.computing[0].next_scored)
            request.num_cached_prompt_tokens = min(num_hit_tokens, skippable)
            state.counters["prefix_query_tokens"] += request.num_prompt_tokens
            state.counters["prefix_hit_tokens"] += request.num_cached_prompt_tokens
            state.pace.started(request.work - Work(request.num_cached_prompt_tokens))
        else:
            state.counters["resume_hit_tokens"] += num_hit_tokens
        request.num_cached_tokens = 0
        request.queue_seconds += now - request.queued_since
        state.holders.pop(request.order, None)
        request.status = RequestStatus.RUNNING
        state.running[request.order] = request
        num_cached = 0 if was_swapped else min(num_hit_tokens, views.num_known_tokens(request) - 1)
        tell_started(state, request, num_cached, is_first=is_first)
