"""The sampler against its definition, row by row, and what a row may never depend on."""

from __future__ import annotations

import gc
import math
import pickle
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.reference_sampler import PlacedRow, allowed_probabilities, greedy_token, sample_row, step_of

from pageturner.service.core.outputs import SampledSequence
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.token_log import TokenLog
from pageturner.service.errors import InvalidArgument, NonFiniteLogits
from pageturner.service.model.logprobs import row_maxima
from pageturner.service.model.random_streams import uniforms
from pageturner.service.model.sampler import Sampler, inverse_cdf
from pageturner.service.model.token_counts import CountsOfSequences
from pageturner.service.model.truncation import mass_of_runs, truncate_

GREEDY = SamplingParams(temperature=0.0)


def _logits(num_rows: int, width: int, *, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(num_rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def _sample(logits: torch.Tensor, *rows: PlacedRow) -> tuple[SampledSequence, ...]:
    return Sampler(logits.shape[-1]).sample(logits, step_of(*([row] for row in rows)))


def _tokens(results: Sequence[SampledSequence]) -> list[int]:
    assert all(result.error is None and len(result.tokens) == 1 for result in results)
    return [result.tokens[0].token_id for result in results]


def _draw_many(logits: torch.Tensor, row: PlacedRow, count: int) -> Counter[int]:
    """Tokens drawn at positions 0 .. count - 1 of one stream, all from the same logits [V]."""
    rows = [replace(row, position=position) for position in range(count)]
    return Counter(_tokens(_sample(logits.expand(count, -1), *rows)))


def _chi_square_per_degree(observed: Counter[int], expected: dict[int, float]) -> float:
    count = observed.total()
    cells = [
        (observed[token_id] - count * p) ** 2 / (count * p)
        for token_id, p in expected.items()
        if count * p >= 5
    ]
    return sum(cells) / (len(cells) - 1)


# --- distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7, top_k=9),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.05),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, min_p=0.02),
        SamplingParams(logit_bias=((3, 2.5), (7, -4.0))),
    ],
)
def test_tokens_are_drawn_with_the_probabilities_of_the_definition(params: SamplingParams) -> None:
    logits = _logits(1, 40, seed=3)[0]
    row = sample_row(params, seed=11)
    expected = allowed_probabilities(logits.tolist(), row)
    observed = _draw_many(logits, row, 4000)
    assert set(observed) <= set(expected)
    assert _chi_square_per_degree(observed, expected) < 2.2


def test_the_uniform_is_spent_in_the_order_of_the_vocabulary() -> None:
    logits = _logits(1, 50, seed=5)[0]
    row = sample_row(SamplingParams(top_p=0.9), seed=4)
    expected = allowed_probabilities(logits.tolist(), row)
    for position in range(200):
        draw = float(uniforms([4], [0], [position])[0])
        running, wanted = 0.0, -1
        for token_id, p in expected.items():
            running += p
            wanted = token_id
            if running > draw:
                break
        assert _tokens(_sample(logits[None], replace(row, position=position))) == [wanted]


# --- truncation ---------------------------------------------------------------------------------------


def _kept(weights: torch.Tensor, min_p: float, top_k: int, top_p: float) -> list[set[int]]:
    rows = weights.clone()
    count = len(rows)
    truncate_(
        rows,
        torch.full((count,), min_p),
        torch.full((count,), top_k),
        torch.full((count,), top_p, dtype=torch.float64),
    )
    for row, original in zip(rows, weights, strict=True):
        assert torch.equal(row[row > 0], original[row > 0])
    return [set(row.nonzero().squeeze(-1).tolist()) for row in rows]


