"""All requests of a run, in a few numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.traces.trace import TraceRequest
from pageturner.loadtest.workload.arrivals import ArrivalProcess
from pageturner.loadtest.workload.conduct import ConductMix
from pageturner.loadtest.workload.lengths import Distribution, Lengths
from pageturner.loadtest.workload.mix import Mix

ONE_TURN = Lengths(1, 1)


@dataclass(frozen=True, slots=True)
class SystemPrompts:
    """Texts of which one stands before the first prompt of each conversation.

    count: how many there are. tokens: of each. skew: exponent of Zipf's law of their popularity; 0 is even.
    Raises OptionError.
    """

    count: int
    tokens: Distribution
    skew: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise OptionError("system-prompts", f"must be at least 1, not {self.count}")

    @property
    def weights(self) -> list[float]:
        """How popular each is."""
        return [(rank + 1) ** -self.skew for rank in range(self.count)]

    def __str__(self) -> str:
        return f"{self.count} of {self.tokens} tokens"

    @staticmethod
    def parse(option: str, text: str) -> SystemPrompts:
        """`COUNT:TOKENS`, such as 4:512. Raises OptionError."""
        count, colon, tokens = text.partition(":")
        if not colon or not count.isdecimal():
            raise OptionError(option, f"{text!r} is not COUNT:TOKENS")
        return SystemPrompts(int(count), Lengths.parse(option, tokens))


@dataclass(frozen=True, slots=True)
class LoadtestWorkload:
    """All requests of a run.

    num_requests: of all turns together. prompt_lengths: new tokens of each turn; output_lengths: of each
    answer; correlation: of the two, by a Gaussian copula. token_ids: the ids that prompts are made of; those
    of a model's text, once it is known. shared_prefix_tokens: how many tokens at the head of each first
    prompt are the same in all of them; they count towards its length. system_prompts: stand before it and do
    not count. arrivals: of conversations; None is a closed loop, where one begins when another ended. turns:
    requests of a conversation; each prompt holds all before it, answers included, and is sent think_seconds
    (exponential, on average) after the answer. trace: requests to be sent in place of those that lengths,
    turns and labels describe. max_context: what prompt and output may reach together; what is longer is cut.
    None: nothing is. Raises OptionError.
    """

    num_requests: int
    prompt_lengths: Distribution
    output_lengths: Distribution
    token_ids: tuple[int, ...] = (0,)
    seed: int = 0
    shared_prefix_tokens: int = 0
    arrivals: ArrivalProcess | None = None
    priorities: Mix[int] = Mix((0,), (1.0,))
    tenants: Mix[str] = Mix(("",), (1.0,))
    correlation: float = 0.0
    turns: Distribution = ONE_TURN
    think_seconds: float = 0.0
    system_prompts: SystemPrompts | None = None
    conduct: ConductMix = ConductMix()
    trace: tuple[TraceRequest, ...] = ()
    max_context: int | None = None
    name: str = "random"

    def __post_init__(self) -> None:
        if self.num_requests < 1:
            raise OptionError("requests", f"must be at least 1, not {self.num_requests}")
        shortest = self.prompt_lengths.at(0.0)
        if not 0 <= self.shared_prefix_tokens <= shortest:
            raise OptionError(
                "shared-prefix-tokens",
                f"{self.shared_prefix_tokens} is not within the shortest prompt ({shortest})",
            )
        if not 0 <= self.think_seconds < math.inf:
            raise OptionError("think-seconds", f"must not be negative, not {self.think_seconds}")
        assert self.token_ids, "a workload needs token ids to make prompts of"
