"""Low-rank parts of products, as adapters have them (Hu et al. 2021, "LoRA"): y += B (A x).

A product's outputs are up to PARTS parts one behind the other, such as q, k and v, each with an A and a B of
its own. A step holds rows of several adapters and of none; `AdapterRows` says which is whose.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from pageturner.kernels.checks import check_shape, describe
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.packed import TILE

PARTS = 3
"""Of one product, at most."""

Rows = np.ndarray[tuple[int], np.dtype[np.int32]]

LayerSizes = tuple[tuple[tuple[int, ...], int], ...]
"""Of the products of a layer, in the order of a forward: outputs of each part, and inputs."""


@dataclass(frozen=True, slots=True, eq=False)
class Factors:
    """One part: B A, [size, in]. a: float32 [rank, in]. b: float32 [size, rank], with the adapter's factor on
    it."""

    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """What one adapter adds to one product.

    a: [R, in], the A of each part, one below the other. b: for each part B as operations read it,
    None where the adapter leaves the part as it is. sizes: outputs of the parts.
    """

    a: torch.Tensor
    b: tuple[torch.Tensor | None, ...]
    ranks: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def rank(self) -> int:
        """R, of all parts together."""
        return sum(self.ranks)

    @property
    def in_features(self) -> int:
        return self.a.shape[1]

    @property
    def num_bytes(self) -> int:
        """Of its numbers, as they lie in memory."""
        return sum(part.numel() * part.element_size() for part in (self.a, *self.b) if part is not None)


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
            product is None or (product.sizes, product.in_features) == size
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
    """Adds low-rank parts to the rows of adapters; `reference.add_low_rank` defines the result.

    A row's bits depend on its own values and its adapter alone.
    """

    def prepare(self, parts: Sequence[Factors | None], sizes: Sequence[int]) -> LowRank | None:
        """As `add` reads it; None for one that has no part. sizes: outputs of each part.

        Raises KernelArgumentError for parts that do not fit each other.
        """
        ...

    def add(
        self,
        output: torch.Tensor,
        rows: torch.Tensor,
        adapters: AdapterRows,
        low_ranks: Sequence[LowRank | None],
    ) -> None:
        """output [T, out] += B (A rows), in place, for rows [T, in] with an adapter. low_ranks: by
        adapter."""
        ...


def check_factors(parts: Sequence[Factors | None], sizes: Sequence[int]) -> int | None:
    """The inputs of the parts, None where there is no part."""
    if len(parts) != len(sizes) or not 0 < len(parts) <= PARTS:
        raise KernelArgumentError(
            "parts", f"{len(parts)} of {len(sizes)} sizes", f"1 to {PARTS}, each with its size"
        )
    in_features = None
    for index, (part, size) in enumerate(zip(parts, sizes, strict=True)):
        if part is None:
            continue
        check_shape(f"parts[{index}].a", part.a, (None, in_features), torch.float32)
        in_features = part.a.shape[1]
        check_shape(f"parts[{index}].b", part.b, (size, part.a.shape[0]), torch.float32)
        if not part.a.shape[0]:
            raise KernelArgumentError(f"parts[{index}].a", describe(part.a), "a rank of 1 or more")
    return in_features


def check_add(
    output: torch.Tensor, rows: torch.Tensor, adapters: AdapterRows, low_ranks: Sequence[LowRank | None]
) -> None:
    """That all of them are of one product, and of one step."""
    check_shape("rows", rows, (len(adapters.of_row), None))
    check_shape("output", output, (len(adapters.of_row), None), rows.dtype)
    if len(low_ranks) != adapters.num_adapters:
        raise KernelArgumentError(
            "low_ranks", str(len(low_ranks)), f"{adapters.num_adapters}, one an adapter"
        )
    for index, low_rank in enumerate(low_ranks):
        if low_rank is None:
            continue
        found = (sum(low_rank.sizes), low_rank.in_features)
        if found != (output.shape[1], rows.shape[1]):
            wanted = f"[{output.shape[1]}, {rows.shape[1]}]"
            raise KernelArgumentError(f"low_ranks[{index}]", f"of {list(found)}", wanted)


def stacked(parts: Sequence[Factors | None]) -> torch.Tensor:
    """The A of all parts, one below the other."""
    return torch.cat([part.a for part in parts if part is not None]).contiguous()


def in_tiles(b: torch.Tensor) -> torch.Tensor:
    """float32 [out, rank] -> [tiles of TILE outputs, rank, TILE], filled up with zeros."""
    out, rank = b.shape
    filled = torch.nn.functional.pad(b, (0, 0, 0, -out % TILE))
    return filled.view(-1, TILE, rank).transpose(1, 2).contiguous()
