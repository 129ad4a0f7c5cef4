"""What may continue a beam: its row's likeliest tokens, among them as many that go on as there are beams.

The `width` best continuations of all beams are among the `width` likeliest tokens of each row, and those that
go on among the `width` likeliest that stop nothing. Both lie in the first 2 * `width` unless more than
`width` of these stop; only such a row is gone through once more. So a step costs the same however many tokens
end an answer.

What a form does not allow is no candidate. The others keep the log-probabilities that they have without it,
as under a `prefix_allowed_tokens_fn` of `transformers`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pageturner.service.core.outputs import SampledToken, SampleRow, TokenLogprob
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import PageturnerError
from pageturner.service.model.logprobs import largest, log_masses, row_maxima
from pageturner.service.model.token_masks import RowMasks, mask_
from pageturner.service.model.upload import upload

Candidates = tuple[TokenLogprob, ...]

MAX_KEPT = 64
"""Searches whose stop tokens are kept as a set and a tensor, some 100 KB each at most."""


@dataclass(frozen=True, slots=True)
class _Stops:
    """Stop tokens of one search. params: of its rows, by whose identity these are found."""

    params: SamplingParams
    ids: frozenset[int]
    places: torch.Tensor


class BeamRows:
    """Finds the candidates of rows, which ask as `core.beam_search.asked_of_sampler` says. masks: of those
    with a form."""

    def __init__(self, masks: RowMasks | None) -> None:
        self._masks = masks
        self._stops: OrderedDict[int, _Stops] = OrderedDict()

    def search(
        self, logits: torch.Tensor, samples: Sequence[SampleRow]
    ) -> list[tuple[SampledToken, ...] | PageturnerError]:
        """Each row's likeliest token with the candidates, the likeliest first and of equals the lowest id;
        nothing where no token is possible.

        logits: float32 [R, V], each row's maximum finite; they are written to.
        """
        masses = log_masses(logits, row_maxima(logits)[1])
        formed = [(row, s) for row, s in enumerate(samples) if s.params.structured_output is not None]
        errors: dict[int, PageturnerError] = {}
        if formed:
            assert self._masks is not None, "a form was asked for where nothing can mask tokens"
            errors = mask_(logits, formed, self._masks)
        counts = [sample.params.logprobs or 0 for sample in samples]
        found = _likeliest(logits, masses, counts)
        short = [row for row, sample in enumerate(samples) if self._is_short(found[row], sample.params)]
        if short:
            for row, more in zip(short, self._that_go_on(logits, masses, short, samples), strict=True):
                known = {candidate.token_id for candidate in found[row]}
                # What is new is behind all that is known, since of the likeliest none is missing.
                found[row] += tuple(candidate for candidate in more if candidate.token_id not in known)
        return [errors.get(row, _best_of(candidates)) for row, candidates in enumerate(found)]

    def _is_short(self, candidates: Candidates, params: SamplingParams) -> bool:
        """Whether more of a row's tokens may be needed: so many of its likeliest stop."""
        assert params.beam_search is not None
        assert params.logprobs is not None
        width = params.beam_search.width
        if len(candidates) < params.logprobs or params.logprobs - len(params.stop_token_ids) >= width:
            return False
        stops = self._stops_of(params).ids
        return sum(candidate.token_id not in stops for candidate in candidates) < width

    def _that_go_on(
        self, logits: torch.Tensor, masses: torch.Tensor, rows: Sequence[int], samples: Sequence[SampleRow]
    ) -> list[Candidates]:
        """Of each of these rows the likeliest tokens that stop nothing."""
        (places,) = upload((np.array(rows, dtype=np.int64),), logits.device)
        others = logits.index_select(0, places)
        widths = []
        for place, row in enumerate(rows):
            params = samples[row].params
            assert params.beam_search is not None
            widths.append(params.beam_search.width)
            others[place].index_fill_(0, self._stops_of(params).places.to(logits.device), -math.inf)
        return _likeliest(others, masses[places], widths)

    def _stops_of(self, params: SamplingParams) -> _Stops:
        """Made once for each search: its rows ask with one and the same object."""
        kept = self._stops.get(id(params))
        if kept is None or kept.params is not params:
            ids = params.stop_token_ids
            kept = _Stops(params, frozenset(ids), torch.tensor(ids, dtype=torch.int64))
            self._stops[id(params)] = kept
        self._stops.move_to_end(id(params))
        while len(self._stops) > MAX_KEPT:
            self._stops.popitem(last=False)
        return kept


def _best_of(candidates: Candidates) -> tuple[SampledToken, ...]:
    """The first, which the others stand beside."""
    return tuple(SampledToken(first.token_id, first.logprob, candidates) for first in candidates[:1])


def _likeliest(logits: torch.Tensor, masses: torch.Tensor, counts: Sequence[int]) -> list[Candidates]:
    """So many of each row's likeliest tokens, without those that are impossible."""
    values, ids = largest(logits, max(counts))
    width = values.shape[-1]
    # float64 holds the logprobs and the ids exactly, in one transfer.
    table = torch.cat(((values - masses.unsqueeze(-1)).double(), ids.double()), dim=-1).tolist()
    return [
        tuple(
            TokenLogprob(int(token_id), logprob)
            for logprob, token_id in zip(row[:width][:count], row[width:], strict=False)
            if logprob > -math.inf
        )
        for row, count in zip(table, counts, strict=True)
    ]
