"""The deadlines of live requests: which of them are missed, and which can no longer be met."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.forecast import concurrency, gain_of, likely_outputs
from pageturner.service.core.scheduling.pace import SHORT, TYPICAL
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.errors import DeadlineExceeded, DeadlineUnreachable

START_TRUST = 1.0
"""The share of the forecast wait that counts: some of those ahead end early, or are shed themselves."""
SPARE_SHARE = 0.8
"""Of the spare time that a request came with: while it has so much, fewer may run for its sake instead."""
LATE_TEXT = "the deadline can no longer be met: too much is served before this request"


class Deadlines:
    """Remembers when each request with a deadline is to be looked at.

    That is at its deadline, or while it waits, just after the latest moment at which it could have started.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._looks: list[tuple[float, int, Request]] = []

    def watch(self, request: Request) -> None:
        """From now on; ended requests are swept out before they are the most."""
        deadline = request.new.deadline
        if deadline is None:
            return
        latest_start = deadline - self._state.rates.prefill_seconds(views.num_known_tokens(request))
        heapq.heappush(self._looks, (latest_start, request.order, request))
        if len(self._looks) > 2 * len(self._state.requests) + 64:
            self._looks = [look for look in self._looks if look[2].status is not RequestStatus.FINISHED]
            heapq.heapify(self._looks)

    def missed(self, now: float) -> Iterator[tuple[Request, DeadlineExceeded]]:
        """Every request to be ended at this moment, and why; it is to be ended before the next is asked for.

        A request that still waits when not even its prompt could be computed in time would only take
        blocks from others.
        """
        while self._looks and self._looks[0][0] <= now:
            _, _, request = heapq.heappop(self._looks)
            deadline = request.new.deadline
            if request.status is RequestStatus.FINISHED or deadline is None:
                continue
            is_waiting = request.status is RequestStatus.WAITING
            latest_start = deadline - self._least_seconds(request) if is_waiting else deadline
            if deadline <= now:
                self._learn_from(request)
                yield request, DeadlineExceeded("the deadline passed")
            elif latest_start < now:
                reason = "the deadline can no longer be met: the request waited too long to start"
                yield request, DeadlineUnreachable(reason)
            else:
                moment = math.nextafter(latest_start, math.inf) if is_waiting else deadline
                heapq.heappush(self._looks, (moment, request.order, request))
        if self._looks and self._state.options.deadline_shedding and self._state.is_sweep_due:
            yield from self._late(now)

    def _learn_from(self, request: Request) -> None:
        """An answer that its deadline cuts would have been longer. Were only those counted that end in time,
        all others would be taken for as short."""
        for sequence in request.unfinished:
            if sequence.num_output_tokens:
                self._state.pace.answered(sequence.num_output_tokens, is_cut=True)

    def _late(self, now: float) -> Iterator[tuple[Request, DeadlineExceeded]]:
        """Requests that wait for their start, and would likely end too late behind those served before them.

        Only while the machine is full: else the request takes nothing from others by trying. One is late if
        it would be beside as many as run now, and has lost too much of its time for fewer to run beside it.
        """
        state = self._state
        pace, ahead = state.pace, 0.0
        if not state.is_full:
            return
        company = concurrency(pace, list(state.running.values()))
        for request in list(state.waiting):
            new, rows = request.new, request.num_slots
            if new.deadline is not None and request.admitted_at is None:
                asked = self._num_uncached(request), likely_outputs(pace, request, SHORT)
                gain = gain_of(pace, request)
                alone = company.seconds_alone(*asked, gain)
                left = new.deadline - now - START_TRUST * ahead / pace.drain_rate
                spare = new.deadline - new.arrival_time - alone
                if company.seconds(*asked, rows, gain) > left and left - alone < SPARE_SHARE * spare:
                    yield request, DeadlineUnreachable(LATE_TEXT)
                    continue
            ahead += request.num_prompt_tokens + rows * likely_outputs(pace, request, TYPICAL)

    def _least_seconds(self, request: Request) -> float:
        """What a waiting request needs at the least until its first token: its uncached tokens' prefill."""
        return self._state.rates.prefill_seconds(self._num_uncached(request))

    def _num_uncached(self, request: Request) -> int:
        num_left = views.num_known_tokens(request) - views.num_computed_tokens(request)
        return max(1, num_left - self._state.manager.num_cached_tokens(request))
