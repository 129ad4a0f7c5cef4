"""Masks of a step: begun before its forward, derived from tokens alone, other rows left alone."""

from __future__ import annotations

import gc
import itertools
import math
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import replace
from time import perf_counter

import numpy as np
import pytest
import torch
from support.formed_model import END, GRAMMARS, TEXTS, VOCAB_SIZE, grammars_of, ids_in

from pageturner.service.core.outputs import ScheduledSequence, SchedulerOutput
from pageturner.service.core.sample_row import SampleRow
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.core.token_log import DraftedTokens, TokenLog
from pageturner.service.errors import InvalidArgument, PageturnerError
from pageturner.service.grammars.compiler import Position
from pageturner.service.grammars.step_masks import StepMasks
from pageturner.service.model.sampler import Sampler
from pageturner.service.model.token_masks import penalties, penalties_of_tensor

A, B, C = (TEXTS.index(text) for text in (b"a", b"b", b"c"))
AB = TEXTS.index(b"ab")
FORM = StructuredOutput(OutputForm.REGEX, "(ab)*c?")
GREEDY = SamplingParams(temperature=0.0, structured_output=FORM)
NUMBERS = itertools.count(1)


@pytest.fixture
def masks() -> Iterator[StepMasks]:
    made = StepMasks(GRAMMARS, perf_counter)
    yield made
    made.close()


def row(
    tokens: list[int],
    log: TokenLog | None = None,
    params: SamplingParams = GREEDY,
    min_tokens: int = 0,
    **changes: object,
) -> SampleRow:
    """What a sequence with these outputs asks for; another one each time."""
    params = replace(params, min_tokens=min_tokens)
    view = (log or TokenLog(tokens)).view(0, len(tokens))
    made = SampleRow(next(NUMBERS), 0, 0, 0, params, (), view, end_token_ids=(END,))
    return replace(made, **changes)  # type: ignore[arg-type] # by the names of its fields


def step(*rows: SampleRow) -> SchedulerOutput:
    return SchedulerOutput(
        1, tuple(ScheduledSequence(each.seq_id, "r", each.epoch, (0,), 0, 0, (0,), (each,)) for each in rows)
    )


def allowed(masks: StepMasks, asked: SampleRow) -> list[int]:
    (mask,) = masks.of([asked])
    assert not isinstance(mask, PageturnerError)
    return ids_in(mask)


def test_end_tokens_are_allowed_where_the_text_may_end_and_nowhere_else(masks: StepMasks) -> None:
    assert allowed(masks, row([])) == sorted([A, C, AB, END])
    assert allowed(masks, row([A])) == [B]
    assert allowed(masks, row([A, B])) == sorted([A, C, AB, END])
    assert allowed(masks, row([C])) == [END]


def test_a_text_token_that_ends_is_allowed_only_where_the_text_may_end(masks: StepMasks) -> None:
    """`b` as a stop token: in the midst of a text it would end what does not parse."""
    ends = (B, END)
    assert isinstance(masks.of([row([A], end_token_ids=ends)])[0], InvalidArgument)
    assert allowed(masks, row([AB], end_token_ids=ends)) == sorted([A, B, C, AB, END])


def test_min_tokens_withholds_the_end_while_the_text_can_go_on(masks: StepMasks) -> None:
    assert allowed(masks, row([], min_tokens=2)) == sorted([A, C, AB])
    assert allowed(masks, row([AB, AB], min_tokens=2)) == sorted([A, C, AB, END])
    assert allowed(masks, row([C], min_tokens=9)) == [END]


def test_a_place_follows_its_log_and_is_forgotten_with_it(masks: StepMasks) -> None:
    tokens = [AB]
    log = TokenLog(tokens)
    assert allowed(masks, row(tokens, log)) == sorted([A, C, AB, END])
    tokens += [A]
    later = row(tokens, log)
    assert allowed(masks, later) == [B]
    assert len(masks) == 1
    del log, later
    gc.collect()
    assert len(masks) == 0


def test_rows_without_a_log_are_answered_from_their_tokens(masks: StepMasks) -> None:
    """As they are behind a border between processes."""
    copied = pickle.loads(pickle.dumps(row([AB, A])))
    assert copied.output_token_ids == (AB, A)
    assert allowed(masks, copied) == [B]
    assert len(masks) == 0


def test_rows_behind_drafts_are_masked_as_if_the_drafts_were_tokens(masks: StepMasks) -> None:
    tokens = [AB]
    plain = row(tokens)
    view = plain.output_token_ids
    assert not isinstance(view, tuple)
    part = ScheduledSequence(plain.seq_id, "r", 0, (AB, A, B, B), 0, 0, (0,), (plain,), num_drafts=3)
    masks.begin(SchedulerOutput(1, (part,)))
    behind = [replace(plain, output_token_ids=DraftedTokens(view, (A, B, B)[:count])) for count in (1, 2, 3)]  # type: ignore[arg-type] # a view
    assert allowed(masks, behind[0]) == [B]
    assert allowed(masks, behind[1]) == sorted([A, C, AB, END])
    assert isinstance(masks.of([behind[2]])[0], InvalidArgument)
    assert allowed(masks, plain) == sorted([A, C, AB, END])


