"""Log-probabilities of known tokens, against their definition in float64 and against one another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_sampler import sample_row

from pageturner.kernels.known_tokens import KnownTokens
from pageturner.service.core.outputs import SampledSequence, ScheduledSequence, SchedulerOutput, ScoreRun
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import NonFiniteLogits
from pageturner.service.model import logprobs, scores
from pageturner.service.model.logprobs import largest
from pageturner.service.model.scores import ScoredRows, score_logits

VOCAB_SIZE = 256
GREEDY = sample_row(SamplingParams(temperature=0.0))


def part(seq_id: int, runs: Sequence[tuple[int, ...]], num_top: int, *, samples: bool) -> ScheduledSequence:
    """One run of several tokens, or at a fork several runs of one token each; tokens of a run differ."""
    num_rows = len(runs[0]) if runs else 0
    scored = tuple(ScoreRun(seq_id + i, 0, 0, tokens, num_top) for i, tokens in enumerate(runs))
    rows = (replace(GREEDY, seq_id=seq_id),) if samples else ()
    token_ids = (1,) * (num_rows + samples)
    return ScheduledSequence(seq_id, f"r{seq_id}", 0, token_ids, 0, 0, (0,), rows, scored=scored)


@st.composite
def steps(draw: st.DrawFn) -> SchedulerOutput:
    """Parts of every kind, one behind the other: prompts, forks, and rows to sample from."""
    tokens = st.integers(0, VOCAB_SIZE - 1)
    parts = []
    for number in range(draw(st.integers(1, 4))):
        if draw(st.booleans()):
            runs = [tuple(draw(st.lists(tokens, min_size=1, max_size=9)))]
        else:
            runs = [(token,) for token in draw(st.lists(tokens, min_size=0, max_size=5))]
        parts.append(
            part(100 * number, runs, draw(st.sampled_from((0, 0, 1, 4))), samples=draw(st.booleans()))
        )
    return SchedulerOutput(1, tuple(parts))


def logits_of(output: SchedulerOutput, seed: int = 0) -> torch.Tensor:
    num_rows = sum(len(each.scored_rows) + len(each.samples) for each in output.scheduled)
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 4


def take_scores(
    logits: torch.Tensor, output: SchedulerOutput, tile_rows: int
) -> tuple[torch.Tensor, tuple[SampledSequence, ...]]:
    """(logits of the rows that are sampled from, what each run yields)."""
    scored = ScoredRows.of(output)
    assert scored is not None
    scores = score_logits(logits[torch.from_numpy(scored.places)], scored.known, tile_rows)
    return logits[torch.from_numpy(scored.sampled)], scored.results(scores)


def rows_of(output: SchedulerOutput) -> Iterator[tuple[ScoreRun, int]]:
    """Each run, and the row of logits that scores its first token."""
    row = 0
    for each in output.scheduled:
        yield from ((run, row) for run in each.scored)
        row += len(each.scored_rows) + len(each.samples)


def check(output: SchedulerOutput, tile_rows: int) -> None:
    logits = logits_of(output)
    if not any(each.scored for each in output.scheduled):
        return
    kept, found = take_scores(logits, output, tile_rows)
    expected = torch.log_softmax(logits.double(), -1)
    assert len(kept) == sum(len(each.samples) for each in output.scheduled), "rows that are sampled from"
    for result, (run, first) in zip(found, rows_of(output), strict=True):
        assert (result.seq_id, result.tokens, result.error) == (run.seq_id, (), None)
        assert [token.token_id for token in result.scores] == list(run.token_ids)
        for row, token in enumerate(result.scores, first):
            assert token.logprob == pytest.approx(float(expected[row, token.token_id]), abs=2e-5)
            best = expected[row].topk(run.num_top)
            assert [top.token_id for top in token.top_logprobs] == best.indices.tolist()
            assert [top.logprob for top in token.top_logprobs] == pytest.approx(
                best.values.tolist(), abs=2e-5
            )


@settings(max_examples=30, deadline=None)
@given(output=steps(), tile_rows=st.sampled_from((1, 2, 5, 64)))
def test_scores_are_those_of_the_definition(output: SchedulerOutput, tile_rows: int) -> None:
    check(output, tile_rows)


STEP = SchedulerOutput(
    1,
    (
        part(0, [(5, 6, 7)], 2, samples=True),
        part(100, [(1,), (2,), (3,)], 1, samples=False),
        part(200, [], 0, samples=True),
        part(300, [(9, 8)], 0, samples=False),
    ),
)


def test_scores_are_bitwise_independent_of_tiles_and_of_the_rows_beside_them() -> None:
    logits = logits_of(STEP)
    together = [take_scores(logits, STEP, tile_rows)[1] for tile_rows in (1, 3, 64)]
    assert together[0] == together[1] == together[2]
    row = 0
    alone: list[SampledSequence] = []
    for each in STEP.scheduled:
        count = len(each.scored_rows) + len(each.samples)
        if each.scored:
            alone += take_scores(logits[row : row + count], SchedulerOutput(1, (each,)), 2)[1]
        row += count
    assert tuple(alone) == together[0]


def test_half_precision_logits_are_scored_in_float32() -> None:
    logits = logits_of(STEP).bfloat16()
    assert take_scores(logits, STEP, 2)[1] == take_scores(logits.float(), STEP, 2)[1]


@pytest.mark.parametrize("poison", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_spoils_the_runs_that_it_scores(poison: float) -> None:
    logits = logits_of(STEP)
    logits[1, 3] = poison  # of the first prompt's second row
    first, *others = take_scores(logits, STEP, 2)[1]
    assert isinstance(first.error, NonFiniteLogits)
    assert not first.scores
    clean = take_scores(logits_of(STEP), STEP, 2)[1]
    assert tuple(others) == clean[1:]
    logits = logits_of(STEP)
    logits[4] = -torch.inf  # the fork's row
    assert [result.error is not None for result in take_scores(logits, STEP, 2)[1]] == [
        *(False, True, True, True, False)
    ]


def test_an_impossible_token_has_its_log_probability() -> None:
    output = SchedulerOutput(1, (part(0, [(3, 4)], 0, samples=False),))
    logits = logits_of(output)
    logits[0, 3] = -torch.inf
    (result,) = take_scores(logits, output, 16)[1]
    assert result.scores[0].logprob == -torch.inf
    assert result.error is None


def test_alternatives_are_looked_for_only_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a sort nor a search for the largest for what is only summed and looked up."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a row was sorted")

    for name in ("topk", "sort"):
        monkeypatch.setattr(torch.Tensor, name, refused)
    plain = SchedulerOutput(1, tuple(part(100 * i, [(1, 2, 3)], 0, samples=True) for i in range(3)))
    take_scores(logits_of(plain), plain, 4)
    with pytest.raises(AssertionError, match="sorted"):
        take_scores(logits_of(STEP), STEP, 4)


def test_a_row_is_gone_through_once_whatever_it_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred continuations of one prompt begin at one row."""
    rows = []
    log_masses = logprobs.log_masses

    def counted(logits: torch.Tensor, best_ids: torch.Tensor) -> torch.Tensor:
        rows.append(len(logits))
        return log_masses(logits, best_ids)

    monkeypatch.setattr(scores, "log_masses", counted)
    fork = SchedulerOutput(1, (part(0, [(token,) for token in range(100)], 1, samples=False),))
    take_scores(logits_of(fork), fork, 16)
    assert rows == [1]


