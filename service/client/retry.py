"""How often, where and when a call is tried again. Decides; sends nothing and waits for nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from pageturner.service.backoff import doubled
from pageturner.service.client.balancing import Balancer, Balancing, Mixed, Placement, Wanted
from pageturner.service.client.failures import is_temporary, retry_after
from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.client.targets import Target
from pageturner.service.core.clock import Clock
from pageturner.service.errors import (
    DuplicateRequest,
    InvalidArgument,
    MixedServers,
    NotResumable,
    PageturnerError,
    QueueFull,
)


@dataclass(frozen=True, slots=True)
class Retry:
    """What a client does where a server is away, is full, or goes away in the middle of an answer.

    Calls that may be repeated go to the next server at once, and round again after a wait. That is drawn
    between half and all of first_wait_seconds, and doubles with each round (Brooker, "Exponential Backoff and
    Jitter", AWS 2015); where servers said when to come back, it is as long as the soonest of them wants.
    Raises InvalidArgument.
    """

    max_attempts: int = 8
    """In a row, without a word of an answer between them; 1 never tries again."""
    first_wait_seconds: float = 0.1
    longest_wait_seconds: float = 3.0
    longest_hint_seconds: float = 30.0
    """A server that wants a client to come back later than that is taken to have refused."""
    resumes: bool = True
    """Whether an answer that broke off goes on where the servers promise exactly the same tokens."""
    allow_inexact: bool = False
    """Whether it also goes on where they don't, and other tokens may come than would have."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1:
            raise InvalidArgument("retry.max_attempts", f"{self.max_attempts} is not at least 1")
        for name in ("first_wait_seconds", "longest_wait_seconds", "longest_hint_seconds"):
            if not 0 <= getattr(self, name) < math.inf:  # also refuses NaN
                raise InvalidArgument(f"retry.{name}", f"{getattr(self, name)} s is not a time")


STANDARD = Retry()

NEVER = Retry(max_attempts=1, resumes=False)
"""The first failure is the call's."""


@dataclass(frozen=True, slots=True)
class Retried:
    """A call failed and is tried again.

    target: of the server that comes next. request_id: of a stream; empty before a server has accepted one
    that names none. is_resumed: an answer that had begun goes on.
    """

    error: PageturnerError
    target: str
    wait_seconds: float
    request_id: str = ""
    is_resumed: bool = False


class Attempts:
    """Those of one call, which begins with server `first` of num_servers, or where its placement says.

    random: draws from [0, 1). left_seconds: until the end of the call, None for no limit.
    """

    def __init__(
        self,
        retry: Retry,
        first: int,
        num_servers: int,
        random: Callable[[], float],
        left_seconds: Callable[[], float | None] = lambda: None,
        placement: Placement | None = None,
    ) -> None:
        self._placement = placement
        self._tried: set[int] = set()
        self._retry = retry
        self._random = random
        self._num_servers = num_servers
        self._unfit: set[int] = set()
        self._num_failed = 0
        self._num_in_round = 0
        self._num_rounds = 0
        self._hint = math.inf
        self._has_failed = False
        self.left_seconds = left_seconds
        self.server = first if placement is None else placement.choose((), first)
        """The one to ask now."""

    def succeed(self) -> None:
        """A part of the answer has come: what failed before counts no more."""
        self._tried.clear()
        self._num_failed = self._num_in_round = self._num_rounds = 0
        self._hint = math.inf

    def computed(self) -> None:
        """The first token has come."""
        if self._placement is not None:
            self._placement.computed()

    def close(self) -> None:
        """The call is over, whichever way."""
        if self._placement is not None:
            self._placement.end()

    def after(self, error: PageturnerError) -> float | None:
        """How long to wait before `server`, now another, is asked; None where the error is the call's end."""
        is_first, self._has_failed = not self._has_failed, True
        if self._placement is not None:
            self._placement.failed(
                self.server, is_away=is_temporary(error) and not isinstance(error, QueueFull)
            )
        if isinstance(error, NotResumable | MixedServers):
            self._unfit.add(self.server)
        elif isinstance(error, DuplicateRequest):
            if is_first:
                return None  # of another request; later it is this one, on a server that lost its client
        elif not is_temporary(error):
            return None
        hint = retry_after(error) or 0.0
        self._num_failed += 1
        is_over = self._num_failed >= self._retry.max_attempts or len(self._unfit) == self._num_servers
        if is_over or hint > self._retry.longest_hint_seconds:
            return None
        self._hint = min(self._hint, hint)
        wait, left = self._move_on(), self.left_seconds()
        return None if left is not None and wait >= left else wait

    def _move_on(self) -> float:
        """To the next server that may do; the wait before it."""
        self._num_in_round += 1
        self._tried.add(self.server)
        following = (self.server + 1) % self._num_servers
        while following in self._unfit:
            following = (following + 1) % self._num_servers
        if self._placement is not None:
            chosen = self._placement.choose(self._tried | self._unfit, following)
            following = following if chosen in self._unfit else chosen
        self.server = following
        if self._num_in_round < self._num_servers - len(self._unfit):
            return 0.0
        retry = self._retry
        wait = doubled(retry.first_wait_seconds, self._num_rounds, retry.longest_wait_seconds)
        wait = max(wait * (1 + self._random()) / 2, self._hint * (1 + self._random() / 4))
        self._num_rounds += 1
        self._num_in_round, self._hint = 0, math.inf
        self._tried.clear()
        return wait


class Routing:
    """To which of a client's servers its calls go. random: draws from [0, 1). on_retry: told of each retry.
    balancer: chooses for each call; None to stay with a server that works.

    current: the server that answered last. Without a balancer calls begin there.
    """

    def __init__(
        self,
        targets: tuple[Target, ...],
        retry: Retry,
        clock: Clock,
        random: Callable[[], float],
        on_retry: Callable[[Retried], object] | None = None,
        balancer: Balancer | None = None,
    ) -> None:
        self._balancer = balancer
        self._addresses = tuple(target.address for target in targets)
        self.targets = targets
        self.retry = retry
        self.clock = clock
        self.current = 0
        self._random = random
        self._on_retry = on_retry

    def attempts(self, timeout_seconds: float | None, wanted: Wanted | None = None) -> Attempts:
        """Those of a call that begins now. wanted: what its place hangs on, of one that may go anywhere."""
        clock, end = self.clock, math.inf
        if timeout_seconds is not None:
            end = clock.now() + timeout_seconds
        return Attempts(
            self.retry,
            self.current,
            len(self.targets),
            self._random,
            lambda: None if end == math.inf else max(0.0, end - clock.now()),
            None
            if self._balancer is None or wanted is None
            else Placement(self._balancer, wanted, self._addresses),
        )

    @property
    def is_balanced(self) -> bool:
        """Whether calls are spread over the servers."""
        return self._balancer is not None

    def answered(self, server: int) -> None:
        """The server answers."""
        self.current = server
        if self._balancer is not None:
            self._balancer.succeeded(self._addresses[server])

    def note_load(self, server: int, report: bytes) -> None:
        """The load that a server told with the end of a call."""
        if self._balancer is not None:
            self._balancer.report(self._addresses[server], report)

    def note_begun(self, server: int, fingerprint: str) -> None:
        """A server begins an answer of this fingerprint. Raises MixedServers where it is to be refused."""
        if self._balancer is not None:
            self._balancer.note_fingerprint(self._addresses[server], fingerprint)

    def again(self, attempts: Attempts, error: PageturnerError, answer: PartialAnswer | None = None) -> float:
        """How long to wait before the next attempt. Raises the error where there is none.

        answer: what has come of a stream.
        """
        is_resumed = answer is not None and answer.has_begun
        if answer is not None and is_resumed and not (self.retry.resumes and answer.can_be_resumed):
            raise error
        wait = attempts.after(error)
        if wait is None:
            raise error
        if self._on_retry is not None:
            request_id = answer.request_id if answer is not None else ""
            target = self.targets[attempts.server].address
            self._on_retry(Retried(error, target, wait, request_id, is_resumed))
        return wait

    def takes_load(self, server: int) -> Callable[[bytes], object] | None:
        """What is to be told of the load that comes with the ends of its calls; None where nobody asks."""
        return None if self._balancer is None else partial(self.note_load, server)


OF_NAMES = {"round-robin": "round_robin", "least-load": "weighted_round_robin"}
"""gRPC's own policies, for the addresses of one name: the second weighs them by the load that they report."""


def balanced(
    targets: tuple[Target, ...],
    balancing: Balancing | None,
    mixed: Mixed,
    retry: Retry,
    clock: Clock,
    random: Callable[[], float],
    on_retry: Callable[[Retried], object] | None,
) -> Routing:
    """The routing of a client. Raises InvalidArgument for a way to balance that these targets don't allow."""
    if balancing is None:
        return Routing(targets, retry, clock, random, on_retry)
    balancer = Balancer(balancing, [target.address for target in targets], clock, random, mixed)
    if any(target.is_name_of_many for target in targets):
        if balancing not in OF_NAMES:
            reason = f"{balancing} is for servers that are named one by one, such as pods of a StatefulSet"
            raise InvalidArgument("balancing", reason)
        targets = tuple(
            target.balanced_over_names(OF_NAMES[balancing]) if target.is_name_of_many else target
            for target in targets
        )
    return Routing(targets, retry, clock, random, on_retry, balancer)
