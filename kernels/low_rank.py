"""Low-rank parts of products, as adapters have them (Hu et al. 2021, "LoRA"): y += B (A x).

A product's outputs are up to PARTS parts one behind the other, such as q, k and v, each with an A and a B of
its own. A step holds rows of several adapters and of none; `AdapterRows` says which is whose.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

import numpy as np
import torch

from pageturner.kernels.checks import check_shape, describe
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.packed import TILE, PackedWeight

PARTS = 3
"""Of one product, at most."""

Rows = np.ndarray[tuple[int], np.dtype[np.int32]]


class ProductSizes(NamedTuple):
    """Of one product of a layer. sizes: outputs of each part. group: inputs that share a scale where its rows
    are quantised."""

    sizes: tuple[int, ...]
    in_features: int
    group: int


LayerSizes = tuple[ProductSizes, ...]
"""Of the products of a layer, in the order of a forward."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One part: B A, [size, in]. a: float32 [rank, in]. b: float32 [size, rank], with the adapter's factor on
    it."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank(ABC):
    """What one adapter adds to one product, as the operations that prepared it read it. ranks, sizes: of its
    parts; a part of rank 0 it leaves as it is."""

    ranks: tuple[int, ...]
    sizes: tuple[int, ...]
    in_features: int

    @property
    def rank(self) -> int:
        """Of all parts together."""
        return sum(self.ranks)

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Of its numbers, as they lie in memory."""

    def fits(self, sizes: ProductSizes) -> bool:
        """Whether it is of a product of these sizes."""
        return (self.sizes, self.in_features) == (sizes.sizes, sizes.in_features)


@dataclass(frozen=True, slots=True, eq=False)
class FloatLowRank(LowRank):
    """In floats. a: [R, in], the A of each part, one below the other. b: for each part B as operations read
    it, None where the rank is 0."""

    a: torch.Tensor
    b: tuple[torch.Tensor | None, ...]

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.a, *self.b) if part is not None)


@dataclass(frozen=True, slots=True, eq=False)
class PackedLowRank(LowRank):
    """In groups of integers of 8 bits; `packed_low_rank` makes it. a: [R, in] in the groups of the product's
    rows. b: for each part [size, rank], in groups of `group` ranks, None where the rank is 0."""

    a: PackedWeight
    b: tuple[PackedWeight | None, ...]
    group: int

    @property
    def num_bytes(self) -> int:
        return sum(part.buffer.numel() for part in (self.a, *self.b) if part is not None)

    def fits(self, sizes: ProductSizes) -> bool:
        return LowRank.fits(self, sizes) and self.a.layout.group == sizes.group


@dataclass(frozen=True, slots=True, eq=False)
class LayerLowRank:
    """What one adapter adds to one layer; None where it leaves a product as it is."""

    qkv: LowRank | None = None
    out: LowRank | None = None
    gate_up: LowRank | None = None
    down: LowRank | None = None

    def products(self) -> tuple[LowRank | None, ...]:
        """In the order of a forward."""
        return self.qkv, self.out, self.gate_up, self.down

    def fits(self, sizes: LayerSizes) -> bool:
        """Whether its products have these sizes."""
        return all(
            product is None or product.fits(size)
            for product, size in zip(self.products(), sizes, strict=True)
        )


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class AdapterRows:
    """of_row: int32 [T], which of `num_adapters` each row of a step has; -1 for none.

    Raises KernelArgumentError for any other.
    """

    of_row: Rows
    num_adapters: int

    def __post_init__(self) -> None:
        low, high = int(self.of_row.min(initial=-1)), int(self.of_row.max(initial=-1))
        if self.of_row.ndim != 1 or self.of_row.dtype != np.int32 or low < -1 or high >= self.num_adapters:
            raise KernelArgumentError(
                "of_row",
                f"{self.of_row.dtype} of {low} to {high}",
                f"int32[T] of -1 to {self.num_adapters - 1}",
            )

    def rows_of(self, adapter: int) -> Rows:
        """In ascending order."""
        return np.flatnonzero(self.of_row == adapter).astype(np.int32)


class LowRankOps(Protocol):
    """Adds low-rank parts to the rows of adapters; `reference_low_rank.py` defines the result, of floats and
    of packed factors.

    A row's bits depend on its own values and its adapter alone.
    """

    def prepare(self, parts: Sequence[Factors | None], sizes: ProductSizes) -> LowRank | None:
        """As `add` reads it; None for one that has no part.

        Raises KernelArgumentError for parts that do not fit each other, or the product.
        """
        ...

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        """output [T, out] += B (A rows), in place, for rows [T, in] with an adapter. low_ranks: by adapter,
        as these operations prepared them."""
        ...


@runtime_checkable
class LowRankBackend(Protocol):
    """A backend of `PagedOps` that has operations of its own for low-rank parts."""

    def low_rank_ops(self, dtype: torch.dtype) -> LowRankOps:
        """For rows of that dtype."""
        ...


def check_factors(parts: Sequence[Factors | None], sizes: ProductSizes) -> bool:
    """That the parts are the product's; whether there is one."""
    if len(parts) != len(sizes.sizes) or not 0 < len(parts) <= PARTS:
        raise KernelArgumentError(
            "parts", f"{len(parts)} of {len(sizes.sizes)} sizes", f"1 to {PARTS}, each with its size"
        )
    for index, (part, size) in enumerate(zip(parts, sizes.sizes, strict=True)):
        if part is None:
            continue
        check_shape(f"parts[{index}].a", part.a, (None, sizes.in_features), torch.float32)
        check_shape(f"parts[{index}].b", part.b, (size, part.a.shape[0]), torch.float32)
        if not part.a.shape[0]:
            raise KernelArgumentError(f"parts[{index}].a", describe(part.a), "a rank of 1 or more")
    return any(part is not None for part in parts)


