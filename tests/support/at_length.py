"""State machines at length: as many examples as they ask for, or for as long as an operator has."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import seed, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

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
        began, done = self.now(), 0
        while done < examples and (not done or self.now() - began < self.seconds):
            size = min(ROUND, examples - done)
            seeded = seed(self.first_seed + done)(type(machine.__name__, (machine,), {}))
            run_state_machine_as_test(
                seeded, settings=settings(common, max_examples=size, stateful_step_count=steps)
            )
            done += size
        self.tell(f"{done} of {examples} examples from seed {self.first_seed} on")
        return done
