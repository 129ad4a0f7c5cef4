"""Beams of a request go on together: once all have their candidates the next are chosen, and tables follow.

The beams are the request's sequences. One whose candidates are in has nothing to compute, so it waits for the
others without more ado: for one that a step had no room for, or one that is computed again after a
preemption. A beam that lives on in one continuation keeps its sequence, and its table as it is. Of one that
lives on in several, each further one takes over a sequence whose beam died, and shares the parent's blocks;
of those that share a block that is not full, all but the last to write to it copy it.
"""

from __future__ import annotations

from pageturner.service.core.beam_search import (
    BeamGroup,
    Continuation,
    Hypothesis,
    Selection,
    best_hypotheses,
    is_over,
    num_common,
    select,
    with_length_penalty,
)
from pageturner.service.core.memory.block import Release
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishReason,
    SampledToken,
    StopCondition,
    TokenEvent,
)
from pageturner.service.core.request import Request, Sequence
from pageturner.service.core.sampling_params import BeamSearch
from pageturner.service.core.scheduling.finish import Finisher, text_failed
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.structured_output import FIELD
from pageturner.service.errors import InvalidArgument


class BeamProcessor:
    """state: its sequences and their tables are changed here. finisher: ends the request."""

    def __init__(self, state: SchedulerState, finisher: Finisher, stop_condition: StopCondition) -> None:
        self._state = state
        self._manager = state.manager
        self._finisher = finisher
        self._stop_condition = stop_condition

    def take(self, sequence: Sequence, sampled: tuple[SampledToken, ...], events: list[Event]) -> None:
        """Candidates of one beam are in; the last of a request's beams lets all of them go on."""
        request, group = sequence.request, sequence.request.beams
        assert group is not None, f"{request.request_id} searches no beams"
        sequence.num_in_flight -= 1
        if request.first_token_at is None:
            request.first_token_at = self._state.now
            if self._state.waiting:
                self._state.pace.new_drained += request.num_prompt_tokens
        group.candidates[sequence.index] = sequence.epoch, sampled[0].top_logprobs if sampled else ()
        if not all(self._has_candidates(request.sequences[place], group) for place in group.beams):
            return
        try:
            self._advance(request, group, events)
        except TextError as failure:
            events.append(self._finisher.abort(request, text_failed(failure.error)))

    @staticmethod
    def _has_candidates(sequence: Sequence, group: BeamGroup) -> bool:
        """What it was given before a preemption is void: its last token is computed once more."""
        return group.candidates.get(sequence.index, (None,))[0] == sequence.epoch

    def _advance(self, request: Request, group: BeamGroup, events: list[Event]) -> None:
        """All beams take a token. Raises TextError."""
        params, search = request.new.params, request.new.params.beam_search
        assert search is not None
        if request.is_forked:
            self._count_blocks(request)
        num_outputs = request.sequences[group.beams[0]].num_output_tokens + 1
        selection = select(
            group.scores,
            [group.candidates[place][1] for place in group.beams],
            search.width,
            request.stops,
            may_stop=request.has_timely_ends or num_outputs > params.min_tokens,
            is_last=num_outputs == request.max_tokens,
        )
        ended = self._hypotheses(request, group, search, selection)
        group.hypotheses = best_hypotheses(group.hypotheses, ended, search.width)
        going_on = selection.continued
        if not (going_on or group.hypotheses):
            events.append(self._finisher.abort(request, InvalidArgument(FIELD, "no beam can go on or end")))
            return
        if not going_on or is_over(
            search, group.hypotheses, going_on[0].score, num_outputs, request.max_tokens
        ):
            self._finish(request, group, events)
            return
        self._regroup(request, group, going_on)
        self._settle(request, group, events)

    def _count_blocks(self, request: Request) -> None:
        """How many blocks the beams hold, and how many they would if none were shared."""
        references, counters = self._manager.references(request), self._state.counters
        counters["beam_selections"] += 1
        counters["beam_table_entries"] += references.total()
        counters["beam_blocks"] += len(references)

    # --- beams that end ----------------------------------------------------------------------

    def _hypotheses(
        self, request: Request, group: BeamGroup, search: BeamSearch, selection: Selection
    ) -> list[Hypothesis]:
        """The answers that ended, but for those that come behind as many better ones."""
        known, hypotheses = group.hypotheses, []
        num_outputs = request.sequences[group.beams[0]].num_output_tokens + 1
        for continuation in selection.ended:
            score = with_length_penalty(continuation.score, num_outputs, search)
            if len(known) == search.width and score <= known[-1].score:
                continue
            place = group.beams[continuation.parent]
            tokens = (*self._outputs(request, group, place), self._token(request, group, continuation))
            token_id = continuation.candidate.token_id
            matched = token_id if token_id in request.stops else None
            hypotheses.append(Hypothesis(score, tokens, matched))
        return hypotheses

    @staticmethod
    def _outputs(request: Request, group: BeamGroup, place: int) -> list[SampledToken]:
        if request.new.params.logprobs is not None:
            return group.tokens.get(place, [])
        return list(map(SampledToken, request.sequences[place].tokens[request.num_prompt_tokens :]))

    @staticmethod
    def _token(request: Request, group: BeamGroup, continuation: Continuation) -> SampledToken:
        candidate, num_logprobs = continuation.candidate, request.new.params.logprobs
        if num_logprobs is None:
            return SampledToken(candidate.token_id)
        likeliest = group.candidates[group.beams[continuation.parent]][1][:num_logprobs]
        return SampledToken(candidate.token_id, candidate.logprob, likeliest)

    # --- beams that go on --------------------------------------------------------------------

    def _regroup(self, request: Request, group: BeamGroup, continued: tuple[Continuation, ...]) -> None:
        """Give each continuation a sequence, with its parent's tokens and table, and its own next token."""
        sequences = request.sequences
        parents = [group.beams[continuation.parent] for continuation in continued]
        chosen = [self._token(request, group, continuation) for continuation in continued]
        spare = [sequence for sequence in reversed(sequences) if sequence.index not in parents]
        release = Release(request.last_step, self._state.now, request.new.tenant, request.priority)
        for sequence in spare:
            self._manager.free(sequence, release)
        places: list[int] = []
        for parent in parents:
            if parent not in places:
                places.append(parent)
                continue
            child = spare.pop()
            self._branch(sequences[parent], child)
            if parent in group.tokens:
                group.tokens[child.index] = list(group.tokens[parent])
            places.append(child.index)
        for place, token in zip(places, chosen, strict=True):
            sequences[place].tokens.append(token.token_id)
            if token.logprob is not None:
                group.tokens.setdefault(place, []).append(token)
        group.beams, group.scores = places, [continuation.score for continuation in continued]
        group.candidates.clear()
        request.is_forked = True
        histories = [sequences[place].tokens for place in places]
        request.num_shared_tokens = num_common(histories, request.num_shared_tokens)

    def _branch(self, parent: Sequence, child: Sequence) -> None:
        """The child, which holds nothing, becomes what the parent is, and shares its blocks."""
        child.tokens = list(parent.tokens)
        child.token_log = None if parent.token_log is None else parent.token_log.fork(child.tokens)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_kv_tokens = parent.num_kv_tokens
        child.num_accepted_tokens = parent.num_accepted_tokens
        child.num_ever_computed = parent.num_ever_computed
        child.last_step = parent.last_step
        self._manager.fork(parent, child, parent.num_kv_tokens)

    # --- what is told ------------------------------------------------------------------------

    def _settle(self, request: Request, group: BeamGroup, events: list[Event]) -> None:
        """Tell the tokens that any answer will begin with: those that all beams and hypotheses share."""
        first, num_prompt = group.num_settled, request.num_prompt_tokens
        shared = request.sequences[group.beams[0]].tokens[num_prompt + first : request.num_shared_tokens]
        ends = [[token.token_id for token in h.tokens[first : first + len(shared)]] for h in group.hypotheses]
        num_new = num_common([shared, *ends], 0)
        if not num_new:
            return
        group.num_settled = first + num_new
        settled = tuple(self._outputs(request, group, group.beams[0])[first : group.num_settled])
        for choice in range(_num_told_early(request)):
            text = self._text(request, choice, settled, first)
            events.append(TokenEvent(request.request_id, choice, settled, text))

    def _finish(self, request: Request, group: BeamGroup, events: list[Event]) -> None:
        """The search is over: tell the rest of the best answers, of which a form may have fewer than n."""
        told: list[Event] = []
        answers, request_id = group.hypotheses[: request.new.params.n], request.request_id
        for choice, answer in enumerate(answers):
            num_told = group.num_settled if choice < _num_told_early(request) else 0
            sequence, rest = request.sequences[choice], answer.tokens[num_told:]
            text = self._text(request, choice, rest, num_told, is_stopped=answer.matched is not None)
            text += self._end_text(sequence)
            reason = FinishReason.LENGTH if answer.matched is None else FinishReason.STOP
            told.append(TokenEvent(request_id, choice, rest, text))
            told.append(ChoiceFinishedEvent(request_id, choice, reason, answer.matched, answer.score))
            sequence.tokens[request.num_prompt_tokens :] = [token.token_id for token in answer.tokens]
            self._state.pace.answered(len(answer.tokens), is_cut=answer.matched is None)
        for sequence in request.sequences:
            if sequence.index >= len(answers):
                self._end_text(sequence)
                del sequence.tokens[request.num_prompt_tokens :]  # of no answer
            self._finisher.retire(sequence)
        events += told
        events.append(self._finisher.complete(request))

    def _text(
        self,
        request: Request,
        choice: int,
        tokens: tuple[SampledToken, ...],
        num_before: int,
        *,
        is_stopped: bool = False,
    ) -> str:
        """What these tokens add to the choice's text. Raises TextError."""
        seq_id, last = request.sequences[choice].seq_id, len(tokens) - 1
        min_tokens, append = request.new.params.min_tokens, self._stop_condition.append
        try:
            return "".join(
                append(
                    seq_id,
                    token.token_id,
                    may_stop=num_before + number >= min_tokens,
                    is_stop_token=is_stopped and number == last,
                ).text
                for number, token in enumerate(tokens)
            )
        except Exception as error:
            raise TextError(error) from error

    def _end_text(self, sequence: Sequence) -> str:
        """What was withheld of its text. Raises TextError."""
        try:
            return self._stop_condition.finish(sequence.seq_id)
        except Exception as error:
            raise TextError(error) from error


def _num_told_early(request: Request) -> int:
    """Choices that are told what all answers begin with before the end. A form may have fewer texts than n:
    of it one is told, the best, which there is in any case."""
    return 1 if request.has_timely_ends else request.new.params.n


class TextError(Exception):
    """A tokenizer's fault, which is of one request alone."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
