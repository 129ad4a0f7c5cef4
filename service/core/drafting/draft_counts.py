"""How many drafts a step verifies, and how the odds of a sequence's drafts are learned. Pure.

A draft's row makes the step longer for all that share it, and brings a token only if the draft comes true and
all those before it. So rows are added, likeliest first, while the step's tokens a second grow by them; and no
further than every sequence of the step, also one that has no drafts, keeps KEPT_RATE of its own rate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_DRAFT_TOKENS = 64
"""Of one sequence in a step, whoever asks."""

FIRST_ODDS = 0.75
"""Odds that a sequence begins with: enough to be tried where rows are cheap."""

LEARNING_RATE = 0.125
"""Weight of one draft that came true or did not, against those before it."""

RECOVERY_RATE = 1 / 256
"""How far a sequence that is not worth drafts comes back, a token, towards FIRST_ODDS: what did not repeat so
far may do so later."""

KEPT_RATE = 0.8
"""What a sequence keeps of its rate, at least, where others have drafts."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step without drafts. seconds: it takes. row_seconds: one more row takes. num_samples: tokens it
    yields. num_others: sequences in it that can have no drafts."""

    seconds: float
    row_seconds: float
    num_samples: int
    num_others: int

    @property
    def least_odds(self) -> float:
        """A single draft of no better odds costs more tokens a second than it brings."""
        return self.row_seconds * self.num_samples / self.seconds


def draft_counts(found: Sequence[tuple[float, int]], step: StepCost, max_rows: int) -> list[int]:
    """For each (odds, drafts found) of a sequence how many of its drafts to verify, max_rows in all at most.

    odds: that a draft comes true if those before it did.
    """
    chances = [
        (odds**count, place) for place, (odds, most) in enumerate(found) for count in range(1, most + 1)
    ]
    chances.sort(key=lambda chance: (-chance[0], chance[1]))
    taken: list[tuple[float, int]] = []
    num_tokens, seconds = float(step.num_samples), step.seconds
    for chance in chances[:max_rows]:
        if chance[0] * seconds <= step.row_seconds * num_tokens:
            break
        taken.append(chance)
        num_tokens += chance[0]
        seconds += step.row_seconds
    return _spare_others(taken, len(found), step)


def _spare_others(taken: list[tuple[float, int]], num_found: int, step: StepCost) -> list[int]:
    """Drop the least likely rows until no sequence of the step loses more than it may."""
    while True:
        counts, expected = [0] * num_found, [1.0] * num_found
        for chance, place in taken:
            counts[place] += 1
            expected[place] += chance
        slowest = 1.0 if step.num_others else min(expected, default=1.0)
        longest = step.seconds * max(1.0, slowest / KEPT_RATE)
        num_rows = int((longest - step.seconds) / step.row_seconds)
        if len(taken) <= num_rows:
            return counts
        del taken[num_rows:]


def learned_odds(odds: float, num_drafts: int, num_right: int) -> float:
    """The odds after a step that verified `num_drafts`, of which the first `num_right` came true.

    Those behind the first that did not say nothing: they were drafts of another text.
    """
    for _ in range(num_right):
        odds += LEARNING_RATE * (1.0 - odds)
    return odds if num_right == num_drafts else odds - LEARNING_RATE * odds


def recovered_odds(odds: float) -> float:
    """The odds of a sequence that had no drafts in a step since they were too low."""
    return odds + RECOVERY_RATE * (FIRST_ODDS - odds)
