"""What a request came to; part of `outputs`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one request. Outputs are summed over its choices; the prompt is counted once.

    num_resumed_tokens: those of the outputs that came with the request, and were not sampled for it.
    num_drafted_tokens: guesses that steps verified. num_accepted_drafts: those of them that are outputs.
    """

    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_output_tokens: int
    num_resumed_tokens: int = 0
    num_drafted_tokens: int = 0
    num_accepted_drafts: int = 0


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds spent queued, prefilling and decoding, and how often the request yielded, by kind."""

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    num_swaps: int
    num_recomputes: int
    num_tail_reclaims: int
