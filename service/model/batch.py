"""One step as tensors: SchedulerOutput -> ForwardBatch, a few numpy operations whatever the step's size."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from pageturner.kernels.layout import AttentionBatch, HostBatch
from pageturner.service.core.outputs import NO_BLOCK, UNKNOWN_TOKEN, ScheduledSequence, SchedulerOutput
from pageturner.service.model.adapter_store import BatchAdapters
from pageturner.service.model.upload import upload


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """T rows of S sequences, flat, in the order in which they were scheduled.

    token_ids: int64 [T]. attention: which rows attend to what; holds the positions.
    logit_rows: int64 [R], ascending: of each sequence rows that are scored, then the last row if it samples,
    and with drafts the one before each of them. adapters: None where no row has one.
    """

    token_ids: torch.Tensor
    attention: AttentionBatch
    logit_rows: torch.Tensor
    adapters: BatchAdapters | None = None

    @property
    def positions(self) -> torch.Tensor:
        """int64 [T], the position of each row in its sequence."""
        return self.attention.positions

    @property
    def num_rows(self) -> int:
        """T, the rows of the step."""
        return self.token_ids.shape[0]


def build_batch(
    output: SchedulerOutput,
    block_size: int,
    device: torch.device,
    resolve: Callable[[ScheduledSequence], int],
) -> ForwardBatch:
    """The tensors of a step that schedules at least one sequence, sent to the device in one transfer.

    resolve: the token that stands for UNKNOWN_TOKEN in a sequence, asked only where there is one.
    """
    scheduled = output.scheduled
    counts = np.array([len(sequence.token_ids) for sequence in scheduled], dtype=np.int64)
    starts = np.array([sequence.start for sequence in scheduled], dtype=np.int64)
    write_starts = np.array([sequence.write_start for sequence in scheduled], dtype=np.int64)
    seq_lens = starts + counts
    query_start_loc = np.concatenate(([0], np.cumsum(counts)))
    num_rows = int(query_start_loc[-1])

    tokens = chain.from_iterable(sequence.token_ids for sequence in scheduled)
    token_ids = np.fromiter(tokens, dtype=np.int64, count=num_rows)
    sequence_of_row = np.repeat(np.arange(len(scheduled)), counts)
    for row in np.flatnonzero(token_ids == UNKNOWN_TOKEN):
        token_ids[row] = resolve(scheduled[sequence_of_row[row]])

    block_tables = _padded_tables(scheduled, -(-seq_lens // block_size))
    positions = np.arange(num_rows) - np.repeat(query_start_loc[:-1] - starts, counts)
    blocks = block_tables[sequence_of_row, positions // block_size].astype(np.int64)
    slots = blocks * block_size + positions % block_size
    slots[positions < write_starts[sequence_of_row]] = -1

    num_sampled = np.array([sequence.num_drafts + 1 if sequence.samples else 0 for sequence in scheduled])
    last_sampled = np.cumsum(num_sampled)
    wanted_rows = np.arange(last_sampled[-1]) + np.repeat(query_start_loc[1:] - last_sampled, num_sampled)
    if any(sequence.scored for sequence in scheduled):
        wanted_rows = np.sort(np.concatenate((wanted_rows, *_scored_rows(scheduled, query_start_loc))))
    host = HostBatch(
        query_start_loc=query_start_loc.astype(np.int32),
        seq_lens=seq_lens.astype(np.int32),
        block_tables=block_tables,
        slot_mapping=slots,
    )
    sent_ids, sent_positions, logit_rows, starts_of_rows, lens, tables, slot_mapping = upload(
        (
            token_ids,
            positions,
            wanted_rows,
            host.query_start_loc,
            host.seq_lens,
            host.block_tables,
            host.slot_mapping,
        ),
        device,
    )
    return ForwardBatch(
        token_ids=sent_ids,
        attention=AttentionBatch(
            query_start_loc=starts_of_rows,
            seq_lens=lens,
            block_tables=tables,
            slot_mapping=slot_mapping,
            positions=sent_positions,
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            host=host,
        ),
        logit_rows=logit_rows,
    )


def _scored_rows(
    scheduled: tuple[ScheduledSequence, ...], first_rows: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> Iterator[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """The rows of each sequence whose logits score known tokens. first_rows: where each sequence begins."""
    for sequence, first in zip(scheduled, first_rows.tolist(), strict=False):
        positions = sequence.scored_rows
        yield np.arange(positions.start, positions.stop, dtype=np.int64) + (first - sequence.start)


def _padded_tables(
    scheduled: tuple[ScheduledSequence, ...], num_blocks: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    """int32 [S, most blocks], each table cut to the blocks that its sequence reaches, padded with 0.

    In the place of blocks that were given back behind a sliding window stands the first that was not. Kernels
    load whole tiles of keys and multiply what no row sees by 0: that block is full of the sequence's own KV,
    so what they load is finite.
    """
    tables = np.zeros((len(scheduled), int(num_blocks.max())), dtype=np.int32)
    for row, (sequence, length) in enumerate(zip(scheduled, num_blocks.tolist(), strict=True)):
        assert len(sequence.block_table) >= length, f"sequence {sequence.seq_id} outgrew its block table"
        tables[row, :length] = sequence.block_table[:length]
    for row in np.flatnonzero(tables[:, 0] == NO_BLOCK).tolist():
        dropped = np.count_nonzero(tables[row] == NO_BLOCK)
        tables[row, :dropped] = tables[row, dropped]
    return tables
