"""How evenly tenants are served while they all want more.

The gap is that of the virtual token counter's bound (Sheng et al., "Fairness in Serving Large Language
Models", OSDI 2024): over every stretch of time in which two tenants both have requests that are not served,
the largest difference of the service that they got in it. An output token counts as two of a prompt;
tokens computed again are none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import combinations

PROMPT_WEIGHT = 1.0
OUTPUT_WEIGHT = 2.0


class TenantLedger:
    """Service by tenant, and the largest gap seen. Costs time in the square of the tenants a step."""

    def __init__(self, tenants: Sequence[str]) -> None:
        self.largest_gap = 0.0
        self._live: Counter[str] = Counter()
        self._service = dict.fromkeys(tenants, 0.0)
        # Of each pair: the least and the largest difference of service since both began to wait.
        self._since: dict[tuple[str, str], tuple[float, float]] = {}

    def arrived(self, tenant: str) -> None:
        """A request of `tenant` entered the queue."""
        self._live[tenant] += 1

    def ended(self, tenant: str) -> None:
        """A request of `tenant` is gone."""
        self._live[tenant] -= 1

    def served(self, tenant: str, num_prompt: int, num_output: int) -> None:
        """Tokens computed for `tenant` for the first time."""
        self._service[tenant] += PROMPT_WEIGHT * num_prompt + OUTPUT_WEIGHT * num_output

    def end_step(self, scheduled: Iterable[str]) -> None:
        """scheduled: the tenant of each request in the step."""
        running = Counter(scheduled)
        backlogged = [tenant for tenant in self._service if self._live[tenant] > running[tenant]]
        since: dict[tuple[str, str], tuple[float, float]] = {}
        for pair in combinations(backlogged, 2):
            difference = self._service[pair[0]] - self._service[pair[1]]
            low, high = self._since.get(pair, (difference, difference))
            since[pair] = min(low, difference), max(high, difference)
            self.largest_gap = max(self.largest_gap, since[pair][1] - since[pair][0])
        self._since = since
