"""How much service each tenant has had: the memory of the fair policies.

Virtual token counters (Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, algorithm 2):
a tenant's counter grows by w_in for each prompt token when its request first starts, and by w_out for each
token generated, divided by the tenant's weight. A tenant that comes back to the queue is lifted to the
least counter there, so that idleness earns no credit.

What the paper leaves open: prompt tokens that the prefix cache held cost nothing, and tokens computed again
after a preemption cost nothing either, since the tenant did not ask for that.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import TypeAlias

from pageturner.policies.events import PolicyEvent, RequestEnded, RequestQueued, RequestStarted, StepServed
from pageturner.policies.frozen_map import FrozenMap

MAX_WEIGHTS_CHARACTERS = 1 << 16
"""Of the option tenant_weights: some 4,000 tenants. It is kept, compared and shown as a whole."""

_PRUNE_ABOVE = 64


@dataclass(frozen=True, slots=True)
class Account:
    """One tenant. All sums are in weighted tokens over the tenant's weight.

    queued - started is what waits.
    """

    counter: float = 0.0
    """Service had."""
    queued: float = 0.0
    """Prompt costs of all requests that ever entered the queue."""
    started: float = 0.0
    """Prompt costs of all requests that left the queue."""
    num_waiting: int = 0
    num_running: int = 0
    is_listed: bool = False
    """Whether it has an entry in `ServiceCounters.waiting`."""

    def charged(self, cost: float) -> Account:
        """With so much more service; spelt out because `replace` takes twice as long."""
        return Account(
            self.counter + cost,
            self.queued,
            self.started,
            self.num_waiting,
            self.num_running,
            self.is_listed,
        )


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request in the queue."""

    cost: float
    """What starting it will cost."""
    queued_before: float
    """The account's `queued` before it came."""


Entry: TypeAlias = tuple[float, str]
"""A counter and its tenant."""


@dataclass(frozen=True, slots=True)
class ServiceCounters:
    """What a virtual token counter remembers. A value: `fold` makes the next one."""

    accounts: FrozenMap[str, Account]
    tickets: FrozenMap[str, Ticket]
    running: FrozenMap[str, str]
    waiting: tuple[Entry, ...] = ()
    """A heap with one entry for each tenant that has requests waiting: a counter that it had, and its
    name. Counters only grow meanwhile, so an entry is a lower bound; one that is out of date, or whose
    tenant waits no more, is put right when it comes to the top. So the least counter is found without a
    look at every tenant."""
    last_left: str = ""
    """The tenant whose request left the queue last, for a lift when the queue is empty."""
    prune_above: int = _PRUNE_ABOVE
    """Where there are more accounts, those of tenants that are away, and that a lift would raise anyway,
    are forgotten."""

    def counter(self, tenant: str) -> float:
        """Weighted service that the tenant had; 0 for one unknown."""
        return self.account(tenant).counter

    def account(self, tenant: str) -> Account:
        """The tenant's account; an empty one if it has none."""
        return self.accounts.get(tenant) or _NEW

    def virtual_start(self, request_id: str, tenant: str) -> float:
        """The tenant's counter once all its requests that queue before this one will have started.

        So one look at the queue interleaves tenants as if their counters were read before each start.
        """
        account, ticket = self.account(tenant), self.tickets.get(request_id)
        if ticket is None:
            return account.counter
        return account.counter + max(0.0, ticket.queued_before - account.started)


_NEW = Account()
NOTHING_SERVED = ServiceCounters(FrozenMap(), FrozenMap(), FrozenMap())


@dataclass(frozen=True, slots=True)
class Prices:
    """What a prompt token and an output token cost."""

    input_weight: float
    output_weight: float
    tenant_weights: str
    """As `parse_weights` reads them."""

    def weight(self, tenant: str) -> float:
        """The tenant's weight; 1 unless named."""
        return parse_weights(self.tenant_weights).get(tenant, 1.0)


Weights: TypeAlias = MappingProxyType[str, float]


@lru_cache(maxsize=8)
def parse_weights(text: str) -> Weights:
    """ "gold=4, free=0.5": the weight of each tenant named. Raises ValueError for what cannot be read so, or
    is longer than MAX_WEIGHTS_CHARACTERS."""
    if len(text) > MAX_WEIGHTS_CHARACTERS:
        raise ValueError(f"has {len(text)} characters; at most {MAX_WEIGHTS_CHARACTERS}")
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        tenant, is_given, weight = part.rpartition("=")
        if not is_given or not 0 < float(weight) < float("inf"):
            raise ValueError(f"{part[:80]!r} is not TENANT=WEIGHT with a finite weight above 0")
        weights[tenant.strip()] = float(weight)
    return MappingProxyType(weights)


def fold(state: ServiceCounters, event: PolicyEvent, prices: Prices) -> ServiceCounters:
    """The state after one event, in time that grows with the logarithm of the requests and tenants that wait.

    (The heap is copied too, which takes some microseconds a thousand tenants.)
    """
    match event:
        case RequestQueued():
            return _queued(state, event, prices)
        case RequestStarted():
            return _started(state, event, prices)
        case RequestEnded():
            return _ended(state, event)
        case StepServed():
            return _served(state, event, prices)


