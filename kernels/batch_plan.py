"""How one step's rows are grouped into rectangles; made once a step, used by every layer alike."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch

ROW_TILE = 16


@dataclass(frozen=True, slots=True)
class RowGroup:
    """B pieces of n rows, each piece of one sequence, and the L = width * block_size keys they look at.

    rows: int64 [B, n] rows of the batch. real: bool [B, n], False for padding (which repeats a row).
    blocks: int64 [B, width], the blocks that hold each piece's keys, padded with any valid id.
    visible: bool [B, n, L], which of those keys each row sees; none for padding.
    hidden: bool [B, L], keys that no row of the piece sees.
    """

    rows: torch.Tensor
    real: torch.Tensor
    blocks: torch.Tensor
    visible: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Piece:
    """Rows [row, row + count) of the batch, of one sequence, at positions [position, position + count)."""

    sequence: int
    row: int
    count: int
    position: int

    @property
    def end(self) -> int:
        return self.position + self.count


def plan_by_sequence(batch: AttentionBatch, spec: AttentionSpec, block_size: int) -> list[RowGroup]:
    """Sequences of one row each together, where their lengths are alike; every other one by itself.

    Blocks before the first key that a piece sees are left out.
    """
    pieces = list(_pieces(batch))
    singles = sorted((piece for piece in pieces if piece.count == 1), key=lambda piece: -piece.end)
    groups = [[piece] for piece in pieces if piece.count > 1]
    while singles:
        alike = sum(2 * piece.end >= singles[0].end for piece in singles)
        groups.append(singles[:alike])
        del singles[:alike]
    return [_group(batch, spec, block_size, group, group[0].count, skip=True) for group in groups]


def plan_by_row_tile(batch: AttentionBatch, spec: AttentionSpec, block_size: int) -> list[RowGroup]:
    """All rows in tiles of ROW_TILE a piece, padded; keys from position 0 on."""
    tiles = [
        _Piece(piece.sequence, piece.row + i, min(ROW_TILE, piece.count - i), piece.position + i)
        for piece in _pieces(batch)
        for i in range(0, piece.count, ROW_TILE)
    ]
    return [_group(batch, spec, block_size, tiles, ROW_TILE, skip=False)] if tiles else []


def first_keys(positions: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """The first key that a row at each position sees."""
    first = torch.zeros_like(positions)
    if spec.sliding_window is not None:
        first = torch.maximum(first, positions - (spec.sliding_window - 1))
    if spec.chunk is not None:
        first = torch.maximum(first, positions - positions % spec.chunk)
    return first


def _pieces(batch: AttentionBatch) -> Iterator[_Piece]:
    starts = batch.query_start_loc.tolist()
    for sequence, seq_len in enumerate(batch.seq_lens.tolist()):
        count = starts[sequence + 1] - starts[sequence]
        if count:
            yield _Piece(sequence, starts[sequence], count, seq_len - count)


def _group(
    batch: AttentionBatch,
    spec: AttentionSpec,
    block_size: int,
    pieces: list[_Piece],
    height: int,
    *,
    skip: bool,
) -> RowGroup:
    def column(values: Iterator[int]) -> torch.Tensor:
        return torch.tensor(list(values))[:, None]

    lane = torch.arange(height)
    count = column(piece.count for piece in pieces)
    position = column(piece.position for piece in pieces) + lane
    real = lane < count
    last = torch.where(real, position, -1)
    first = first_keys(position, spec)

    begin = first[:, :1] // block_size if skip else torch.zeros_like(count)
    end = last.amax(dim=1, keepdim=True) // block_size
    index = begin + torch.arange(int((end - begin).max()) + 1)
    # Past a sequence's end its table may name anything: repeat its last block.
    sequences = column(piece.sequence for piece in pieces)
    blocks = batch.block_tables.cpu()[sequences, torch.minimum(index, end)].long()

    keys = (begin * block_size + torch.arange(index.shape[1] * block_size))[:, None]
    visible = (keys >= first[..., None]) & (keys <= last[..., None])
    rows = column(piece.row for piece in pieces) + torch.minimum(lane, count - 1)
    hidden = ~visible.any(dim=1)
    return RowGroup(*(tensor.to(batch.seq_lens.device) for tensor in (rows, real, blocks, visible, hidden)))
