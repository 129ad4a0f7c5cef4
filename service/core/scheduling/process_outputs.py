"""Takes what a step computed: caches its blocks, appends its tokens, stops what is done."""

from __future__ import annotations

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishReason,
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    StopCondition,
    TokenEvent,
)
from pageturner.service.core.request import Sequence
from pageturner.service.core.scheduling.beams import BeamProcessor
from pageturner.service.core.scheduling.finish import Finisher, text_failed
from pageturner.service.core.scheduling.scores import keep_scores
from pageturner.service.core.scheduling.speculation import settle_drafts
from pageturner.service.core.scheduling.state import SchedulerState


class OutputProcessor:
    """Results of an older epoch are dropped: the work was void when it ended."""

    def __init__(self, state: SchedulerState, finisher: Finisher, stop_condition: StopCondition) -> None:
        self._state = state
        self._finisher = finisher
        self._stop_condition = stop_condition
        self._beams = BeamProcessor(state, finisher, stop_condition)

    def take(self, output: SchedulerOutput, sampled: tuple[SampledSequence, ...]) -> list[Event]:
        """In this order: what is poisoned is never cached, and what is cached is there before any
        token of this step ends its sequence."""
        events: list[Event] = []
        sequences = self._state.sequences
        for result in sampled:
            if result.error is not None:
                sequence = sequences.get(result.seq_id)
                if sequence is not None and sequence.epoch == result.epoch:
                    events.append(self._finisher.abort_poisoned(sequence.request, result.error))
        self._publish(output)
        for result in sampled:
            sequence = sequences.get(result.seq_id)
            if sequence is None or sequence.epoch != result.epoch:
                continue
            if result.scores:
                events += keep_scores(self._state, self._finisher, sequence, result.scores)
            elif sequence.request.beams is None:
                self._accept(sequence, result.tokens, events)
            else:
                self._beams.take(sequence, result.tokens, events)
        return events

    def _publish(self, output: SchedulerOutput) -> None:
        """The KV of the step is made; blocks that are full with it are cached. Drafts are settled later."""
        sequences, manager = self._state.sequences, self._state.manager
        block_size = manager.block_size
        for part in output.scheduled:
            sequence = sequences.get(part.seq_id)
            if sequence is None or sequence.epoch != part.epoch:
                continue
            end = part.start + len(part.token_ids) - part.num_drafts
            if end > sequence.num_accepted_tokens:
                sequence.num_accepted_tokens = end
            else:
                end = sequence.num_accepted_tokens
            if end >= (sequence.num_cached_blocks + 1) * block_size:
                manager.cache_full_blocks(sequence)
            if sequence.request.new.hands_over:
                manager.offer_blocks(sequence)

    def _accept(self, sequence: Sequence, sampled: tuple[SampledToken, ...], events: list[Event]) -> None:
        """Append tokens until one ends the sequence. One function, as it runs for each sequence of a step."""
        request, tokens = sequence.request, sequence.tokens
        if request.first_token_at is None:
            request.first_token_at = self._state.now
            if self._state.waiting:
                self._state.pace.new_drained += request.num_prompt_tokens
        sequence.num_in_flight -= 1
        text, num_accepted = "", 0
        reason = FinishReason.UNSPECIFIED
        matched: str | int | None = None
        try:
            for token in sampled:
                token_id = token.token_id
                tokens.append(token_id)
                num_accepted += 1
                num_tokens = len(tokens)
                may_stop, is_stop = num_tokens >= request.min_total_tokens, token_id in request.stops
                delta = self._stop_condition.append(
                    sequence.seq_id, token_id, may_stop=may_stop, is_stop_token=is_stop
                )
                text += delta.text
                if delta.matched_stop is not None:
                    reason, matched = FinishReason.STOP, delta.matched_stop
                elif is_stop and (may_stop or request.has_timely_ends):
                    reason, matched = FinishReason.STOP, token_id
                elif num_tokens >= request.max_total_tokens:
                    reason = FinishReason.LENGTH
                else:
                    continue
                text += self._stop_condition.finish(sequence.seq_id)
                break
        except Exception as error:  # a tokenizer's fault is of this request alone
            events.append(self._finisher.abort(request, text_failed(error)))
            return
        if sequence.num_drafts:
            settle_drafts(self._state, sequence, len(sampled) - 1, num_accepted)
        events.append(TokenEvent(request.new.request_id, sequence.index, sampled[:num_accepted], text))
        if reason is not FinishReason.UNSPECIFIED:
            events.append(ChoiceFinishedEvent(request.request_id, sequence.index, reason, matched))
            self._state.manager.cache_partial_block(sequence)
            if request.new.hands_over:
                self._state.manager.end_offers(sequence)
            self._state.pace.answered(sequence.num_output_tokens, is_cut=reason is FinishReason.LENGTH)
            self._finisher.retire(sequence)
            if not request.unfinished:
                events.append(self._finisher.complete(request))
