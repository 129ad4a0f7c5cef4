"""What ranks say to each other within a forward: the seam between the sharded model and how bytes travel.

Every rank calls the same operations in the same order with the same shapes. Sums are added in the order of
ranks, in float32, and rounded once: each rank gets the same bits, and a row's bits do not depend on the
rows beside it. (The rings and trees of an ordinary all-reduce add in an order that hangs on where a number
lies in the tensor, hence on the batch.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch.nn.functional import pad


class Collectives(Protocol):
    """Of one rank, called by the one thread that computes.

    Each raises RankLost if another rank is gone or does not answer in time. Nothing can be computed after
    that: what the tensors hold is undefined.
    """

    @property
    def rank(self) -> int:
        """From 0; the scheduler's is 0."""
        ...

    @property
    def size(self) -> int:
        """How many ranks there are."""
        ...

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In place, the sum of all ranks' tensors."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every rank's tensor, all of one shape, in the order of ranks."""
        ...

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """In place, what the rank `source` has."""
        ...

    def close(self) -> None:
        """The last call. Waits for no other rank."""
        ...


class Alone:
    """`Collectives` of a model that is whole on one rank."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """The sum of one."""

    def all_gather(self, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        return (tensor,)

    def broadcast(self, tensor: torch.Tensor, source: int = 0) -> None:
        """It is there already."""

    def close(self) -> None:
        """There is nothing to let go of."""


ALONE = Alone()


def add_in_order(parts: Sequence[torch.Tensor], total: torch.Tensor) -> None:
    """total = the sum of the parts, first to last, in float32 if that is wider, rounded once."""
    if len(parts) == 1:
        total.copy_(parts[0])
        return
    wide = torch.promote_types(total.dtype, torch.float32) if total.is_floating_point() else total.dtype
    first, second, *others = (part.to(wide) for part in parts)
    sums = torch.add(first, second, out=total) if total.dtype is wide else first + second
    for part in others:
        sums += part
    if sums is not total:
        total.copy_(sums)


def gather_columns(collectives: Collectives, columns: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """All ranks' columns side by side: [..., width of this rank] -> [..., sum of widths]."""
    padded = pad(columns, (0, max(widths) - columns.shape[-1]))  # what is gathered has one shape
    parts = collectives.all_gather(padded)
    return torch.cat([part[..., :width] for part, width in zip(parts, widths, strict=True)], dim=-1)