def _kept_by_definition(weights: Sequence[float], min_p: float, top_k: int, top_p: float) -> set[int]:
    order = sorted(range(len(weights)), key=lambda token_id: (-weights[token_id], token_id))
    largest = weights[order[0]]
    order = [i for i in order if weights[i] >= float(torch.tensor(largest) * torch.tensor(min_p))]
    order = order[:top_k] if top_k else order
    mass = math.fsum(weights[i] for i in order)
    kept: list[int] = []
    for token_id in order:
        if kept and top_p < 1 and math.fsum(weights[i] for i in kept) >= top_p * mass:
            break
        kept.append(token_id)
    return {i for i in kept if weights[i] > 0}


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=30).filter(any),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(0, 32),
    st.sampled_from([0.0, 0.25, 0.3, 0.5, 0.75, 0.99, 1.0]),
)
def test_what_is_kept_is_exact_even_among_equals(
    weights: list[int], min_p: float, top_k: int, top_p: float
) -> None:
    rows = torch.tensor([weights], dtype=torch.float32)
    expected = _kept_by_definition([float(w) for w in weights], min_p, top_k, top_p)
    # Integer weights sum exactly, so a share reached to the last bit is reached in both.
    assert _kept(rows, min_p, top_k, top_p) == [expected]


@pytest.mark.parametrize("scale", [0.1, 2.0, 6.0])
@pytest.mark.parametrize(
    ("min_p", "top_k", "top_p"),
    [
        (0.0, 50, 1.0),
        (0.0, 1023, 1.0),
        (0.0, 1024, 1.0),
        (0.0, 1025, 1.0),
        (0.0, 1500, 0.7),
        (0.0, 0, 0.5),
        (0.0, 0, 0.95),
        (0.9, 0, 0.95),
        (0.01, 0, 0.9),
        (0.001, 1200, 0.99),
        (0.0, 10**9, 0.3),
    ],
)
def test_wide_vocabularies_keep_the_same_as_the_definition(
    scale: float, min_p: float, top_k: int, top_p: float
) -> None:
    logits = _logits(3, 3000, seed=1, scale=scale)
    logits[1] = logits[1].bfloat16().float()  # many equals
    weights = torch.softmax(logits, -1)
    expected = [_kept_by_definition(row.tolist(), min_p, top_k, top_p) for row in weights]
    assert _kept(weights, min_p, top_k, top_p) == expected


def test_equals_beyond_the_cut_fall_from_the_highest_id_down() -> None:
    weights = torch.full((2, 2048), 1 / 2048)
    weights[1, 2000] = 0.5
    assert _kept(weights, 0.0, 3, 1.0) == [{0, 1, 2}, {0, 1, 2000}]
    assert _kept(weights, 0.0, 1500, 1.0) == [set(range(1500)), set(range(1499)) | {2000}]


def test_inverse_cdf_never_draws_what_has_no_weight() -> None:
    weights = torch.zeros(3, 512)
    weights[0, 511], weights[1, 0], weights[2, 255] = 0.1, 0.3, 1e-30
    for draw in (0.0, 0.5, 1 - 2.0**-52):
        draws = torch.full((3,), draw, dtype=torch.float64)
        assert inverse_cdf(weights, draws).tolist() == [511, 0, 255]


def test_a_draw_next_to_one_stays_inside_though_two_sums_of_a_run_differ() -> None:
    weights = torch.rand(200, 256, generator=torch.Generator().manual_seed(0))
    single, double = weights.sum(-1).double(), weights.cumsum(-1, dtype=torch.float64)[:, -1]
    assert (single > double).any(), "else this tests nothing"
    assert inverse_cdf(weights, torch.full((200,), 1 - 2.0**-52, dtype=torch.float64)).tolist() == [255] * 200


# --- greedy -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 7, 64, 320, 1024])
def test_greedy_takes_the_largest_and_among_equals_the_lowest_id(dtype: torch.dtype, width: int) -> None:
    logits = (_logits(20, width, seed=width) * 2).round().to(dtype)
    expected = [row.index(max(row)) for row in logits.tolist()]
    assert _tokens(_sample(logits, *([sample_row(GREEDY)] * 20))) == expected
    values, ids = row_maxima(logits)
    assert ids.tolist() == expected
    assert values.tolist() == [max(row) for row in logits.tolist()]


# --- edits --------------------------------------------------------------------------------------------


