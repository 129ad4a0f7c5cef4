"""How fast this machine serves at present: measured from the steps that ended, foretold by `Rates` before.

Pure: time comes in with the calls. What a step adds are plain sums, written in place by those who know them;
they are taken into the averages (`fold`) ten times a second of work, in which nothing counts that was idle.
"""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass, fields

from pageturner.policies.views import Rates
from pageturner.service.core.outlook import Drafting, Work

FOLD_SECONDS = 0.1
"""Of work, until what steps added is taken into the averages."""
WINDOW_SECONDS = 5.0
"""Of work: what lies further back weighs less than 1/e."""
PRIOR_SECONDS = 1.0
"""Of work, that what was measured at start counts for."""
LEARNING_RATE = 0.2
"""The share of an error in a forecast of steps that the next forecast makes good."""
NUM_LENGTHS = 128
"""Answers of which the lengths are kept."""
FEWEST_LENGTHS = 8
"""Answers without which nothing is foretold of lengths."""

PRIOR_DECODES = 16
"""Steps of sequences without drafts, that those with drafts are measured beside."""

TRUSTED_GAIN = 0.5
"""The share of the mean gain by drafts that is reckoned with of an answer that has yet to begin: many are
not guessed at all, and the more there are beside it the fewer drafts are worth a row."""

ENDLESS = 1 << 40
"""The length of an answer that was cut."""

SHORT, TYPICAL = 0.25, 0.5
"""Shares of answers that are shorter than the one that is reckoned with: a request is given up by the first,
and makes room for others by the second."""


@dataclass(frozen=True, slots=True)
class PaceState:
    """A `Pace` at one moment.

    step, prompt_token, output_token: seconds that a step takes with nothing in it, and that each token of
    either kind adds. drain_seconds, num_drained: of steps behind which requests waited, and the tokens that
    the queue lost by them, prompts and answers. lengths: of answers that ended of late; ENDLESS where
    max_tokens or a deadline cut them. starts: what requests that started of late asked for, less what of
    their prompts was cached. num_decodes, num_drafts, num_gained: where there is speculation, of late: steps
    that sequences decoded in, drafts verified in them, tokens that came beyond one a step. new_...: since the
    last fold. step_began, last_end, last_seconds: of the step under way, and of the last that ended.
    """

    step: float
    prompt_token: float
    output_token: float
    drain_seconds: float
    num_drained: float
    lengths: tuple[int, ...] = ()
    step_began: float = 0.0
    last_end: float = 0.0
    last_seconds: float = 0.0
    new_seconds: float = 0.0
    new_drain_seconds: float = 0.0
    new_steps: int = 0
    new_prompt_tokens: int = 0
    new_output_tokens: int = 0
    new_drained: int = 0
    starts: tuple[Work, ...] = ()
    num_decodes: float = 0.0
    num_drafts: float = 0.0
    num_gained: float = 0.0
    new_decodes: int = 0
    new_drafts: int = 0
    new_gained: int = 0


_FIGURES = tuple(field.name for field in fields(PaceState) if field.name not in ("lengths", "starts"))


