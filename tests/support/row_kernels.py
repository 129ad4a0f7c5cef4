"""The least host of each kernel that works on rows or on whole blocks: tensors in, one launch, tensors out.

Nothing is checked here, so that tests can hand a kernel what the operations would refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import torch

from pageturner.kernels.cuda import row_grids, variants
from pageturner.kernels.cuda.arguments import (
    CopyBlocksArguments,
    KvLayer,
    KvWriteArguments,
    PackBlocksArguments,
    RmsNormArguments,
    SiluAndMulArguments,
)
from pageturner.kernels.cuda.block_moves import Move, chains_of
from pageturner.kernels.cuda.runtime import Launcher

GUARD = 64
"""Elements before and after an output that must stay as they are."""


class Guarded:
    """A 16-bit output that begins as NaN, between guards; aligned as an allocator's."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device) -> None:
        size = torch.Size(shape).numel()
        self._memory = torch.full((size + 2 * GUARD,), -1, dtype=torch.int16, device=device).view(dtype)
        self._before = self._memory.clone()
        self.tensor = self._memory[GUARD : GUARD + size].view(shape)

    def checked(self) -> torch.Tensor:
        for guard in (slice(None, GUARD), slice(-GUARD, None)):
            assert torch.equal(bits(self._memory[guard]), bits(self._before[guard])), "written outside"
        return self.tensor


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """16-bit elements as integers, so that NaNs compare."""
    return tensor.view(torch.int16)


def write_kv(
    launcher: Launcher, key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slots: torch.Tensor
) -> None:
    args = _kv_write_arguments(key, value, kv_layer, slots)
    launcher.launch(variants.write_kv(key.dtype), row_grids.write_kv(args), args)


def rope_and_write_kv(
    launcher: Launcher,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv_layer: torch.Tensor,
    slots: torch.Tensor,
) -> torch.Tensor:
    rotated = Guarded(*query.shape, dtype=query.dtype, device=query.device)
    args = _kv_write_arguments(key, value, kv_layer, slots)
    args.query, args.query_stride, args.num_heads = query.data_ptr(), query.stride(0), query.shape[1]
    args.rotated_query = rotated.tensor.data_ptr()
    args.cos, args.sin = cos.data_ptr(), sin.data_ptr()
    variant = variants.rope_and_write_kv(key.dtype, cos.dtype)
    launcher.launch(variant, row_grids.rope_and_write_kv(args), args)
    return rotated.checked()


def _kv_write_arguments(
    key: torch.Tensor, value: torch.Tensor, kv_layer: torch.Tensor, slots: torch.Tensor
) -> KvWriteArguments:
    num_blocks, _, num_kv_heads, block_size, head_dim = kv_layer.shape
    return KvWriteArguments(
        key=key.data_ptr(),
        value=value.data_ptr(),
        kv=KvLayer(
            keys=kv_layer[:, 0].data_ptr(),
            values=kv_layer[:, 1].data_ptr(),
            block_stride=kv_layer.stride(0),
            head_stride=kv_layer.stride(2),
            num_blocks=num_blocks,
            block_size_log2=block_size.bit_length() - 1,
        ),
        slot_mapping=slots.data_ptr(),
        key_stride=key.stride(0),
        value_stride=value.stride(0),
        num_rows=len(slots),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
    )


def rms_norm(
    launcher: Launcher,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """hidden [outer, inner, size], any strides of the first two; residual contiguous."""
    normed = Guarded(*hidden.shape, dtype=hidden.dtype, device=hidden.device)
    summed = Guarded(*hidden.shape, dtype=hidden.dtype, device=hidden.device)
    outer, inner, size = hidden.shape
    args = RmsNormArguments(
        hidden=hidden.data_ptr(),
        residual=None if residual is None else residual.data_ptr(),
        weight=weight.data_ptr(),
        normed=normed.tensor.data_ptr(),
        summed=None if residual is None else summed.tensor.data_ptr(),
        outer_stride=hidden.stride(0),
        inner_stride=hidden.stride(1),
        outer=outer,
        inner=inner,
        size=size,
        epsilon=eps,
    )
    launcher.launch(variants.rms_norm(hidden.dtype), row_grids.rms_norm(args), args)
    return normed.checked(), hidden if residual is None else summed.checked()


def silu_and_mul(launcher: Launcher, gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * size], any stride of rows."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    output = Guarded(num_rows, size, dtype=gate_up.dtype, device=gate_up.device)
    args = SiluAndMulArguments(
        gate_up=gate_up.data_ptr(),
        output=output.tensor.data_ptr(),
        gate_up_stride=gate_up.stride(0),
        num_rows=num_rows,
        size=size,
    )
    launcher.launch(variants.silu_and_mul(gate_up.dtype), row_grids.silu_and_mul(args), args)
    return output.checked()


def copy_blocks(
    launcher: Launcher, pool: torch.Tensor, pairs: Sequence[tuple[int, int]], most_rows: int | None = None
) -> None:
    """most_rows: of the grid, to have a block of threads walk several chains."""
    run_chains(launcher, pool, chains_of(pairs), most_rows)


def run_chains(
    launcher: Launcher, pool: torch.Tensor, chains: Sequence[Sequence[Move]], most_rows: int | None = None
) -> None:
    moves = torch.tensor(list(chain.from_iterable(chains)), dtype=torch.int32, device=pool.device)
    starts = torch.tensor([0, *map(len, chains)], device=pool.device).cumsum(0).int()
    args = CopyBlocksArguments(
        pool=pool.data_ptr(),
        moves=moves.data_ptr(),
        chain_starts=starts.data_ptr(),
        block_bytes=_block_bytes(pool),
        num_chains=len(chains),
        num_blocks=pool.shape[0],
    )
    groups, rows, _ = row_grids.copy_blocks(args)
    launcher.launch(variants.copy_blocks(), (groups, min(rows, most_rows or rows), 1), args)


def gather_blocks(
    launcher: Launcher, pool: torch.Tensor, ids: Sequence[int], most_rows: int | None = None
) -> torch.Tensor:
    packed = Guarded(len(ids), *pool.shape[1:], dtype=pool.dtype, device=pool.device)
    block_ids = torch.tensor(ids, dtype=torch.int32, device=pool.device)
    args = _pack_arguments(pool, packed.tensor, block_ids)
    groups, rows, _ = row_grids.gather_blocks(args)
    launcher.launch(variants.gather_blocks(), (groups, min(rows, most_rows or rows), 1), args)
    return packed.checked()


def scatter_blocks(
    launcher: Launcher,
    packed: torch.Tensor,
    pool: torch.Tensor,
    ids: Sequence[int],
    most_rows: int | None = None,
) -> None:
    block_ids = torch.tensor(ids, dtype=torch.int32, device=pool.device)
    args = _pack_arguments(pool, packed, block_ids)
    groups, rows, _ = row_grids.scatter_blocks(args)
    launcher.launch(variants.scatter_blocks(), (groups, min(rows, most_rows or rows), 1), args)


def _pack_arguments(pool: torch.Tensor, packed: torch.Tensor, ids: torch.Tensor) -> PackBlocksArguments:
    return PackBlocksArguments(
        pool=pool.data_ptr(),
        packed=packed.data_ptr(),
        block_ids=ids.data_ptr(),
        block_bytes=_block_bytes(pool),
        num_ids=len(ids),
        num_blocks=pool.shape[0],
    )


def _block_bytes(pool: torch.Tensor) -> int:
    return pool.stride(0) * pool.element_size()
