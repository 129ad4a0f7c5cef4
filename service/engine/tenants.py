"""What each tenant holds of the service, and whether it may have more: the one owner of both.

Lives on the event loop, where requests are refused without waiting for a step. A request holds something from
`enter` to `end` or `cancel`, one of which is called once, however it ends.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.adapter_reports import Lease
from pageturner.service.engine.rate_meter import RateMeter
from pageturner.service.engine.token_bucket import TokenBucket
from pageturner.service.errors import InvalidArgument, PageturnerError, QueueFull, TenantLimitReached
from pageturner.service.identity import Identity, TenantLimits

QUEUE_WEIGHT = 4
"""A tenant may have at most so many times as much in the queue as the queue has room left: one that floods
alone fills four fifths of it, k of them leave 1 / (1 + 4 k) of it free, so another tenant always finds a
place. Source: Choudhury and Hahne, "Dynamic Queue Length Thresholds for Shared-Memory Packet Switches",
IEEE/ACM Transactions on Networking, 1998."""

SHORTEST_RETRY, USUAL_RETRY, LONGEST_RETRY = 0.1, 1.0, 60.0
"""Seconds; the usual one where nothing was measured yet."""

NEWEST_WEIGHT = 0.2
"""Of the latest end in the mean of how long a tenant's requests take."""

MAX_IDLE_ACCOUNTS = 1024
"""Tenants that hold nothing and are remembered all the same, for what they were refused."""


class Cause(Enum):
    """Why a tenant's request was refused; the values are names of TenantLimits, but for the queue's share."""

    CONCURRENT_REQUESTS = "max_concurrent_requests"
    QUEUED_TOKENS = "max_queued_tokens"
    TOKENS_PER_MINUTE = "tokens_per_minute"
    TOKENIZED_PER_MINUTE = "tokenized_per_minute"
    MAX_TOKENS = "max_tokens"
    PRIORITY = "priority"
    QUEUE_SHARE = "queue_share"


@dataclass(frozen=True, slots=True)
class TenantReport:
    """One tenant at one moment.

    num_requests: that wait or run. num_waiting: those of them without a token yet; num_queued_tokens: of
    their prompts. tokens_left: of its tokens a minute, below 0 in debt; None without such a limit.
    """

    tenant: str
    limits: TenantLimits
    num_requests: int
    num_waiting: int
    num_queued_tokens: int
    tokens_left: float | None
    refused: Mapping[Cause, int]


@dataclass(frozen=True, slots=True)
class TenantsReport:
    """The tenants that hold most first. num_tenants: all that are known. refused: of all, since start."""

    tenants: tuple[TenantReport, ...]
    num_tenants: int
    refused: Mapping[Cause, int]


@dataclass(slots=True, eq=False)
class Account:
    """One tenant; only the ledger changes it.

    bucket, text_bucket: of tokens_per_minute and tokenized_per_minute, where it has such a limit.
    mean_seconds: from entering to the end, of late; None before the first end.
    """

    limits: TenantLimits
    bucket: TokenBucket | None
    text_bucket: TokenBucket | None
    starts: RateMeter
    started_tokens: RateMeter
    mean_seconds: float | None = None
    num_requests: int = 0
    num_waiting: int = 0
    num_queued_tokens: int = 0
    refused: Counter[Cause] = field(default_factory=Counter)

    def note_end(self, seconds: float) -> None:
        """One of its requests ended so long after it had entered."""
        mean = seconds if self.mean_seconds is None else self.mean_seconds
        self.mean_seconds = mean + NEWEST_WEIGHT * (seconds - mean)

    def seconds_for_ends(self, count: int) -> float | None:
        """How long it takes until so many of those that it has end (Little's law); None where none ended yet.

        By what they take, not by how often they ended: who asks once a minute would hear of minutes.
        """
        if self.mean_seconds is None or not self.num_requests:
            return None
        return count * self.mean_seconds / self.num_requests


