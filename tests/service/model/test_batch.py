"""SchedulerOutput -> tensors, against a row-by-row statement of the same."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.core.outputs import UNKNOWN_TOKEN, SampleRow, ScheduledSequence, SchedulerOutput
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model.batch import build_batch

CPU = torch.device("cpu")


def scheduled(
    seq_id: int, tokens: list[int], start: int, write_start: int, table: list[int], *, samples: int = 1
) -> ScheduledSequence:
    rows = tuple(SampleRow(seq_id, 0, i, 0, SamplingParams()) for i in range(samples))
    return ScheduledSequence(seq_id, str(seq_id), 0, tuple(tokens), start, write_start, tuple(table), rows)


def never(sequence: ScheduledSequence) -> int:
    raise AssertionError(f"nothing is unknown in sequence {sequence.seq_id}")


def test_a_mixed_step() -> None:
    output = SchedulerOutput(
        0,
        (
            scheduled(1, [11, 12, 13], start=3, write_start=4, table=[5, 2]),
            scheduled(2, [21], start=8, write_start=9, table=[7, 1, 0, 9]),
            scheduled(3, [31, 32], start=0, write_start=0, table=[3], samples=0),
        ),
    )
    batch = build_batch(output, 4, CPU, never)
    attention = batch.attention
    assert batch.token_ids.tolist() == [11, 12, 13, 21, 31, 32]
    assert batch.positions.tolist() == [3, 4, 5, 8, 0, 1]
    assert attention.query_start_loc.tolist() == [0, 3, 4, 6]
    assert attention.seq_lens.tolist() == [6, 9, 2]
    assert attention.block_tables.tolist() == [[5, 2, 0], [7, 1, 0], [3, 0, 0]]
    # Position 3 of the first and 8 of the second are below write_start: their KV is there already.
    assert attention.slot_mapping.tolist() == [-1, 8, 9, -1, 12, 13]
    assert batch.logit_rows.tolist() == [2, 3]
    assert (attention.max_query_len, attention.max_seq_len) == (3, 9)


def test_unknown_tokens_are_resolved_by_sequence() -> None:
    output = SchedulerOutput(
        0,
        (
            scheduled(1, [UNKNOWN_TOKEN], 0, 0, [0]),
            scheduled(2, [5], 0, 0, [1]),
            scheduled(3, [UNKNOWN_TOKEN], 0, 0, [2]),
        ),
    )
    batch = build_batch(output, 4, CPU, lambda sequence: 100 + sequence.seq_id)
    assert batch.token_ids.tolist() == [101, 5, 103]


@given(st.data())
def test_any_step_is_laid_out_as_defined(data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    sequences = []
    for seq_id in range(data.draw(st.integers(1, 5))):
        start, count = data.draw(st.integers(0, 12)), data.draw(st.integers(1, 7))
        length = -(-(start + count) // block_size) + data.draw(st.integers(0, 2))
        table = data.draw(st.lists(st.integers(0, 50), min_size=length, max_size=length))
        write_start = start + data.draw(st.integers(0, count))
        tokens = [1000 * seq_id + start + i for i in range(count)]
        sequences.append(
            scheduled(seq_id, tokens, start, write_start, table, samples=data.draw(st.integers(0, 2)))
        )
    batch = build_batch(SchedulerOutput(0, tuple(sequences)), block_size, CPU, never)

    tokens, positions, slots, logit_rows = [], [], [], []
    for sequence in sequences:
        for i, token in enumerate(sequence.token_ids):
            position = sequence.start + i
            block, offset = sequence.block_table[position // block_size], position % block_size
            tokens.append(token)
            positions.append(position)
            slots.append(block * block_size + offset if position >= sequence.write_start else -1)
        if sequence.samples:
            logit_rows.append(len(tokens) - 1)
    assert batch.token_ids.tolist() == tokens
    assert batch.positions.tolist() == positions
    assert batch.attention.slot_mapping.tolist() == slots
    assert batch.logit_rows.tolist() == logit_rows
    assert batch.num_rows == len(tokens)
    host = batch.attention.host
    assert host is not None
    for name in ("query_start_loc", "seq_lens", "block_tables", "slot_mapping"):
        sent, kept = getattr(batch.attention, name), getattr(host, name)
        assert np.array_equal(sent.numpy(), kept)
        assert sent.numpy().dtype == kept.dtype
