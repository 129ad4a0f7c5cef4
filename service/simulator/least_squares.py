"""Least squares with no coefficient below 0, for a few columns and many rows. Pure Python."""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]

_RIDGE = 1e-10
"""Far below what a fit can tell; keeps columns that depend on each other solvable."""

_TOLERANCE = 1e-10


def nonnegative_least_squares(rows: Matrix, targets: Sequence[float]) -> list[float]:
    """The x of which no entry is below 0 and each row times x is nearest to its target.

    The active set method of Lawson and Hanson ("Solving Least Squares Problems", 1974, chapter 23) on the
    normal equations, columns scaled to unit length. A column that was struck out may come back: for the x
    that is returned, no entry at 0 would better the fit by growing. No column may be 0 throughout.
    """
    width = len(rows[0])
    lengths = [math.sqrt(math.fsum(row[i] ** 2 for row in rows)) for i in range(width)]
    scaled = [[value / lengths[i] for i, value in enumerate(row)] for row in rows]
    products = [
        [math.fsum(row[i] * row[j] for row in scaled) + (_RIDGE if i == j else 0.0) for j in range(width)]
        for i in range(width)
    ]
    wanted = [
        math.fsum(row[i] * target for row, target in zip(scaled, targets, strict=True)) for i in range(width)
    ]
    return [value / lengths[i] for i, value in enumerate(_active_set(products, wanted))]


def _active_set(products: Matrix, wanted: Sequence[float]) -> list[float]:
    """x >= 0 with the least x'Px/2 - w'x, for P = products and w = wanted."""
    width = len(wanted)
    tolerance = _TOLERANCE * max(map(abs, wanted), default=0.0)
    x = [0.0] * width
    free: set[int] = set()
    while len(free) < width:
        gain = {i: wanted[i] - _dot(products[i], x) for i in range(width) if i not in free}
        best = max(gain, key=gain.__getitem__)
        if gain[best] <= tolerance:
            break
        free.add(best)
        while True:
            order = sorted(free)
            solved = _solve([[products[i][j] for j in order] for i in order], [wanted[i] for i in order])
            target = [0.0] * width
            for i, value in zip(order, solved, strict=True):
                target[i] = value
            below = [i for i in order if target[i] <= 0]
            if not below:
                x = target
                break
            # As far towards the target as no entry falls below 0; those that reach it are held there.
            reach = {i: x[i] / (x[i] - target[i]) if x[i] > target[i] else 0.0 for i in below}
            first = min(reach, key=reach.__getitem__)
            x = [a + reach[first] * (b - a) for a, b in zip(x, target, strict=True)]
            held = {first, *(i for i in below if x[i] <= tolerance)}
            free -= held
            for i in held:
                x[i] = 0.0
            if best in held:
                return x  # its gain was rounding: the fit is as good as it gets
    return x


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def _solve(matrix: Matrix, wanted: Sequence[float]) -> list[float]:
    """By elimination with pivots; `matrix` is square and has an inverse."""
    size = len(wanted)
    work = [[*row, value] for row, value in zip(matrix, wanted, strict=True)]
    for pivot in range(size):
        best = max((abs(work[i][pivot]), i) for i in range(pivot, size))[1]
        work[pivot], work[best] = work[best], work[pivot]
        for i in range(size):
            if i != pivot:
                factor = work[i][pivot] / work[pivot][pivot]
                work[i] = [a - factor * b for a, b in zip(work[i], work[pivot], strict=True)]
    return [work[i][size] / work[i][i] for i in range(size)]
