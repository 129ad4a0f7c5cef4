"""The order of the queue: the keys that the policy in force gives, and when they are asked for anew."""

from __future__ import annotations

from itertools import islice

from pageturner.policies.interfaces import KeyChange, SortKey
from pageturner.policies.views import LoadView
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.request import Request
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.waiting_queue import WaitingQueue
from pageturner.service.policy_host.host import PolicyHost

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
