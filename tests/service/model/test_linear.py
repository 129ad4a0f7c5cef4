"""Packed products, and rows whose bits do not depend on the rest of the batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as torch's readers expect
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.errors import ModelError
from pageturner.service.model.linear import (
    ROW_TILES,
    Linear,
    LinearFactory,
    probe_row_invariance,
    product,
    tiles_of,
)

DTYPES = [torch.float32, torch.bfloat16]


@given(st.integers(1, 2000), st.sets(st.sampled_from(ROW_TILES), min_size=1))
def test_tiles_cover_all_rows_and_only_the_last_is_padded(num_rows: int, chosen: set[int]) -> None:
    row_tiles = sorted(chosen)
    sizes = tiles_of(num_rows, row_tiles)
    assert set(sizes) <= chosen
    assert sum(sizes[:-1]) < num_rows <= sum(sizes)


@pytest.mark.parametrize(
    ("num_rows", "sizes"),
    [(1, [1]), (3, [4]), (5, [8]), (17, [24]), (65, [64, 1]), (128, [128]), (130, [128, 2]), (520, [512, 8])],
)
def test_tiles_are_few_and_little_is_padded(num_rows: int, sizes: list[int]) -> None:
    assert tiles_of(num_rows, ROW_TILES) == sizes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_product_is_that_of_torch(dtype: torch.dtype, bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 24, generator=generator).to(dtype)
    offset = torch.randn(40, generator=generator).to(dtype) if bias else None
    x = torch.randn(5, 24, generator=generator).to(dtype)
    found = product(weight, offset)(x)
    tolerance = 1e-5 if dtype is torch.float32 else 5e-2
    torch.testing.assert_close(found, F.linear(x, weight, offset), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(96, 64), (576, 1536), (33, 17)])
def test_deterministic_rows_have_the_same_bits_in_every_batch(
    dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(2)
    linear = LinearFactory(deterministic=True)(torch.randn(shape, generator=generator).to(dtype))
    x = torch.randn(300, shape[1], generator=generator).to(dtype)
    alone = torch.cat([linear(row[None]) for row in x])
    for num_rows in (2, 3, 7, 8, 9, 31, 64, 65, 130, 300):
        start = 300 - num_rows
        assert torch.equal(linear(x[start:]), alone[start:])


def test_the_probe_drops_numbers_of_rows_that_change_bits() -> None:
    def fickle(x: torch.Tensor) -> torch.Tensor:
        return x + (1 if x.shape[0] == 16 else 0)

    tiles = probe_row_invariance(lambda weight, bias: fickle, (4, 4), torch.float32, (8, 16, 24))
    assert tiles == (8, 24)
    x = torch.randn(16, 4)
    assert torch.equal(Linear(fickle, tiles)(x), x)


def test_the_probe_sees_another_order_of_additions_behind_bfloat16() -> None:
    def make(weight: torch.Tensor, bias: torch.Tensor | None) -> Callable[[torch.Tensor], torch.Tensor]:
        def multiply(x: torch.Tensor) -> torch.Tensor:
            columns = range(x.shape[1])
            total = torch.zeros(x.shape[0], weight.shape[0])
            for k in reversed(columns) if x.shape[0] == 1 else columns:
                total = total + x[:, k, None].float() * weight[:, k].float()
            return total.to(x.dtype)

        return multiply

    assert probe_row_invariance(make, (8, 256), torch.bfloat16, (1, 2, 8)) == (2, 8)


def test_the_probe_refuses_rows_that_depend_on_their_place() -> None:
    def by_place(x: torch.Tensor) -> torch.Tensor:
        return x + torch.arange(x.shape[0])[:, None]

    with pytest.raises(ModelError, match="place"):
        probe_row_invariance(lambda weight, bias: by_place, (4, 4), torch.float32, (8, 16))
