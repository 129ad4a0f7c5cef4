"""What a sequence asks the sampler for, and what it is given; part of `outputs`, below it since a sequence
remembers its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.token_log import DraftedTokens, TokenView

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass that mypy holds to be frozen, for the few kinds a step makes one of a sequence.

    `frozen=True` guards each field at run time by `object.__setattr__`: 2 us for eight fields where plain
    assignment takes 0.1, and so half of a whole step at 256 decodes.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)


@record
class ScoreRun:
    """Known tokens of which log-probabilities are wanted, each given all before it.

    token_ids[i] stands at position start + 1 + i, and the logits of row start + i score it. The result is of
    seq_id: at a fork that of a choice whose first token the shared row scores. num_top: alternatives wanted.
    """

    seq_id: int
    epoch: int
    start: int
    token_ids: tuple[int, ...]
    num_top: int


@record
class SampleRow:
    """One token to be sampled from the last computed row of a scheduled sequence, for the position behind it.

    It says nothing of the step: a sequence asks with the same one for as long as nothing else changes.
    """

    seq_id: int
    epoch: int
    index: int
    """The choice (0 .. n-1)."""
    seed: int
    params: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    """Filled only when params.needs_history."""
    output_token_ids: tuple[int, ...] | TokenView | DraftedTokens = ()
    """Likewise: a view of the sequence's log, which grows; behind drafts, those too."""
    banned_token_ids: tuple[int, ...] = ()
    """Ids that must not be sampled (stops below min_tokens)."""
    end_token_ids: tuple[int, ...] = ()
    """Filled only with params.structured_output: ids to be sampled only where the text is complete."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of a token under the raw float32 logits."""

    token_id: int
    logprob: float


@record
class SampledToken:
    """A token with its log-probability and the most likely alternatives (empty unless asked for)."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()
