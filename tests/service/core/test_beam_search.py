"""The choice of beams, by the rules of `transformers`, with which whole searches are compared elsewhere."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pageturner.service.core.beam_search import (
    Hypothesis,
    asked_of_sampler,
    best_hypotheses,
    is_over,
    num_common,
    select,
    with_length_penalty,
)
from pageturner.service.core.outputs import TokenLogprob
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping, SamplingParams
from pageturner.service.core.structured_output import StructuredOutput
from pageturner.service.errors import InvalidArgument

EOS = 9
ANY_FORM = StructuredOutput.one_of(("yes", "no"))
A, B, C = 1, 2, 3


def offered(**logprobs: float) -> tuple[TokenLogprob, ...]:
    ids = {"a": A, "b": B, "c": C, "eos": EOS}
    return tuple(TokenLogprob(ids[name], logprob) for name, logprob in logprobs.items())


def test_the_best_of_all_beams_go_on_and_may_have_one_parent() -> None:
    first, second = offered(a=-0.5, b=-1.0, c=-8.0), offered(a=-0.1, b=-9.0, c=-9.5)
    selection = select((-1.0, -3.0), (first, second), 2, (EOS,), may_stop=True, is_last=False)
    assert [(c.parent, c.candidate.token_id, c.score) for c in selection.continued] == [
        (0, A, -1.5),
        (0, B, -2.0),
    ]
    assert not selection.ended


def test_a_stop_ends_an_answer_only_among_the_best_and_takes_no_place_of_a_beam() -> None:
    first, second = offered(eos=-0.1, a=-0.5, b=-1.0), offered(a=-1.0, eos=-2.0, b=-3.0)
    selection = select((-1.0, -1.5), (first, second), 2, (EOS,), may_stop=True, is_last=False)
    assert [c.score for c in selection.ended] == [-1.1]  # the other one is the fifth
    assert [c.score for c in selection.continued] == [-1.5, -2.0]


def test_no_stop_is_taken_before_min_tokens() -> None:
    selection = select((0.0,), (offered(eos=-0.1, a=-2.0, b=-3.0),), 2, (EOS,), may_stop=False, is_last=False)
    assert not selection.ended
    assert [c.candidate.token_id for c in selection.continued] == [A, B]


def test_the_last_token_ends_the_best_whatever_it_is() -> None:
    selection = select((0.0,), (offered(a=-0.1, eos=-0.2, b=-3.0),), 2, (EOS,), may_stop=True, is_last=True)
    assert [c.candidate.token_id for c in selection.ended] == [A, EOS]
    assert not selection.continued


def test_ties_fall_to_the_better_beam_then_to_the_order_offered() -> None:
    first, second = offered(a=-1.0, b=-1.0), offered(c=0.0, a=0.0)
    selection = select((0.0, -1.0), (first, second), 4, (), may_stop=True, is_last=False)
    assert [(c.parent, c.candidate.token_id) for c in selection.continued] == [(0, A), (0, B), (1, C), (1, A)]


def test_an_impossible_token_is_no_candidate_and_the_best_stands_in_its_place() -> None:
    selection = select((0.0,), (offered(a=-1.0, b=-math.inf),), 2, (), may_stop=True, is_last=False)
    assert [(c.candidate.token_id, c.score) for c in selection.continued] == [(A, -1.0), (A, -math.inf)]
    last = select((0.0,), (offered(a=-1.0, b=-math.inf),), 2, (), may_stop=True, is_last=True)
    assert [c.candidate.token_id for c in last.ended] == [A]


def test_a_beam_that_stands_in_anothers_place_offers_nothing() -> None:
    first, second = offered(a=-1.0, b=-2.0, c=-3.0), offered(a=-0.1, eos=-0.2, b=-0.3)
    selection = select((-4.0, -math.inf), (first, second), 2, (EOS,), may_stop=True, is_last=False)
    assert [(c.parent, c.candidate.token_id) for c in selection.continued] == [(0, A), (0, B)]
    assert not selection.ended


def test_a_search_that_can_only_end_goes_on_no_more() -> None:
    selection = select((0.0,), (offered(eos=-0.1),), 3, (EOS,), may_stop=True, is_last=False)
    assert [c.candidate.token_id for c in selection.ended] == [EOS]
    assert not selection.continued
    assert select((0.0,), ((),), 3, (EOS,), may_stop=True, is_last=False).continued == ()


def ended(*scores: float) -> tuple[Hypothesis, ...]:
    return tuple(Hypothesis(score, ()) for score in scores)


@pytest.mark.parametrize(
    ("stopping", "penalty", "best_score", "over"),
    [
        (EarlyStopping.FIRST, 1.0, -0.1, True),
        (EarlyStopping.HEURISTIC, 1.0, -4.1, True),  # -1.025 at its four tokens
        (EarlyStopping.HEURISTIC, 1.0, -3.9, False),
        (EarlyStopping.NEVER, 1.0, -4.1, False),  # -0.41 at ten tokens
        (EarlyStopping.NEVER, 1.0, -10.1, True),
        (EarlyStopping.NEVER, 0.0, -1.1, True),
        (EarlyStopping.NEVER, -1.0, -0.26, True),  # longer answers score worse: its four tokens are the best
        (EarlyStopping.NEVER, -1.0, -0.24, False),
    ],
)
def test_a_search_is_over_when_no_beam_is_held_to_score_better(
    stopping: EarlyStopping, penalty: float, best_score: float, over: bool
) -> None:
    search = BeamSearch(2, penalty, stopping)
    assert is_over(search, ended(-0.5, -1.0), best_score, num_outputs=4, max_tokens=10) is over
    assert not is_over(search, ended(-0.5), best_score, num_outputs=4, max_tokens=10), "one answer lacks"


def test_the_best_answers_are_kept_and_of_equals_the_first() -> None:
    known, late = Hypothesis(-1.0, (), 1), Hypothesis(-1.0, (), 2)
    assert best_hypotheses((known,), (late, Hypothesis(-0.5, ())), 2) == (Hypothesis(-0.5, ()), known)


def test_scores_favour_length_by_the_penalty() -> None:
    assert with_length_penalty(-6.0, 4, BeamSearch(2, 1.0)) == -1.5
    assert with_length_penalty(-6.0, 4, BeamSearch(2, 0.0)) == -6.0
    assert with_length_penalty(-6.0, 4, BeamSearch(2, -1.0)) == -24.0


def test_common_beginnings_are_counted_on_from_what_is_known() -> None:
    assert num_common([[1, 2, 3], [1, 2, 4]], 0) == 2
    assert num_common([[1, 2], [1, 2, 4]], 1) == 2
    assert num_common([[1, 2, 3]], 0) == 3


def test_a_row_asks_for_as_many_candidates_as_may_be_needed() -> None:
    params = SamplingParams(beam_search=BeamSearch(4), logprobs=3, min_tokens=2, structured_output=ANY_FORM)
    asked = asked_of_sampler(params, (7, 7, 8))
    assert asked == replace(params, temperature=0.0, logprobs=6, stop_token_ids=(7, 8))
    assert asked_of_sampler(SamplingParams(beam_search=BeamSearch(4), logprobs=9), ()).logprobs == 9


def test_a_row_asks_for_no_more_the_more_tokens_stop() -> None:
    params = SamplingParams(beam_search=BeamSearch(4))
    assert [asked_of_sampler(params, range(count)).logprobs for count in (3, 4, 5, 1024)] == [7, 8, 8, 8]


@pytest.mark.parametrize(
    ("field", "params"),
    [
        ("beam_search.width", SamplingParams(beam_search=BeamSearch(1))),
        ("beam_search.width", SamplingParams(beam_search=BeamSearch(17))),
        ("beam_search.length_penalty", SamplingParams(beam_search=BeamSearch(2, math.nan))),
        ("beam_search.length_penalty", SamplingParams(beam_search=BeamSearch(2, 10.5))),
        ("n", SamplingParams(n=3, beam_search=BeamSearch(2))),
        ("temperature", SamplingParams(temperature=0.7, beam_search=BeamSearch(2))),
        ("top_k", SamplingParams(top_k=1, beam_search=BeamSearch(2))),
        ("top_p", SamplingParams(top_p=0.5, beam_search=BeamSearch(2))),
        ("min_p", SamplingParams(min_p=0.5, beam_search=BeamSearch(2))),
        ("repetition_penalty", SamplingParams(repetition_penalty=1.1, beam_search=BeamSearch(2))),
        ("presence_penalty", SamplingParams(presence_penalty=1.0, beam_search=BeamSearch(2))),
        ("frequency_penalty", SamplingParams(frequency_penalty=1.0, beam_search=BeamSearch(2))),
        ("logit_bias", SamplingParams(logit_bias=((1, 1.0),), beam_search=BeamSearch(2))),
        ("stop", SamplingParams(stop=("x",), beam_search=BeamSearch(2))),
        ("best_of", SamplingParams(best_of=2, beam_search=BeamSearch(2))),
    ],
)
def test_what_a_search_cannot_be_is_refused_by_its_field(field: str, params: SamplingParams) -> None:
    with pytest.raises(InvalidArgument) as caught:
        params.check(vocab_size=100, max_n=16)
    assert caught.value.field == field


def test_a_search_is_taken_with_what_it_may_stand_beside() -> None:
    SamplingParams(
        n=4,
        temperature=0.0,
        logprobs=2,
        stop_token_ids=tuple(range(90)),
        min_tokens=1,
        max_tokens=9,
        structured_output=ANY_FORM,
        beam_search=BeamSearch(4),
    ).check(vocab_size=100, max_n=16)