def test_penalties_bias_and_bans_move_the_greedy_choice() -> None:
    logits = torch.tensor([[5.0, 4.0, 3.0, -1.0, -2.0]])

    def choice(row: PlacedRow) -> int:
        assert greedy_token(logits[0].tolist(), row) == _tokens(_sample(logits, row))[0]
        return _tokens(_sample(logits, row))[0]

    plain = sample_row(GREEDY)
    assert choice(plain) == 0
    assert choice(replace(plain, banned_token_ids=(0, 1))) == 2
    assert choice(replace(plain, params=replace(GREEDY, logit_bias=((4, 8.0),)))) == 4
    repetition = replace(plain, params=replace(GREEDY, repetition_penalty=2.0))
    assert choice(repetition) == 0
    assert choice(replace(repetition, prompt_token_ids=(0,))) == 1
    assert choice(replace(repetition, prompt_token_ids=(0,), output_token_ids=(1, 1))) == 2
    presence = replace(plain, params=replace(GREEDY, presence_penalty=1.5))
    assert choice(replace(presence, prompt_token_ids=(0,))) == 0, "presence counts outputs only"
    assert choice(replace(presence, output_token_ids=(0,))) == 1
    frequency = replace(plain, params=replace(GREEDY, frequency_penalty=0.6))
    assert choice(replace(frequency, output_token_ids=(0,))) == 0
    assert choice(replace(frequency, output_token_ids=(0, 0))) == 1
    assert choice(replace(frequency, output_token_ids=(0, 0, 1, 1, 1))) == 0


def test_a_repetition_penalty_pushes_negative_logits_down() -> None:
    logits = torch.tensor([[-1.0, -1.5]])
    row = replace(sample_row(replace(GREEDY, repetition_penalty=2.0)), prompt_token_ids=(0, 0))
    assert _tokens(_sample(logits, row)) == [1]


def test_the_logits_are_not_written_to() -> None:
    logits = _logits(2, 64)
    before = logits.clone()
    params = SamplingParams(repetition_penalty=1.5, logit_bias=((1, 3.0),), top_p=0.5)
    row = replace(sample_row(params), prompt_token_ids=(1, 2), banned_token_ids=(5,))
    _sample(logits, row, sample_row(SamplingParams(logprobs=3)))
    assert torch.equal(logits, before)


def test_temperatures_too_small_for_float32_are_greedy() -> None:
    logits = _logits(1, 64, scale=30.0)
    for temperature in (1e-3, 1e-30, 1e-300):
        assert _tokens(_sample(logits, sample_row(SamplingParams(temperature=temperature)))) == [
            int(logits.argmax())
        ]


# --- logprobs -----------------------------------------------------------------------------------------


def test_logprobs_are_of_the_raw_logits_and_only_where_asked() -> None:
    logits = _logits(3, 200, seed=9)
    params = SamplingParams(temperature=0.5, logit_bias=((17, 100.0),))
    results = _sample(
        logits,
        sample_row(replace(params, logprobs=4)),
        sample_row(params),
        sample_row(replace(params, logprobs=0)),
    )
    raw = torch.log_softmax(logits.double(), -1)
    assert _tokens(results) == [17, 17, 17]
    first = results[0].tokens[0]
    assert first.logprob == pytest.approx(float(raw[0, 17]), abs=1e-5)
    assert [top.token_id for top in first.top_logprobs] == raw[0].topk(4).indices.tolist()
    assert [top.logprob for top in first.top_logprobs] == pytest.approx(
        raw[0].topk(4).values.tolist(), abs=1e-5
    )
    assert results[1].tokens[0].logprob is None
    assert results[1].tokens[0].top_logprobs == ()
    assert results[2].tokens[0].logprob == pytest.approx(float(raw[2, 17]), abs=1e-5)
    assert results[2].tokens[0].top_logprobs == ()


def test_top_logprobs_name_the_lowest_ids_among_equals() -> None:
    logits = torch.zeros(1, 500)
    logits[0, 400] = 1.0
    result = _sample(logits, sample_row(replace(GREEDY, logprobs=3)))[0].tokens[0]
    assert [top.token_id for top in result.top_logprobs] == [400, 0, 1]


