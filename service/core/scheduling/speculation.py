"""Drafts of what sequences say next, verified in the step that computes their last token.

A draft is accepted while it equals the token that its position samples. Random numbers depend on the
position alone, so at any temperature an answer's tokens are those of a run without drafts, one by one; there
is no need to trade probabilities, by which others keep the distribution (Leviathan et al., "Fast Inference
from Transformers via Speculative Decoding", ICML 2023).

Drafts come last and leave first. A step is decided and committed as if there were none: they may have what
that leaves of the token budget and of the pool, so none costs another sequence a token of the step. When
the step ends, the blocks behind what came true are given back, before anything is planned again: no plan, no
policy and no victim is ever told of them. KV of a draft counts, and may be cached, once it is verified.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from pageturner.service.core.drafting.draft_counts import (
    FIRST_ODDS,
    FIRST_WHOLE_ODDS,
    USUAL_ROW_COST,
    StepCost,
    draft_counts,
    learned_odds,
    recovered_odds,
)
from pageturner.service.core.drafting.ngram_index import NO_DRAFTS, Drafts, NgramIndex
from pageturner.service.core.memory.block import Release
from pageturner.service.core.memory.block_manager import blocks_for
from pageturner.service.core.options import SpeculationOptions
from pageturner.service.core.outputs import ScheduledSequence, SchedulerOutput
from pageturner.service.core.request import Sequence
from pageturner.service.core.scheduling.state import SchedulerState

PACE_RATE = 1 / 16
"""Weight of one step of a sequence in what is reckoned with for the rest of its answer."""


class Drafter(Protocol):
    """Guesses at what a sequence says next."""

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        """At most `limit` tokens, at least 1, that may follow."""
        ...


class NgramDrafter:
    """What followed the last tokens where they stood before in the sequence, prompt included."""

    def __init__(self, options: SpeculationOptions) -> None:
        self._options = options

    def propose(self, sequence: Sequence, limit: int) -> Drafts:
        """At most `limit` tokens that may follow."""
        index = sequence.ngrams
        if index is None:
            options, longest = self._options, sequence.request.max_total_tokens
            index = NgramIndex(sequence.tokens, options.min_ngram, options.max_ngram, longest)
            sequence.ngrams = index
        return index.propose(limit)


class Speculation:
    """Adds drafts to steps, while none is ahead of its results."""

    def __init__(self, state: SchedulerState, options: SpeculationOptions, drafter: Drafter) -> None:
        self._state = state
        self._num_tokens = options.num_tokens
        self._row_cost = options.row_cost or USUAL_ROW_COST
        self._drafter = drafter

    def add_drafts(self, output: SchedulerOutput) -> SchedulerOutput:
        """A step just committed, with drafts behind those of its sequences that are worth their time."""
        output = self._drafted(output)
        pace = self._state.pace
        for part in output.scheduled:
            if len(part.samples) == 1:
                pace.new_decodes += 1
                if not part.num_drafts:
                    learn_drafting(self._state, self._state.sequences[part.seq_id], 0, 0)
        return output

    def _drafted(self, output: SchedulerOutput) -> SchedulerOutput:
        state, num_rows = self._state, output.num_tokens
        state.found_drafts = {}
        num_samples = sum(len(part.samples) for part in output.scheduled)
        num_scored = sum(len(part.scored_rows) for part in output.scheduled if part.scored)
        options = state.options
        max_rows = min(options.max_num_batched_tokens - num_rows, options.max_scored_rows - num_scored)
        if max_rows <= 0 or not num_samples:
            return output
        cost = StepCost.of(num_rows, num_samples, self._row_cost)
        found = self._find(output, cost.least_odds, min(self._num_tokens, max_rows))
        if not found:
            return output
        odds = [(_odds(s, d.is_whole), len(d.token_ids)) for _, s, d in found]
        counts = draft_counts(odds, cost, max_rows, has_others=len(found) < len(output.scheduled))
        scheduled, num_drafts = list(output.scheduled), 0
        for (place, sequence, drafts), count in zip(found, counts, strict=True):
            if count:
                scheduled[place] = self._with_drafts(scheduled[place], sequence, drafts, count)
                num_drafts += sequence.num_drafts
        state.counters["scheduled_tokens"] += num_drafts
        state.counters["drafted_tokens"] += num_drafts
        state.pace.new_output_tokens += num_drafts
        return replace(output, scheduled=tuple(scheduled))

    def _find(
        self, output: SchedulerOutput, least_odds: float, most: int
    ) -> list[tuple[int, Sequence, Drafts]]:
        """Place in the step, sequence and drafts, where one token of an answer is computed and has any."""
        found = []
        for place, part in enumerate(output.scheduled):
            if len(part.token_ids) > 1 or len(part.samples) != 1:
                continue
            sequence = self._state.sequences[part.seq_id]
            if part.start < sequence.request.num_prompt_tokens:
                continue  # behind the prompt its choices fork, and share the block that drafts would go to
            limit = min(most, _most_drafts(sequence))
            if limit <= 0:
                continue
            drafts = NO_DRAFTS
            if max(sequence.draft_odds, sequence.whole_draft_odds) > least_odds:
                drafts = self._drafter.propose(sequence, limit)
            if drafts.token_ids:
                self._state.found_drafts[part.seq_id] = (len(drafts.token_ids), drafts.is_whole)
                if _odds(sequence, drafts.is_whole) > least_odds:
                    found.append((place, sequence, drafts))
            _recover(sequence, least_odds)
        return found

    def _with_drafts(
        self, part: ScheduledSequence, sequence: Sequence, drafts: Drafts, count: int
    ) -> ScheduledSequence:
        """Behind the one token of `part` the first `count` of the drafts, as many as there are slots for."""
        manager = self._state.manager
        num_blocks = len(manager.table(sequence)) + manager.device.num_available
        token_ids = drafts.token_ids[: min(count, num_blocks * manager.block_size - part.end)]
        manager.grow(sequence, part.end + len(token_ids))
        sequence.num_drafts, sequence.has_whole_match = len(token_ids), drafts.is_whole
        return replace(
            part,
            token_ids=part.token_ids + token_ids,
            block_table=manager.table(sequence),
            num_drafts=len(token_ids),
        )


def _most_drafts(sequence: Sequence) -> int:
    """Drafts that a step may verify for it: no token comes behind the last of an answer, and what is withheld
    below min_tokens is withheld behind every draft or behind none."""
    request, num_tokens = sequence.request, len(sequence.tokens)
    if request.beams is not None:
        return 0  # which token follows a beam is decided beside the others
    limit, most = request.max_total_tokens - num_tokens - 1, request.new.params.max_draft_tokens
    if most is not None:
        limit = min(limit, most)
    if num_tokens < request.min_total_tokens:
        limit = min(limit, request.min_total_tokens - num_tokens - 1)
    return limit


def _odds(sequence: Sequence, is_whole: bool) -> float:
    return sequence.whole_draft_odds if is_whole else sequence.draft_odds


def _recover(sequence: Sequence, least_odds: float) -> None:
    """A token more without drafts, for each kind of match whose odds are too low."""
    if sequence.draft_odds <= least_odds:
        sequence.draft_odds = recovered_odds(sequence.draft_odds, FIRST_ODDS)
    if sequence.whole_draft_odds <= least_odds:
        sequence.whole_draft_odds = recovered_odds(sequence.whole_draft_odds, FIRST_WHOLE_ODDS)


def learn_drafting(state: SchedulerState, sequence: Sequence, num_drafts: int, num_gained: int) -> None:
    """A step of it verified so many drafts, and yielded num_gained tokens beyond the one."""
    drafts, gain = sequence.mean_drafts, sequence.mean_gain
    if drafts is None or gain is None:
        usual = state.pace.usual_drafting
        drafts, gain = usual.drafts, usual.gain
    sequence.mean_drafts = drafts + PACE_RATE * (num_drafts - drafts)
    sequence.mean_gain = gain + PACE_RATE * (num_gained - gain)


def settle_drafts(state: SchedulerState, sequence: Sequence, num_right: int, num_taken: int) -> None:
    """A step that verified drafts has ended, and its tokens are appended.

    num_right: drafts that came true. num_taken: tokens that were appended; fewer than came where one of them
    ended the sequence. KV counts as far as without drafts: up to the last token, that one left out.
    """
    manager, request, num_drafts = state.manager, sequence.request, sequence.num_drafts
    sequence.num_drafts = 0
    if sequence.has_whole_match:
        sequence.whole_draft_odds = learned_odds(sequence.whole_draft_odds, num_drafts, num_right)
    else:
        sequence.draft_odds = learned_odds(sequence.draft_odds, num_drafts, num_right)
    num_accepted = min(num_right, num_taken)
    learn_drafting(state, sequence, num_drafts, num_taken - 1)
    state.pace.new_drafts += num_drafts
    state.pace.new_gained += num_taken - 1
    request.num_drafted_tokens += num_drafts
    request.num_accepted_drafts += num_accepted
    state.counters["accepted_drafts"] += num_accepted
    if num_taken > 1:
        if state.waiting:
            state.pace.new_drained += num_taken - 1
        end = sequence.num_computed_tokens + num_taken - 1
        sequence.num_computed_tokens = sequence.num_kv_tokens = sequence.num_accepted_tokens = end
        manager.cache_full_blocks(sequence)
    num_blocks = blocks_for(sequence.num_kv_tokens, manager.block_size)
    if num_blocks < len(manager.table(sequence)):
        manager.truncate(sequence, num_blocks, Release(sequence.last_step, state.now))


def make_speculation(
    state: SchedulerState, options: SpeculationOptions, drafter: Drafter | None, depth: int
) -> Speculation | None:
    """None without a method. drafter: in place of the method's own. A step that is planned ahead of the one
    before it does not know the token that drafts would follow."""
    if options.method == "none":
        return None
    assert not depth, "drafts need each step's tokens before the next is planned"
    return Speculation(state, options, drafter or NgramDrafter(options))
