"""A policy of one's own: who yields when blocks run out, beside two that are built in, on a virtual clock.

    python -m pageturner.service.examples.own_policy [RECIPE]
    pageturner serve --victim-policy pageturner.service.examples.own_policy:BusiestTenant

`tests/service/examples/test_own_policy.py` is its test; it holds it to the contract of its axis too.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pageturner.policies.registry import create, default_policies
from pageturner.policies.views import LoadView, RequestView, VictimView
from pageturner.service.simulator.experiment import Contender, run_experiment
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.synthetic import parse_recipe


@dataclass(frozen=True)
class BusiestTenant:
    """Of the tenant with the most running requests, the one that has computed least yields first.

    at_least: tenants with fewer requests yield after all others. Fields are options, set as in
    `victim = { name = "...", at_least = 3 }`; they are checked against their types.
    """

    at_least: int = 2

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        """All the candidates' ids, who yields first in front; from what is shown, and nothing else."""
        running = Counter(victim.request.tenant for victim in candidates)

        def order(victim: VictimView) -> tuple[bool, int, int, str]:
            request, count = victim.request, running[victim.request.tenant]
            # The id last: the order may not depend on how the candidates happen to be listed.
            return count < self.at_least, -count, request.num_computed_tokens, request.request_id

        return [victim.request.request_id for victim in sorted(candidates, key=order)]


def main(recipe: str = "two-tenants") -> None:
    name, workload = parse_recipe(recipe)
    machine = load_machine("h100-8b")
    machine = replace(machine, cache=replace(machine.cache, num_blocks=500))  # too few for all at once
    victims = (create("victim", "least-computed"), create("victim", "last-arrived"), BusiestTenant())
    sets = [replace(default_policies(), victim=victim) for victim in victims]
    contenders = [Contender(type(policies.victim).__name__, policies, machine) for policies in sets]
    for outcome in run_experiment(contenders, {0: workload.make(name, 0)}):
        (run,) = outcome.figures
        print(f"{outcome.name:16} TTFT p99 {run['ttft_p99']:7.3f} s, {run['preemptions']:4.0f} preemptions")


if __name__ == "__main__":
    main(*sys.argv[1:])