def test_masks_are_begun_once_and_of_the_step_at_hand(masks: StepMasks) -> None:
    first, second = row([]), row([A])
    plain = replace(row([]), params=SamplingParams())
    before = GRAMMARS.figures().num_masks
    masks.begin(step(first, second, plain))
    assert masks.of([second, first]) is not None
    assert GRAMMARS.figures().num_masks == before + 2
    masks.begin(step(plain))
    assert GRAMMARS.figures().num_masks == before + 2
    assert allowed(masks, first) == sorted([A, C, AB, END])  # not begun: made at once


def test_a_grammar_that_cannot_be_had_any_more_ends_its_own_row_alone() -> None:
    masks = StepMasks(grammars_of(max_characters=10), perf_counter)
    long = StructuredOutput(OutputForm.REGEX, "a" * 11)
    broken = row([], params=SamplingParams(structured_output=long))
    fine = row([])
    masks.begin(step(broken, fine))
    found = masks.of([broken, fine])
    assert isinstance(found[0], InvalidArgument)
    assert not isinstance(found[1], PageturnerError)
    masks.close()


def sampled(masks: StepMasks, logits: torch.Tensor, *rows: SampleRow) -> list[object]:
    """Token or error of each row."""
    output = step(*rows)
    masks.begin(output)
    results = Sampler(VOCAB_SIZE, masks).sample(logits, output)
    return [result.error or result.tokens[0].token_id for result in results]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sampler_takes_the_likeliest_allowed_and_leaves_other_rows_alone(
    masks: StepMasks, dtype: torch.dtype
) -> None:
    logits = torch.linspace(1, 2, VOCAB_SIZE, dtype=torch.float32).repeat(3, 1).to(dtype)
    logits[:, B] = 9
    plain = replace(row([]), params=SamplingParams(temperature=0.0), end_token_ids=())
    assert sampled(masks, logits, row([]), row([A]), plain) == [END, B, B]
    biased = row([], params=replace(GREEDY, logit_bias=((C, 50.0), (B, 90.0))))
    assert sampled(masks, logits[:1], biased) == [C]


@pytest.mark.parametrize("width", [1, 31, 32, 33, 1000])
def test_bits_are_read_alike_on_the_host_and_on_a_device(width: int) -> None:
    words = np.random.default_rng(width).integers(
        -(1 << 31), 1 << 31, (3, -(-width // 32) + 1), dtype=np.int32
    )
    on_host = penalties(words, width)
    assert torch.equal(on_host, penalties_of_tensor(torch.from_numpy(words), width))
    is_set = int(words[1, (width - 1) // 32]) >> (width - 1) % 32 & 1
    assert on_host[1, width - 1] == (0.0 if is_set else -math.inf)


def test_drawn_tokens_are_always_allowed(masks: StepMasks) -> None:
    params = SamplingParams(temperature=50.0, structured_output=FORM, top_p=0.9)
    drawn = {
        sampled(masks, torch.zeros(1, VOCAB_SIZE), row([AB], seed=seed, params=params))[0]
        for seed in range(80)
    }
    assert drawn <= {A, C, AB, END}
    assert len(drawn) > 2


def test_a_row_without_an_allowed_token_fails_alone(masks: StepMasks) -> None:
    logits = torch.zeros(2, VOCAB_SIZE)
    logits[0, END] = -math.inf
    dead, fine = row([C]), row([A])
    error, token = sampled(masks, logits, dead, fine)
    assert isinstance(error, InvalidArgument)
    assert error.field == "structured_output"
    assert token == B


def test_penalties_count_beside_a_form(masks: StepMasks) -> None:
    params = SamplingParams(temperature=0.0, structured_output=FORM, presence_penalty=2.0)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, AB] = 1.0
    assert sampled(masks, logits, row([], params=params)) == [AB]
    assert sampled(masks, logits, row([AB], params=params)) != [AB]


# --- forks ------------------------------------------------------------------------------------------------


def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """What places take from now on."""
    calls: list[tuple[int, ...]] = []
    take = Position.take

    def noted(self: Position, token_ids: Sequence[int]) -> None:
        calls.append(tuple(token_ids))
        take(self, token_ids)

    monkeypatch.setattr(Position, "take", noted)
    return calls


def test_a_fork_begins_where_its_origin_stands(masks: StepMasks, monkeypatch: pytest.MonkeyPatch) -> None:
    """The origin's row may come first, and take its own token first."""
    tokens = [A, B, A, B]
    log = TokenLog(tokens)
    masks.begin(step(row(tokens, log)))
    forked = list(tokens)
    fork = log.fork(forked)
    tokens.append(C)
    forked.append(A)
    first, second = row(tokens, log), row(forked, fork)
    calls = taken(monkeypatch)
    masks.begin(step(first, second))
    assert (allowed(masks, first), allowed(masks, second)) == ([END], [B])
    assert calls == [(C,), (A,)], "not a token of what they share"


def test_a_fork_whose_origin_has_gone_on_finds_its_place_by_itself(masks: StepMasks) -> None:
    tokens = [A, B]
    log = TokenLog(tokens)
    forked = list(tokens)
    fork = log.fork(forked)
    tokens.append(C)
    masks.begin(step(row(tokens, log)))
    forked.append(A)
    late = row(forked, fork)
    masks.begin(step(late))
    assert allowed(masks, late) == [B]


def test_a_fork_outlives_its_origin(masks: StepMasks) -> None:
    tokens = [A, B]
    log = TokenLog(tokens)
    masks.begin(step(row(tokens, log)))
    fork = log.fork(list(tokens))
    del log
    gc.collect()
    late = row(tokens, fork)
    masks.begin(step(late))
    assert B not in allowed(masks, late)
    assert len(masks) == 1