_Kind = TypeVar("_Kind", bound=LowRank)


def check_add(
    output: torch.Tensor,
    rows: torch.Tensor,
    adapters: AdapterRows,
    low_ranks: Sequence[LowRank | None],
    kind: type[_Kind],
) -> Sequence[_Kind | None]:
    """low_ranks, of which all are of one product, of this kind and of one step."""
    check_shape("rows", rows, (len(adapters.of_row), None))
    check_shape("output", output, (len(adapters.of_row), None), rows.dtype)
    if len(low_ranks) != adapters.num_adapters:
        raise KernelArgumentError(
            "low_ranks", str(len(low_ranks)), f"{adapters.num_adapters}, one an adapter"
        )
    found: list[_Kind | None] = []
    for index, low_rank in enumerate(low_ranks):
        if low_rank is None:
            found.append(None)
            continue
        if not isinstance(low_rank, kind):
            raise KernelArgumentError(f"low_ranks[{index}]", type(low_rank).__name__, kind.__name__)
        shape = (sum(low_rank.sizes), low_rank.in_features)
        if shape != (output.shape[1], rows.shape[1]):
            wanted = f"[{output.shape[1]}, {rows.shape[1]}]"
            raise KernelArgumentError(f"low_ranks[{index}]", f"of {list(shape)}", wanted)
        found.append(low_rank)
    return found


def ranks_of(parts: Sequence[Factors | None]) -> tuple[int, ...]:
    """Of each part, 0 where there is none."""
    return tuple(0 if part is None else part.a.shape[0] for part in parts)


def stacked(parts: Sequence[Factors | None]) -> torch.Tensor:
    """The A of all parts, one below the other."""
    return torch.cat([part.a for part in parts if part is not None]).contiguous()


def in_tiles(b: torch.Tensor) -> torch.Tensor:
    """float32 [out, rank] -> [tiles of TILE outputs, rank, TILE], filled up with zeros."""
    out, rank = b.shape
    filled = torch.nn.functional.pad(b, (0, 0, 0, -out % TILE))
    return filled.view(-1, TILE, rank).transpose(1, 2).contiguous()
