"""Known tokens and their log-probabilities: which rows of a chunk score them, and what comes of it.

A row whose logits are wanted is computed whether or not its KV is cached (`Sequence.next_position`), and then
writes nothing: blocks are shared with the prefix cache, their computation is not.
"""

from __future__ import annotations

from collections.abc import Iterator

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    Event,
    FinishReason,
    SampledToken,
    ScoredTokensEvent,
    ScoreRun,
)
from pageturner.service.core.request import NOTHING_SCORED, Sequence
from pageturner.service.core.scheduling.finish import Finisher
from pageturner.service.core.scheduling.state import SchedulerState


def score_runs(sequence: Sequence, start: int, end: int) -> tuple[ScoreRun, ...]:
    """What rows start .. end-1 of a sequence score. The row at which a prompt forks is that of every
    continuation's first token."""
    request = sequence.request
    num_top = request.new.num_score_top
    assert num_top is not None, f"nothing of {request.request_id} is to be scored"
    is_shared = request.new.is_scoring and not request.is_forked
    first = max(start, sequence.next_scored)
    runs = []
    for owner in request.unfinished if is_shared else (sequence,):
        token_ids = owner.scored_tokens(first, end) if owner.next_scored <= first else ()
        if token_ids:
            runs.append(ScoreRun(owner.seq_id, owner.epoch, first, token_ids, num_top))
    return tuple(runs)


def keep_scores(
    state: SchedulerState, finisher: Finisher, sequence: Sequence, scores: tuple[SampledToken, ...]
) -> Iterator[Event]:
    """The next known tokens were scored: a prompt's, or a continuation's, which ends with its last one."""
    request, num_prompt_tokens = sequence.request, sequence.request.num_prompt_tokens
    start = sequence.next_scored + 1
    sequence.next_scored += len(scores)
    if not request.new.is_scoring:
        if sequence.next_scored == num_prompt_tokens - 1:
            sequence.next_scored = NOTHING_SCORED
        yield ScoredTokensEvent(request.request_id, None, start, scores)
        return
    if request.first_token_at is None:
        request.first_token_at = state.now
    index = sequence.index
    yield ScoredTokensEvent(request.request_id, index, start - num_prompt_tokens, scores)
    if sequence.next_scored == len(sequence.tokens):
        yield ChoiceFinishedEvent(request.request_id, index, FinishReason.LENGTH)
        finisher.retire(sequence)
        if not request.unfinished:
            yield finisher.complete(request)
