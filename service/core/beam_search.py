"""Beam search: which continuations of a request's beams live on, which end, when the search is over. Pure.

At each token every beam offers its likeliest candidates. Those that end an answer do so if they are among
the `width` best of all; the `width` best of the others are the beams of the next token. Of what ended, the
`width` best answers by score are kept. The rules, and so answers and scores, are those of
`generate(num_beams=...)` in Hugging Face `transformers` 5: a score is the sum of log-probabilities under the
raw logits, divided by the number of tokens, the one that stops included, to the power of `length_penalty`.
Ties fall to the better beam, then to the likelier token, then to the lower id. Under a form the search is
among the texts that have it, by the same log-probabilities; if there are no more, it ends with what it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from pageturner.service.core.sample_row import SampledToken, TokenLogprob
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping, SamplingParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam and its next token. parent: the beam's rank. score: log-probability of all its tokens."""

    parent: int
    candidate: TokenLogprob
    score: float


@dataclass(frozen=True, slots=True)
class Selection:
    """What becomes of the beams at one token, best first. ended: continuations that are whole answers."""

    continued: tuple[Continuation, ...]
    ended: tuple[Continuation, ...]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A whole answer. score: with the length penalty. matched: the stop token that ended it; None where
    max_tokens did."""

    score: float
    tokens: tuple[SampledToken, ...]
    matched: int | None = None


@dataclass(slots=True)
class BeamGroup:
    """Where the search of one request stands. Beams are named by their sequences' places in the request.

    beams, scores: those that live, best first; the one that stands for the prompt at first. candidates: by
    place, what a sequence of this epoch was given for its next token and the others wait for. tokens: by
    place, the outputs with their log-probabilities, where these were asked for. hypotheses: what ended, best
    first. num_settled: outputs that any answer will begin with, and that were told.
    """

    beams: list[int] = field(default_factory=lambda: [0])
    scores: list[float] = field(default_factory=lambda: [0.0])
    candidates: dict[int, tuple[int, tuple[TokenLogprob, ...]]] = field(default_factory=dict)
    tokens: dict[int, list[SampledToken]] = field(default_factory=dict)
    hypotheses: tuple[Hypothesis, ...] = ()
    num_settled: int = 0


def asked_of_sampler(params: SamplingParams, stop_ids: Collection[int]) -> SamplingParams:
    """What a beam's row asks for: so many likeliest tokens, and of those that stop nothing `width` in any
    case. stop_token_ids: all that stop, each once."""
    search = params.beam_search
    assert search is not None
    stops = tuple(dict.fromkeys(stop_ids))
    return SamplingParams(
        temperature=0.0,
        min_tokens=params.min_tokens,
        stop_token_ids=stops,
        logprobs=max(search.width, params.logprobs or 0) + min(search.width, len(stops)),
        structured_output=params.structured_output,
        beam_search=search,
    )


def select(
    scores: Sequence[float],
    candidates: Sequence[Sequence[TokenLogprob]],
    width: int,
    stop_ids: Collection[int],
    *,
    may_stop: bool,
    is_last: bool,
) -> Selection:
    """Choose among the candidates of all beams.

    scores, candidates: by rank of the beams; candidates with the likeliest first. stop_ids: of which a look
    is quick. may_stop: whether a stop token may be taken. is_last: whether max_tokens ends every answer with
    this token.

    Where fewer than `width` continuations are possible, as a form may have it, the best of them stands in
    the places that are left, at a score of minus infinity: what continues such a beam is no candidate.
    """
    ranked = [
        Continuation(parent, candidate, score + candidate.logprob)
        for parent, score in enumerate(scores)
        if score > -math.inf
        for candidate in candidates[parent]
        if candidate.logprob > -math.inf and (may_stop or candidate.token_id not in stop_ids)
    ]
    ranked.sort(key=lambda continuation: -continuation.score)
    ended = [c for c in ranked[:width] if is_last or c.candidate.token_id in stop_ids]
    going_on = [] if is_last else [c for c in ranked if c.candidate.token_id not in stop_ids][:width]
    for best in going_on[:1]:
        idle = Continuation(best.parent, best.candidate, -math.inf)
        going_on += [idle] * (width - len(going_on))
    return Selection(tuple(going_on), tuple(ended))


def best_hypotheses(
    known: Sequence[Hypothesis], new: Sequence[Hypothesis], width: int
) -> tuple[Hypothesis, ...]:
    """The `width` best, best first; of equals those known before."""
    return tuple(sorted((*known, *new), key=lambda hypothesis: -hypothesis.score)[:width])


def with_length_penalty(score: float, num_outputs: int, search: BeamSearch) -> float:
    """The score of an answer of so many tokens."""
    return score / math.pow(num_outputs, search.length_penalty)


def is_over(
    search: BeamSearch,
    hypotheses: Sequence[Hypothesis],
    best_score: float,
    num_outputs: int,
    max_tokens: int,
) -> bool:
    """Whether the answers found are taken, whatever the beams may come to.

    hypotheses: best first. best_score: of the best beam, which has num_outputs tokens.
    """
    if len(hypotheses) < search.width:
        return False
    if search.early_stopping is EarlyStopping.FIRST:
        return True
    is_longest_best = search.early_stopping is EarlyStopping.NEVER and search.length_penalty > 0.0
    attainable = with_length_penalty(best_score, max_tokens if is_longest_best else num_outputs, search)
    return attainable <= hypotheses[-1].score


def num_common(token_lists: Sequence[Sequence[int]], start: int) -> int:
    """How many tokens all of these begin with, `start` of them known to be so."""
    shortest = min(map(len, token_lists))
    first = token_lists[0]
    while start < shortest and all(tokens[start] == first[start] for tokens in token_lists):
        start += 1
    return start
