"""The definition of quantised products itself: by hand, and against exact arithmetic."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from support.grouped import KINDS, Kind, grouped_weight

from pageturner.kernels.errors import KernelArgumentError
from pageturner.kernels.packed import pack
from pageturner.kernels.reference import (
    ReferenceOps,
    ReferenceQuantisedOps,
    fused_multiply_add,
    quantise_rows,
)

TINY = torch.finfo(torch.float32).tiny


def as_rows(rows: torch.Tensor, group: int) -> torch.Tensor:
    """float32 rows as they are worth once quantised."""
    quantised = quantise_rows(rows, group)
    return quantised.scales.repeat_interleave(group, 1) * quantised.codes


def test_a_group_is_quantised_by_its_largest_value() -> None:
    rows = torch.zeros(1, 64)
    rows[0, :6] = torch.tensor([-12.7, 0.25, 0.15, 0.05, 6.0, 12.7])
    quantised = quantise_rows(rows, 32)
    assert quantised.codes[0, :6].tolist() == [-127, 2, 2, 0, 60, 127]  # 2.5 and 0.5 go to the even one
    assert float(quantised.scales[0, 0]) == pytest.approx(0.1)
    assert quantised.sums.tolist() == [[64, 0]]
    assert float(quantised.scales[0, 1]) == 0


def test_quantising_errs_by_half_a_step() -> None:
    rows = torch.randn(7, 96, generator=torch.Generator().manual_seed(0))
    steps = quantise_rows(rows, 16).scales.repeat_interleave(16, 1)
    assert bool(((as_rows(rows, 16) - rows).abs() <= steps * 0.5001).all())


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_group_that_is_not_finite_has_the_scale_nan(bad: float) -> None:
    rows = torch.ones(2, 64)
    rows[1, 40] = bad
    quantised = quantise_rows(rows, 32)
    assert quantised.scales.isnan().tolist() == [[False, False], [False, True]]
    assert not quantised.codes[1, 32:].any()


def test_values_too_small_for_a_normal_scale_count_as_zero() -> None:
    for value, kept in ((TINY * 128, True), (TINY * 126, False), (1e-45, False)):
        quantised = quantise_rows(torch.full((1, 32), value), 32)
        assert bool(quantised.codes.all()) is bool(quantised.scales.all()) is kept


def nearest_float(value: Fraction) -> float:
    """The float32 nearest to it, ties to even, found by its definition."""
    guess = torch.tensor(float(value))  # through float64: at most one step off
    steps = [torch.nextafter(guess, torch.tensor(side)) for side in (-math.inf, math.inf)]
    return min(
        (float(candidate) for candidate in (guess, *steps)),
        key=lambda candidate: (
            abs(Fraction(candidate) - value),
            int(torch.tensor(candidate).view(torch.int32)) & 1,
        ),
    )


def test_fused_multiply_add_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 400, generator=generator)
    c = torch.randn(400, generator=generator) * 2.0 ** torch.randint(-30, 30, (400,), generator=generator)
    c[:100] = -(a * b)[:100]  # what is left is the rounding error of the product
    found = fused_multiply_add(a, b, c)
    for index in range(400):
        exact = Fraction(float(a[index])) * Fraction(float(b[index])) + Fraction(float(c[index]))
        assert float(found[index]) == nearest_float(exact)


@pytest.mark.parametrize("sign", [1, -1])
def test_fused_multiply_add_sees_what_float64_drops(sign: int) -> None:
    """The product is a tie between two float32; float64 has no room for the little that decides it."""
    a = torch.tensor([1 + 2.0**-12])
    c = torch.tensor([sign * 2.0**-60])
    wanted = 1 + 2.0**-11 + (2.0**-23 if sign > 0 else 0)
    assert float(fused_multiply_add(a, a, c)) == wanted
    assert float(fused_multiply_add(-a, a, -c)) == -wanted
    assert float((a.double() * a.double() + c.double()).float()) == 1 + 2.0**-11


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_linear_is_the_product_of_what_both_are_worth(kind: Kind) -> None:
    weight = grouped_weight(kind, 21, 96)
    rows = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    bias = torch.linspace(-1, 1, 21)
    found = ReferenceQuantisedOps().linear(rows, pack(weight, bias))
    wanted = as_rows(rows, kind.group).double() @ weight.dequantised().double().T + bias.double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)


def test_a_row_that_is_not_finite_gives_nan_and_changes_no_other() -> None:
    packed = pack(grouped_weight(KINDS["Q4_1"], 21, 96))
    rows = torch.randn(3, 96, generator=torch.Generator().manual_seed(0))
    clean = ReferenceQuantisedOps().linear(rows, packed)
    rows[1, 50] = math.inf
    found = ReferenceQuantisedOps().linear(rows, packed)
    assert bool(found[1].isnan().all())
    assert torch.equal(found[[0, 2]], clean[[0, 2]])


def test_no_rows_give_no_rows() -> None:
    packed = pack(grouped_weight(KINDS["Q4_1"], 21, 96))
    assert ReferenceQuantisedOps().linear(torch.zeros(0, 96), packed).shape == (0, 21)


def test_the_fused_forms_are_their_parts() -> None:
    ops, paged = ReferenceQuantisedOps(), ReferenceOps()
    gate_up = pack(grouped_weight(KINDS["Q4_1"], 128, 96))
    down = pack(grouped_weight(KINDS["Q4_1"], 96, 64, seed=1))
    hidden, residual = torch.randn(2, 4, 96, generator=torch.Generator().manual_seed(0))
    norm = torch.linspace(0.5, 1.5, 96)
    normed, summed = paged.rms_norm(hidden, norm, 1e-5, residual)
    gated = ops.linear(normed, gate_up)
    found, left = ops.norm_linear(hidden, norm, 1e-5, gate_up, residual)
    assert torch.equal(found, gated)
    assert torch.equal(left, summed)
    found, left = ops.norm_mlp(hidden, norm, 1e-5, gate_up, down, residual)
    assert torch.equal(found, ops.linear(paged.silu_and_mul(gated), down))
    assert torch.equal(left, summed)


def test_rows_of_other_inputs_and_dtypes_are_refused() -> None:
    packed = pack(grouped_weight(KINDS["Q4_1"], 21, 96))
    for rows in (torch.zeros(2, 64), torch.zeros(2, 96, dtype=torch.bfloat16), torch.zeros(96)):
        with pytest.raises(KernelArgumentError, match="rows is"):
            ReferenceQuantisedOps().linear(rows, packed)
