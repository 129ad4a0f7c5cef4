"""The attention calls that kernels are measured on: two models' shapes, decode and prefill; their cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch, HostBatch, KvLayout, token_elements
from pageturner.service.model.kv_dtypes import POOL_DTYPES

ELEMENT_BYTES = 2
"""bfloat16."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)


@dataclass(frozen=True, slots=True)
class Heads:
    """One model's attention: query heads, kv heads, width of each."""

    model: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def token_bytes(self, kv_dtype: torch.dtype = torch.bfloat16) -> int:
        """Key and value of one token in one layer, with their scales."""
        return 2 * self.num_kv_heads * token_elements(self.head_dim, kv_dtype) * kv_dtype.itemsize


MODELS = (Heads("SmolLM2-135M", 9, 3, 64), Heads("8B", 32, 8, 128))


@dataclass(frozen=True, slots=True)
class Case:
    """One call of one layer. decode: `batch` sequences with one new row each over `context` keys.
    prefill: the whole prompt of `context` rows of each sequence, causal. kv: what the pool is kept in."""

    kind: Literal["decode", "prefill"]
    heads: Heads
    batch: int
    context: int
    kv: str = "bfloat16"

    @property
    def kv_dtype(self) -> torch.dtype:
        """Of the pool."""
        return POOL_DTYPES[self.kv]

    @property
    def rows_each(self) -> int:
        """Query rows of a sequence."""
        return 1 if self.kind == "decode" else self.context

    @property
    def num_rows(self) -> int:
        """Query rows of all sequences."""
        return self.batch * self.rows_each

    @property
    def kv_bytes(self) -> int:
        """Of the keys and values of all contexts."""
        return self.batch * self.context * self.heads.token_bytes(self.kv_dtype)

    @property
    def bytes_moved(self) -> int:
        """The least that any kernel moves: every key and value once, the query and the output."""
        rows = 2 * self.num_rows * self.heads.num_heads * self.heads.head_dim * ELEMENT_BYTES
        return self.kv_bytes + rows

    @property
    def flops(self) -> int:
        """Of the two products, masked scores not counted: row r of a prompt sees r + 1 keys."""
        seen = self.context if self.kind == "decode" else self.context * (self.context + 1) // 2
        return 4 * self.heads.num_heads * self.heads.head_dim * self.batch * seen

    @property
    def memory_bytes(self) -> int:
        """What measuring it takes: the pool, contiguous keys and values, gathered ones, and rows."""
        return 3 * self.kv_bytes + 4 * (self.bytes_moved - self.kv_bytes)

    def __str__(self) -> str:
        kv = "" if self.kv == "bfloat16" else f" {self.kv}"
        return f"{self.kind} {self.heads.model} {self.batch} x {self.context}{kv}"


def cases(
    models: Sequence[Heads] = MODELS,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    kv: str = "bfloat16",
) -> Iterator[Case]:
    """Decode over batches x contexts, then prefill of one sequence over contexts, model by model."""
    for heads in models:
        yield from (Case("decode", heads, batch, context, kv) for batch in batches for context in contexts)
        yield from (Case("prefill", heads, 1, context, kv) for context in contexts)


@dataclass(frozen=True, slots=True)
class Inputs:
    """The tensors of a case over one paged pool of random keys and values.

    query: [T, num_heads, head_dim]. kv_layer: the pool, of one layer, its blocks dealt at random.
    """

    case: Case
    query: torch.Tensor
    kv_layer: torch.Tensor
    batch: AttentionBatch

    @property
    def spec(self) -> AttentionSpec:
        """The scale that attention has without any other option."""
        return AttentionSpec(scale=self.case.heads.head_dim**-0.5)


def make_inputs(case: Case, block_size: int, device: torch.device, seed: int = 0) -> Inputs:
    """Random numbers of order 1, the same for the same arguments; blocks dealt at random fill the pool."""
    generator = torch.Generator(device).manual_seed(seed)
    heads = case.heads
    width = -(-case.context // block_size)
    layout = KvLayout(1, heads.num_kv_heads, heads.head_dim, block_size, torch.bfloat16)
    num_blocks = case.batch * width
    pool = torch.empty(layout.pool_shape(num_blocks), dtype=torch.bfloat16, device=device)
    pool.normal_(generator=generator)
    query = torch.empty(
        case.num_rows, heads.num_heads, heads.head_dim, dtype=torch.bfloat16, device=device
    ).normal_(generator=generator)
    order = np.random.default_rng(seed).permutation(num_blocks).astype(np.int32)
    host = HostBatch(
        query_start_loc=(np.arange(case.batch + 1) * case.rows_each).astype(np.int32),
        seq_lens=np.full(case.batch, case.context, dtype=np.int32),
        block_tables=order.reshape(case.batch, width),
        slot_mapping=np.full(case.num_rows, -1, dtype=np.int64),
    )
    positions = np.tile(np.arange(case.context - case.rows_each, case.context), case.batch)
    batch = AttentionBatch(
        query_start_loc=torch.from_numpy(host.query_start_loc).to(device),
        seq_lens=torch.from_numpy(host.seq_lens).to(device),
        block_tables=torch.from_numpy(host.block_tables).to(device),
        slot_mapping=torch.from_numpy(host.slot_mapping).to(device),
        positions=torch.from_numpy(positions).to(device),
        max_query_len=case.rows_each,
        max_seq_len=case.context,
        host=host,
    )
    return Inputs(case, query, pool[:, 0], batch)


def contiguous(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query [B, H, n, D], keys and values [B, Hkv, L, D]: gathered from the pool, as SDPA wants them."""
    case, kv_layer = inputs.case, inputs.kv_layer
    query = inputs.query.view(case.batch, case.rows_each, -1, case.heads.head_dim).transpose(1, 2)
    keys, values = (_gather(kv_layer[:, side], inputs.batch.block_tables, case.context) for side in (0, 1))
    return query, keys, values


def _gather(blocks: torch.Tensor, tables: torch.Tensor, context: int) -> torch.Tensor:
    """[num_blocks, Hkv, block_size, D] -> [B, Hkv, L, D], by one copy: heads lead while it is gathered."""
    gathered = blocks.transpose(0, 1)[:, tables]  # [Hkv, B, blocks, block_size, D]
    return gathered.flatten(2, 3)[:, :, :context].transpose(0, 1)