@dataclass(slots=True, eq=False)
class Holding:
    """What one request holds; only the ledger changes it.

    num_prompt_tokens: with those that were resumed; 0 once it waits no more. entered_at: by our clock.
    num_charged: taken from `bucket`, if there was one. adapter: that it has, if it has one.
    """

    account: Account
    num_prompt_tokens: int
    entered_at: float
    is_waiting: bool = True
    is_over: bool = False
    bucket: TokenBucket | None = None
    num_charged: int = 0
    num_resumed_tokens: int = 0
    adapter: Lease | None = None


class TenantLedger:
    """queue: the bounds that all tenants share. load: the scheduler's figures at this moment. now: our clock.

    Without authentication all requests are on the account of the tenant without a name, which has no limits.
    """

    def __init__(
        self, queue: SchedulerOptions, load: Callable[[], SchedulerStats], now: Callable[[], float]
    ) -> None:
        self._queue = queue
        self._load = load
        self._now = now
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        self._refused: Counter[Cause] = Counter()

    # --- what a request may state ----------------------------------------------------------

    def check(self, identity: Identity, params: SamplingParams, priority: int) -> int:
        """The priority in force: what is asked for, or where nothing is (0), the nearest that is allowed.

        Raises InvalidArgument for what waiting would not help: a priority or a max_tokens that the tenant may
        not have.
        """
        limits = identity.limits
        low = -math.inf if limits.min_priority is None else limits.min_priority
        high = math.inf if limits.max_priority is None else limits.max_priority
        if priority and not low <= priority <= high:
            reason = f"{priority} is not in [{low}, {high}], which tenant {identity.tenant!r} may ask for"
            raise self._refusal(identity, Cause.PRIORITY, InvalidArgument("priority", reason))
        if limits.max_tokens is not None:
            for name, asked in (("max_tokens", params.max_tokens or 1), ("min_tokens", params.min_tokens)):
                if asked > limits.max_tokens:
                    reason = f"{asked} is over {limits.max_tokens}, the limit of tenant {identity.tenant!r}"
                    raise self._refusal(identity, Cause.MAX_TOKENS, InvalidArgument(name, reason))
        return int(max(low, min(priority, high)))

    # --- what a request holds --------------------------------------------------------------

    def enter(self, identity: Identity, num_tokens: int, num_likely: int = 0) -> Holding:
        """Let a request in, before the work of reading its prompt, which has so many tokens at the least.

        num_likely: output tokens that it will probably be charged for; they tell when to try again.
        Raises TenantLimitReached or QueueFull; nothing is held then.
        """
        account, limits = self._account(identity), identity.limits
        most = limits.max_concurrent_requests
        if most is not None and account.num_requests >= most:
            reason = f"{account.num_requests} requests of the tenant wait or run; at most {most} may"
            seconds = account.seconds_for_ends(account.num_requests - most + 1)
            raise self._limit_reached(identity, Cause.CONCURRENT_REQUESTS, reason, _bounded(seconds))
        self._check_queued_tokens(identity, account, num_tokens)
        self._check_rate(identity, account, num_tokens + 1, num_tokens + num_likely)
        if identity.tenant:
            self._check_share(identity, account, num_tokens)
        account.num_requests += 1
        account.num_waiting += 1
        account.num_queued_tokens += num_tokens
        return Holding(account, num_tokens, self._now())

    def charge(
        self,
        identity: Identity,
        holding: Holding,
        num_prompt_tokens: int,
        num_output_tokens: int,
        num_resumed_tokens: int = 0,
    ) -> None:
        """The prompt is read: count its tokens, and take from the bucket all that the request may yet use.

        num_resumed_tokens: of the output, those that came with it. They wait to be computed like a prompt's.
        Raises TenantLimitReached; the caller then cancels.
        """
        account = holding.account
        account.num_queued_tokens -= holding.num_prompt_tokens
        holding.num_prompt_tokens = 0
        num_known_tokens = num_prompt_tokens + num_resumed_tokens
        self._check_queued_tokens(identity, account, num_known_tokens)
        most = num_prompt_tokens + num_output_tokens
        self._check_rate(identity, account, most, most)
        account.num_queued_tokens += num_known_tokens
        holding.num_prompt_tokens = num_known_tokens
        holding.num_resumed_tokens = num_resumed_tokens
        if account.bucket is not None:
            account.bucket.take(most, self._now())
            holding.bucket, holding.num_charged = account.bucket, most

    def take_text(self, identity: Identity, size: int) -> None:
        """Let in a text of so many characters, or so many ids, to be turned into the other for its own sake.

        Raises TenantLimitReached, and nothing is taken then. What is taken stays taken, whatever comes of it.
        """
        if identity.limits.tokenized_per_minute is None:
            return
        account, now = self._account(identity), self._now()
        bucket = account.text_bucket
        assert bucket is not None, "an account has a bucket for each limit of a rate"
        seconds = bucket.seconds_until(size, now)
        if seconds > 0:
            left, rate = max(0, int(bucket.level(now))), identity.limits.tokenized_per_minute
            reason = f"{size} characters or ids; {left} are left of {rate} a minute"
            raise self._limit_reached(identity, Cause.TOKENIZED_PER_MINUTE, reason, seconds)
        bucket.take(size, now)

    def start(self, holding: Holding) -> None:
        """Its first token came: it waits no more."""
        account, now = holding.account, self._now()
        account.starts.add(1, now)
        account.started_tokens.add(holding.num_prompt_tokens, now)
        self._leave_queue(holding)

    def end(self, holding: Holding, num_used_tokens: int) -> None:
        """It ended, having used so many tokens, prompt and output: the rest of its charge goes back.

        The prompt of a request that was accepted counts as used however it ends: it may have been computed,
        and else a tenant could have prompts computed and leave before the first token.
        """
        if holding.is_over:
            return
        if holding.bucket is not None:
            holding.bucket.give_back(max(0, holding.num_charged - num_used_tokens), self._now())
        self._leave_queue(holding)
        holding.is_over = True
        if holding.adapter is not None:
            holding.adapter.release()
        holding.account.num_requests -= 1
        holding.account.note_end(self._now() - holding.entered_at)

    def cancel(self, holding: Holding) -> None:
        """It was not accepted after all: all of its charge goes back, and how short it was tells nothing."""
        self._give_up(holding, 0)

    def refuse(self, holding: Holding) -> None:
        """The scheduler found fault with it, after it had read the tokens that were resumed: those are used,
        else a tenant could have the engine read for ever for nothing."""
        self._give_up(holding, holding.num_resumed_tokens)

    def _give_up(self, holding: Holding, num_used_tokens: int) -> None:
        mean_seconds = holding.account.mean_seconds
        self.end(holding, num_used_tokens)
        holding.account.mean_seconds = mean_seconds

    # --- what is known ---------------------------------------------------------------------

    def report(self, limit: int) -> TenantsReport:
        """At most `limit` tenants, those that hold most first, then in the order of last use."""
        latest_first = reversed(self._accounts.items())
        most = heapq.nlargest(limit, latest_first, key=lambda item: item[1].num_requests)
        now = self._now()
        tenants = (_report(tenant, account, now) for tenant, account in most)
        return TenantsReport(tuple(tenants), len(self._accounts), dict(self._refused))

    # --- checks ----------------------------------------------------------------------------

    def _check_queued_tokens(self, identity: Identity, account: Account, num_tokens: int) -> None:
        """A lone request is let in whatever its size, else it could never be; but none where none may."""
        most, queued = account.limits.max_queued_tokens, account.num_queued_tokens
        if most is not None and (queued or not most) and queued + num_tokens > most:
            reason = f"{queued + num_tokens} prompt tokens of the tenant would wait; at most {most} may"
            seconds = account.started_tokens.seconds_for(queued + num_tokens - most, self._now())
            raise self._limit_reached(identity, Cause.QUEUED_TOKENS, reason, _bounded(seconds))

    def _check_rate(self, identity: Identity, account: Account, num_least: int, num_likely: int) -> None:
        if account.bucket is None:
            return
        now, num_likely = self._now(), max(num_least, num_likely)
        if account.bucket.seconds_until(num_least, now) > 0:
            seconds = account.bucket.seconds_until(num_likely, now)
            left, rate = max(0, int(account.bucket.level(now))), account.limits.tokens_per_minute
            reason = f"the request may use {num_likely} tokens; {left} are left of {rate} a minute"
            raise self._limit_reached(identity, Cause.TOKENS_PER_MINUTE, reason, seconds)

    def _check_share(self, identity: Identity, account: Account, num_tokens: int) -> None:
        """No tenant fills the queue, which others need too. One that has nothing in it yet is let in."""
        load = self._load()
        room = max(0, self._queue.max_waiting - load.num_waiting)
        room_tokens = max(0, self._queue.max_queued_tokens - load.num_queued_prompt_tokens)
        if not account.num_waiting:
            return
        if account.num_waiting >= QUEUE_WEIGHT * room:
            reason = f"{account.num_waiting} requests of the tenant wait; others need the rest"
            seconds = account.starts.seconds_for(1, self._now())
        elif account.num_queued_tokens + num_tokens > QUEUE_WEIGHT * room_tokens:
            reason = f"{account.num_queued_tokens} tokens of the tenant wait; others need the rest"
            seconds = account.started_tokens.seconds_for(num_tokens, self._now())
        else:
            return
        error = QueueFull(reason, _bounded(seconds), Cause.QUEUE_SHARE.value)
        raise self._refusal(identity, Cause.QUEUE_SHARE, error)

    def _limit_reached(
        self, identity: Identity, cause: Cause, reason: str, seconds: float
    ) -> PageturnerError:
        return self._refusal(identity, cause, TenantLimitReached(cause.value, reason, seconds))

    def _refusal(self, identity: Identity, cause: Cause, error: PageturnerError) -> PageturnerError:
        self._account(identity).refused[cause] += 1
        self._refused[cause] += 1
        return error

    # --- accounts --------------------------------------------------------------------------

    def _account(self, identity: Identity) -> Account:
        """The tenant's, as of now the one last used, under the limits that the identity says."""
        tenant, limits, now = identity.tenant, identity.limits, self._now()
        account = self._accounts.get(tenant)
        if account is None:
            buckets = _bucket(limits.tokens_per_minute, now), _bucket(limits.tokenized_per_minute, now)
            account = Account(limits, *buckets, RateMeter(now), RateMeter(now))
            self._accounts[tenant] = account
            self._forget_idle(now)
        elif account.limits != limits:
            account.bucket = _resized(account.bucket, limits.tokens_per_minute, now)
            account.text_bucket = _resized(account.text_bucket, limits.tokenized_per_minute, now)
            account.limits = limits
        self._accounts.move_to_end(tenant)
        return account

    def _forget_idle(self, now: float) -> None:
        """Keep MAX_IDLE_ACCOUNTS, beside those that would be other ones if they were made anew: that hold
        something, or whose bucket is not full. Looks at two for each that came, so it keeps up."""
        for _ in range(2):
            if len(self._accounts) <= MAX_IDLE_ACCOUNTS:
                return
            tenant, account = next(iter(self._accounts.items()))
            buckets = (account.bucket, account.text_bucket)
            if account.num_requests or not all(bucket is None or bucket.is_full(now) for bucket in buckets):
                self._accounts.move_to_end(tenant)
            else:
                del self._accounts[tenant]

    def _leave_queue(self, holding: Holding) -> None:
        if holding.is_waiting:
            holding.is_waiting = False
            holding.account.num_waiting -= 1
            holding.account.num_queued_tokens -= holding.num_prompt_tokens
            holding.num_prompt_tokens = 0


def _bucket(per_minute: int | None, now: float) -> TokenBucket | None:
    return None if per_minute is None else TokenBucket(per_minute, now)


def _resized(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    """The bucket under another limit."""
    if bucket is None or per_minute is None:
        return _bucket(per_minute, now)
    bucket.resize(per_minute, now)
    return bucket


def _bounded(seconds: float | None) -> float:
    return USUAL_RETRY if seconds is None else min(max(seconds, SHORTEST_RETRY), LONGEST_RETRY)


def _report(tenant: str, account: Account, now: float) -> TenantReport:
    return TenantReport(
        tenant,
        account.limits,
        account.num_requests,
        account.num_waiting,
        account.num_queued_tokens,
        None if account.bucket is None else account.bucket.level(now),
        dict(account.refused),
    )
