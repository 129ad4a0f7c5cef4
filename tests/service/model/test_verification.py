"""Drafts are verified by the tokens that steps of their own would have sampled."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.service.core.outputs import SampledSequence, SampleRow, ScheduledSequence, SchedulerOutput
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.token_log import DraftedTokens, TokenLog
from pageturner.service.errors import NonFiniteLogits
from pageturner.service.model import sampler as sampler_module
from pageturner.service.model import verification
from pageturner.service.model.batch import build_batch
from pageturner.service.model.sampler import Sampler

VOCABULARY = 12
PROMPT = (3, 1, 4, 1, 5)


def logits_behind(position: int, salt: int = 0) -> torch.Tensor:
    """[V], of a model that looks at the position alone, so that any history has the same."""
    generator = torch.Generator().manual_seed(1000 * salt + position)
    return torch.randn(VOCABULARY, generator=generator)


def part_of(
    outputs: list[int], drafts: tuple[int, ...], params: SamplingParams, seq_id: int = 0
) -> ScheduledSequence:
    """The step of a sequence whose last token is computed, with drafts behind it."""
    tokens = [*PROMPT, *outputs]
    log = TokenLog(tokens)
    row = SampleRow(seq_id, 0, 0, 7, params)
    if params.needs_history:
        row = SampleRow(seq_id, 0, 0, 7, params, PROMPT, log.view(len(PROMPT), len(tokens)))
    start = len(tokens) - 1
    table = tuple(range(len(tokens) + len(drafts)))
    return ScheduledSequence(
        seq_id, "r", 0, (tokens[-1], *drafts), start, start, table, (row,), num_drafts=len(drafts)
    )


def sampled(sampler: Sampler, *parts: ScheduledSequence) -> tuple[SampledSequence, ...]:
    rows = [
        logits_behind(position, part.seq_id)
        for part in parts
        for position in range(part.end - part.num_drafts, part.end + 1)
    ]
    return sampler.sample(torch.stack(rows), SchedulerOutput(1, parts))


def stepwise(params: SamplingParams, count: int, seq_id: int = 0) -> list[int]:
    """The first outputs, by steps without drafts."""
    sampler, outputs = Sampler(VOCABULARY), [2]
    for _ in range(count):
        (result,) = sampled(sampler, part_of(outputs, (), params, seq_id))
        outputs.append(result.tokens[0].token_id)
    return outputs[1:]


ANY_PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.7, 1.5)),
    top_k=st.sampled_from((0, 3)),
    top_p=st.sampled_from((1.0, 0.8)),
    repetition_penalty=st.sampled_from((1.0, 1.7)),
    presence_penalty=st.sampled_from((0.0, 1.5)),
    frequency_penalty=st.sampled_from((0.0, 0.9)),
    logit_bias=st.sampled_from(((), ((3, 2.0),))),
    logprobs=st.sampled_from((None, 0, 2)),
)


@settings(max_examples=80, deadline=None)
@given(params=ANY_PARAMS, num_right=st.integers(0, 4), num_drafts=st.integers(1, 4), others=st.booleans())
def test_what_comes_of_drafts_is_what_steps_without_them_sample(
    params: SamplingParams, num_right: int, num_drafts: int, others: bool
) -> None:
    expected = stepwise(params, 5)
    drafts = [*expected[: min(num_right, num_drafts)]]
    while len(drafts) < num_drafts:
        drafts.append((expected[len(drafts)] + 1) % VOCABULARY)
    sampler = Sampler(VOCABULARY)
    beside = (part_of([2], (), params, 1), part_of([2], (6, 6), params, 2)) if others else ()
    result, *rest = sampled(sampler, part_of([2], tuple(drafts), params), *beside)
    tokens = [token.token_id for token in result.tokens]
    assert tokens == expected[: min(num_right, num_drafts) + 1]
    assert all((token.logprob is not None) == (params.logprobs is not None) for token in result.tokens)
    for number, other in enumerate(rest, 1):
        assert other.tokens[0].token_id == stepwise(params, 1, number)[0]
    # What is kept of a sequence's history is of its tokens alone: the next step finds it as it was.
    (after,) = sampled(sampler, part_of([2, *tokens], (), params))
    assert after.tokens[0].token_id == stepwise(params, len(tokens) + 1)[-1]


def test_an_error_behind_a_draft_is_left_to_the_step_that_meets_it() -> None:
    expected = stepwise(SamplingParams(), 3)
    part = part_of([2], tuple(expected), SamplingParams())
    rows = torch.stack([logits_behind(part.start + 1 + i) for i in range(4)])
    for bad, num_told in ((3, 3), (2, 2), (1, 1)):
        broken = rows.clone()
        broken[bad] = torch.nan
        (result,) = Sampler(VOCABULARY).sample(broken, SchedulerOutput(1, (part,)))
        assert result.error is None
        assert [token.token_id for token in result.tokens] == expected[:num_told]
    rows[0] = torch.nan
    (result,) = Sampler(VOCABULARY).sample(rows, SchedulerOutput(1, (part,)))
    assert isinstance(result.error, NonFiniteLogits)


def test_a_row_of_logits_is_wanted_behind_the_last_token_and_each_draft() -> None:
    parts = (
        part_of([2], (8, 9), SamplingParams(), 0),
        part_of([2], (), SamplingParams(), 1),
        ScheduledSequence(2, "c", 0, (1, 2, 3), 0, 0, (0, 1, 2), ()),
        part_of([2], (8,), SamplingParams(), 3),
    )
    batch = build_batch(SchedulerOutput(1, parts), 1, torch.device("cpu"), lambda _: 0)
    assert batch.logit_rows.tolist() == [0, 1, 2, 3, 7, 8]


def test_tokens_behind_drafts_read_as_a_tuple() -> None:
    seen = DraftedTokens(TokenLog([5, 6, 7]).view(1, 3), (8, 9))
    assert (len(seen), tuple(seen), seen[0], seen[-1], seen[1:3]) == (4, (6, 7, 8, 9), 6, 9, (7, 8))
    assert seen == (6, 7, 8, 9)
    assert hash(seen) == hash((6, 7, 8, 9))


def _first_rows_history(original: Callable[..., SampleRow]) -> Callable[..., SampleRow]:
    return lambda sample, drafts: sample


def _one_draft_too_many(original: Callable[..., SampledSequence]) -> Callable[..., SampledSequence]:
    def accepted(part: ScheduledSequence, own: tuple[SampledSequence, ...]) -> SampledSequence:
        result = original(part, own)
        end = min(len(own), len(result.tokens) + 1)
        tokens = tuple(token for each in own[:end] for token in each.tokens)
        return SampledSequence(result.seq_id, result.epoch, tokens)

    return accepted


def _same_position(original: object) -> object:
    def rows(wanted: tuple[ScheduledSequence, ...]) -> verification.Rows:
        places, samples, _ = verification.drafted_rows(wanted)
        counts = [part.num_drafts + 1 if part.num_drafts else len(part.samples) for part in wanted]
        ends = [part.end for part, count in zip(wanted, counts, strict=True) for _ in range(count)]
        return places, samples, ends

    return rows


PENALISED = SamplingParams(temperature=0, frequency_penalty=2.0, logit_bias=((3, 6.0),))
"""Token 3 is the likeliest until it has come a few times."""


@pytest.mark.parametrize(
    ("module", "name", "mistake", "params"),
    [
        (verification, "_behind", _first_rows_history, PENALISED),
        (verification, "_verified", _one_draft_too_many, SamplingParams(temperature=0)),
        (sampler_module, "drafted_rows", _same_position, SamplingParams(temperature=1.5)),
    ],
)
def test_planted_bugs_change_tokens(
    module: object,
    name: str,
    mistake: Callable[[object], object],
    params: SamplingParams,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = stepwise(params, 6)
    drafts = (*expected[:3], (expected[3] + 1) % VOCABULARY, 0)
    monkeypatch.setattr(module, name, mistake(getattr(module, name)))
    (result,) = sampled(Sampler(VOCABULARY), part_of([2], drafts, params))
    assert [token.token_id for token in result.tokens] != expected[:4]
