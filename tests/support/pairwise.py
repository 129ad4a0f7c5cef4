"""Few cases in which any two choices come together."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from itertools import combinations, product
from typing import Any


def pairwise_cases(factors: Mapping[str, Sequence[Any]], *, seed: int = 0) -> list[dict[str, Any]]:
    """Every value of each factor beside every value of each other one; the same for the same seed.

    Greedy: of some random cases that hold a missing pair, the one that holds the most of them.
    """
    generator = random.Random(seed)
    missing = {
        ((first, one), (second, other))
        for first, second in combinations(factors, 2)
        for one, other in product(range(len(factors[first])), range(len(factors[second])))
    }
    cases = []
    while missing:
        wanted = min(missing)
        drawn = [
            {name: generator.randrange(len(values)) for name, values in factors.items()} | dict(wanted)
            for _ in range(30)
        ]
        best = max(drawn, key=lambda case: len(missing.intersection(combinations(case.items(), 2))))
        missing.difference_update(combinations(best.items(), 2))
        cases.append({name: factors[name][index] for name, index in best.items()})
    return cases