# --- the largest of a row -----------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    width=st.sampled_from((3, 40, 32 * 65, 256 * 9)),
    count=st.integers(0, 40),
    seed=st.integers(0, 1000),
    spread=st.sampled_from((0.0, 1.0, 30.0)),
)
def test_the_largest_are_those_of_a_whole_sort(width: int, count: int, seed: int, spread: float) -> None:
    """spread: of values that are whole numbers, so that there are ties at every edge."""
    values = (torch.randn(2, width, generator=torch.Generator().manual_seed(seed)) * spread).round()
    found, ids = largest(values, count)
    for row, row_values, row_ids in zip(values.tolist(), found.tolist(), ids.tolist(), strict=True):
        order = sorted(range(width), key=lambda i, row=row: (-row[i], i))[:count]  # type: ignore[misc]
        assert row_ids == order
        assert row_values == [row[i] for i in order]


def _a_tile_reads_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    tile = scores._tile
    monkeypatch.setattr(scores, "_tile", lambda logits, known: tile(logits.roll(1, 0), known))


def _a_fork_reads_the_next_row(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = KnownTokens.rows
    monkeypatch.setattr(KnownTokens, "rows", lambda known: (rows(known) + 1) % known.num_rows)


def _samples_are_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    of = ScoredRows.of
    monkeypatch.setattr(
        ScoredRows, "of", lambda output: (found := of(output)) and replace(found, sampled=found.places)
    )


def _sums_without_the_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "log_masses", lambda logits, best_ids: logits.exp().sum(-1))


def _runs_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    largest_of_all = logprobs._largest_of_all
    monkeypatch.setattr(
        logprobs,
        "_largest_of_all",
        lambda values, count: tuple(x.flip(-1) for x in largest_of_all(values, count)),
    )


@pytest.mark.parametrize(
    "plant",
    [
        _a_tile_reads_other_rows,
        _a_fork_reads_the_next_row,
        _samples_are_scores,
        _sums_without_the_maximum,
        _runs_in_another_order,
    ],
)
def test_a_planted_mistake_is_caught(plant: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        check(STEP, 3)


def test_the_step_of_these_tests_is_of_every_kind() -> None:
    check(STEP, 3)
    kinds = [(len(each.scored) > 1, bool(each.scored), bool(each.samples)) for each in STEP.scheduled]
    assert len(set(kinds)) == 4