class Pace:
    """rates: as measured at start. full_rows: sequences of a full step."""

    def __init__(self, rates: Rates, full_rows: int) -> None:
        self.step = max(rates.prefill_seconds_fixed, 1e-6)
        self.prompt_token = max(rates.prefill_seconds_per_token, 1e-9)
        self.output_token = self.prompt_token
        self.drain_seconds = PRIOR_SECONDS
        self.num_drained = PRIOR_SECONDS * full_rows / self.step_seconds(full_rows)
        self.step_began = self.last_end = self.last_seconds = 0.0
        self.new_seconds = self.new_drain_seconds = 0.0
        self.new_steps = self.new_prompt_tokens = self.new_output_tokens = self.new_drained = 0
        self.num_decodes = self.num_drafts = self.num_gained = 0.0
        self.new_decodes = self.new_drafts = self.new_gained = 0
        self._lengths: deque[int] = deque(maxlen=NUM_LENGTHS)
        self._sorted: list[int] = []
        self._starts: deque[Work] = deque(maxlen=NUM_LENGTHS)
        self._started = Work()

    # --- what is known -----------------------------------------------------------------------

    @property
    def drain_rate(self) -> float:
        """Tokens a second, of prompts and answers, by which a queue is shortened."""
        return max(1e-3, self.num_drained / self.drain_seconds)

    def step_seconds(self, num_rows: float) -> float:
        """Of a step of so many rows: sequences that decode, and their drafts."""
        return self.step + num_rows * self.output_token

    @property
    def prompt_ratio(self) -> float | None:
        """Tokens of prompts that come with each token of an answer, as requests of late had it, whatever runs
        now: one with a long prompt is not followed by others like it. None while too few are known."""
        if min(len(self._starts), len(self._sorted)) < FEWEST_LENGTHS:
            return None
        asked = self._started
        typical = self.outputs_left(0, ENDLESS, TYPICAL)
        return asked.num_prompt_tokens / min(typical * asked.num_sequences, asked.num_max_output_tokens)

    @property
    def has_drafts(self) -> bool:
        """Whether there were steps with drafts of late."""
        return self.num_drafts > 0

    @property
    def usual_drafting(self) -> Drafting:
        """What is reckoned with of a sequence of which nothing is known, by all of late."""
        num_decodes = PRIOR_DECODES + self.num_decodes
        return Drafting(self.num_drafts / num_decodes, TRUSTED_GAIN * self.num_gained / num_decodes)

    def outputs_left(self, num_outputs: int, max_tokens: int, share: float) -> int:
        """Tokens that an answer of num_outputs will at least have yet, in `1 - share` of all cases.

        Told from those of late that were longer; 1 while too few are known, or none was as long."""
        longer = len(self._sorted) - bisect_right(self._sorted, num_outputs)
        if len(self._sorted) < FEWEST_LENGTHS or not longer:
            return 1
        length = self._sorted[len(self._sorted) - longer + int(share * (longer - 1))]
        return max(1, min(length, max_tokens) - num_outputs)

    # --- as a value --------------------------------------------------------------------------

    def snapshot(self) -> PaceState:
        """All of it."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        return PaceState(**figures, lengths=tuple(self._lengths), starts=tuple(self._starts))

    def restore(self, state: PaceState) -> None:
        """Be as it was when `state` was taken."""
        for name in _FIGURES:
            setattr(self, name, getattr(state, name))
        self._lengths = deque(state.lengths, maxlen=NUM_LENGTHS)
        self._sorted = sorted(state.lengths)
        self._starts = deque(state.starts, maxlen=NUM_LENGTHS)
        self._started = sum(state.starts, Work())

    # --- what is learned ---------------------------------------------------------------------

    def answered(self, num_outputs: int, *, is_cut: bool) -> None:
        """A choice ended of itself, or (is_cut) where it would have gone on."""
        if len(self._lengths) == NUM_LENGTHS:
            self._sorted.remove(self._lengths[0])
        length = ENDLESS if is_cut else num_outputs
        self._lengths.append(length)
        insort(self._sorted, length)

    def started(self, asked: Work) -> None:
        """A request starts, of whose prompt so many tokens are not cached."""
        if len(self._starts) == NUM_LENGTHS:
            self._started -= self._starts[0]
        self._starts.append(asked)
        self._started += asked

    def fold(self) -> None:
        """Take what steps added into the averages."""
        self._learn_costs()
        self._fold_drafts()
        kept = math.exp(-self.new_drain_seconds / WINDOW_SECONDS)
        self.drain_seconds = kept * self.drain_seconds + self.new_drain_seconds
        self.num_drained = kept * self.num_drained + self.new_drained
        self.new_seconds = self.new_drain_seconds = 0.0
        self.new_steps = self.new_prompt_tokens = self.new_output_tokens = self.new_drained = 0

    def _fold_drafts(self) -> None:
        kept = math.exp(-self.new_seconds / WINDOW_SECONDS)
        self.num_decodes = kept * self.num_decodes + self.new_decodes
        self.num_drafts = kept * self.num_drafts + self.new_drafts
        self.num_gained = kept * self.num_gained + self.new_gained
        self.new_decodes = self.new_drafts = self.new_gained = 0

    def _learn_costs(self) -> None:
        """Normalised least mean squares (Widrow and Hoff), in relative terms: each price moves in the measure
        in which it had a part in the steps. One that had none stays as it was."""
        parts = (
            self.new_steps * self.step,
            self.new_prompt_tokens * self.prompt_token,
            self.new_output_tokens * self.output_token,
        )
        foretold = sum(parts)
        error = max(-0.5 * foretold, min(self.new_seconds - foretold, foretold))  # a stall is no price
        gain = LEARNING_RATE * error / max(sum(part * part for part in parts), 1e-18)
        self.step *= 1 + gain * parts[0]
        self.prompt_token *= 1 + gain * parts[1]
        self.output_token *= 1 + gain * parts[2]
