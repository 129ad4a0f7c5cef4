"""How a sequence and a request end, each exactly once, wherever they stand."""

from __future__ import annotations

from contextlib import suppress

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.outputs import FinishedEvent, RequestTimings, StopCondition, Usage
from pageturner.service.core.request import Request, RequestStatus, Sequence
from pageturner.service.core.scheduling.policy_events import tell_ended
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.transitions import Transitions
from pageturner.service.errors import PageturnerError, TextFailed


def text_failed(error: Exception) -> TextFailed:
    """The error of a request whose stop condition raised."""
    failure = TextFailed(f"{type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure


class Finisher:
    """stop_condition: told of each sequence that is cut short."""

    def __init__(
        self, state: SchedulerState, transitions: Transitions, stop_condition: StopCondition
    ) -> None:
        self._state = state
        self._transitions = transitions
        self._stop_condition = stop_condition

    def retire(self, sequence: Sequence) -> None:
        """A sequence is done: its blocks go back, its results in flight are void."""
        self._state.manager.free(sequence, self._transitions.release(sequence.request))
        sequence.is_finished = True
        sequence.epoch += 1
        del self._state.sequences[sequence.seq_id]

    def abort(self, request: Request, error: PageturnerError) -> FinishedEvent:
        """End a request early."""
        for sequence in request.unfinished:
            if not request.new.is_scoring:
                with suppress(Exception):  # the text of what is cut short is dropped
                    self._stop_condition.finish(sequence.seq_id)
            self.retire(sequence)
        return self.complete(request, error)

    def abort_poisoned(self, request: Request, error: PageturnerError) -> FinishedEvent:
        """End a request whose KV is not to be trusted: it leaves the cache, and what no other uses is
        zeroed."""
        state = self._state
        if state.manager.tiers is not None:
            state.manager.tiers.forget(h for sequence in request.unfinished for h in sequence.block_hashes)
        suspect = {
            block_id for sequence in request.unfinished for block_id in state.manager.forget_content(sequence)
        }
        event = self.abort(request, error)
        state.pending_clears += sorted(b for b in suspect if state.manager.device.ref_count(b) == 0)
        return event

    def complete(self, request: Request, error: PageturnerError | None = None) -> FinishedEvent:
        """All its sequences have ended; nothing may remember the request after this."""
        state, now = self._state, self._state.now
        state.manager.drop_host(request, self._transitions.release(request))
        if request in state.waiting:
            state.waiting.remove(request)
            request.queue_seconds += now - request.queued_since
        state.running.pop(request.order, None)
        state.holders.pop(request.order, None)
        request.status = RequestStatus.FINISHED
        state.forget(request)
        tell_ended(state, request)
        admitted = now if request.admitted_at is None else request.admitted_at
        first_token = now if request.first_token_at is None else request.first_token_at
        by_kind = request.num_preemptions_by_kind
        return FinishedEvent(
            request.request_id,
            Usage(
                request.num_prompt_tokens,
                request.num_cached_prompt_tokens,
                _num_output_tokens(request),
                request.new.num_resumed_tokens,
                request.num_drafted_tokens,
                request.num_accepted_drafts,
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
            state.policy_host.names,
            policies_changed=request.policies is not state.policy_host.names,
        )


def _num_output_tokens(request: Request) -> int:
    """Of its answers, all that were sampled for them included; of continuations, those that were scored."""
    if request.new.is_scoring:
        return request.new.num_resumed_tokens
    answers = request.sequences if request.beams is None else request.sequences[: request.new.params.n]
    return sum(sequence.num_output_tokens for sequence in answers)
