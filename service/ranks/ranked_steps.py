"""`StepComputation` on all ranks: rank 0 sends each step before it computes it.

A step that fails on one rank fails on all. Whoever notices leaves the group, which makes the collectives of
all others fail; each says so to rank 0; then all meet anew, and the engine retries by halves as it does on
one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import NoReturn

from pageturner.service.core.outputs import BlockCopies, SampledSequence, ScheduledSequence, SchedulerOutput
from pageturner.service.engine.step_computation import StepComputation
from pageturner.service.errors import RankLost
from pageturner.service.ranks.codec import StepEncoder
from pageturner.service.ranks.follower import Group
from pageturner.service.ranks.leader import Leader
from pageturner.service.ranks.messages import Ready, Renew


class StepFailedOnRank(RuntimeError):
    """Other ranks failed to carry out a step; says which, and why."""


class Ranks:
    """Has all ranks carry out a step, and agree on what became of it.

    group: rank 0's collectives, met once.
    """

    def __init__(self, leader: Leader, group: Group) -> None:
        self.leader = leader
        self._group = group
        self._encoder = StepEncoder()
        self._generation = 0
        self._tokens: dict[tuple[int, int], int] = {}

    def send(self, output: SchedulerOutput) -> None:
        """Have the other ranks begin. Rank 0 carries it out next. Raises RankLost."""
        self.leader.send_step(self._encoder.encode(output, self._resolve))

    def settle(self) -> None:
        """Rank 0 has carried the step out. Returns if all others have.

        Raises RankLost if one is lost, or StepFailedOnRank, after which further steps can be sent.
        """
        if failures := self.leader.outcomes():
            self.renew()
            raise StepFailedOnRank("; ".join(failures))

    def fail(self, error: Exception) -> NoReturn:
        """Rank 0 has met with `error`: have the step fail on all. Raises as `settle`, or `error`."""
        self.leader.check()
        self._group.close()
        failures = self.leader.outcomes()
        self.renew()
        if isinstance(error, RankLost):  # that rank 0 was left is no cause: others say why they left
            raise StepFailedOnRank("; ".join(failures) or str(error)) from error
        raise error

    def together(self, forward: Callable[[SchedulerOutput], object]) -> Callable[[SchedulerOutput], None]:
        """A forward on all ranks. forward: rank 0's. What it gives raises as `settle` and `fail`."""
        return lambda output: self._carry_out(output, lambda: forward(output))

    def copying(self, apply: Callable[[BlockCopies], object]) -> Callable[[BlockCopies], None]:
        """Block traffic on all ranks, likewise."""
        return lambda copies: self._carry_out(SchedulerOutput(-1, (), copies), lambda: apply(copies))

    def _carry_out(self, output: SchedulerOutput, work: Callable[[], object]) -> None:
        self.send(output)
        try:
            work()
        except Exception as error:
            self.fail(error)
        self.settle()

    def begin(self) -> None:
        """The model is loaded: from now on no rank waits long for another."""
        self.renew()
        self.leader.expect_signs()

    def renew(self) -> None:
        """Have all ranks meet anew. Raises RankLost."""
        self._generation += 1
        generation, patience = self._generation, self.leader.patience
        self._group.close()
        self.leader.tell(lambda _: Renew(generation))
        try:
            self._group.meet(generation, timedelta(seconds=patience.step))
        except RankLost:
            self.leader.check()
            raise
        self.leader.hear(Ready, patience.step)

    def close(self) -> None:
        """End the other ranks, and leave them."""
        self.leader.close()
        self._group.close()

    def note_sampled(self, sampled: tuple[SampledSequence, ...]) -> None:
        """What the step that ran last sampled: a step planned before it was known is sent with these
        tokens."""
        self._tokens = {
            (result.seq_id, result.epoch): result.tokens[-1].token_id for result in sampled if result.tokens
        }

    def _resolve(self, sequence: ScheduledSequence) -> int:
        # One that sampled nothing is computed once more in vain, as rank 0's runner does: any token.
        return self._tokens.get((sequence.seq_id, sequence.epoch), 0)


class RankedSteps:
    """Carries out steps by `steps`, rank 0's own, on all ranks."""

    def __init__(self, steps: StepComputation, ranks: Ranks) -> None:
        self._steps = steps
        self._ranks = ranks

    def start(self, output: SchedulerOutput) -> None:
        self._ranks.send(output)
        self._steps.start(output)

    def finish(self) -> tuple[SampledSequence, ...]:
        try:
            sampled = self._steps.finish()
        except Exception as error:
            self._ranks.fail(error)
        self._ranks.settle()
        self._ranks.note_sampled(sampled)
        return sampled

    def copy_blocks(self, copies: BlockCopies) -> None:
        self._ranks.copying(self._steps.copy_blocks)(copies)

    def close(self) -> None:
        self._steps.close()
        self._ranks.close()