def test_top_logprobs_are_exact_where_equals_lie_at_the_edge() -> None:
    logits = _logits(8, 5000, seed=4).round()
    for count in (1, 7, 20):
        results = _sample(logits, *([sample_row(replace(GREEDY, logprobs=count))] * 8))
        for row, result in zip(logits.tolist(), results, strict=True):
            order = sorted(range(5000), key=lambda token_id: (-row[token_id], token_id))
            assert [top.token_id for top in result.tokens[0].top_logprobs] == order[:count]


def test_more_logprobs_than_tokens() -> None:
    result = _sample(_logits(1, 3), sample_row(replace(GREEDY, logprobs=20)))[0].tokens[0]
    assert sorted(top.token_id for top in result.top_logprobs) == [0, 1, 2]


# --- streams ------------------------------------------------------------------------------------------


def test_forks_differ_under_one_seed_and_repeat_under_the_same() -> None:
    logits = _logits(1, 4096, scale=0.5)
    forks = [sample_row(SamplingParams(n=8), seed=42, index=index, position=10) for index in range(8)]
    sampler = Sampler(4096)
    first = sampler.sample(logits, step_of(forks))
    assert [result.seq_id for result in first] == list(range(8))
    assert len(set(_tokens(first))) == 8
    assert sampler.sample(logits, step_of(forks)) == first
    other = sampler.sample(logits, step_of([replace(fork, seed=43) for fork in forks]))
    assert _tokens(other) != _tokens(first)


def test_a_stream_resumes_elsewhere_from_its_position() -> None:
    logits = _logits(20, 4096, scale=0.5)
    rows = [sample_row(SamplingParams(), seed=7, position=100 + i) for i in range(20)]
    whole = _tokens(_sample(logits, *rows))
    assert len(set(whole)) > 15
    assert _tokens(_sample(logits[12:], *rows[12:])) == whole[12:]


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [4096, 49_152, 4099])
def test_a_row_alone_equals_the_row_in_a_batch(dtype: torch.dtype, width: int) -> None:
    logits = _logits(40, width, seed=2, scale=1.5).to(dtype)
    kinds = [
        SamplingParams(logprobs=5),
        GREEDY,
        SamplingParams(top_k=40),
        SamplingParams(top_p=0.95, logprobs=2),
        SamplingParams(temperature=0.7, min_p=0.02),
        SamplingParams(top_k=2000, top_p=0.9, presence_penalty=0.5),
        SamplingParams(repetition_penalty=1.3, top_p=0.3),
    ]
    rows = []
    for i in range(40):
        history = (i, i + 1, i) if kinds[i % 7].needs_history else ()
        row = sample_row(kinds[i % 7], seed=i, index=i % 3, position=i)
        rows.append(replace(row, prompt_token_ids=history, output_token_ids=history))
    together = _sample(logits, *rows)
    for i in range(40):
        alone = _sample(logits[i : i + 1], rows[i])[0]
        assert replace(alone, seq_id=together[i].seq_id) == together[i], "tokens and logprobs, bit for bit"
    # Bits before the draw, not only the token that hides them.
    weights = torch.softmax(logits.float(), -1)
    mass = mass_of_runs(weights)
    for i in range(40):
        assert torch.equal(weights[i], torch.softmax(logits[i : i + 1].float(), -1)[0])
        assert torch.equal(mass[i], mass_of_runs(weights[i : i + 1])[0])


# --- faults -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 100, 1023])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_non_finite_row_fails_alone(bad: float, place: int, dtype: torch.dtype) -> None:
    logits = _logits(4, 1024).to(dtype)
    rows = [sample_row(params) for params in (GREEDY, GREEDY, SamplingParams(), SamplingParams(top_p=0.9))]
    clean = _sample(logits, *rows)
    for victim in range(4):
        poisoned = logits.clone()
        poisoned[victim, place] = bad
        results = _sample(poisoned, *rows)
        for i, result in enumerate(results):
            if i == victim:
                assert isinstance(result.error, NonFiniteLogits)
                assert result.tokens == ()
            else:
                assert result == clean[i]


