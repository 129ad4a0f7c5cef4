"""Steps as bytes: what comes out is what went in, as far as a forward reads it, for any row of steps."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.planted_ranks import PLANTED_CODECS, Codec

from pageturner.service.core.outputs import (
    NO_BLOCK,
    UNKNOWN_TOKEN,
    BlockCopies,
    BlockCopy,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    ScoreRun,
)
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.token_log import TokenLog
from pageturner.service.model.batch import build_batch
from pageturner.service.ranks.codec import BadStep, StepDecoder, StepEncoder, as_computed

INT32 = st.integers(-(2**31), 2**31 - 1)
SMALL = st.integers(0, 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
IDS = st.integers(0, 3) | st.integers(0, 2**63 - 1)
BLOCKS = st.integers(0, 40) | SMALL
TABLES = st.lists(BLOCKS | st.just(NO_BLOCK), max_size=6).map(tuple)
COPIES = st.lists(st.builds(BlockCopy, SMALL, SMALL), max_size=3).map(tuple)
ADAPTERS = st.sampled_from(["", "a", "ä\0b", "0123456789abcdef" * 5])


def sample_rows(seq_id: int) -> tuple[SampleRow, ...]:
    """A row with all that a rank is not told: a secret prompt, a history that grows."""
    history = TokenLog([1, 2, 3]).view(0, 2)
    params = SamplingParams(temperature=0.5, repetition_penalty=1.5)
    return (SampleRow(seq_id, 0, 1, 77, params, (5, 6), history, (9,), (8,)),)


@st.composite
def sequences(draw: st.DrawFn) -> ScheduledSequence:
    seq_id, start = draw(IDS), draw(SMALL)
    num_scored = draw(st.integers(0, 3))
    return ScheduledSequence(
        seq_id,
        "request",
        draw(INT64),
        tuple(draw(st.lists(SMALL | st.just(UNKNOWN_TOKEN), max_size=4))),
        start,
        draw(SMALL),
        draw(TABLES),
        sample_rows(seq_id) if draw(st.booleans()) else (),
        draw(ADAPTERS),
        draw(st.integers(0, 64)),
        (ScoreRun(seq_id, 3, draw(SMALL), tuple(range(num_scored)), 2),) if num_scored else (),
    )


STEPS = st.builds(
    SchedulerOutput,
    INT64,
    st.lists(sequences(), max_size=3, unique_by=lambda part: part.seq_id).map(tuple),
    st.builds(BlockCopies, st.lists(SMALL, max_size=3).map(tuple), COPIES, COPIES, COPIES),
)


def resolve(part: ScheduledSequence) -> int:
    return part.seq_id % 1000


def check_codec(codec: Codec, steps: Sequence[SchedulerOutput]) -> None:
    """Each step comes out as it is computed, whatever went before it."""
    encoder, decoder = codec()
    for step in steps:
        assert decoder.decode(encoder.encode(step, resolve)) == as_computed(step, resolve)


@settings(max_examples=60)
@given(st.lists(STEPS, max_size=4))
def test_any_steps_come_out_as_they_are_computed(steps: list[SchedulerOutput]) -> None:
    check_codec(lambda: (StepEncoder(), StepDecoder()), steps)


def decodes(*tables: tuple[int, ...], step_id: int = 0, tokens: tuple[int, ...] = ()) -> SchedulerOutput:
    """A step in which each table's sequence decodes one token in its last block."""
    return SchedulerOutput(
        step_id,
        tuple(
            ScheduledSequence(
                seq_id,
                "who",
                0,
                (tokens[seq_id] if tokens else seq_id,),
                4 * len(table) - 1,
                4 * len(table) - 1,
                table,
                sample_rows(seq_id),
            )
            for seq_id, table in enumerate(tables)
        ),
    )


GROWING = [
    decodes((1, 2), (3,)),
    decodes((1, 2), (3,), tokens=(7, UNKNOWN_TOKEN)),  # as before
    decodes((1, 2, 9), (3,)),  # grown
    decodes((1, 2, 9), (4,)),  # another block after a copy
    decodes((1, 2)),  # shrunk; the second sequence is left out
    decodes((1, 2), (4,)),  # and comes back
    decodes((NO_BLOCK, 2), (4, 5)),  # a block behind the window is given back
    decodes((NO_BLOCK, 2), (4, 5)),
]


