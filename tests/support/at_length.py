"""Properties at length: as many examples as they ask for, or for as long as an operator has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hypothesis import given, seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from hypothesis.strategies import SearchStrategy, tuples

ROUND = 25
"""Examples between two looks at the clock: a failing one is shrunk within its round, by Hypothesis."""


@dataclass(frozen=True, slots=True)
class AtLength:
    """seconds: after so many no other round begins. first_seed: each round has the next one, so that what one
    run found another finds. tell: how many examples were run."""

    seconds: float
    first_seed: int
    tell: Callable[[str], None]
    now: Callable[[], float] = time.monotonic

    def run(self, machine: type[RuleBasedStateMachine], common: settings, examples: int, steps: int) -> int:
        """Returns how many examples were run, one round at least. Raises what the machine does."""

        def one_round(size: int, first: int) -> None:
            seeded = seed(first)(type(machine.__name__, (machine,), {}))
            budget = settings(common, max_examples=size, stateful_step_count=steps)
            run_state_machine_as_test(seeded, settings=budget)

        return self._rounds(examples, one_round)

    def hold(
        self,
        check: Callable[..., None],
        strategies: tuple[SearchStrategy[Any], ...],
        common: settings,
        examples: int,
    ) -> int:
        """The same for a check of what the strategies draw."""

        def one_round(size: int, first: int) -> None:
            def drawn(case: tuple[Any, ...]) -> None:
                check(*case)

            seed(first)(settings(common, max_examples=size)(given(tuples(*strategies))(drawn)))()

        return self._rounds(examples, one_round)

    def _rounds(self, examples: int, one_round: Callable[[int, int], None]) -> int:
        began, done = self.now(), 0
        while done < examples and (not done or self.now() - began < self.seconds):
            size = min(ROUND, examples - done)
            one_round(size, self.first_seed + done)
            done += size
        self.tell(f"{done} of {examples} examples from seed {self.first_seed} on")
        return done
