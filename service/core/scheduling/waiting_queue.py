"""Requests that are not running, in the order of the queue policy.

Keys are computed when a request enters, and again only as often as the policy says they may change.
Entering and leaving cost a binary search and a move of pointers, so a queue of 100,000 stays cheap.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from pageturner.policies.interfaces import KeyChange, SortKey
from pageturner.policies.views import LoadView
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.outlook import Work
from pageturner.service.core.request import QueueEntry, Request
from pageturner.service.core.scheduling import views
from pageturner.service.policy_host.answers import comparable
from pageturner.service.policy_host.host import PolicyHost


class WaitingQueue:
    """key: the policy's key of a request under a load. Ties fall to arrival, then to order of acceptance.

    load: the load now. is_key_fixed: a request's key never changes, so it is asked for once.
    work: of all that are here. num_unstarted, num_unstarted_tokens: those that never ran, and their prompts;
    a request must not start, in the sense of `Request.admitted_at`, while it is here.
    """

    def __init__(
        self,
        key: Callable[[Request, LoadView], SortKey],
        load: Callable[[], LoadView],
        *,
        is_key_fixed: bool,
    ) -> None:
        self._key = key
        self._load = load
        self._is_key_fixed = is_key_fixed
        self._entries: list[QueueEntry] = []
        self._entry_of: dict[int, QueueEntry] = {}
        self._request_of: dict[int, Request] = {}
        self.work = Work()
        self.num_unstarted = 0
        self.num_unstarted_tokens = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Request]:
        """First to be served first. The queue must not change meanwhile."""
        return (self._request_of[order] for _, _, order in self._entries)

    def __contains__(self, request: Request) -> bool:
        return request.order in self._entry_of

    def add(self, request: Request) -> None:
        """Queue a request by its key."""
        entry = request.queue_entry
        if entry is None or not self._is_key_fixed:
            entry = self._make_entry(request, self._load())
        insort(self._entries, entry)
        self._entry_of[request.order] = entry
        self._request_of[request.order] = request
        self._count(request, 1)

    def restore(self, requests: Iterable[Request]) -> None:
        """Fill an empty queue with requests in their order, each at the place that it had (`queue_entry`).

        The policy is not asked again, as its answer may depend on what has passed."""
        for request in requests:
            assert request.queue_entry is not None, f"{request.request_id} was never queued"
            self._entries.append(request.queue_entry)
            self._entry_of[request.order] = request.queue_entry
            self._request_of[request.order] = request
            self._count(request, 1)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        entry = self._entry_of.pop(request.order)
        del self._entries[bisect_left(self._entries, entry)]
        del self._request_of[request.order]
        self._count(request, -1)

    def _count(self, request: Request, sign: int) -> None:
        if request.admitted_at is None:
            self.num_unstarted += sign
            self.num_unstarted_tokens += sign * request.num_prompt_tokens
        self.work = self.work + request.work if sign > 0 else self.work - request.work

    def resort(self) -> None:
        """Compute every key anew."""
        load = self._load()
        self._entries = sorted(self._make_entry(request, load) for request in self._request_of.values())
        self._entry_of = {entry[2]: entry for entry in self._entries}

    def rekey(self, running: Iterable[Request], *, is_key_fixed: bool) -> None:
        """Another policy answers: every key is void, also those that running requests keep."""
        self._is_key_fixed = is_key_fixed
        self.resort()
        load = self._load()
        for request in running:
            self._make_entry(request, load)

    def _make_entry(self, request: Request, load: LoadView) -> QueueEntry:
        entry = (comparable(self._key(request, load)), request.new.arrival_time, request.order)
        request.queue_entry = entry
        return entry


MAX_LOOKUPS = 1024
"""How many waiting requests, first ones first, a look for new cache hits takes in."""


class QueueOrder:
    """interval_seconds: how often keys that may change are looked at again. next_resort: when next."""

    def __init__(self, policy_host: PolicyHost, manager: BlockManager, interval_seconds: float) -> None:
        self._policy_host = policy_host
        self._manager = manager
        self._interval_seconds = interval_seconds
        self.next_resort = 0.0

    @property
    def is_fixed(self) -> bool:
        """Whether a request's key never changes."""
        return self._policy_host.key_change is KeyChange.NEVER

    def key(self, request: Request, load: LoadView) -> SortKey:
        request.num_cached_tokens = self._manager.num_cached_tokens(request)
        return self._policy_host.queue_key(views.request_view(request), load)

    def look_soon(self, now: float) -> None:
        """A tenant has come: keys that are out of date are not to stand before its own. An eighth of the
        interval passes between two looks all the same."""
        earliest = self.next_resort - 7 / 8 * self._interval_seconds
        self.next_resort = min(self.next_resort, max(now, earliest))

    def refresh(self, waiting: WaitingQueue, now: float) -> None:
        """Once an interval: keys that change with time anew, others where the cache holds more or less."""
        change = self._policy_host.key_change
        if change is KeyChange.NEVER or now < self.next_resort:
            return
        self.next_resort = now + self._interval_seconds
        if change is KeyChange.WITH_TIME:
            waiting.resort()
            return
        count = self._manager.num_cached_tokens
        moved = [r for r in islice(waiting, MAX_LOOKUPS) if count(r) != r.num_cached_tokens]
        for request in moved:
            waiting.remove(request)
            waiting.add(request)
