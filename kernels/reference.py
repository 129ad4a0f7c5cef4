"""The definition of every operation: plain, slow, in float64 where it matters, never optimised.

Every backend is tested against this file. It reads keys and values only through the block table, so
whatever a slot that no sequence owns may hold cannot reach a result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pageturner.kernels import address_checks, checks
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.known_tokens import KnownTokens, TokenScores
from pageturner.kernels.kv_codes import encode
from pageturner.kernels.layout import AttentionBatch, KeyOrder, is_coded, key_tiles, split_codes
from pageturner.kernels.packed import PackedWeight, check_mlp, check_rows, unpack
from pageturner.kernels.reference_scores import token_scores

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What every backend's dtypes are among."""


def first_key(position: int, spec: AttentionSpec) -> int:
    """The first key that a row at `position` sees; it sees all from there to its own, inclusive."""
    first = 0
    if spec.sliding_window is not None:
        first = max(first, position - spec.sliding_window + 1)
    if spec.chunk is not None:
        first = max(first, position // spec.chunk * spec.chunk)
    return first


def rotate(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al. 2021, arXiv:2104.09864) in llama's order: dim i turns with dim i + head_dim / 2.

    rows [T, heads, head_dim], cos and sin [T, head_dim]. Each product and the sum round to the wider
    of the two dtypes, the result to that of rows.
    """
    half = rows.shape[-1] // 2
    cos, sin = cos[:, None], sin[:, None]
    low, high = rows[..., :half], rows[..., half:]
    turned_low = low * cos[..., :half] - high * sin[..., :half]
    turned_high = high * cos[..., half:] + low * sin[..., half:]
    return torch.cat((turned_low, turned_high), dim=-1).to(rows.dtype)


class ReferenceOps:
    """`PagedOps` by definition, on any device and for either key order."""

    name = "reference"
    narrow_pool = True
    coded_pool = True
    row_invariant = True

    def __init__(self, key_order: KeyOrder = KeyOrder.PLAIN) -> None:
        self.key_order = key_order

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch
    ) -> None:
        checks.check_kv_layer(kv_layer, self.key_order, DTYPES)
        num_blocks, _, _, block_size, _ = kv_layer.shape
        address_checks.check_batch(batch, num_blocks, block_size)
        slots = batch.slot_mapping.tolist()
        checks.check_key_value(key, value, kv_layer, len(slots), checks.row_dtype(key, kv_layer, DTYPES))
        written = [slot for slot in slots if slot >= 0]
        if len(set(written)) != len(written):
            raise KernelArgumentError("slot_mapping", "naming a slot twice", "distinct slots")

        for part, order, rows in (
            (kv_layer[:, 0], self.key_order, key),
            (kv_layer[:, 1], KeyOrder.PLAIN, value),
        ):
            for row, slot in zip(rows, slots, strict=True):
                if slot >= 0:
                    self._write(part, order, slot, row)

    def _write(self, part: torch.Tensor, order: KeyOrder, slot: int, row: torch.Tensor) -> None:
        """row [num_kv_heads, head_dim] to one slot of the keys or of the values."""
        block, offset = divmod(slot, part.shape[2])
        if is_coded(part.dtype):
            part, scales = split_codes(part)
            row, scales[block, :, offset] = encode(row, part.dtype)
        tiles = key_tiles(part, order)
        tile = tiles.shape[3]
        tiles[block, :, offset // tile, offset % tile] = row

    def attention(
        self, query: torch.Tensor, kv_layer: torch.Tensor, batch: AttentionBatch, spec: AttentionSpec
    ) -> torch.Tensor:
        checks.check_kv_layer(kv_layer, self.key_order, DTYPES)
        num_blocks, _, num_kv_heads, block_size, _ = kv_layer.shape
        address_checks.check_batch(batch, num_blocks, block_size)
        num_rows, dtype = batch.slot_mapping.shape[0], checks.row_dtype(query, kv_layer, DTYPES)
        checks.check_query(query, kv_layer, num_rows, dtype)
        checks.check_sinks(spec.sinks, query.shape[1])
        group = query.shape[1] // num_kv_heads
        starts, seq_lens = batch.query_start_loc.tolist(), batch.seq_lens.tolist()

        output = torch.empty_like(query)
        for sequence, seq_len in enumerate(seq_lens):
            table = batch.block_tables[sequence].tolist()
            for row in range(starts[sequence], starts[sequence + 1]):
                position = seq_len - (starts[sequence + 1] - row)
                visible = range(first_key(position, spec), position + 1)
                for head in range(query.shape[1]):
                    keys, values = self._read(kv_layer, head // group, table, visible)
                    scores = keys @ query[row, head].double() * spec.scale
                    if spec.logit_softcap is not None:
                        scores = spec.logit_softcap * torch.tanh(scores / spec.logit_softcap)
                    sink = -math.inf if spec.sinks is None else float(spec.sinks[head])
                    top = max(float(scores.max()), sink)
                    weights = torch.exp(scores - top)
                    total = weights.sum() + math.exp(sink - top)
                    output[row, head] = (weights @ values / total).to(query.dtype)
        return output

    def _read(
        self, kv_layer: torch.Tensor, head: int, table: list[int], positions: range
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [len(positions), head_dim] of one kv head, in float64."""
        block_size = kv_layer.shape[3]
        found = []
        for part, order in ((kv_layer[:, 0], self.key_order), (kv_layer[:, 1], KeyOrder.PLAIN)):
            numbers, scales = split_codes(part) if is_coded(part.dtype) else (part, None)
            tiles = key_tiles(numbers, order)
            tile = tiles.shape[3]
            rows = []
            for position in positions:
                block, offset = table[position // block_size], position % block_size
                row = tiles[block, head, offset // tile, offset % tile].double()
                rows.append(row if scales is None else row * scales[block, head, offset].double())
            found.append(torch.stack(rows))
        return found[0], found[1]

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
        checks.check_kv_layer(kv_layer, self.key_order, DTYPES)
        num_rows, dtype = batch.slot_mapping.shape[0], checks.row_dtype(query, kv_layer, DTYPES)
        checks.check_query(query, kv_layer, num_rows, dtype)
        checks.check_key_value(key, value, kv_layer, query.shape[0], query.dtype)
        checks.check_rope(query, cos, sin)
        self.write_kv(rotate(key, cos, sin), value, kv_layer, batch)
        return rotate(query, cos, sin)

    def rms_norm(
        self, hidden: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467); rounds to the dtype before the weight."""
        checks.check_rms_norm(hidden, weight, residual, DTYPES)
        summed = hidden if residual is None else residual + hidden
        wide = summed.double()
        scale = torch.rsqrt((wide * wide).mean(dim=-1, keepdim=True) + eps)
        return weight * (wide * scale).to(hidden.dtype), summed

    def silu_and_mul(self, gate_up: torch.Tensor) -> torch.Tensor:
        """SwiGLU's product (Shazeer 2020, arXiv:2002.05202); silu rounds to the dtype before it."""
        checks.check_gate_up(gate_up, DTYPES)
        gate, up = gate_up.chunk(2, dim=-1)
        wide = gate.double()
        return (wide / (1 + torch.exp(-wide))).to(gate.dtype) * up

    def copy_blocks(self, pool: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> None:
        address_checks.check_copy(pool, pairs)
        read = [pool[source].clone() for source, _ in pairs]
        for (_, destination), block in zip(pairs, read, strict=True):
            pool[destination] = block

    def transfer_blocks(
        self, source: torch.Tensor, destination: torch.Tensor, pairs: Sequence[tuple[int, int]]
    ) -> None:
        address_checks.check_transfer(source, destination, pairs)
        for from_id, to_id in pairs:
            destination[to_id] = source[from_id]


@dataclass(frozen=True, slots=True, eq=False)
class QuantisedRows:
    """float32 rows [T, in] as products read them: row[i] is about scales[i // group] * codes[i]."""

    codes: torch.Tensor
    """int8 [T, in] of -127 to 127."""
    scales: torch.Tensor
    """float32 [T, in / group]; 0 for a group of zeros, NaN for one that holds an infinity or NaN."""
    sums: torch.Tensor
    """int32 [T, in / group], of the codes."""

    def dequantised(self) -> torch.Tensor:
        """float32 [T, in], each element rounded once."""
        groups = self.codes.float().reshape(*self.scales.shape, -1)
        return (self.scales[..., None] * groups).flatten(1)


def quantise_rows(rows: torch.Tensor, group: int) -> QuantisedRows:
    """float32 [T, in] in groups: the scale is max|x| / 127, a code the nearest integer, ties to even.

    A scale below the smallest normal float counts as 0. Every operation is in float32.
    """
    groups = rows.reshape(len(rows), rows.shape[1] // group, group)
    top = groups.abs().amax(dim=-1)
    finite = groups.isfinite().all(dim=-1)
    scales = top / 127
    scales = scales.masked_fill(scales < torch.finfo(torch.float32).tiny, 0)
    coded = finite & (scales > 0)
    inverse = torch.where(coded, 1 / scales, 0)
    codes = torch.where(coded[..., None], groups, 0) * inverse[..., None]
    codes = codes.round().to(torch.int8)
    return QuantisedRows(
        codes.flatten(1), scales.masked_fill(~finite, math.nan), codes.sum(dim=-1, dtype=torch.int32)
    )


def fused_multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded there to odd, which makes the rounding to float32 that
    follows the only one that counts (Boldo and Melquiond 2008, "Emulation of FMA").
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exactly what the sum lost (Knuth's TwoSum)
    bits = total.view(torch.int64)
    to_odd = total.isfinite() & (error != 0) & (bits % 2 == 0)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    return torch.where(to_odd, bits + away, bits).view(torch.float64).float()


class ReferenceQuantisedOps:
    """`QuantisedOps` by definition."""

    name = "reference"

    def linear(self, rows: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
        """Groups in ascending order, for each scale * sum of code products, then offset * sum of codes."""
        check_rows("rows", rows, weight.layout)
        grouped = unpack(weight)
        group = grouped.group
        quantised = quantise_rows(rows, group)
        codes = quantised.codes.float().reshape(len(rows), weight.layout.groups, group)
        weights = grouped.codes.float().reshape(grouped.out_features, -1, group)
        shifts = quantised.scales * quantised.sums.float()
        result = rows.new_zeros(len(rows), grouped.out_features)
        for index in range(weight.layout.groups):
            sums = codes[:, index] @ weights[:, index].T  # integers below 2^24: exact in any order
            scales = quantised.scales[:, index, None] * grouped.scales[None, :, index].float()
            result = fused_multiply_add(scales, sums, result)
            if grouped.offsets is not None:
                offsets = grouped.offsets[None, :, index].float()
                result = fused_multiply_add(offsets, shifts[:, index, None], result)
        return result if weight.bias is None else result + weight.bias

    def norm_linear(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_rows("hidden", hidden, weight.layout)
        normed, summed = ReferenceOps().rms_norm(hidden, norm, eps, residual)
        return self.linear(normed, weight), summed

    def norm_mlp(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        gate_up: PackedWeight,
        down: PackedWeight,
        residual: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        check_mlp(gate_up.layout, down.layout)
        gated, summed = self.norm_linear(hidden, norm, eps, gate_up, residual)
        return self.linear(ReferenceOps().silu_and_mul(gated), down), summed

    def norm_scores(
        self,
        hidden: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        weight: PackedWeight,
        known: KnownTokens,
        residual: torch.Tensor | None = None,
    ) -> TokenScores:
        known.check(len(hidden), weight.layout.out_features)
        return token_scores(self.norm_linear(hidden, norm, eps, weight, residual)[0], known)
