"""How is the token budget of one step split between decoding and catching up?

Shares never sum to more than the budget, and none is withheld from the only kind of work there is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.interfaces import BatchSplit
from pageturner.policies.options import check_option
from pageturner.policies.views import BatchView


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """Every decoding sequence gets its token; chunks of prefill fill what is left.

    Source: Sarathi-Serve's stall-free batching (Agrawal et al., OSDI 2024).
    """

    name: ClassVar[str] = "decode-first"
    summary: ClassVar[str] = (
        "wins on inter-token latency, no decode ever stalls; loses some TTFT in a burst of prompts"
    )

    def split(self, batch: BatchView) -> BatchSplit:
        return _decode_first(batch)


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """Prefill already begun is finished first; decoding takes what is left.

    New requests are begun from what decoding leaves, so that a queue which cannot be admitted stalls
    no request. Source: Orca and the first vLLM, which ran prompts ahead of decodes.
    """

    name: ClassVar[str] = "prefill-first"
    summary: ClassVar[str] = (
        "wins on TTFT and on filling the batch; loses on inter-token latency, decodes stall"
    )

    def split(self, batch: BatchView) -> BatchSplit:
        begun = min(sum(batch.prefill_tokens), batch.token_budget)
        decode = min(batch.num_decode_tokens, batch.token_budget - begun)
        return BatchSplit(decode, batch.token_budget - decode)


@dataclass(frozen=True, slots=True)
class EqualProgress:
    """Decodes first, then all prefills advance alike: the chunk is the level to which water would rise.

    Those waiting count as one more prefill. No chunk is below `min_chunk_tokens`, since slivers waste
    steps. Source: processor sharing (Kleinrock, 1967).
    """

    name: ClassVar[str] = "equal-progress"
    summary: ClassVar[str] = "wins when short prompts arrive among long ones; loses TTFT when all are alike"

    min_chunk_tokens: int = 32
    """The smallest chunk, in tokens; fewer waste a step."""

    def __post_init__(self) -> None:
        check_option(self, "min_chunk_tokens", at_least=1)

    def split(self, batch: BatchView) -> BatchSplit:
        decode_first = _decode_first(batch)
        demands = batch.prefill_tokens + ((decode_first.prefill_tokens,) if batch.num_waiting else ())
        level = _water_level(demands, decode_first.prefill_tokens)
        return BatchSplit(
            decode_first.decode_tokens, decode_first.prefill_tokens, max(level, self.min_chunk_tokens)
        )


@dataclass(frozen=True, slots=True)
class LongPrefillCap:
    """Decodes first; while several prefills compete, none takes more than `cap_tokens` of a step.

    Source: vLLM's `long_prefill_token_threshold`.
    """

    name: ClassVar[str] = "long-prefill-cap"
    summary: ClassVar[str] = (
        "wins when a few huge prompts would hold up many small ones; loses the huge ones' TTFT"
    )

    cap_tokens: int = 256
    """Tokens that one prefill may take of a step while several compete."""

    def __post_init__(self) -> None:
        check_option(self, "cap_tokens", at_least=1)

    def split(self, batch: BatchView) -> BatchSplit:
        decode_first = _decode_first(batch)
        num_competing = len(batch.prefill_tokens) + batch.num_waiting
        cap = self.cap_tokens if num_competing > 1 else None
        return BatchSplit(decode_first.decode_tokens, decode_first.prefill_tokens, cap)


def _decode_first(batch: BatchView) -> BatchSplit:
    decode = min(batch.num_decode_tokens, batch.token_budget)
    return BatchSplit(decode, batch.token_budget - decode)


def _water_level(demands: tuple[int, ...], supply: int) -> int:
    """The largest level L such that giving each of them min(demand, L) spends no more than `supply`."""
    level = 0
    for position, demand in enumerate(sorted(demands)):
        share = supply // (len(demands) - position)
        if share < demand:
            return share
        level = demand
        supply -= demand
    return level
