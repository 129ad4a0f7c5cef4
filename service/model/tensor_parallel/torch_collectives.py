"""`Collectives` by torch.distributed: NCCL between GPUs, gloo between processes on CPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined] # torch leaves it out of what it exports
from torch.distributed.distributed_c10d import _set_pg_timeout

from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel.collectives import add_in_order

TWO_STEP_BYTES = 256 << 10
"""From so many bytes on, each rank adds up its share of a tensor and hands that on. Below it everyone adds up
everything: one exchange in place of two, which is what a small one costs."""

CONNECTING = timedelta(seconds=30)
"""For ranks that have all come to connect: torch waits so long for one that was lost in that moment."""

_Gather = Callable[[torch.Tensor, torch.Tensor], object]


def open_collectives(
    device: torch.device, store: Store, rank: int, size: int, timeout: timedelta
) -> TorchCollectives:
    """Connect with the other ranks, which have all come, by the store. timeout: of each operation.

    torch has one default group in a process, and this is it. Raises RankLost where ranks don't connect.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    connecting = min(timeout, CONNECTING)
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=connecting)
        if timeout > connecting:
            _set_pg_timeout(timeout)
    except RuntimeError as error:
        raise RankLost(f"rank {rank} of {size} does not meet the others: {_first_line(error)}") from error
    return TorchCollectives(rank, size)


class TorchCollectives:
    """Over torch's default process group; see `open_collectives`.

    two_step_bytes: as TWO_STEP_BYTES, for tests; sums have the same bits either way.
    """

    def __init__(self, rank: int, size: int, two_step_bytes: int = TWO_STEP_BYTES) -> None:
        self.rank, self.size = rank, size
        self._two_step_bytes = two_step_bytes
        # Renamed in torch 2.13, where the old name warns.
        self._gather: _Gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

    def all_reduce(self, tensor: torch.Tensor) -> None:
        if not tensor.numel():
            return
        # Of two ranks each would have to send the same bytes in two steps as in one.
        if self.size > 2 and tensor.numel() * tensor.element_size() >= self._two_step_bytes:
            self._all_reduce_in_two_steps(tensor)
        else:
            add_in_order(self.all_gather(tensor), tensor)

    def _all_reduce_in_two_steps(self, tensor: torch.Tensor) -> None:
        """Each rank adds up its share of the elements, and all gather the shares."""
        flat = tensor.reshape(-1)
        share = -(-flat.numel() // self.size)
        padded = torch.nn.functional.pad(flat, (0, share * self.size - flat.numel()))
        parts = torch.empty_like(padded)
        with self._no_rank_lost():
            dist.all_to_all_single(_bytes(parts), _bytes(padded))
        total = torch.empty_like(padded[:share])
        add_in_order(parts.view(self.size, share).unbind(), total)
        with self._no_rank_lost():
            self._gather(_bytes(padded), _bytes(total))
        tensor.copy_(padded[: flat.numel()].view(tensor.shape))

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        if not tensor.numel():
            return (tensor,) * self.size
        gathered = tensor.new_empty(self.size, *tensor.shape)
        sent = _bytes(tensor.contiguous())
        with self._no_rank_lost():
            self._gather(_bytes(gathered), sent)
        return gathered.unbind()

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        whole = tensor.contiguous()
        sent = _bytes(whole)
        with self._no_rank_lost():
            dist.broadcast(sent, source)
        if whole is not tensor:
            tensor.copy_(whole)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _no_rank_lost(self) -> Iterator[None]:
        """torch's errors in ours. (Of NCCL's, torch's own watchdog ends the process.)"""
        try:
            yield
        except RuntimeError as error:
            raise RankLost(f"rank {self.rank} has lost another: {_first_line(error)}") from error


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as what travels: not every backend has every dtype."""
    return tensor.view(-1).view(torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
