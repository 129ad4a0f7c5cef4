"""Lengths of ShareGPT's conversations: what a chat is taken to be where the real thing can't be shipped.

Tokens of first prompts and first answers as `vllm bench serve` samples them (prompts of at most 1,024, both
together of at most 2,048), by their quantiles; the logarithms of a prompt's and its answer's length are
correlated, which a Gaussian copula keeps.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from dataclasses import dataclass
from statistics import NormalDist

LEVELS = (0.0, 0.01, 0.05, 0.10, 0.25, 0.50, 0.75, 0.90, 0.95, 0.99, 1.0)
PROMPT_TOKENS = (4, 5, 8, 10, 20, 106, 388, 657, 809, 958, 1024)
ANSWER_TOKENS = (3, 4, 8, 11, 27, 138, 339, 531, 697, 931, 1024)
MESSAGES = (2, 2, 2, 2, 2, 3, 6, 10, 14, 17, 26)
"""Of a conversation, questions and answers."""

LOG_LENGTH_CORRELATION = -0.46
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Exchange:
    """Tokens of a question and of its answer."""

    prompt_tokens: int
    answer_tokens: int


def sample_exchange(rng: random.Random) -> Exchange:
    """One question and its answer."""
    first = rng.gauss()
    second = LOG_LENGTH_CORRELATION * first + math.sqrt(1 - LOG_LENGTH_CORRELATION**2) * rng.gauss()
    return Exchange(
        _quantile(PROMPT_TOKENS, _NORMAL.cdf(first)), _quantile(ANSWER_TOKENS, _NORMAL.cdf(second))
    )


def sample_conversation(rng: random.Random) -> tuple[Exchange, ...]:
    """Exchanges in order; each prompt of the conversation holds all that came before."""
    num_exchanges = max(1, _quantile(MESSAGES, rng.random()) // 2)
    return tuple(sample_exchange(rng) for _ in range(num_exchanges))


def _quantile(lengths: tuple[int, ...], level: float) -> int:
    """The length at this level, geometric between those that are known."""
    upper = min(bisect_right(LEVELS, level), len(LEVELS) - 1)
    low, high = LEVELS[upper - 1], LEVELS[upper]
    share = (level - low) / (high - low)
    return round(math.exp((1 - share) * math.log(lengths[upper - 1]) + share * math.log(lengths[upper])))
