"""Attention in torch by gathering whole blocks; and the logits that both torch paths share."""

from __future__ import annotations

import torch

from pageturner.kernels.batch_plan import RowGroup
from pageturner.kernels.interface import AttentionSpec
from pageturner.kernels.layout import KeyOrder
from pageturner.kernels.torch_pool import read_blocks


def scale_and_mask(scores: torch.Tensor, visible: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """Scores q.k in float32 -> logits, -inf where not visible."""
    scores = scores * spec.scale
    if spec.logit_softcap is not None:
        scores = torch.tanh(scores / spec.logit_softcap) * spec.logit_softcap
    return scores.masked_fill(~visible, -torch.inf)


def sink_logits(spec: AttentionSpec, num_kv_heads: int, rows: int) -> torch.Tensor | None:
    """The sink of each packed row, [Hkv, rows, 1] with rows = G * n, or None."""
    if spec.sinks is None:
        return None
    group = spec.sinks.shape[0] // num_kv_heads
    return spec.sinks.view(num_kv_heads, group, 1).repeat_interleave(rows // group, dim=1)


def _softmax(scores: torch.Tensor, visible: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
    """float32 weights [B, Hkv, R, L]; a sink takes its share of the sum and has no value."""
    logits = scale_and_mask(scores, visible, spec)
    sinks = sink_logits(spec, scores.shape[1], scores.shape[2])
    if sinks is None:
        return logits.softmax(dim=-1)
    extended = torch.cat((logits, sinks.expand(*logits.shape[:-1], 1)), dim=-1)
    return extended.softmax(dim=-1)[..., :-1]


def gather_attention(
    query: torch.Tensor, kv_layer: torch.Tensor, key_order: KeyOrder, group: RowGroup, spec: AttentionSpec
) -> torch.Tensor:
    """query [B, Hkv, G * n, D] -> the same shape."""
    pieces, width = group.blocks.shape
    hidden = group.hidden[:, None, :, None]

    def gather(part: torch.Tensor, order: KeyOrder) -> torch.Tensor:
        """Keys or values [num_blocks, Hkv, ...] -> [B, Hkv, L, D], zero where no row looks.

        A slot that no sequence owns may hold NaN, and 0 * NaN is NaN: select before multiplying.
        """
        taken = read_blocks(part, order, group.blocks.flatten()).to(query.dtype)
        taken = taken.view(pieces, width, *taken.shape[1:])
        return taken.transpose(1, 2).flatten(2, 4).masked_fill(hidden, 0)

    keys = gather(kv_layer[:, 0], key_order)
    values = gather(kv_layer[:, 1], KeyOrder.PLAIN)
    heads = query.shape[2] // group.visible.shape[1]
    visible = group.visible.repeat(1, heads, 1)[:, None]
    if spec.logit_softcap is None and spec.sinks is None:
        return torch.nn.functional.scaled_dot_product_attention(
            query, keys, values, attn_mask=visible, scale=spec.scale
        )
    weights = _softmax(query.float() @ keys.float().transpose(-1, -2), visible, spec)
    return (weights @ values.float()).to(query.dtype)
