"""Keys and values into and out of a pool in torch, whatever it keeps: numbers as they are, or codes.

`part` is kv_layer[:, 0] or kv_layer[:, 1]: [num_blocks, num_kv_heads, block_size, ...].
"""

from __future__ import annotations

import torch

from pageturner.kernels.kv_codes import decode, encode
from pageturner.kernels.layout import KeyOrder, is_coded, key_tiles, split_codes


def as_bytes(pool: torch.Tensor) -> torch.Tensor:
    """A view that torch can index: it copies floats of 8 bits only whole. Other pools stay what they are."""
    return pool.view(torch.uint8) if pool.dtype is torch.float8_e4m3fn else pool


def write_tokens(
    part: torch.Tensor, key_order: KeyOrder, blocks: torch.Tensor, offsets: torch.Tensor, rows: torch.Tensor
) -> None:
    """rows [N, num_kv_heads, head_dim] to token offsets[i] of blocks[i]."""
    if is_coded(part.dtype):
        codes, scales = split_codes(part)
        rows, scales[blocks, :, offsets] = encode(rows, part.dtype)
        part, rows = as_bytes(codes), as_bytes(rows)
    tiles = key_tiles(part, key_order)
    tile = tiles.shape[3]
    tiles[blocks, :, offsets // tile, offsets % tile] = rows


def read_tokens(
    part: torch.Tensor, key_order: KeyOrder, blocks: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """blocks, offsets [...] -> [..., num_kv_heads, head_dim]; float32 out of codes."""
    scales = None
    if is_coded(part.dtype):
        dtype, (codes, every_scale) = part.dtype, split_codes(part)
        part, scales = as_bytes(codes), every_scale[blocks, :, offsets]
    tiles = key_tiles(part, key_order)
    tile = tiles.shape[3]
    found = tiles[blocks, :, offsets // tile, offsets % tile]
    return found if scales is None else decode(found.view(dtype), scales)


def read_blocks(part: torch.Tensor, key_order: KeyOrder, blocks: torch.Tensor) -> torch.Tensor:
    """blocks [N] -> [N, num_kv_heads, block_size / tile, tile, head_dim], token by token; float32 out of
    codes."""
    if not is_coded(part.dtype):
        return key_tiles(part, key_order).index_select(0, blocks)
    codes, scales = split_codes(part)
    tiles = key_tiles(as_bytes(codes), key_order).index_select(0, blocks).view(part.dtype)
    return decode(tiles, scales.index_select(0, blocks).view(tiles.shape[:-1]))
