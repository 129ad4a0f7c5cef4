"""Planted bugs of what scores known tokens, in the manner of `bad_machines`."""

from __future__ import annotations

from typing import Any

from pageturner.service.core.outputs import ScoreRun
from pageturner.service.core.request import Sequence
from pageturner.service.core.scheduling import committer as committer_module
from support.bad_machines import PlantedBug
from support.scheduler_machine import ScoringMachine


def _cached_rows_are_skipped(original: Any) -> Any:
    def next_position(self: Sequence, num_kv_tokens: int) -> int:
        return min(num_kv_tokens, self.num_known_tokens - 1)

    return next_position


def _token_of_the_row_itself(original: Any) -> Any:
    def scored_tokens(self: Sequence, first: int, end: int) -> tuple[int, ...]:
        tokens = original(self, first, end)
        return tokens and (*tokens[:-1], self.tokens[first + len(tokens) - 1])

    return scored_tokens


def _only_the_lead_is_scored(original: Any) -> Any:
    def score(sequence: Sequence, start: int, end: int) -> tuple[ScoreRun, ...]:
        return original(sequence, start, end)[:1]  # type: ignore[no-any-return] # the original is any

    return score


def _scored_again_after_preemption(original: Any) -> Any:
    def reset(self: Sequence, num_kv_tokens: int, block_size: int) -> None:
        if self.request.new.params.prompt_logprobs is not None and not self.index:
            self.next_scored = 0
        original(self, num_kv_tokens, block_size)

    return reset


SCORED = (("scores_prompt", True),)

SCORING_BUGS: tuple[PlantedBug, ...] = (
    PlantedBug(
        "cached-rows-not-scored",
        Sequence,
        "next_position",
        _cached_rows_are_skipped,
        "scored|scores",
        SCORED,
        machine=ScoringMachine,
    ),
    PlantedBug(
        "score-of-the-row-itself",
        Sequence,
        "scored_tokens",
        _token_of_the_row_itself,
        "scores",
        SCORED,
        machine=ScoringMachine,
    ),
    PlantedBug(
        "first-tokens-lost-at-fork",
        committer_module,
        "score_runs",
        _only_the_lead_is_scored,
        "scored|scores",
        machine=ScoringMachine,
    ),
    PlantedBug(
        "scored-again-after-preemption",
        Sequence,
        "reset",
        _scored_again_after_preemption,
        "scores|scored",
        SCORED,
        machine=ScoringMachine,
    ),
)
