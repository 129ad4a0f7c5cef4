"""Paged batches for tests: scattered blocks, ragged lengths, and NaN in every slot of no sequence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from pageturner.kernels.kv_codes import decode, encode
from pageturner.kernels.layout import (
    KEY_TILE,
    AttentionBatch,
    KeyOrder,
    KvLayout,
    head_dim_of,
    is_coded,
)


@dataclass(frozen=True)
class PagedCase:
    """One layer's pool with a batch that attends to it.

    keys[s], values[s]: [seq_len, num_kv_heads, head_dim], what the pool holds for sequence s.
    """

    kv_layer: torch.Tensor
    batch: AttentionBatch
    query: torch.Tensor
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    def rows(self, start: int, stop: int) -> PagedCase:
        """The same sequence with only rows [start, stop) of its query asked: a chunk of its prompt.

        For cases of one sequence whose rows are its whole prompt.
        """
        count = stop - start
        batch = replace(
            self.batch,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=torch.tensor([stop], dtype=torch.int32),
            slot_mapping=self.batch.slot_mapping[start:stop],
            positions=self.batch.positions[start:stop],
            max_query_len=count,
            max_seq_len=stop,
        )
        return replace(self, batch=batch, query=self.query[start:stop])

    def sequence(self, index: int) -> PagedCase:
        """Sequence `index` alone in its batch."""
        start, stop = self.batch.query_start_loc[index : index + 2].tolist()
        seq_len = int(self.batch.seq_lens[index])
        batch = AttentionBatch(
            query_start_loc=torch.tensor([0, stop - start], dtype=torch.int32),
            seq_lens=self.batch.seq_lens[index : index + 1].clone(),
            block_tables=self.batch.block_tables[index : index + 1].clone(),
            slot_mapping=self.batch.slot_mapping[start:stop],
            positions=self.batch.positions[start:stop],
            max_query_len=stop - start,
            max_seq_len=seq_len,
        )
        return replace(self, batch=batch, query=self.query[start:stop])


def key_elements(offset: int, head_dim: int, key_order: KeyOrder) -> torch.Tensor:
    """Where token `offset` of a block keeps its key, as indices into one head's flat part. Spelled out on
    purpose: a second statement of the layout, independent of `layout.key_tiles`."""
    dims = torch.arange(head_dim)
    if key_order is KeyOrder.PLAIN:
        return offset * head_dim + dims
    return offset // KEY_TILE * KEY_TILE * head_dim + dims * KEY_TILE + offset % KEY_TILE


def store_row(heads: torch.Tensor, offset: int, row: torch.Tensor, key_order: KeyOrder) -> torch.Tensor:
    """row [num_kv_heads, head_dim] to token `offset` of one block's keys or values, kv_layer[block, part];
    returns what is to be read there. Codes and scales are spelled out for the same reason."""
    block_size, flat = heads.shape[1], heads.flatten(1)
    if not is_coded(heads.dtype):
        flat[:, key_elements(offset, row.shape[1], key_order)] = row.to(heads.dtype)
        return row.to(heads.dtype)
    codes, scales = encode(row, heads.dtype)
    in_bytes = flat.view(torch.uint8)
    in_bytes[:, key_elements(offset, row.shape[1], key_order)] = codes.view(torch.uint8)
    scale = block_size * row.shape[1] + 2 * offset
    in_bytes[:, scale : scale + 2] = scales[:, None].view(torch.uint8)
    return decode(codes, scales)


def empty_pool(layout: KvLayout, num_blocks: int) -> torch.Tensor:
    """NaN wherever a number may be it: floats, codes of 8-bit floats, and scales."""
    pool = torch.empty(layout.pool_shape(num_blocks), dtype=layout.dtype)
    pool.view(torch.uint8).fill_(0xFF)
    return pool


def read_slot(kv_layer: torch.Tensor, slot: int, key_order: KeyOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """Key and value [num_kv_heads, head_dim] stored at `slot`; out of codes, what they stand for."""
    block, offset = divmod(slot, kv_layer.shape[3])
    key, value = (
        _read_row(kv_layer[block, part], offset, order)
        for part, order in ((0, key_order), (1, KeyOrder.PLAIN))
    )
    return key, value


def _read_row(heads: torch.Tensor, offset: int, key_order: KeyOrder) -> torch.Tensor:
    head_dim, flat = head_dim_of(heads), heads.flatten(1)
    elements = key_elements(offset, head_dim, key_order)
    if not is_coded(heads.dtype):
        return flat[:, elements]
    in_bytes, scale = flat.view(torch.uint8), heads.shape[1] * head_dim + 2 * offset
    scales = in_bytes[:, scale : scale + 2].contiguous().view(torch.bfloat16).flatten()
    return decode(in_bytes[:, elements].view(heads.dtype), scales)


def make_batch(
    sequences: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]], block_size: int
) -> AttentionBatch:
    """sequences: (rows, seq_len) each. tables are padded with 0, and so may name another sequence's block."""
    counts = [rows for rows, _ in sequences]
    width = max(len(table) for table in tables)
    positions = [position for rows, seq_len in sequences for position in range(seq_len - rows, seq_len)]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for (rows, seq_len), table in zip(sequences, tables, strict=True)
        for position in range(seq_len - rows, seq_len)
    ]
    return AttentionBatch(
        query_start_loc=torch.tensor([0, *counts]).cumsum(0).int(),
        seq_lens=torch.tensor([seq_len for _, seq_len in sequences], dtype=torch.int32),
        block_tables=torch.tensor([[*t, *[0] * (width - len(t))] for t in tables], dtype=torch.int32),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        positions=torch.tensor(positions, dtype=torch.int64),
        max_query_len=max(counts),
        max_seq_len=max(seq_len for _, seq_len in sequences),
    )


