"""How many requests may run side by side, so that those with deadlines still end in time.

Each sequence more makes every step longer. Where the running requests leave no room for that, or the next one
itself would end too late beside them, it waits until one of them has ended.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from pageturner.service.core.request import Request
from pageturner.service.core.scheduling.forecast import (
    concurrency,
    gain_of,
    likely_outputs,
    num_uncomputed,
)
from pageturner.service.core.scheduling.pace import TYPICAL
from pageturner.service.core.scheduling.state import SchedulerState


class _Bound(NamedTuple):
    """What a request with a deadline has yet to do, in how many seconds, and what its steps yield beyond one
    token."""

    left: float
    num_uncomputed: int
    num_outputs: int
    priority: int
    gain: float


class DeadlineGate:
    """For one attempt at a step. running: requests that run in it."""

    def __init__(self, state: SchedulerState, running: Sequence[Request]) -> None:
        self._state = state
        active = [request for request in running if not request.is_paused]
        self._concurrency = concurrency(state.pace, active)
        self._num_uncomputed = sum(map(num_uncomputed, active))
        bounds = filter(None, map(self._bound, active))
        # One that ends too late in any case holds up nobody.
        self._bounds = [bound for bound in bounds if self._seconds(bound, 0, 0) <= bound.left]

    def holds(self, request: Request, starting: Iterable[Request]) -> bool:
        """Whether `request`, beside those that start in this step, would be late or make another late."""
        own = self._bound(request)
        if not self._concurrency.num_rows or not (own or self._bounds):
            return False
        rows, uncomputed = request.num_slots, num_uncomputed(request)
        for other in starting:
            rows += other.num_slots
            uncomputed += num_uncomputed(other)
        if own is not None:
            alone = self._concurrency.seconds_alone(own.num_uncomputed, own.num_outputs, own.gain)
            if alone <= own.left < self._seconds(own, rows, uncomputed):
                return True
        return any(
            bound.priority >= request.priority and self._seconds(bound, rows, uncomputed) > bound.left
            for bound in self._bounds
        )

    def _bound(self, request: Request) -> _Bound | None:
        deadline = request.new.deadline
        if deadline is None:
            return None
        left = likely_outputs(self._state.pace, request, TYPICAL)
        gain = gain_of(self._state.pace, request)
        return _Bound(deadline - self._state.now, num_uncomputed(request), left, request.priority, gain)

    def _seconds(self, bound: _Bound, more_rows: int, more_uncomputed: int) -> float:
        """Of a request beside all that run. Prompts that are to be computed now delay it whole; of those that
        come later, it meets its share."""
        company = self._concurrency
        in_turn = company.seconds(bound.num_uncomputed, bound.num_outputs, more_rows, bound.gain)
        rows = company.num_rows + more_rows + company.drafting.drafts + more_rows * company.usual.drafts
        at_once = (self._num_uncomputed + more_uncomputed) * company.prompt_token
        step = company.step + rows * company.output_token
        return max(in_turn, at_once + company.num_steps(bound.num_outputs, bound.gain) * step)
