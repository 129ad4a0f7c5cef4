"""Finds the request that makes steps fail, by halves.

After a failed step only the first group runs, alone. If it fails again it is split further; once every
member has got as far as sampling a token in a step that succeeded, the next group has its turn. The one
that fails alone is the one at fault.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable

from pageturner.service.core.outputs import FinishedEvent, SampledSequence, SchedulerOutput
from pageturner.service.core.request import RequestStatus
from pageturner.service.core.scheduling.finish import Finisher
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.transitions import Transitions
from pageturner.service.errors import StepFailed


class Suspects:
    """Members are `Request.order` numbers."""

    def __init__(self) -> None:
        self._groups: deque[set[int]] = deque()

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def running_alone(self) -> frozenset[int] | None:
        """The requests that may run now; None if no step has failed."""
        return frozenset(self._groups[0]) if self._groups else None

    def snapshot(self) -> tuple[tuple[int, ...], ...]:
        """The groups in the order of their turns."""
        return tuple(tuple(sorted(group)) for group in self._groups)

    def restore(self, groups: Iterable[Iterable[int]]) -> None:
        """Take the place of one whose `snapshot` this was."""
        self._groups = deque(set(group) for group in groups)

    def failed(self, members: Iterable[int]) -> int | None:
        """A step with these members failed. Returns the culprit if there was only one."""
        failed = sorted(members)
        if self._groups:
            self._groups[0].difference_update(failed)
        if len(failed) == 1:
            self._drop_empty()
            return failed[0]
        half = len(failed) // 2
        for group in (failed[half:], failed[:half]):
            if group:
                self._groups.appendleft(set(group))
        self._drop_empty()
        return None

    def cleared(self, order: int) -> None:
        """This member sampled a token in a step that succeeded."""
        if self._groups:
            self._groups[0].discard(order)
            self._drop_empty()

    def keep(self, able: Collection[int]) -> None:
        """Forget members that ended or cannot run at present: they would hold up all others."""
        for group in self._groups:
            group.intersection_update(able)
        self._drop_empty()

    def _drop_empty(self) -> None:
        while self._groups and not self._groups[0]:
            self._groups.popleft()


class StepFailures:
    """What becomes of the requests of a step that failed."""

    def __init__(self, state: SchedulerState, transitions: Transitions, finisher: Finisher) -> None:
        self._state = state
        self._transitions = transitions
        self._finisher = finisher
        self.suspects = Suspects()

    def fail(self, output: SchedulerOutput, error: Exception) -> tuple[FinishedEvent, ...]:
        """Every request that the step computed or copied for starts over, its tokens kept.

        So does every one that the step after it touched already: that one may have built on what never came.
        """
        state = self._state
        state.counters["step_failures"] += 1
        scheduled = {part.request_id for part in output.scheduled}
        members = [
            request
            for request in state.requests.values()
            if request.request_id in scheduled or request.last_step >= output.step_id
        ]
        for request in members:
            self._transitions.drop_kv(request)
            self._transitions.requeue(request, RequestStatus.WAITING)
        state.producing = {}
        device = state.manager.device
        if state.manager.tiers is not None:
            state.manager.tiers.fail_step(output.block_copies.swap_outs)
        state.pending_clears += [
            b for b in output.block_copies.clears if not device.ref_count(b) and not device.is_cached(b)
        ]
        for copy in output.block_copies.copies:
            device.uncache_block(copy.destination)  # of a sequence that ended meanwhile
        computed = [request for request in members if request.request_id in scheduled]
        for request in computed:
            request.num_step_failures += 1
        culprit = self.suspects.failed(request.order for request in computed) if computed else None
        state.suspects = self.suspects.running_alone
        return tuple(
            self._finisher.abort(request, StepFailed(f"the model failed on this request: {error}"))
            for request in computed
            if request.order == culprit or request.num_step_failures > state.options.max_step_failures
        )

    def clear(self, sampled: tuple[SampledSequence, ...]) -> None:
        """These tokens came of a step that succeeded: their requests are not the culprit."""
        for result in sampled:
            sequence = self._state.sequences.get(result.seq_id)
            if sequence is not None and sequence.epoch == result.epoch and result.error is None:
                self.suspects.cleared(sequence.request.order)

    def keep(self) -> None:
        """Before a step: a suspect that cannot run at present would hold up the search, and all others."""
        if self.suspects:
            live = {request.order for request in self._state.requests.values() if not request.is_paused}
            self.suspects.keep(live - self._state.fetching)
        self._state.suspects = self.suspects.running_alone
