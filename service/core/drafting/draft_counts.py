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

LEAST_ROW_COST, USUAL_ROW_COST = 0.001, 0.1
"""Of one more row, as a share of a step of one row: what is measured is no less, and what is taken where
nothing was."""

FIRST_ODDS, FIRST_WHOLE_ODDS = 0.4, 0.85
"""That a sequence's first drafts come true, behind a part of a match and behind a whole one: quoted text is
recognised by the latter, the former is often no more than a turn of phrase."""

LEARNING_RATE = 0.125
"""Weight of one draft that came true or did not, against those before it."""

RECOVERY_RATE = 1 / 256
"""How far odds that are too low for drafts come back, a token, towards the first: what did not repeat so far
may do so later."""

PRICE = 1.15
"""What a row has to bring, over what it costs by a straight line: it is sampled and read as text as well, and
where many rows are computed no cost is left that they share."""

KEPT_RATE = 0.8
"""What a sequence keeps of its rate, at least, where others have drafts."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """A step without drafts, in units of a step of one row. seconds: it takes. row_cost: one more row takes.
    num_samples: tokens it yields."""

    seconds: float
    row_cost: float
    num_samples: int

    @classmethod
    def of(cls, num_rows: int, num_samples: int, row_cost: float) -> StepCost:
        """A step of so many rows, num_samples of them sampled."""
        return cls(1.0 + row_cost * (num_rows - 1), row_cost, num_samples)

    @property
    def least_odds(self) -> float:
        """A single draft of no better odds costs more tokens a second than it brings."""
        return PRICE * self.row_cost * self.num_samples / self.seconds


def draft_counts(
    found: Sequence[tuple[float, int]], step: StepCost, max_rows: int, *, has_others: bool
) -> list[int]:
    """For each (odds, drafts found) of a sequence how many of its drafts to verify, max_rows in all at most.

    odds: that a draft comes true if those before it did. has_others: the step has sequences without drafts.
    """
    chances = [
        (odds**count, place) for place, (odds, most) in enumerate(found) for count in range(1, most + 1)
    ]
    chances.sort(key=lambda chance: (-chance[0], chance[1]))
    taken: list[tuple[float, int]] = []
    num_tokens, seconds = float(step.num_samples), step.seconds
    for chance in chances[:max_rows]:
        if chance[0] * seconds <= PRICE * step.row_cost * num_tokens:
            break
        taken.append(chance)
        num_tokens += chance[0]
        seconds += step.row_cost
    return _spare_the_slowest(taken, len(found), step, has_others)


def _spare_the_slowest(
    taken: list[tuple[float, int]], num_found: int, step: StepCost, has_others: bool
) -> list[int]:
    """Drop the least likely rows until no sequence of the step loses more than it may."""
    while True:
        counts, expected = [0] * num_found, [1.0] * num_found
        for chance, place in taken:
            counts[place] += 1
            expected[place] += chance
        slowest = 1.0 if has_others else min(expected)
        num_rows = int(step.seconds * max(0.0, slowest / KEPT_RATE - 1.0) / step.row_cost)
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


def recovered_odds(odds: float, first: float) -> float:
    """The odds after a step that had no drafts since they were too low."""
    return odds + RECOVERY_RATE * (first - odds)