def test_tables_that_grow_change_and_come_back() -> None:
    check_codec(lambda: (StepEncoder(), StepDecoder()), GROWING)


@pytest.mark.parametrize("name", PLANTED_CODECS)
def test_a_planted_bug_is_caught(name: str) -> None:
    copies = BlockCopies((1,), (BlockCopy(1, 2),), (BlockCopy(3, 4),), (BlockCopy(5, 6),))
    scored = (ScoreRun(0, 0, 2, (4, 5), 0),)
    full = decodes((1, 2), (3,), step_id=5)
    first = replace(full.scheduled[0], adapter="a", num_drafts=3, scored=scored)
    steps = [*GROWING, replace(full, scheduled=(first, full.scheduled[1]), block_copies=copies)]
    with pytest.raises((AssertionError, BadStep)):
        check_codec(PLANTED_CODECS[name], steps)


def test_a_forward_reads_the_same_batch() -> None:
    step = decodes((0, 1), (2, 3, 4), tokens=(5, UNKNOWN_TOKEN))
    step = replace(step, scheduled=(step.scheduled[0], replace(step.scheduled[1], num_drafts=0)))
    told = StepDecoder().decode(StepEncoder().encode(step, resolve))
    device = torch.device("cpu")
    ours, theirs = (build_batch(each, 4, device, resolve) for each in (step, told))
    assert torch.equal(ours.token_ids, theirs.token_ids)
    assert torch.equal(ours.logit_rows, theirs.logit_rows)
    assert torch.equal(ours.attention.block_tables, theirs.attention.block_tables)
    assert torch.equal(ours.attention.slot_mapping, theirs.attention.slot_mapping)
    assert torch.equal(ours.positions, theirs.positions)


def test_what_users_said_stays_with_rank_0() -> None:
    encoded = StepEncoder().encode(
        SchedulerOutput(
            1, (ScheduledSequence(1, "request-of-alice", 0, (4,), 0, 0, (1,), sample_rows(1), "digest"),)
        ),
        resolve,
    )
    assert b"alice" not in encoded
    assert b"digest" in encoded
    assert not StepDecoder().decode(encoded).scheduled[0].samples[0].prompt_token_ids


def test_a_decode_costs_the_same_however_long_its_context_is() -> None:
    def size(num_blocks: int) -> int:
        encoder, table = StepEncoder(), tuple(range(num_blocks))
        first, second = (encoder.encode(decodes(table, step_id=step), resolve) for step in range(2))
        assert len(first) - len(second) == 4 * num_blocks
        return len(second)

    assert size(4) == size(4096)


def test_a_message_lost_twice_or_out_of_order_is_noticed() -> None:
    encoder = StepEncoder()
    first, second, third = (encoder.encode(step, resolve) for step in GROWING[:3])
    for order in ((second,), (first, first), (first, third), (first, second, first)):
        decoder = StepDecoder()
        for encoded in order[:-1]:
            decoder.decode(encoded)
        with pytest.raises(BadStep, match="was due"):
            decoder.decode(order[-1])


@pytest.mark.parametrize(
    "damage",
    [
        lambda encoded: encoded[:-1],
        lambda encoded: encoded + b"\0",
        lambda encoded: b"",
        lambda encoded: struct.pack("<H", 2) + encoded[2:],
        lambda encoded: encoded[: len(encoded) // 2],
    ],
)
def test_what_is_no_step_is_refused(damage: Callable[[bytes], bytes]) -> None:
    encoded = StepEncoder().encode(GROWING[0], resolve)
    with pytest.raises(BadStep):
        StepDecoder().decode(damage(encoded))


def test_a_number_without_a_place_changes_nothing() -> None:
    encoder, decoder = StepEncoder(), StepDecoder()
    decoder.decode(encoder.encode(GROWING[0], resolve))
    with pytest.raises(struct.error):
        encoder.encode(decodes((2**31,)), resolve)
    assert decoder.decode(encoder.encode(GROWING[1], resolve)) == as_computed(GROWING[1], resolve)
