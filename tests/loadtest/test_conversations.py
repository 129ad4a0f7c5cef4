"""Conversations: each prompt holds all that was said before, answers as they came, and fits the model."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_server import serve
from support.real_service import real_service

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.runner import Run, run_part
from pageturner.loadtest.server import Target
from pageturner.loadtest.traces.columns import NO_LABELS, Labels
from pageturner.loadtest.traces.trace import Piece, TraceRequest
from pageturner.loadtest.workload import (
    Lengths,
    LoadtestWorkload,
    PlannedConversation,
    SystemPrompts,
    plan_conversations,
)
from pageturner.loadtest.workload.conduct import ConductMix
from pageturner.loadtest.workload.named import NAMED
from pageturner.loadtest.workload.shapes import plan_shapes

WORKLOAD = LoadtestWorkload(
    num_requests=12,
    prompt_lengths=Lengths(3, 6),
    output_lengths=Lengths(2, 4),
    token_ids=tuple(range(3, 40)),
    turns=Lengths(3, 3),
    seed=4,
)


async def records_of(run: Run) -> list[RequestRecord]:
    records: list[RequestRecord] = []
    await run_part(run, 0, time.monotonic, records.append)
    return sorted(records, key=lambda record: record.index)


def full_length(conversation: PlannedConversation) -> int:
    """Tokens of the last prompt and its answer."""
    first = conversation.first
    return (
        len(first.prompt_token_ids)
        + first.output_tokens
        + sum(len(each.new_token_ids) + each.output_tokens for each in conversation.follow_ups)
    )


def test_requests_are_numbered_through_all_turns() -> None:
    conversations = list(plan_conversations(WORKLOAD))
    numbers = [
        index for each in conversations for index in (each.first.index, *(f.index for f in each.follow_ups))
    ]
    assert numbers == list(range(12))
    assert [each.num_requests for each in conversations] == [3, 3, 3, 3]
    cut = list(plan_conversations(replace(WORKLOAD, num_requests=10)))
    assert [each.num_requests for each in cut] == [3, 3, 3, 1]


@settings(deadline=None)
@given(
    num_parts=st.integers(1, 5),
    seed=st.integers(0, 1000),
    name=st.sampled_from(sorted(NAMED)),
    limit=st.sampled_from([64, 512, 4096]),
)
def test_any_workload_is_shared_by_processes_and_fits_the_model(
    num_parts: int, seed: int, name: str, limit: int
) -> None:
    named = NAMED[name]
    workload = LoadtestWorkload(
        20,
        named.prompt_lengths,
        named.output_lengths,
        token_ids=(7, 8, 9),
        seed=seed,
        correlation=named.correlation,
        turns=named.turns,
        system_prompts=named.system_prompts,
        max_context=limit,
    )
    whole = list(plan_conversations(workload))
    shares = [each for part in range(num_parts) for each in plan_conversations(workload, part, num_parts)]
    assert sorted(shares, key=lambda each: each.first.index) == whole
    assert sum(each.num_requests for each in whole) == 20
    for conversation in whole:
        assert full_length(conversation) <= limit
        assert conversation.first.prompt_token_ids
        assert conversation.first.output_tokens >= 1


def test_what_was_cut_is_counted() -> None:
    workload = LoadtestWorkload(
        4, Lengths(50, 50), Lengths(20, 20), turns=Lengths(3, 3), max_context=160, seed=1
    )
    shapes, cuts = plan_shapes(workload)
    assert (cuts.prompts, cuts.outputs, cuts.conversations) == (0, 0, 2)
    assert [len(shape.turns) for shape in shapes] == [2, 2]
    assert str(cuts) == "2 conversations"
    shapes, cuts = plan_shapes(replace(workload, max_context=30))
    assert (cuts.prompts, cuts.outputs, cuts.conversations) == (4, 4, 4)
    (turn,) = shapes[0].turns
    assert (turn.num_new_tokens, turn.output_tokens) == (15, 15)
    assert str(plan_shapes(replace(workload, max_context=None))[1]) == "nothing"


async def test_the_next_prompt_is_all_before_it_and_the_answer_that_came() -> None:
    """The fake answers 0, 1, 2, ... whatever was asked."""
    with serve() as server:
        records = await records_of(Run(Target(server.address), WORKLOAD, concurrency=4))
    assert [record.turn for record in records] == [0, 1, 2] * 4
    prompts = {len(r.prompt.token_ids.ids): tuple(r.prompt.token_ids.ids) for r in server.requests}
    assert len(prompts) > 4
    for conversation in plan_conversations(WORKLOAD):
        said = conversation.first.prompt_token_ids
        answered = conversation.first.output_tokens
        sent = [tuple(r.prompt.token_ids.ids) for r in server.requests]
        assert said in sent
        for follow_up in conversation.follow_ups:
            said = (*said, *range(answered), *follow_up.new_token_ids)
            answered = follow_up.output_tokens
            assert said in sent


async def test_a_turn_is_due_when_its_think_time_is_over() -> None:
    workload = replace(WORKLOAD, num_requests=3, think_seconds=0.02)
    with serve() as server:
        first, second, third = await records_of(Run(Target(server.address), workload))
    (conversation,) = plan_conversations(workload)
    for before, after, planned in zip((first, second), (second, third), conversation.follow_ups, strict=True):
        assert planned.think_seconds > 0
        assert after.scheduled_at == pytest.approx(before.ended_at + planned.think_seconds)
        assert after.sent_at >= after.scheduled_at


async def test_later_turns_hit_the_cache_of_a_real_scheduler() -> None:
    """All whole blocks that the turn before computed: its prompt, and its answer but for the last token."""
    workload = replace(WORKLOAD, token_ids=tuple(range(300)), output_lengths=Lengths(4, 4))
    async with real_service(num_blocks=64) as service:
        records = await records_of(Run(Target(service.target), workload, concurrency=2))
        await service.until_idle()
    assert [record.outcome for record in records] == [Outcome.OK] * 12
    for before, after in pairwise(records):
        if after.turn:
            computed = before.num_prompt_tokens + before.num_output_tokens - 1
            assert after.num_prompt_tokens > before.num_prompt_tokens + before.num_output_tokens
            assert after.num_cached_prompt_tokens >= computed // 4 * 4 > 0
    assert {record.num_cached_prompt_tokens for record in records if not record.turn} == {0}


async def test_conversations_share_system_prompts() -> None:
    workload = replace(
        WORKLOAD,
        num_requests=30,
        turns=Lengths(1, 1),
        system_prompts=SystemPrompts(3, Lengths(8, 8)),
    )
    async with real_service(num_blocks=64) as service:
        records = await records_of(Run(Target(service.target), workload))
    heads = Counter(each.first.prompt_token_ids[:8] for each in plan_conversations(workload))
    assert len(heads) == 3
    assert heads.most_common(1)[0][1] > 30 / 3
    assert sum(record.num_cached_prompt_tokens >= 8 for record in records) == 30 - 3


async def test_clients_that_cancel_free_what_they_held() -> None:
    workload = replace(
        WORKLOAD,
        num_requests=40,
        output_lengths=Lengths(12, 12),
        turns=Lengths(2, 2),
        conduct=ConductMix(0.5),
    )
    planned = {
        turn.index: turn.conduct.cancel_after for shape in plan_shapes(workload)[0] for turn in shape.turns
    }
    async with real_service(num_blocks=64) as service:
        records = await records_of(Run(Target(service.target), workload, concurrency=4))
        await service.until_idle()
    assert [record.index for record in records] == list(range(40))
    for record in records:
        cancel_after = planned[record.index]
        if record.outcome is Outcome.OK:
            assert cancel_after is None or record.num_output_tokens == 12
            continue
        assert record.outcome is Outcome.ABANDONED
        assert cancel_after is not None
        assert cancel_after <= record.num_output_tokens <= 12  # the server may join tokens that wait
    assert 8 <= sum(record.outcome is Outcome.ABANDONED for record in records) <= 30


async def test_slow_readers_read_to_the_end() -> None:
    workload = replace(WORKLOAD, conduct=ConductMix(slow_rate=0.5, slow_seconds=0.002))
    with serve() as server:
        records = await records_of(Run(Target(server.address), workload, concurrency=4))
    assert {record.outcome for record in records} == {Outcome.OK}
    assert 2 <= sum(record.is_slow_reader for record in records) <= 10


def test_conduct_changes_neither_lengths_nor_prompts() -> None:
    plain = list(plan_conversations(WORKLOAD))
    other = list(plan_conversations(replace(WORKLOAD, conduct=ConductMix(0.5, 0.5))))
    assert [each.first.prompt_token_ids for each in plain] == [e.first.prompt_token_ids for e in other]
    assert plain != other


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ((-0.1,), "cancel-rate"),
        ((0.0, 1.1), "slow-reader-rate"),
        ((0.0, 0.0, -1.0), "slow-reader-seconds"),
        ((float("nan"),), "cancel-rate"),
    ],
)
def test_conduct_that_makes_no_sense_names_its_flag(arguments: tuple[float, ...], option: str) -> None:
    with pytest.raises(OptionError) as caught:
        ConductMix(*arguments)
    assert caught.value.option == option


def test_a_trace_is_sent_as_it_was() -> None:
    """Equal pieces are equal tokens, others are not; labels go along."""
    trace = (
        TraceRequest(0.0, (Piece(1, 16), Piece(2, 4)), Piece(3, 5), NO_LABELS),
        TraceRequest(1.0, (Piece(1, 16), Piece(4, 4)), Piece(5, 2), Labels(tenant="alice", priority=3)),
    )
    one, two = plan_conversations(replace(WORKLOAD, num_requests=2, trace=trace))
    assert one.first.prompt_token_ids[:16] == two.first.prompt_token_ids[:16]
    assert one.first.prompt_token_ids[16:] != two.first.prompt_token_ids[16:]
    assert [len(each.first.prompt_token_ids) for each in (one, two)] == [20, 20]
    assert [each.first.output_tokens for each in (one, two)] == [5, 2]
    assert (two.first.tenant, two.first.priority) == ("alice", 3)


@pytest.mark.parametrize("text", ["", "4", "4:", "x:5", "0:5", "-1:5", "4:0"])
def test_bad_system_prompts_are_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--system-prompts"):
        SystemPrompts.parse("system-prompts", text)
