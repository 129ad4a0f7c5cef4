"""Candidates of beams: from what a row yields, the same beams are chosen as from all of the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_sampler import sample_row, step_of

from pageturner.service.core.beam_search import Selection, asked_of_sampler, select
from pageturner.service.core.outputs import SampleRow, TokenLogprob
from pageturner.service.core.sampling_params import BeamSearch, SamplingParams
from pageturner.service.core.structured_output import StructuredOutput
from pageturner.service.errors import InvalidArgument, PageturnerError
from pageturner.service.grammars.compiler import Words
from pageturner.service.model import beam_candidates
from pageturner.service.model.beam_candidates import BeamRows
from pageturner.service.model.logprobs import largest, log_masses
from pageturner.service.model.sampler import Sampler

FORM = StructuredOutput.one_of(("yes", "no"))
WIDTHS_OF_VOCABULARY = (7, 40, 32 * 65, 256 * 9)
"""The last two are cut into runs of 32 and of 256."""


class FixedMasks:
    """allowed: the tokens of each row, or why it has none."""

    def __init__(self, width: int, allowed: Sequence[Sequence[int] | PageturnerError]) -> None:
        self._width = width
        self._allowed = allowed

    def of(self, rows: Sequence[SampleRow]) -> list[Words | PageturnerError]:
        return [
            each if isinstance(each, PageturnerError) else self._words(each)
            for row in rows
            for each in (self._allowed[row.seq_id],)
        ]

    def _words(self, token_ids: Sequence[int]) -> Words:
        bits = np.zeros(-(-self._width // 32) * 32, dtype=np.uint8)
        bits[list(token_ids)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


def ranked(logits: torch.Tensor, count: int, allowed: Sequence[int] | None = None) -> list[TokenLogprob]:
    """The likeliest tokens of one row [V] that are possible, by the definition."""
    logprobs = torch.log_softmax(logits.double(), -1).tolist()
    values = logits.tolist()
    ids = range(len(values)) if allowed is None else allowed
    order = sorted(ids, key=lambda i: (-values[i], i))[:count]
    return [TokenLogprob(i, logprobs[i]) for i in order if logprobs[i] > -math.inf]


def candidates(
    logits: torch.Tensor, params: SamplingParams, allowed: Sequence[Sequence[int]] | None = None
) -> list[tuple[TokenLogprob, ...]]:
    """What the rows of one search yield, all asking with one object."""
    asked = asked_of_sampler(params, params.stop_token_ids)
    rows = [replace(sample_row(asked), seq_id=number) for number in range(len(logits))]
    masks = None if allowed is None else FixedMasks(logits.shape[-1], allowed)
    found = BeamRows(masks).search(logits.clone(), rows)
    listed = []
    for each in found:
        assert not isinstance(each, PageturnerError)
        listed.append(each[0].top_logprobs if each else ())
    return listed


def chosen(selection: Selection) -> tuple[list[tuple[int, int]], ...]:
    """(beam, token) of those that go on and those that ended."""
    return tuple(
        [(each.parent, each.candidate.token_id) for each in part]
        for part in (selection.continued, selection.ended)
    )


def check(
    width: int, num_stops: int, vocab_size: int, seed: int, num_logprobs: int | None, is_formed: bool
) -> None:
    """One selection among `width` beams, from rows and from all of the vocabulary."""
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(width, vocab_size, generator=draw) * 3
    if seed % 2:
        logits = logits.round()  # ties everywhere
    # Stop tokens are among the likeliest as often as not.
    best = logits.amax(0).argsort(descending=True).tolist()
    stops = tuple(best[:num_stops] if seed % 3 else sorted(best)[:num_stops])
    allowed = None
    if is_formed:
        allowed = [
            sorted(torch.randperm(vocab_size, generator=draw)[: 1 + seed % (2 * width)].tolist())
            for _ in range(width)
        ]
    params = SamplingParams(
        beam_search=BeamSearch(width),
        stop_token_ids=stops,
        logprobs=num_logprobs,
        structured_output=FORM if is_formed else None,
    )
    found = candidates(logits, params, allowed)
    masses = log_masses(logits, logits.argmax(-1))
    whole = []
    for number, few in enumerate(found):
        row = ranked(logits[number], width + num_stops + 20, None if allowed is None else allowed[number])
        logprobs = {each.token_id: each.logprob for each in row}
        assert [each.logprob for each in few] == pytest.approx([logprobs[e.token_id] for e in few], abs=2e-5)
        num_told = num_logprobs or 0
        assert [e.token_id for e in few[:num_told]] == [e.token_id for e in row[:num_told]], "told"
        assert len(few) <= max(width, num_told) + 2 * width, "more than can be needed"
        # By the same sums, so that no rounding decides between equals.
        exact = (logits[number] - masses[number]).tolist()
        whole.append([TokenLogprob(e.token_id, exact[e.token_id]) for e in row])
    scores = [-0.25 * rank for rank in range(width)]
    for may_stop in (True, False):
        for is_last in (True, False):
            by_rows, by_all = (
                select(scores, given, width, frozenset(stops), may_stop=may_stop, is_last=is_last)
                for given in (found, whole)
            )
            assert chosen(by_rows) == chosen(by_all), "selection"


@settings(max_examples=25, deadline=None)
@given(
    width=st.integers(2, 6),
    num_stops=st.sampled_from((0, 1, 2, 5, 30)),
    vocab_size=st.sampled_from(WIDTHS_OF_VOCABULARY),
    seed=st.integers(0, 1000),
    num_logprobs=st.sampled_from((None, 0, 3, 20)),
    is_formed=st.booleans(),
)
def test_the_beams_chosen_are_those_of_the_whole_vocabulary(
    width: int, num_stops: int, vocab_size: int, seed: int, num_logprobs: int | None, is_formed: bool
) -> None:
    check(width, min(num_stops, vocab_size - width), vocab_size, seed, num_logprobs, is_formed)


def check_many(is_formed: bool) -> None:
    for seed in range(30):
        check(3, 12, 40, seed, 2, is_formed)


def _no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BeamRows, "_is_short", lambda *_: False)


def _a_second_look_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    search = BeamRows._that_go_on

    def that_go_on(self: Any, logits: torch.Tensor, *rest: Any) -> Any:
        return search(self, logits.flip(-1), *rest)

    monkeypatch.setattr(BeamRows, "_that_go_on", that_go_on)


def _shares_of_what_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    likeliest = beam_candidates._likeliest

    def renormalised(logits: torch.Tensor, masses: torch.Tensor, counts: Sequence[int]) -> Any:
        return likeliest(logits, torch.logsumexp(logits, -1), counts)

    monkeypatch.setattr(beam_candidates, "_likeliest", renormalised)


def _one_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    likeliest = beam_candidates._likeliest
    monkeypatch.setattr(
        beam_candidates,
        "_likeliest",
        lambda logits, masses, counts: likeliest(logits, masses, [c - 1 for c in counts]),
    )


@pytest.mark.parametrize(
    ("plant", "is_formed"),
    [
        (_no_second_look, False),
        (_a_second_look_alone, False),
        (_shares_of_what_is_allowed, True),
        (_one_fewer, False),
    ],
)
def test_a_planted_mistake_is_caught(
    plant: Callable[[pytest.MonkeyPatch], None], is_formed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check_many(is_formed)


@pytest.mark.parametrize("num_stops", [1, 900])
def test_a_row_is_looked_at_once_however_many_tokens_stop(
    num_stops: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[tuple[int, int]] = []

    def counted(values: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        looks.append((len(values), count))
        return largest(values, count)

    monkeypatch.setattr(beam_candidates, "largest", counted)
    logits = torch.randn(4, 2304, generator=torch.Generator().manual_seed(1))
    unlikely = logits.amax(0).argsort()[:num_stops].tolist()
    candidates(logits, SamplingParams(beam_search=BeamSearch(4), stop_token_ids=tuple(unlikely)))
    assert looks == [(4, 4 + min(4, num_stops))]


def test_rows_without_a_token_and_rows_at_fault_leave_the_others_alone() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(2))
    logits[1, 5] = -math.inf
    params = SamplingParams(beam_search=BeamSearch(2), structured_output=FORM, stop_token_ids=(0,))
    asked = asked_of_sampler(params, params.stop_token_ids)
    error = InvalidArgument("structured_output", "too complex")
    sampler = Sampler(40, FixedMasks(40, [[3, 9, 0], [5], error]))
    step = step_of(*([sample_row(asked)] for _ in range(3)))
    scheduled = tuple(
        replace(part, samples=(replace(part.samples[0], seq_id=number),))
        for number, part in enumerate(step.scheduled)
    )
    good, dead, bad = sampler.sample(logits, replace(step, scheduled=scheduled))
    assert good.tokens[0].top_logprobs == good.tokens[0].top_logprobs[:3]
    assert {each.token_id for each in good.tokens[0].top_logprobs} == {0, 3, 9}
    assert (dead.tokens, dead.error) == ((), None)
    assert bad.error is error


def test_searches_beside_other_rows_change_nothing_of_either() -> None:
    logits = torch.randn(3, 512, generator=torch.Generator().manual_seed(3))
    search = asked_of_sampler(SamplingParams(beam_search=BeamSearch(3)), (7,))
    drawn = SamplingParams(logprobs=2, top_k=40)
    together = Sampler(512).sample(
        logits, step_of([sample_row(search)], [sample_row(drawn, seed=4)], [sample_row(search)])
    )
    for number, params in enumerate((search, drawn, search)):
        row = sample_row(params, seed=4 if params is drawn else 0)
        (alone,) = Sampler(512).sample(logits[number : number + 1], step_of([row]))
        assert together[number].tokens == alone.tokens, "bit for bit"


def test_searches_of_several_widths_in_one_step_are_each_given_their_own() -> None:
    logits = torch.randn(3, 32 * 65, generator=torch.Generator().manual_seed(5))
    searches = [SamplingParams(beam_search=BeamSearch(width)) for width in (2, 7, 3)]
    rows = [
        replace(sample_row(asked_of_sampler(params, ())), seq_id=row) for row, params in enumerate(searches)
    ]
    for row, found in enumerate(BeamRows(None).search(logits.clone(), rows)):
        assert not isinstance(found, PageturnerError)
        count = (2, 7, 3)[row]
        expected = [each.token_id for each in ranked(logits[row], count)]
        assert [each.token_id for each in found[0].top_logprobs] == expected
