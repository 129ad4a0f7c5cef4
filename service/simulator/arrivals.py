"""What of a workload arrives when: at its time, after what it follows, or as a closed loop allows."""

from __future__ import annotations

import heapq
import math

from pageturner.service.simulator.workload import SimulatedWorkload


class Arrivals:
    """Requests by their index in the workload, each once, in order of arrival.

    late: seconds from a client's send to the queue and from a token to its reader, together; what follows an
    end arrives so much later.
    """

    def __init__(self, workload: SimulatedWorkload, late: float) -> None:
        self._requests = workload.requests
        self._late = late
        self._followers: dict[int, list[int]] = {}
        # (when, index): what is known to arrive. Of a closed loop, `_unsent` follows as others end.
        self._known: list[tuple[float, int]] = []
        self._unsent: list[int] = []
        first: list[int] = []
        for index, request in enumerate(workload.requests):
            if request.follows is None:
                first.append(index)
            else:
                self._followers.setdefault(request.follows, []).append(index)
        if workload.concurrency is None:
            self._known = [(workload.requests[index].at_seconds, index) for index in first]
        else:
            self._known = [(0.0, index) for index in first[: workload.concurrency]]
            self._unsent = first[workload.concurrency :][::-1]
        heapq.heapify(self._known)

    @property
    def next_at(self) -> float:
        """When the next one that is known arrives; infinity if none is."""
        return self._known[0][0] if self._known else math.inf

    def pop(self) -> tuple[float, int]:
        """When the next one arrives, and which it is. There must be one."""
        return heapq.heappop(self._known)

    def ended(self, index: int, now: float) -> None:
        """Its conversation goes on, and a closed loop sends its next."""
        followers = self._followers.get(index)
        if followers is not None:
            for follower in followers:
                think = self._requests[follower].at_seconds
                heapq.heappush(self._known, (now + think + self._late, follower))
        elif self._unsent:
            heapq.heappush(self._known, (now + self._late, self._unsent.pop()))
