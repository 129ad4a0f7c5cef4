"""The two KV pools, device and host, and the block traffic between them."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import finalize

import numpy as np
import torch

from pageturner.kernels import address_checks
from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import AttentionBatch, KvLayout
from pageturner.kernels.torch_pool import as_bytes
from pageturner.service.model.fences import Fences
from pageturner.service.model.pages import own_pages
from pageturner.service.model.pinned import Pinned
from pageturner.service.model.streams import Streams, streams_of
from pageturner.service.model.upload import upload

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pageturner.service.core.outputs import BlockCopies, BlockCopy


class HostPoolRefused(MemoryError):
    """The system has no memory for the pool of swapped blocks; the device's was had."""


class KvCache:
    """Device pool [num_blocks, ...] and host pool [num_host_blocks, ...] of one model (see kernels.layout).

    The host pool is a buffer of its own on the CPU too, pinned where the device is a GPU. Neither is
    initialised: a slot that was not written is not read, so the system hands out pages as they are used
    instead of gigabytes at the start. On a GPU swaps run beside the computation (see `fences`): who reads
    or writes the pool by other ways than `apply` says so to `await_copies` first.

    streams: the device's own by default. Raises ValueError for a negative size, a pool of no blocks, or a
    layout whose key order is not the one that `ops` wants, HostPoolRefused if the system refuses the host
    pool or it cannot be pinned, MemoryError if it refuses a CPU's pool, torch.OutOfMemoryError if a GPU does.
    """

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        num_host_blocks: int,
        ops: PagedOps,
        device: torch.device,
        streams: Streams | None = None,
    ) -> None:
        if num_blocks < 1 or num_host_blocks < 0:
            raise ValueError(
                f"{num_blocks} device and {num_host_blocks} host blocks; needed: at least 1 and 0"
            )
        if layout.key_order is not ops.key_order:
            raise ValueError(f"{layout.key_order} keys given, the {ops.name} operations want {ops.key_order}")
        self.layout = layout
        self.device = device
        shape, host_shape = layout.pool_shape(num_blocks), layout.pool_shape(num_host_blocks)
        if device.type != "cuda":
            # Attention reads pieces of few KiB, a block's stride apart, hence each from another page.
            self.pool = own_pages(shape, layout.dtype, huge=True)
        else:
            self.pool = torch.empty(shape, dtype=layout.dtype, device=device)
        try:
            self.host_pool = own_pages(host_shape, layout.dtype)
            if device.type == "cuda":
                # Unpin before the pages go back to the system, which would hand them out pinned. Not at the
                # end of the process: the driver may be gone by then.
                finalize(self, Pinned(self.host_pool).close).atexit = False
        except MemoryError as error:
            raise HostPoolRefused(str(error)) from error
        self.fences = Fences(streams or streams_of(device), num_blocks)
        self._ops = ops

    @property
    def num_blocks(self) -> int:
        """Blocks on the device."""
        return self.pool.shape[0]

    @property
    def num_host_blocks(self) -> int:
        """Blocks in host memory, for requests swapped out."""
        return self.host_pool.shape[0]

    def layer(self, index: int) -> torch.Tensor:
        """The blocks of one layer, a view: [num_blocks, 2, num_kv_heads, block_size, head_dim]."""
        return self.pool[:, index]

    def apply(self, copies: BlockCopies) -> None:
        """Clears, then swap-outs, then swap-ins, then copies; on a GPU all of them only enqueued.

        So a swap-in may land in a block that a swap-out of this step leaves, and a copy may read what a
        swap-in brought. Raises KernelArgumentError for an id outside its pool or a block written twice
        by one kind; then nothing has moved.
        """
        if not copies:
            return  # as in most steps
        swap_outs, swap_ins, moves = map(_pairs, (copies.swap_outs, copies.swap_ins, copies.copies))
        address_checks.check_copy(self.pool, [(block, block) for block in copies.clears])
        address_checks.check_transfer(self.pool, self.host_pool, swap_outs)
        address_checks.check_transfer(self.host_pool, self.pool, swap_ins)
        address_checks.check_copy(self.pool, moves)
        if copies.clears:
            self.fences.compute(copies.clears, lambda: self._clear(copies.clears))
        if swap_outs or swap_ins:
            swapped = [block for block, _ in swap_outs] + [block for _, block in swap_ins]
            self.fences.copy(swapped, lambda: self._swap(swap_outs, swap_ins))
        if moves:
            copied = [block for pair in moves for block in pair]
            self.fences.compute(copied, lambda: self._ops.copy_blocks(self.pool, moves))

    def await_copies(self, batch: AttentionBatch) -> None:
        """Before a forward of this batch is enqueued: let it find its blocks' swaps done."""
        if self.fences.num_events:
            assert batch.host is not None, "a batch for a GPU has its addresses on the host too"
            tables, num_blocks = batch.host.block_tables, -(-batch.host.seq_lens // self.layout.block_size)
            self.fences.touch(tables[np.arange(tables.shape[1]) < num_blocks[:, None]])

    def _clear(self, blocks: Sequence[int]) -> None:
        (ids,) = upload((np.array(blocks, dtype=np.int64),), self.device)
        as_bytes(self.pool).index_fill_(0, ids, 0)

    def _swap(self, outs: Sequence[tuple[int, int]], ins: Sequence[tuple[int, int]]) -> None:
        if outs:
            self._ops.transfer_blocks(self.pool, self.host_pool, outs)
        if ins:
            self._ops.transfer_blocks(self.host_pool, self.pool, ins)


def _pairs(copies: Sequence[BlockCopy]) -> list[tuple[int, int]]:
    return [(copy.source, copy.destination) for copy in copies]
