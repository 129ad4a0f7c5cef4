"""Blocks between a device's pool and the host's, in few copies however scattered the device's ids are."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter

import numpy as np
import torch

from pageturner.kernels import checks
from pageturner.kernels.block_copy import runs
from pageturner.kernels.cuda import row_grids, variants
from pageturner.kernels.cuda.arguments import PackBlocksArguments
from pageturner.kernels.cuda.device_plan import to_device
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.cuda.variants import Variant

Pairs = Sequence[tuple[int, int]]

DIRECT_BYTES = 256 * 1024
"""A run of so many bytes is copied as it lies: over the 50 GB/s of PCIe 5 it takes 5 us, and the host needs
no longer to ask for it. Shorter ones would leave the link waiting for the host."""
STAGING_BYTES = 64 * 1024 * 1024
"""What is packed at a time, so that a swap takes a bounded part of the device's memory."""

SOURCE, DESTINATION = 0, 1


def transfer_blocks(
    launcher: Launcher, source: torch.Tensor, destination: torch.Tensor, pairs: Pairs
) -> None:
    """`PagedOps.transfer_blocks`, enqueued on torch's current stream. Arguments are checked already.

    Runs of neighbours are copied one by one unless they are shorter than DIRECT_BYTES, on average, and
    packing the device's side leaves fewer: then its blocks are gathered into, or scattered from, one
    staging buffer, and only the host's side is cut into runs.
    """
    # Any order will do: destinations are distinct, and the pools are two.
    pairs = sorted(pairs)
    direct = runs(pairs)
    packed_side = _side_to_pack(source, destination, pairs, len(direct), launcher.runtime.device)
    if packed_side is None:
        for from_id, to_id, length in direct:
            _copy(source[from_id : from_id + length], destination[to_id : to_id + length])
    else:
        pairs = sorted(pairs, key=itemgetter(1 - packed_side))
        most = max(1, STAGING_BYTES // source[0].nbytes)
        for start in range(0, len(pairs), most):
            _transfer_packed(launcher, source, destination, pairs[start : start + most], packed_side)


def _side_to_pack(
    source: torch.Tensor, destination: torch.Tensor, pairs: Pairs, num_direct: int, device: torch.device
) -> int | None:
    """Which side's blocks to pack, if either's."""
    if not pairs or len(pairs) * source[0].nbytes >= num_direct * DIRECT_BYTES:
        return None
    best, fewest = None, num_direct
    for side, pool in ((SOURCE, source), (DESTINATION, destination)):
        if pool.device == device and pool.is_contiguous() and checks.is_vector_aligned(pool.flatten(1)):
            copies = len(_stretches(sorted(pair[1 - side] for pair in pairs)))
            if copies < fewest:
                best, fewest = side, copies
    return best


def _transfer_packed(
    launcher: Launcher, source: torch.Tensor, destination: torch.Tensor, pairs: Pairs, packed_side: int
) -> None:
    """pairs: in the order of the other side's ids, which is that of the blocks in the staging buffer."""
    pool = (source, destination)[packed_side]
    staging = pool.new_empty(len(pairs), *pool.shape[1:])
    stretches = _stretches([pair[1 - packed_side] for pair in pairs])
    ids = np.array([pair[packed_side] for pair in pairs], dtype=np.int32)
    if packed_side == SOURCE:
        _pack(launcher, variants.gather_blocks(), pool, staging, ids)
        for first_id, index, length in stretches:
            _copy(staging[index : index + length], destination[first_id : first_id + length])
    else:
        for first_id, index, length in stretches:
            _copy(source[first_id : first_id + length], staging[index : index + length])
        _pack(launcher, variants.scatter_blocks(), pool, staging, ids)


def _pack(
    launcher: Launcher,
    variant: Variant,
    pool: torch.Tensor,
    staging: torch.Tensor,
    ids: np.ndarray[tuple[int], np.dtype[np.int32]],
) -> None:
    block_ids = to_device(ids, pool.device)
    arguments = PackBlocksArguments(
        pool=pool.data_ptr(),
        packed=staging.data_ptr(),
        block_ids=block_ids.data_ptr(),
        block_bytes=staging[0].nbytes,
        num_ids=len(ids),
        num_blocks=pool.shape[0],
    )
    launcher.launch(variant, row_grids.gather_blocks(arguments), arguments)


def _stretches(ids: Sequence[int]) -> list[tuple[int, int, int]]:
    """(first id, its index, length) of each stretch of ids that rise by one."""
    return runs([(block, index) for index, block in enumerate(ids)])


def _copy(source: torch.Tensor, destination: torch.Tensor) -> None:
    destination.copy_(source, non_blocking=True)
