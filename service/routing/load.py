"""One replica's load: its last report, corrected by what its router sent it and saw end since.

A report is old when it comes, and older with each request that is sent before the next. So requests sent
after it was asked for are added, and those that it counted and that ended since are taken off (Dahlin,
"Interpreting stale load information", 2000, corrects by expected arrivals; a router knows the actual ones).
Before any report, and where there never is one, the load is what the router itself has under way.
"""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.policies.fleet import ReplicaView
from pageturner.service.routing.options import LoadReport, Replica, Routed


@dataclass(slots=True)
class _Open:
    """A request under way. is_computed: its first token came, so none of its prompt waits."""

    num_tokens: int
    is_computed: bool = False


class ReplicaLoad:
    """request_tokens: as of RouterOptions. num_queued_tokens, num_requests, load: as of ReplicaView, reckoned
    anew whenever something is told. position, version, shown_load: the fleet's that it is in."""

    __slots__ = (
        "_ended",
        "_mark",
        "_open",
        "_report",
        "_request_tokens",
        "_settled_tokens",
        "_since_requests",
        "_since_tokens",
        "load",
        "num_queued_tokens",
        "num_requests",
        "position",
        "replica",
        "shown_load",
        "version",
    )

    def __init__(self, replica: Replica, request_tokens: float) -> None:
        self.replica = replica
        self.position = 0
        self.version = 0
        self.shown_load = 0.0
        self.num_queued_tokens = 0
        self.num_requests = 0
        self.load = 0.0
        self._request_tokens = request_tokens
        self._report = LoadReport(0, 0)
        self._mark = 0  # requests of lower numbers are in the report
        self._open: dict[int, _Open] = {}  # by number, which rises
        self._since_tokens = 0  # of those not in the report: tokens of prompts not computed, and how many
        self._since_requests = 0
        self._settled_tokens = 0  # of those in the report: tokens computed since, and how many ended
        self._ended = 0

    def view(self) -> ReplicaView:
        """For a policy."""
        replica = self.replica
        return ReplicaView(
            replica.replica_id, self.num_queued_tokens, self.num_requests, replica.capacity, self.load
        )

    def sent(self, routed: Routed) -> None:
        """A request is on its way there."""
        self._open[routed.number] = _Open(routed.num_tokens)
        self._since_tokens += routed.num_tokens
        self._since_requests += 1
        self._reckon()

    def computed(self, routed: Routed) -> None:
        """Its first token came. No matter if that was told before, or if it ended."""
        found = self._open.get(routed.number)
        if found is not None and not found.is_computed:
            found.is_computed = True
            if routed.number >= self._mark:
                self._since_tokens -= found.num_tokens
            else:
                self._settled_tokens += found.num_tokens
            self._reckon()

    def ended(self, routed: Routed) -> None:
        """However it ended. No matter if that was told before."""
        if routed.number not in self._open:
            return
        self.computed(routed)
        del self._open[routed.number]
        if routed.number >= self._mark:
            self._since_requests -= 1
        else:
            self._ended += 1
        self._reckon()

    def reported(self, report: LoadReport, mark: int) -> None:
        """A report that counts the requests of numbers below `mark`. One older than the last is dropped."""
        if mark < self._mark:
            return
        self._report, self._mark = report, mark
        self._since_tokens = self._since_requests = self._settled_tokens = self._ended = 0
        for number in reversed(self._open):
            if number < mark:
                break
            found = self._open[number]
            self._since_requests += 1
            self._since_tokens += 0 if found.is_computed else found.num_tokens
        self._reckon()

    def _reckon(self) -> None:
        """The report's share, never below 0, and what came since; never fewer requests than are under way."""
        queued = self._report.num_queued_tokens - self._settled_tokens
        self.num_queued_tokens = (queued if queued > 0 else 0) + self._since_tokens
        counted = self._report.num_requests - self._ended
        requests = (counted if counted > 0 else 0) + self._since_requests
        self.num_requests = max(requests, len(self._open))
        waiting = self.num_queued_tokens + self._request_tokens * self.num_requests
        self.load = waiting / self.replica.capacity