def test_every_fork_of_a_non_finite_row_fails() -> None:
    logits = torch.full((2, 64), math.nan)
    logits[1] = torch.arange(64.0)
    results = Sampler(64).sample(logits, step_of([sample_row(GREEDY)] * 3, [sample_row(GREEDY)]))
    assert [type(result.error) for result in results] == [NonFiniteLogits] * 3 + [type(None)]
    assert _tokens(results[3:]) == [63]


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=5)])
def test_masked_tokens_are_no_fault_and_never_drawn(params: SamplingParams) -> None:
    logits = torch.full((1, 64), -math.inf)
    logits[0, 9] = -3.0
    assert _tokens(_sample(logits, sample_row(params))) == [9]
    nothing = _sample(torch.full((1, 64), -math.inf), sample_row(params))[0]
    assert isinstance(nothing.error, NonFiniteLogits)


@pytest.mark.parametrize("params", [GREEDY, SamplingParams()])
def test_banning_every_token_is_an_error_of_that_row(params: SamplingParams) -> None:
    logits = _logits(2, 8)
    results = _sample(
        logits, replace(sample_row(params), banned_token_ids=tuple(range(8))), sample_row(GREEDY)
    )
    assert isinstance(results[0].error, InvalidArgument)
    assert results[0].error.field == "min_tokens"
    assert _tokens(results[1:]) == [int(logits[1].argmax())]


def test_a_penalty_that_overflows_is_an_error() -> None:
    logits = torch.tensor([[3e38, 1.0]])
    row = replace(sample_row(replace(GREEDY, repetition_penalty=0.1)), prompt_token_ids=(0,))
    assert isinstance(_sample(logits, row)[0].error, NonFiniteLogits)


def test_an_unfinished_chunk_has_no_row_and_no_result() -> None:
    logits = _logits(1, 64)
    results = Sampler(64).sample(logits, step_of([], [sample_row(GREEDY)], []))
    assert [result.seq_id for result in results] == [100]
    assert Sampler(64).sample(logits[:0], step_of([], [])) == ()


def test_logits_of_the_wrong_shape_are_our_bug() -> None:
    with pytest.raises(AssertionError):
        Sampler(64).sample(_logits(2, 64), step_of([sample_row(GREEDY)]))
    with pytest.raises(AssertionError):
        Sampler(64).sample(_logits(1, 32), step_of([sample_row(GREEDY)]))


# --- everything at once -------------------------------------------------------------------------------

_IDS = st.lists(st.integers(0, 23), max_size=6).map(tuple)
_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 30),
    top_p=st.floats(0.0, 1.0),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.4]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 1.0]),
    frequency_penalty=st.sampled_from([-0.5, 0.0, 0.5]),
    logit_bias=st.dictionaries(st.integers(0, 23), st.floats(-10, 10), max_size=4).map(
        lambda d: tuple(d.items())
    ),
)
_ROWS = st.builds(
    PlacedRow,
    seq_id=st.just(0),
    epoch=st.just(0),
    index=st.integers(0, 3),
    position=st.integers(0, 1000),
    seed=st.integers(0, 2**64 - 1),
    params=_PARAMS,
    prompt_token_ids=_IDS,
    output_token_ids=_IDS,
    banned_token_ids=_IDS,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(_ROWS, min_size=1, max_size=5), st.integers(0, 2**31))
def test_any_mix_of_rows_draws_what_the_definition_allows(rows: list[PlacedRow], seed: int) -> None:
    logits = _logits(len(rows), 24, seed=seed)
    results = _sample(logits, *rows)
    for row, row_logits, result in zip(rows, logits, results, strict=True):
        (token_id,) = _tokens([result])
        if row.params.is_greedy:
            assert token_id == greedy_token(row_logits.tolist(), row)
        else:
            # A share reached within rounding may keep one token more or less: widen top_p by a hair.
            params = replace(row.params, top_p=min(1.0, row.params.top_p + 1e-5))
            assert token_id in allowed_probabilities(row_logits.tolist(), replace(row, params=params))
        assert _sample(row_logits[None], row)[0].tokens == result.tokens


