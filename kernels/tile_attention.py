"""Attention in torch whose rows do not depend on their batch nor on how a prompt was chunked.

Online softmax (Milakov and Gimelshein 2018, arXiv:1805.02867) over tiles of KEYS_PER_TILE keys that start
at multiples of KEYS_PER_TILE, for tiles of ROW_TILE rows. Both products have one fixed shape whatever the
batch; a tile that a row does not see leaves its sums as they are: exp(0) = 1 rescales them and zeros are
added.
"""

from __future__ import annotations

import torch

from pageturner.kernels.batch_plan import RowGroup
from pageturner.kernels.gather_attention import scale_and_mask, sink_logits
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KeyOrder
from pageturner.kernels.torch_pool import read_tokens

KEYS_PER_TILE = 64
LOWEST = -1e30
"""Finite, so that a row that has seen nothing yet rescales by exp(0), not by exp(inf - inf)."""


def tile_attention(
    query: torch.Tensor, kv_layer: torch.Tensor, key_order: KeyOrder, group: RowGroup, spec: AttentionSpec
) -> torch.Tensor:
    """query [B, Hkv, G * ROW_TILE, D] -> the same shape."""
    pieces, num_kv_heads, rows, _ = query.shape
    block_size = kv_layer.shape[3]
    heads = rows // group.rows.shape[1]
    wide = query.float().flatten(0, 1)
    summed = torch.zeros_like(query, dtype=torch.float32)
    sinks = sink_logits(spec, num_kv_heads, rows)
    top = summed.new_full((pieces, num_kv_heads, rows, 1), LOWEST)
    total = torch.zeros_like(top)
    if sinks is not None:
        top, total = torch.maximum(top, sinks), torch.ones_like(top)

    offsets = torch.arange(KEYS_PER_TILE, device=query.device)
    num_keys = group.visible.shape[2]
    for start in range(0, num_keys, KEYS_PER_TILE):
        positions = (start + offsets).clamp(max=num_keys - 1)
        visible = group.visible[..., positions] & (start + offsets < num_keys)
        hidden = group.hidden[:, positions, None, None]
        blocks, offset = group.blocks[:, positions // block_size], positions % block_size
        # [B, keys, Hkv, D]. An unowned slot may hold NaN, and 0 * NaN is NaN: select before multiplying.
        keys = read_tokens(kv_layer[:, 0], key_order, blocks, offset).masked_fill(hidden, 0).float()
        values = read_tokens(kv_layer[:, 1], KeyOrder.PLAIN, blocks, offset).masked_fill(hidden, 0).float()

        scores = torch.bmm(wide, keys.permute(0, 2, 3, 1).flatten(0, 1).contiguous()).view(
            pieces, num_kv_heads, rows, KEYS_PER_TILE
        )
        logits = scale_and_mask(scores, visible.repeat(1, heads, 1)[:, None], spec)
        raised = torch.maximum(top, logits.amax(dim=-1, keepdim=True))
        shrink, weights = torch.exp(top - raised), torch.exp(logits - raised)
        added = torch.bmm(weights.flatten(0, 1), values.transpose(1, 2).flatten(0, 1).contiguous())
        total = total * shrink + _pairwise_sum(weights)
        summed = summed * shrink + added.view_as(summed)
        top = raised
    return (summed / total).to(query.dtype)


def _pairwise_sum(weights: torch.Tensor) -> torch.Tensor:
    """Sum over the last dimension (KEYS_PER_TILE, a power of two) by halving: one order at any shape."""
    while weights.shape[-1] > 1:
        low, high = weights.chunk(2, dim=-1)
        weights = low + high
    return weights
