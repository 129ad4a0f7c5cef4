"""Beam search written out slowly, over whole texts and the whole vocabulary, with no cache and no sharing."""

from __future__ import annotations

from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from support.fake_model import Stop, candidates_of, content_of

Answer = tuple[list[int], float]
"""Its tokens and its score."""


def expected_answers(
    prompt: tuple[int, ...], search: BeamSearch, stop: Stop, window: int | None = None
) -> list[Answer]:
    """Every answer that the search ends with, best first: as many as there are beams, or fewer."""
    beams: list[Answer] = [([], 0.0)]
    ended: list[Answer] = []
    for length in range(1, stop.max_tokens + 1):
        ranked: list[Answer] = []
        for outputs, score in beams:
            for candidate in candidates_of(content_of([*prompt, *outputs])[-(window or 0) :]):
                if candidate.token_id in stop.stop_ids and length <= stop.min_tokens:
                    continue
                ranked.append(([*outputs, candidate.token_id], score + candidate.logprob))
        ranked.sort(key=lambda answer: -answer[1])
        for outputs, score in ranked[: search.width]:
            if outputs[-1] in stop.stop_ids or length == stop.max_tokens:
                ended.append((outputs, score / length**search.length_penalty))
        ended.sort(key=lambda answer: -answer[1])
        del ended[search.width :]
        beams = [answer for answer in ranked if answer[0][-1] not in stop.stop_ids][: search.width]
        if len(ended) == search.width:
            if search.early_stopping is EarlyStopping.FIRST:
                break
            best_length = length
            if search.early_stopping is EarlyStopping.NEVER and search.length_penalty > 0:
                best_length = stop.max_tokens
            if beams[0][1] / best_length**search.length_penalty <= ended[-1][1]:
                break
    return ended