# --- penalties along a sequence ----------------------------------------------------------------

PENALISED = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=0.4, frequency_penalty=0.7
)


@pytest.mark.fault("41")
def test_penalties_of_a_growing_sequence_are_those_of_its_whole_history() -> None:
    """Two sequences in turns, one of which is overtaken: what is kept never mixes or lags."""
    generator = torch.Generator().manual_seed(3)
    sampler, width = Sampler(12), 12
    logs = [TokenLog([1, 2, 2]), TokenLog([7])]
    tokens = [log._tokens for log in logs]
    num_prompt = [3, 1]
    for step in range(60):
        rows, whole = [], []
        for i in (0, 1) if step % 3 else (0,):
            row = replace(sample_row(PENALISED), seq_id=i, prompt_token_ids=tuple(tokens[i][: num_prompt[i]]))
            rows.append(replace(row, output_token_ids=logs[i].view(num_prompt[i], len(tokens[i]))))
            whole.append(replace(row, output_token_ids=tuple(tokens[i][num_prompt[i] :])))
        assert rows == whole
        logits = torch.randn(len(rows), width, generator=generator)
        chosen = _tokens(sampler.sample(logits, step_of(*([row] for row in rows))))
        assert chosen == _tokens(Sampler(width).sample(logits, step_of(*([row] for row in whole))))
        for row, token_id in zip(rows, chosen, strict=True):
            tokens[row.seq_id].append(token_id)


@pytest.mark.fault("41")
def test_penalties_read_each_token_of_a_sequence_once(monkeypatch: pytest.MonkeyPatch) -> None:
    num_read = 0
    read = TokenLog.slice

    def counted(log: TokenLog, start: int, stop: int) -> tuple[int, ...]:
        nonlocal num_read
        num_read += stop - start
        return read(log, start, stop)

    monkeypatch.setattr(TokenLog, "slice", counted)
    sampler, tokens = Sampler(4), [0] * 50
    log = TokenLog(tokens)
    for _ in range(200):
        row = replace(sample_row(PENALISED), prompt_token_ids=(0,) * 50)
        row = replace(row, output_token_ids=log.view(50, len(tokens)))
        tokens += _tokens(sampler.sample(torch.zeros(1, 4), step_of([row])))
    assert num_read == 199


@pytest.mark.fault("41")
@pytest.mark.parametrize("num_prompt", [0, 3])
def test_any_number_of_distinct_tokens_is_counted(num_prompt: int) -> None:
    tokens = [token_id % 500 for token_id in range(1200)]
    counts = CountsOfSequences()
    log = TokenLog(tokens)
    for num_outputs in (1, 64, 65, 130, 700, 1200 - num_prompt):
        row = replace(sample_row(PENALISED), prompt_token_ids=tuple(tokens[:num_prompt]))
        found = counts.of(
            replace(row, output_token_ids=log.view(num_prompt, num_prompt + num_outputs)),
        )
        outputs = Counter(tokens[num_prompt : num_prompt + num_outputs])
        expected = dict.fromkeys(tokens[:num_prompt], 0) | outputs
        assert dict(zip(found.ids.tolist(), found.output_counts.tolist(), strict=True)) == expected


def test_the_counts_of_a_sequence_that_ended_are_forgotten() -> None:
    counts, log = CountsOfSequences(), TokenLog([1, 2])
    counts.of(replace(sample_row(PENALISED), output_token_ids=log.view(1, 2)))
    assert len(counts) == 1
    del log
    gc.collect()
    assert len(counts) == 0


def test_a_view_of_a_log_stays_as_it_was_and_is_pickled_as_a_tuple() -> None:
    tokens = [1, 2, 3]
    view = TokenLog(tokens).view(1, 3)
    tokens.append(4)
    assert (tuple(view), len(view), view[-1], view[1:], repr(view)) == ((2, 3), 2, 3, (3,), "(2, 3)")
    assert view == (2, 3)
    assert hash(view) == hash((2, 3))
    assert pickle.loads(pickle.dumps(view)) == (2, 3)
