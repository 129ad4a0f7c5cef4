"""What a request that comes now has to expect: said by the scheduler, read wherever requests are taken in."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Work:
    """What requests ask for: tokens of their prompts, their sequences, and the most tokens of all answers."""

    num_prompt_tokens: int = 0
    num_sequences: int = 0
    num_max_output_tokens: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(
            self.num_prompt_tokens + other.num_prompt_tokens,
            self.num_sequences + other.num_sequences,
            self.num_max_output_tokens + other.num_max_output_tokens,
        )

    def __sub__(self, other: Work) -> Work:
        return Work(
            self.num_prompt_tokens - other.num_prompt_tokens,
            self.num_sequences - other.num_sequences,
            self.num_max_output_tokens - other.num_max_output_tokens,
        )


@dataclass(frozen=True, slots=True)
class Drafting:
    """What guesses do to a sequence, in the mean of its steps: drafts that a step verifies for it, and tokens
    that it yields beyond the one."""

    drafts: float = 0.0
    gain: float = 0.0

    def __add__(self, other: Drafting) -> Drafting:
        return Drafting(self.drafts + other.drafts, self.gain + other.gain)

    def times(self, num_sequences: int) -> Drafting:
        """Of so many such sequences together."""
        return Drafting(num_sequences * self.drafts, num_sequences * self.gain)


NO_DRAFTING = Drafting()


@dataclass(frozen=True, slots=True)
class Concurrency:
    """How long answers take beside others. Seconds; the default is a machine that takes no time.

    step: that a step takes with nothing in it. prompt_token, output_token: that each token of either kind
    adds, a draft like one of an answer. num_rows: sequences that run. prompt_ratio: tokens of prompts that
    are computed for each token of an answer, as those that end are followed by others like those of late.
    drafting: of all that run. usual: of a sequence of which nothing is known.
    """

    step: float = 0.0
    prompt_token: float = 0.0
    output_token: float = 0.0
    num_rows: int = 0
    prompt_ratio: float = 0.0
    drafting: Drafting = NO_DRAFTING
    usual: Drafting = NO_DRAFTING

    def seconds(
        self, num_prompt_tokens: float, num_outputs: float, more_rows: int = 0, gain: float | None = None
    ) -> float:
        """Until a request has computed these of its own, with more_rows sequences more than run now.

        gain: tokens that each of its steps yields beyond the one; None for what is usual."""
        drafting = self.drafting + self.usual.times(more_rows)
        prompts = self.prompt_ratio * self.prompt_token
        step = self.step + (self.num_rows + more_rows) * (self.output_token + prompts)
        step += drafting.drafts * self.output_token + drafting.gain * prompts
        return num_prompt_tokens * self.prompt_token + self.num_steps(num_outputs, gain) * step

    def seconds_alone(self, num_prompt_tokens: float, num_outputs: float, gain: float | None = None) -> float:
        """The same with nothing beside it."""
        step = self.step + (1.0 + self.usual.drafts) * self.output_token
        return num_prompt_tokens * self.prompt_token + self.num_steps(num_outputs, gain) * step

    def num_steps(self, num_outputs: float, gain: float | None = None) -> float:
        """That yield so many tokens of one answer."""
        return num_outputs / (1.0 + (self.usual.gain if gain is None else gain))


@dataclass(frozen=True, slots=True)
class Outlook:
    """A forecast of one moment. By default that of a server of which nothing is known: it promises all."""

    num_queued: int = 0
    """Requests that have yet to start; those that were preempted are not among them."""
    num_queued_prompt_tokens: int = 0
    """Tokens of their prompts."""
    queue: Work = Work()
    """Of all that wait, those that were preempted among them."""
    drain_rate: float = math.inf
    """Tokens a second, of prompts and answers, that a queue loses, as measured while there was one."""
    is_full: bool = False
    """Requests wait since no more of them may run side by side."""
    is_in_order: bool = True
    """A newcomer is served after all that wait, as first come, first served has it."""
    concurrency: Concurrency = Concurrency()
    """What runs."""
    next_end: float = 0.0
    """Seconds until the first of what runs has likely ended: earlier, nothing starts while it is full."""
    short_answer: float = 1.0
    """Tokens that three in four answers of late had at least; a very long one was cut by max_tokens."""
    typical_answer: float = 1.0
    """Tokens that half of them had at least."""

    def tokens(self, work: Work) -> float:
        """That the machine will likely have to compute for it."""
        return work.num_prompt_tokens + min(
            self.typical_answer * work.num_sequences, work.num_max_output_tokens
        )

    def drain_seconds(self, tokens: float) -> float:
        """That so many tokens take of the queue's time."""
        return max(0.0, tokens) / self.drain_rate

    def start_seconds(self, share: float) -> float:
        """Until this share of all that waits has started; 0 where nothing does."""
        tokens = share * self.tokens(self.queue)
        return max(self.drain_seconds(tokens), self.next_end if self.is_full else 0.0) if tokens else 0.0

    @property
    def queue_seconds(self) -> float:
        """Until all that waits has started; 0 where nothing does."""
        return self.start_seconds(1.0)
