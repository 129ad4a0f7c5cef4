"""What readers of answers do besides reading them at once to their end."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from pageturner.loadtest.errors import OptionError


@dataclass(frozen=True, slots=True)
class Conduct:
    """How one answer is read. cancel_after: the client cancels the call once so many tokens came; 0 is before
    the first. pause_seconds: the reader sleeps so long after each message."""

    cancel_after: int | None = None
    pause_seconds: float = 0.0


PROMPT_READER = Conduct()


@dataclass(frozen=True, slots=True)
class ConductMix:
    """How many readers do what. cancel_rate, slow_rate: shares of the requests; a request may be both.
    slow_seconds: pause of a slow reader. Raises OptionError."""

    cancel_rate: float = 0.0
    slow_rate: float = 0.0
    slow_seconds: float = 0.05

    def __post_init__(self) -> None:
        for option, value in (("cancel-rate", self.cancel_rate), ("slow-reader-rate", self.slow_rate)):
            if not 0 <= value <= 1:
                raise OptionError(option, f"must be from 0 to 1, not {value}")
        if not 0 <= self.slow_seconds < math.inf:
            raise OptionError("slow-reader-seconds", f"must not be negative, not {self.slow_seconds}")

    def draw(self, rng: random.Random, output_tokens: int) -> Conduct:
        """Of a request that asks for so many tokens. A cancellation is as likely at each of them."""
        cancels, cancel_after = rng.random() < self.cancel_rate, rng.randrange(output_tokens)
        is_slow = rng.random() < self.slow_rate
        return Conduct(cancel_after if cancels else None, self.slow_seconds if is_slow else 0.0)
