"""The kernels of adapters on what they may meet, for whatever runs them: the emulator, or a GPU."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pageturner.kernels.cuda.low_rank import CudaLowRankOps
from pageturner.kernels.cuda.runtime import Launcher
from pageturner.kernels.low_rank import AdapterRows, Factors, LowRank, ProductSizes
from pageturner.kernels.reference_low_rank import ReferenceLowRankOps

BF16, FP16 = torch.bfloat16, torch.float16
GUARD = 64
"""Elements beside each row of the output that must stay as they are."""
TOLERANCE = {BF16: 2e-2, FP16: 3e-3}
"""Of the largest output: both round A x, and the sum."""


@dataclass(frozen=True)
class LowRankCase:
    """ranks: of each adapter's parts, all 0 where it leaves the product as it is. of_row: an adapter for each
    row, -1 for none. unaligned: rows, outputs and sizes that no access of 16 bytes reads."""

    ranks: tuple[tuple[int, ...], ...]
    of_row: tuple[int, ...]
    sizes: tuple[int, ...] = (160, 64, 64)
    in_features: int = 288
    dtype: torch.dtype = BF16
    unaligned: bool = False

    def product(self) -> ProductSizes:
        return ProductSizes(self.sizes, self.in_features, 32)

    def factors(self) -> list[list[Factors | None]]:
        """As the dtype keeps them."""
        generator = torch.Generator().manual_seed(5)

        def normal(*shape: int) -> torch.Tensor:
            values: torch.Tensor = torch.randn(shape, generator=generator) / float(shape[-1]) ** 0.5
            return values.to(self.dtype).float()

        return [
            [
                Factors(normal(rank, self.in_features), normal(size, rank)) if rank else None
                for rank, size in zip(ranks, self.sizes, strict=True)
            ]
            for ranks in self.ranks
        ]

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows with NaN between them, and an output between guards."""
        generator = torch.Generator().manual_seed(7)
        lead = 3 if self.unaligned else 8
        wide = torch.randn(len(self.of_row), lead + self.in_features, generator=generator).to(self.dtype)
        wide[:, :lead] = math.nan
        beside = torch.randn(len(self.of_row), sum(self.sizes) + 2 * GUARD, generator=generator)
        return wide[:, lead:], beside.to(self.dtype)

    def adapters(self) -> AdapterRows:
        return AdapterRows(np.array(self.of_row, dtype=np.int32), len(self.ranks))


def added(
    launcher: Launcher, case: LowRankCase, some: Sequence[int] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(found, expected) outputs of all rows, or of some in that order; nothing is written beside them."""
    rows, wide = case.tensors()
    if some is not None:
        rows, wide = rows[list(some)], wide[list(some)]
        case = replace(case, of_row=tuple(case.of_row[row] for row in some))
    ops, reference = CudaLowRankOps(launcher, case.dtype), ReferenceLowRankOps()
    device = launcher.runtime.device
    before, expected = wide.clone(), wide[:, GUARD:-GUARD].float()
    wide = wide.to(device)
    parts, product, adapters = case.factors(), case.product(), case.adapters()
    prepared: list[LowRank | None] = [ops.prepare(each, product) for each in parts]
    ops.add(wide[:, GUARD:-GUARD], rows.to(device), adapters, prepared)
    reference.add(expected, rows.float(), adapters, [reference.prepare(each, product) for each in parts])
    found = wide.cpu()
    for guard in (slice(None, GUARD), slice(-GUARD, None)):
        assert torch.equal(found[:, guard].view(torch.int16), before[:, guard].view(torch.int16)), "outside"
    without = [row for row, of in enumerate(case.of_row) if of < 0 or not any(case.ranks[of])]
    assert torch.equal(found[without].view(torch.int16), before[without].view(torch.int16)), "other rows"
    return found[:, GUARD:-GUARD], expected


def check(launcher: Launcher, case: LowRankCase) -> None:
    """Against the definition."""
    found, expected = added(launcher, case)
    if not expected.numel():
        return
    allowed = TOLERANCE[case.dtype]
    torch.testing.assert_close(found.float(), expected, atol=allowed * float(expected.abs().max()), rtol=0)


def check_company(launcher: Launcher, case: LowRankCase) -> None:
    """A row's bits are the same alone, among others, and at any place of a piece."""
    whole, _ = added(launcher, case)
    for some in ([0], [len(whole) - 1], list(range(len(whole)))[::-1], [1, 0, 2]):
        found, _ = added(launcher, case, some)
        assert torch.equal(found.view(torch.int16), whole[some].view(torch.int16)), some


MIXED = LowRankCase(
    ((8, 8, 8), (16, 0, 5), (0, 0, 0), (40, 64, 33)), (0, -1, 1, 0, 3, 3, 2, -1, 1, 3, *[0] * 17, 2, 3)
)
CASES = {
    "mixed": MIXED,
    "mixed fp16": replace(MIXED, dtype=FP16),
    "unaligned": replace(MIXED, unaligned=True, sizes=(50, 33, 70), in_features=101),
    "one row": LowRankCase(((16, 16, 16),), (0,)),
    "one part, wide": LowRankCase(((16,), (8,)), (1, 0, 1), sizes=(576,), in_features=1536),
    "two parts": LowRankCase(((8, 16),), (0,) * 5, sizes=(160, 160)),
    "no adapter in use": LowRankCase(((8, 8, 8),), (-1, -1)),
    "more adapters than a launch has": LowRankCase(
        ((8, 0, 0),) * 70, (69, 0, 31, 32, 33, 64, -1, 5), sizes=(48, 16, 16), in_features=64
    ),
}
