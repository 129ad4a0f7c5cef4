"""The coefficients are the best of all that are not below 0."""

from __future__ import annotations

import random

import pytest

from pageturner.service.simulator.least_squares import nonnegative_least_squares


@pytest.mark.fault("L")
@pytest.mark.parametrize("seed", range(200))
def test_no_coefficient_at_0_would_better_the_fit_by_growing(seed: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: at the best x, the error falls in no direction allowed.

    Columns that grow together are those on which striking one out for good goes wrong.
    """
    rng = random.Random(seed)
    rows = [
        [1.0, n := rng.uniform(0, 4), *(n + rng.uniform(0, most) for most in (0.5, 5, 1))] for _ in range(8)
    ]
    targets = [rng.gauss(1, 1) for _ in rows]
    x = nonnegative_least_squares(rows, targets)
    residuals = [
        y - sum(a * b for a, b in zip(row, x, strict=True)) for row, y in zip(rows, targets, strict=True)
    ]
    for i, value in enumerate(x):
        gain = sum(row[i] * residual for row, residual in zip(rows, residuals, strict=True))
        assert value >= 0
        assert gain == pytest.approx(0, abs=1e-6) if value else gain <= 1e-6