def _queued(state: ServiceCounters, event: RequestQueued, prices: Prices) -> ServiceCounters:
    if state.tickets.get(event.request_id) is not None:
        return state
    running = state.running.remove(event.request_id)
    account = state.account(event.tenant)
    if running is not state.running:
        account = replace(account, num_running=account.num_running - 1)
    if account.num_waiting == 0:
        state, least = _least_waiting(state)
        is_listed = state.account(event.tenant).is_listed
        account = replace(account, counter=max(account.counter, least), is_listed=True)
        if not is_listed:
            state = replace(state, waiting=_pushed(state.waiting, (account.counter, event.tenant)))
    cost = 0.0
    if event.is_first:
        cost = prices.input_weight * event.num_prompt_tokens / prices.weight(event.tenant)
    # A request that has started before goes ahead of the tenant's others: it is paid for.
    ticket = Ticket(cost, account.queued if event.is_first else account.started)
    account = replace(account, queued=account.queued + cost, num_waiting=account.num_waiting + 1)
    return _pruned(
        replace(
            state,
            accounts=state.accounts.set(event.tenant, account),
            tickets=state.tickets.set(event.request_id, ticket),
            running=running,
        )
    )


def _started(state: ServiceCounters, event: RequestStarted, prices: Prices) -> ServiceCounters:
    state = _left_queue(state, event.request_id, event.tenant)
    account = state.account(event.tenant)
    if event.is_first:
        num_computed = max(0, event.num_prompt_tokens - event.num_cached_tokens)
        cost = prices.input_weight * num_computed / prices.weight(event.tenant)
        account = account.charged(cost)
    if state.running.get(event.request_id) is None:
        account = replace(account, num_running=account.num_running + 1)
    return replace(
        state,
        accounts=state.accounts.set(event.tenant, account),
        running=state.running.set(event.request_id, event.tenant),
    )


def _ended(state: ServiceCounters, event: RequestEnded) -> ServiceCounters:
    state = _left_queue(state, event.request_id, event.tenant)
    running = state.running.remove(event.request_id)
    if running is state.running:
        return state
    account = state.account(event.tenant)
    account = replace(account, num_running=account.num_running - 1)
    return replace(state, accounts=state.accounts.set(event.tenant, account), running=running)


def _served(state: ServiceCounters, event: StepServed, prices: Prices) -> ServiceCounters:
    accounts = state.accounts
    for share in event.shares:
        if share.num_output_tokens:
            account = accounts.get(share.tenant) or _NEW
            cost = prices.output_weight * share.num_output_tokens / prices.weight(share.tenant)
            accounts = accounts.set(share.tenant, account.charged(cost))
    return replace(state, accounts=accounts)


def _left_queue(state: ServiceCounters, request_id: str, tenant: str) -> ServiceCounters:
    ticket = state.tickets.get(request_id)
    if ticket is None:
        return state
    account = state.account(tenant)
    account = replace(account, started=account.started + ticket.cost, num_waiting=account.num_waiting - 1)
    if account.num_waiting == 0:  # nothing refers to the sums any more: bound them
        account = replace(account, queued=0.0, started=0.0)
    return replace(
        state,
        accounts=state.accounts.set(tenant, account),
        tickets=state.tickets.remove(request_id),
        last_left=tenant,
    )


def _least_waiting(state: ServiceCounters) -> tuple[ServiceCounters, float]:
    """The state with an entry on top that is right, and its counter: the least of the tenants that wait."""
    heap, accounts, is_changed = list(state.waiting), state.accounts, False
    while heap:
        bound, tenant = heap[0]
        account = state.account(tenant)
        if account.num_waiting and account.counter == bound:
            break
        is_changed = True
        if account.num_waiting:
            heapq.heapreplace(heap, (account.counter, tenant))
        else:
            heapq.heappop(heap)
            accounts = accounts.set(tenant, replace(account, is_listed=False))
    if is_changed:
        state = replace(state, accounts=accounts, waiting=tuple(heap))
    return state, heap[0][0] if heap else state.counter(state.last_left)


def _pushed(waiting: tuple[Entry, ...], entry: Entry) -> tuple[Entry, ...]:
    heap = list(waiting)
    heapq.heappush(heap, entry)
    return tuple(heap)


def _pruned(state: ServiceCounters) -> ServiceCounters:
    if len(state.accounts) <= state.prune_above:
        return state
    # Every lift from now on is to this level or above, so a tenant that is away below it loses nothing.
    state, level = _least_waiting(state)
    accounts = state.accounts
    for tenant, account in state.accounts.items():
        is_away = account.num_waiting == account.num_running == 0 and tenant != state.last_left
        if is_away and account.counter <= level and not account.is_listed:
            accounts = accounts.remove(tenant)
    return replace(state, accounts=accounts, prune_above=max(_PRUNE_ABOVE, 2 * len(accounts)))