def make_case(
    sequences: Sequence[tuple[int, int]],
    *,
    layout: KvLayout,
    num_heads: int,
    seed: int = 0,
    spare_blocks: int = 3,
    layer: int = 0,
    row_dtype: torch.dtype | None = None,
) -> PagedCase:
    """Random keys, values and queries for sequences of (rows, seq_len), in blocks dealt at random.

    row_dtype: of queries; by default the pool's, beside codes float32. keys and values of the case are what
    the pool gives back.
    """
    generator = torch.Generator().manual_seed(seed)
    rows_in = row_dtype or (torch.float32 if is_coded(layout.dtype) else layout.dtype)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(rows_in)

    needs = [math.ceil(seq_len / layout.block_size) for _, seq_len in sequences]
    num_blocks = sum(needs) + spare_blocks
    deck = iter(torch.randperm(num_blocks, generator=generator).tolist())
    tables = [[next(deck) for _ in range(need)] for need in needs]

    kv_layer = empty_pool(layout, num_blocks)[:, layer]
    keys, values = [], []
    for (_, seq_len), table in zip(sequences, tables, strict=True):
        key = normal(seq_len, layout.num_kv_heads, layout.head_dim)
        value = normal(seq_len, layout.num_kv_heads, layout.head_dim)
        for position in range(seq_len):
            block, offset = table[position // layout.block_size], position % layout.block_size
            key[position] = store_row(kv_layer[block, 0], offset, key[position], layout.key_order)
            value[position] = store_row(kv_layer[block, 1], offset, value[position], KeyOrder.PLAIN)
        keys.append(key)
        values.append(value)
    num_rows = sum(rows for rows, _ in sequences)
    return PagedCase(
        kv_layer=kv_layer,
        batch=make_batch(sequences, tables, layout.block_size),
        query=normal(num_rows, num_heads, layout.head_dim),
        keys=keys,
        values=values,
    )


def assert_near(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal up to rounding, for results of order 1 that are sums."""
    atol, rtol = (5e-6, 2e-5) if expected.dtype is torch.float32 else (1.6e-2, 1.6e-2)
    torch.testing.assert_close(result, expected, atol=atol, rtol=rtol)


def assert_same(result: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal bit for bit, NaN for NaN."""
    torch.testing.assert_close(result, expected, atol=0, rtol=0, equal_nan=True)
