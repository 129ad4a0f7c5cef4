"""The definition of what rows of logits say of known tokens."""

from __future__ import annotations

import math

import torch

from pageturner.kernels.known_tokens import KnownTokens, TokenScores

ROUNDING = 2.0**-19
"""How far a log-probability may be from its definition, beyond its own rounding to float32: exponentials are
right to 2 ulp, a sum of positive numbers by blocks to a few more."""


def token_scores(logits: torch.Tensor, known: KnownTokens) -> TokenScores:
    """logits [R, V], any float dtype; everything in float64, rounded once."""
    wide = logits.double()
    finite = ~wide.isnan().any(-1) & wide.amax(-1).isfinite()
    logprobs = wide.log_softmax(-1).masked_fill(~finite[:, None], math.nan)
    top_ids = wide.sort(dim=-1, descending=True, stable=True).indices[:, : known.num_top]
    return TokenScores(
        logprobs[known.rows(), known.token_ids.long()].float(), logprobs.gather(-1, top_ids).float(), top_ids
    )


def bound_of(logprobs: torch.Tensor) -> torch.Tensor:
    """How far float32 log-probabilities may be from these, elementwise."""
    return ROUNDING + logprobs.abs() * 2.0**-23
