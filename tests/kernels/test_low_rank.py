"""Low-rank parts of adapters: every implementation against the definition, and a row's bits whatever is
beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from support.ops import cpu_library

from pageturner.kernels.cpu.low_rank import STRUCTURES, CpuLowRankOps
from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.low_rank import AdapterRows, Factors, LowRankOps, ProductSizes
from pageturner.kernels.packed_low_rank import packed_low_rank
from pageturner.kernels.reference_low_rank import ReferenceLowRankOps
from pageturner.kernels.torch_low_rank import TorchLowRankOps

IMPLEMENTATIONS: dict[str, Callable[[torch.dtype], LowRankOps]] = {
    "cpu": lambda dtype: CpuLowRankOps(cpu_library()),
    "torch": TorchLowRankOps,
}
SIZES = (40, 16, 24)
IN_FEATURES = 53
"""No multiple of sixteen, as a model's may be where no product is quantised."""
PRODUCT = ProductSizes(SIZES, IN_FEATURES, 32)


def factors(seed: int, ranks: Sequence[int], sizes: Sequence[int] = SIZES) -> list[Factors | None]:
    generator = torch.Generator().manual_seed(seed)
    return [
        Factors(
            torch.randn(rank, IN_FEATURES, generator=generator), torch.randn(size, rank, generator=generator)
        )
        if rank
        else None
        for rank, size in zip(ranks, sizes, strict=True)
    ]


ADAPTERS = [factors(1, (4, 4, 4)), factors(2, (9, 0, 3)), factors(3, (0, 17, 0))]
"""The last leaves some parts as they are; ranks that four does not divide."""


def of_row(*adapters: int) -> AdapterRows:
    return AdapterRows(np.array(adapters, dtype=np.int32), len(ADAPTERS))


def rows_of(count: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    rows = torch.randn(count, IN_FEATURES, generator=generator).to(dtype)
    return rows, torch.randn(count, sum(SIZES), generator=generator).to(dtype)


def added(ops: LowRankOps, rows: torch.Tensor, output: torch.Tensor, adapters: AdapterRows) -> torch.Tensor:
    output = output.clone()
    ops.add(output, rows, adapters, [ops.prepare(parts, PRODUCT) for parts in ADAPTERS])
    return output


MIXES = [
    (0,),
    (-1, -1, -1),
    (0, -1, 1, 0, 2, 2, -1, 1, 1, 0, 0, 0, 2),
    (1,) * 40,
    tuple(index % 4 - 1 for index in range(100)),
]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("mix", MIXES, ids=len)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_what_the_definition_says(name: str, mix: tuple[int, ...], dtype: torch.dtype) -> None:
    rows, output = rows_of(len(mix), dtype)
    adapters = of_row(*mix)
    expected = added(ReferenceLowRankOps(), rows, output, adapters)
    found = added(IMPLEMENTATIONS[name](dtype), rows, output, adapters)
    # In bfloat16 torch keeps B A x in it between the two products.
    allowed = 2e-2 if dtype is torch.bfloat16 else 1e-5
    assert torch.allclose(found.float(), expected.float(), rtol=allowed, atol=allowed * 20)
    plain = np.flatnonzero(adapters.of_row < 0)
    assert torch.equal(found[plain], output[plain])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_row_has_its_bits_whatever_is_beside_it(name: str) -> None:
    ops = IMPLEMENTATIONS[name](torch.float32)
    rows, output = rows_of(100)
    mix = MIXES[-1]
    together = added(ops, rows, output, of_row(*mix))
    for row in range(0, 100, 7):
        alone = added(ops, rows[row : row + 1], output[row : row + 1], of_row(mix[row]))
        assert torch.equal(alone[0], together[row]), row
    half = added(ops, rows[30:80], output[30:80], of_row(*mix[30:80]))
    assert torch.equal(half, together[30:80])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_may_be_strided_and_none_of_a_product_s_adapters_there(name: str) -> None:
    ops = IMPLEMENTATIONS[name](torch.float32)
    wide = torch.randn(6, 2 * IN_FEATURES)
    rows, output = wide[:, :IN_FEATURES], torch.zeros(6, 2 * sum(SIZES))
    adapters = of_row(0, 0, 1, -1, 1, 1)
    prepared = [ops.prepare(ADAPTERS[0], PRODUCT), None, None]
    ops.add(output[:, : sum(SIZES)], rows, adapters, prepared)
    expected = added(ReferenceLowRankOps(), rows, output[:, : sum(SIZES)] * 0, of_row(0, 0, -1, -1, -1, -1))
    assert torch.allclose(output[:, : sum(SIZES)], expected, rtol=1e-2, atol=1e-4)
    assert not output[:, sum(SIZES) :].any()
    assert ops.prepare([None, None, None], PRODUCT) is None
    ops.add(output[:, : sum(SIZES)], rows, adapters, [None, None, None])


def test_what_does_not_fit_is_refused() -> None:
    ops = CpuLowRankOps(cpu_library())
    rows, output = rows_of(2)
    prepared = [ops.prepare(parts, PRODUCT) for parts in ADAPTERS]
    with pytest.raises(KernelArgumentError, match="of_row"):
        of_row(0, 3)
    with pytest.raises(KernelArgumentError, match="of_row"):
        of_row(-2)
    with pytest.raises(KernelArgumentError, match="low_ranks"):
        ops.add(output, rows, of_row(0, 0), prepared[:2])
    with pytest.raises(KernelArgumentError, match=r"low_ranks\[0\]"):
        ops.add(output[:, 1:], rows, of_row(0, 0), prepared)
    with pytest.raises(KernelArgumentError, match="rows"):
        ops.add(output, rows, of_row(0, 0, 0), prepared)
    with pytest.raises(KernelArgumentError, match=r"parts\[1\].b"):
        ops.prepare(factors(1, (1, 2, 3), (40, 17, 24)), PRODUCT)
    with pytest.raises(KernelArgumentError, match="rows"):
        ops.add(output.half(), rows.half(), of_row(0, 0), prepared)
    packed = packed_low_rank([Factors(torch.ones(2, 32), torch.ones(80, 2))], ProductSizes((80,), 32, 32))
    with pytest.raises(KernelArgumentError, match=r"low_ranks\[0\] is PackedLowRank"):
        ops.add(output, torch.zeros(2, 32), of_row(0, 0), [packed, None, None])


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_size_that_cpp_gives_them(name: str) -> None:
    size = getattr(cpu_library(), f"sizeof_{name}_args")
    size.restype = ctypes.c_int64
    assert size() == ctypes.sizeof(STRUCTURES[name])
