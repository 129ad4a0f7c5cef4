"""The operations in torch alone, for any device: gather whole blocks, then attend.

Ordinary mode gathers a group's blocks and calls scaled_dot_product_attention with the query heads of a
kv head packed as rows. Deterministic mode (`tile_attention`) makes each row's bits independent of what
shares its batch and of how its prompt was chunked.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageturner.kernels import address_checks, block_copy, checks
from pageturner.kernels.batch_plan import RowGroup, plan_by_row_tile, plan_by_sequence
from pageturner.kernels.gather_attention import gather_attention
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import AttentionBatch, KeyOrder, head_dim_of
from pageturner.kernels.tile_attention import tile_attention
from pageturner.kernels.torch_pool import write_tokens


class TorchOps:
    """`PagedOps` in torch. key_order: the order of keys in the pools it is given.

    deterministic: a row's result depends on its own tokens only, bit for bit, wherever torch's batched
    product of matrices of one fixed shape does (true of every CPU seen; tests/kernels probes it).
    dtypes: what it takes. float16 is for a GPU: a CPU is slow at it, or lacks some operation.
    """

    def __init__(
        self,
        key_order: KeyOrder = KeyOrder.PLAIN,
        *,
        deterministic: bool = False,
        dtypes: Sequence[torch.dtype] = checks.DTYPES,
    ) -> None:
        self.key_order = key_order
        self._dtypes = dtypes
        self.deterministic = deterministic
        self._checked_batch = address_checks.CheckedBatch()
        # Of the batch last checked: rows with a slot, their blocks and offsets; groups by window and chunk.
        self._written: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
        self._plans: dict[tuple[int | None, int | None], list[RowGroup]] = {}

    narrow_pool = False
    coded_pool = True

    @property
    def row_invariant(self) -> bool:
        return self.deterministic

    @property
    def name(self) -> str:
        return "torch-deterministic" if self.deterministic else "torch"

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        self._check(kv_layer, batch)
        checks.check_key_value(key, value, kv_layer, batch.slot_mapping.shape[0])
        rows, blocks, offsets = self._written
        write_tokens(kv_layer[:, 0], self.key_order, blocks, offsets, key[rows])
        write_tokens(kv_layer[:, 1], KeyOrder.PLAIN, blocks, offsets, value[rows])

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        self._check(kv_layer, batch)
        checks.check_query(query, kv_layer, batch.slot_mapping.shape[0])
        checks.check_sinks(spec.sinks, query.shape[1])
        num_kv_heads, head_dim = kv_layer.shape[2], head_dim_of(kv_layer)
        attend = tile_attention if self.deterministic else gather_attention
        output = torch.empty_like(query)
        for group in self._plan(kv_layer, batch, spec):
            # [B, n, H, D] -> [B, Hkv, G * n, D]: the query heads that share keys become rows.
            pieces, rows = group.rows.shape
            packed = query[group.rows].view(pieces, rows, num_kv_heads, -1, head_dim).permute(0, 2, 3, 1, 4)
            result = attend(packed.flatten(2, 3), kv_layer, self.key_order, group, spec).view(packed.shape)
            output[group.rows[group.real]] = result.permute(0, 3, 1, 2, 4).flatten(2, 3)[group.real]
        return output

    def rope_and_write_kv(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        kv_layer: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        self._check(kv_layer, batch)
        checks.check_query(query, kv_layer, batch.slot_mapping.shape[0])
        checks.check_key_value(key, value, kv_layer, query.shape[0], query.dtype)
        checks.check_rope(query, cos, sin)
        self.write_kv(_rotate(key, cos, sin), value, kv_layer, batch)
        return _rotate(query, cos, sin)

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        checks.check_rms_norm(hidden, weight, residual, self._dtypes)
        summed = hidden if residual is None else residual + hidden
        wide = summed.float()
        normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return weight * normed.to(hidden.dtype), summed

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        checks.check_gate_up(gate_up, self._dtypes)
        gate, up = gate_up.chunk(2, dim=-1)
        if self.deterministic:
            # F.silu takes the elements left over from its vectors with another exp (seen in float32), and
            # which those are depends on the number of rows. torch.exp has one exp for all.
            wide = gate.float()
            return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up
        return torch.nn.functional.silu(gate.contiguous()) * up

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        block_copy.copy_blocks(pool, pairs)

    def transfer_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        block_copy.transfer_blocks(source, destination, pairs)

    def _check(self, kv_layer: torch.Tensor, batch: AttentionBatch) -> None:
        checks.check_kv_layer(kv_layer, self.key_order, self._dtypes)
        if self._checked_batch.check(batch, kv_layer):
            rows = (batch.slot_mapping >= 0).nonzero().squeeze(1)
            slots = batch.slot_mapping[rows]
            self._written = rows, slots // kv_layer.shape[3], slots % kv_layer.shape[3]
            self._plans = {}

    def _plan(self, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec) -> list[RowGroup]:
        key = (spec.sliding_window, spec.chunk)
        if key not in self._plans:
            make = plan_by_row_tile if self.deterministic else plan_by_sequence
            self._plans[key] = make(batch, spec, kv_layer.shape[3])
        return self._plans[key]


def _rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = rows.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return (rows * cos[:, None] + turned * sin[:, None]).to(rows.dtype)
