"""The one layout of the KV cache, and the metadata that addresses it.

    pool   [num_blocks][num_layers][2][num_kv_heads][head ...]
            |           |           |  |             `- block_size tokens of head_dim each
            |           |           |  `- one kv head's part
            |           |           `- 0: keys, 1: values
            |           `- a layer of the pool is a strided view
            `- one block is one contiguous run of bytes over all layers

so that a swap or a copy-on-write of a block is one copy. Inside a head's part, values are always
[block_size][head_dim]; keys are

    PLAIN    [block_size][head_dim]
    TILED16  [block_size / 16][head_dim][16]   one 512-bit register holds one dim of 16 tokens

A pool of codes (int8, float8_e4m3fn: kv_codes.py) keeps a number in a byte, and a scale for each token of a
head. There a head's part is

    [block_size * head_dim] codes, in the order above    [block_size] scales in bfloat16, token by token

so that a token is written without reading another, and scales go wherever their block goes. By its shape,
such a pool has head_dim + 2 bytes a token.

`slot = block_id * block_size + offset` names a token's place in every layer; slot -1 is "do not write".
A slot that no sequence owns may hold anything, NaN too: readers select, they never multiply by zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

KEY_TILE = 16
CODE_DTYPES = (torch.int8, torch.float8_e4m3fn)
"""Of pools of codes."""
_SCALE_BYTES = 2  # of bfloat16


class KeyOrder(Enum):
    """How the keys of one block and kv head are ordered."""

    PLAIN = "plain"
    TILED16 = "tiled16"


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape of one model's KV cache.

    num_kv_heads and head_dim are the same for every layer. Raises ValueError for sizes below 1, a tiled
    block that 16 does not divide, or codes of a head so odd that the scales behind them would not be aligned.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    key_order: KeyOrder = KeyOrder.PLAIN

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_kv_heads", "head_dim", "block_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, at least 1 is needed")
        if self.key_order is KeyOrder.TILED16 and self.block_size % KEY_TILE:
            raise ValueError(f"block_size {self.block_size} is not a multiple of {KEY_TILE}")
        if is_coded(self.dtype) and self.block_size * self.head_dim % _SCALE_BYTES:
            odd = f"{self.block_size} tokens of head_dim {self.head_dim}"
            raise ValueError(f"{odd} have an odd count of codes, and scales begin at even addresses")

    @property
    def head_elements(self) -> int:
        """Elements of one kv head's part of a block: block_size tokens, with their scales."""
        return self.block_size * token_elements(self.head_dim, self.dtype)

    @property
    def block_elements(self) -> int:
        """Elements of one block over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_elements

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.block_elements * self.dtype.itemsize

    def pool_shape(self, num_blocks: int) -> tuple[int, int, int, int, int, int]:
        """[num_blocks, num_layers, 2, num_kv_heads, block_size, elements of a token]; inside, keys are
        TILED16 and codes lie before scales, if so."""
        token = token_elements(self.head_dim, self.dtype)
        return (num_blocks, self.num_layers, 2, self.num_kv_heads, self.block_size, token)


def is_coded(dtype: torch.dtype) -> bool:
    """Whether a pool of this dtype holds codes and scales."""
    return dtype in CODE_DTYPES


def token_elements(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a token's key, or its value, takes of a kv head's part: a pool's last extent."""
    return head_dim + _SCALE_BYTES if is_coded(dtype) else head_dim


def head_dim_of(pool: torch.Tensor) -> int:
    """head_dim of a pool, or of a part of one with all of its last dimension."""
    return pool.shape[-1] - _SCALE_BYTES if is_coded(pool.dtype) else pool.shape[-1]


def split_codes(part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a pool of codes, or some heads of one, [..., block_size, head_dim + 2]: views of its codes
    [..., block_size, head_dim], in the pool's order, and of its scales, bfloat16 [..., block_size]."""
    block_size, head_dim = part.shape[-2], head_dim_of(part)
    flat, num_codes = part.flatten(-2), block_size * head_dim
    codes = flat[..., :num_codes].view(*part.shape[:-2], block_size, head_dim)
    return codes, flat[..., num_codes:].view(torch.bfloat16)


def key_tiles(keys: torch.Tensor, key_order: KeyOrder) -> torch.Tensor:
    """A view of keys [..., block_size, head_dim] as [..., tiles, tile, head_dim], token by token.

    Token `offset` of a block is [offset // tile, offset % tile] whatever the order in memory; writes
    through the view reach the keys.
    """
    if key_order is KeyOrder.PLAIN:
        return keys.unsqueeze(-3)
    block_size, head_dim = keys.shape[-2:]
    tiles = (block_size // KEY_TILE, KEY_TILE, head_dim)
    strides = (KEY_TILE * head_dim, 1, KEY_TILE)
    return keys.as_strided((*keys.shape[:-2], *tiles), (*keys.stride()[:-2], *strides))


@dataclass(frozen=True, slots=True)
class HostBatch:
    """The addresses of an AttentionBatch as NumPy arrays, equal to its tensors of the same names.

    They let a GPU's backend check and plan a step without waiting for the device.
    """

    query_start_loc: np.ndarray[tuple[int], np.dtype[np.int32]]
    seq_lens: np.ndarray[tuple[int], np.dtype[np.int32]]
    block_tables: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    slot_mapping: np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Which rows attend to what, for one step, every layer alike. T rows of S sequences, flat.

    Its tensors must not change once an operation has seen it: backends check and plan once a batch.
    """

    query_start_loc: torch.Tensor
    """int32 [S + 1], rows of sequence s are [query_start_loc[s], query_start_loc[s+1])."""
    seq_lens: torch.Tensor
    """int32 [S], keys of sequence s including this step's own rows; row r of n rows is at position
    seq_lens[s] - n + r and sees keys 0 .. that position."""
    block_tables: torch.Tensor
    """int32 [S, max_blocks], padded with 0 (a block that is never read beyond seq_lens)."""
    slot_mapping: torch.Tensor
    """int64 [T], where each row's K and V go, each to a slot of its own; -1 writes nothing."""
    positions: torch.Tensor
    """int64 [T], each row's position in its sequence."""
    max_query_len: int
    """The most rows of a sequence, as a Python int."""
    max_seq_len: int
    """The largest of seq_lens, as a Python int."""
    host: HostBatch | None = None
    """The same addresses on the host, where the maker of the batch had them there anyway."""

    @property
    def num_sequences(self) -> int:
        """S, the sequences of the step."""
        return int(self.seq_lens.shape[0])
