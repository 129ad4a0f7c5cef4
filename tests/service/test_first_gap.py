"""Teacher-forced comparison: only the first difference counts, and only how likely both tokens were there."""

from __future__ import annotations

import math

from pageturner.service.bench.preemption import first_gap
from pageturner.service.core.outputs import SampledToken, TokenLogprob


def token(token_id: int, logprob: float, **others: float) -> SampledToken:
    alternatives = tuple(TokenLogprob(int(name[1:]), value) for name, value in others.items())
    return SampledToken(token_id, logprob, (TokenLogprob(token_id, logprob), *alternatives))


def test_equal_streams_have_no_gap() -> None:
    stream = (token(1, -0.1), token(2, -0.2))
    assert first_gap(stream, stream) is None


def test_the_gap_is_the_worse_of_both_runs_at_the_first_difference() -> None:
    one = (token(1, -0.1), token(2, -1.0, t3=-1.1), token(9, -5.0))
    other = (token(1, -0.1), token(3, -1.0, t2=-1.3), token(8, -0.1))
    assert first_gap(one, other) is not None
    assert math.isclose(first_gap(one, other) or 0.0, 0.3)


def test_a_token_that_was_not_even_listed_is_infinitely_far() -> None:
    assert first_gap((token(1, -0.1, t2=-0.2),), (token(3, -0.1, t1=-0.2),)) == math.inf
