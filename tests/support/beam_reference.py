"""Beam search written out slowly, over whole texts and the whole vocabulary, with no cache and no sharing."""

from __future__ import annotations

from collections.abc import Callable

from pageturner.service.core.outputs import TokenLogprob
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from support.fake_model import Stop, candidates_of, content_of

Answer = tuple[list[int], float]
"""Its tokens and its score."""

Offer = Callable[[list[int]], list[TokenLogprob]]
"""All tokens that may follow these outputs, the likeliest first."""


def expected_answers(
    prompt: tuple[int, ...], search: BeamSearch, stop: Stop, window: int | None = None
) -> list[Answer]:
    """Of the fake model: every answer that the search ends with, best first."""

    def offer(outputs: list[int]) -> list[TokenLogprob]:
        offered = candidates_of(content_of([*prompt, *outputs])[-(window or 0) :])
        is_early = len(outputs) < stop.min_tokens
        return [each for each in offered if not (is_early and each.token_id in stop.stop_ids)]

    return searched(search, stop.stop_ids, stop.max_tokens, offer)


def searched(search: BeamSearch, stop_ids: tuple[int, ...], max_tokens: int, offer: Offer) -> list[Answer]:
    """As many answers as there are beams, or fewer."""
    beams: list[Answer] = [([], 0.0)]
    ended: list[Answer] = []
    for length in range(1, max_tokens + 1):
        ranked = [
            ([*outputs, candidate.token_id], score + candidate.logprob)
            for outputs, score in beams
            for candidate in offer(outputs)
        ]
        ranked.sort(key=lambda answer: -answer[1])
        for outputs, score in ranked[: search.width]:
            if outputs[-1] in stop_ids or length == max_tokens:
                ended.append((outputs, score / length**search.length_penalty))
        ended.sort(key=lambda answer: -answer[1])
        del ended[search.width :]
        beams = [answer for answer in ranked if answer[0][-1] not in stop_ids][: search.width]
        if not beams:
            break
        if len(ended) == search.width:
            if search.early_stopping is EarlyStopping.FIRST:
                break
            best_length = length
            if search.early_stopping is EarlyStopping.NEVER and search.length_penalty > 0:
                best_length = max_tokens
            if beams[0][1] / best_length**search.length_penalty <= ended[-1][1]:
                break
    return ended
