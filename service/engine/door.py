"""Who is taken in: decided on the event loop, at once, by the scheduler's figures and what is on its way.

The one owner of that count: a request is under way from `admit` until the scheduler has answered for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from pageturner.service.core.clock import Clock
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outlook import Outlook, Work
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.request import NewRequest
from pageturner.service.core.scheduling.intake import asked_work, check_deadline, check_queue
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.engine.retry_times import RetryTimes
from pageturner.service.errors import QueueFull


class Door:
    """Refuses what would find the queue full, and what would end too late behind it.

    The scheduler's own bound counts the requests that never ran, and so does this one, at figures that are
    older and with all that was sent since: what is admitted here is never refused there.

    stats: the newest of the scheduler's that have come over.
    """

    def __init__(
        self, options: SchedulerOptions, clock: Clock, random: Random, stats: Callable[[], SchedulerStats]
    ) -> None:
        self._options = options
        self._clock = clock
        self._stats = stats
        self._retry_times = RetryTimes(random)
        self._num_under_way = 0
        self._work = Work()

    # --- the decision ------------------------------------------------------------------------

    def check(
        self,
        request: GenerationRequest,
        arrived_at: float,
        num_prompt_tokens: int,
        num_resumed: int = 0,
    ) -> None:
        """Raise QueueFull or DeadlineTooClose, with the time after which to come again.

        num_prompt_tokens: of `request`, or the fewest that it can have while it is not read yet.
        num_resumed: tokens of answers that came with it.
        """
        outlook, now = self.outlook(), self._clock.now()
        work = asked_work(num_prompt_tokens, request.params, self._options, num_resumed)
        try:
            check_queue(self._options, outlook, work)
            if request.deadline_seconds is not None:
                check_deadline(self._options, outlook, work, arrived_at + request.deadline_seconds - now)
        except QueueFull as refusal:
            own_seconds = outlook.drain_seconds(outlook.tokens(work))
            refusal.retry_after_seconds = self._retry_times.seconds(
                now, refusal.retry_after_seconds, own_seconds
            )
            raise

    def outlook(self) -> Outlook:
        """The scheduler's, with what is under way to it."""
        outlook = self._stats().outlook
        if not self._num_under_way:
            return outlook
        return replace(
            outlook,
            num_queued=outlook.num_queued + self._num_under_way,
            num_queued_prompt_tokens=outlook.num_queued_prompt_tokens + self._work.num_prompt_tokens,
            queue=outlook.queue + self._work,
        )

    # --- what is under way -------------------------------------------------------------------

    @property
    def under_way(self) -> tuple[int, int]:
        """Requests on their way to the scheduler, and their prompt tokens."""
        return self._num_under_way, self._work.num_prompt_tokens

    def admit(self, new: NewRequest) -> Work:
        """A request is sent to the scheduler; what is to be given back when it has answered."""
        num_prompt_tokens = len(new.prompt_token_ids)
        work = asked_work(num_prompt_tokens, new.params, self._options, new.num_resumed_tokens)
        self._num_under_way += 1
        self._work += work
        return work

    def answered(self, work: Work) -> None:
        """The scheduler has taken a request, or refused it."""
        self._num_under_way -= 1
        self._work -= work

    def forget_all(self) -> None:
        """The engine is dead, and answers for nothing more."""
        self._num_under_way, self._work = 0, Work()
