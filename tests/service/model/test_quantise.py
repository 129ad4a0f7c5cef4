"""Float weights in groups of integers: how near, in what dtype, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch

from pageturner.service.errors import ModelError
from pageturner.service.model.quantise import GROUP, check_finite, quantise_int4, quantise_int8


def weight(scale: float = 0.05, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 3 * GROUP, generator=torch.Generator().manual_seed(1)) * scale


@pytest.mark.parametrize("scale", [0.05, 1e-9, 1e4])
def test_int8_is_within_half_a_step(scale: float) -> None:
    w = weight(scale)
    found = quantise_int8(w)
    steps = w.view(6, -1, GROUP).abs().amax(dim=-1) / 127
    errors = (found.dequantised() - w).view(6, -1, GROUP).abs().amax(dim=-1)
    # A scale rounded to a half moves the largest code by up to 127 * 2^-9 of a step.
    assert bool((errors <= 0.76 * steps).all())
    assert found.bits == 8
    assert found.offsets is None


def test_int4_beats_the_plain_range_in_squared_error() -> None:
    w = weight(rows=64)
    found = quantise_int4(w)
    groups = w.view(64, -1, GROUP)
    low, high = groups.amin(dim=-1, keepdim=True), groups.amax(dim=-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    error = (found.dequantised() - w).square().sum()
    assert found.bits == 4
    assert error < 0.97 * (plain - groups).square().sum()
    assert error > 0


def test_scales_are_halves_where_halves_hold_them() -> None:
    assert quantise_int8(weight()).scales.dtype is torch.float16
    assert quantise_int8(weight(1e-9)).scales.dtype is torch.float32
    assert quantise_int4(weight(1e9)).scales.dtype is torch.float32


@pytest.mark.parametrize("quantise", [quantise_int8, quantise_int4])
def test_groups_of_one_value_are_exact(quantise: object) -> None:
    assert callable(quantise)
    w = torch.zeros(2, 2 * GROUP)
    assert torch.equal(quantise(w).dequantised(), w)
    w[1, GROUP:] = 0.5
    assert torch.allclose(quantise(w).dequantised(), w, rtol=1e-3, atol=0)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_no_number_is_refused_by_name(value: float) -> None:
    w = weight()
    assert check_finite("a.weight", w) is w
    w[3, 3] = value
    with pytest.raises(ModelError, match=r"^a\.weight holds"):
        check_finite("a.weight", w)
