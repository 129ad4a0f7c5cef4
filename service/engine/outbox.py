"""The way from the engine thread to the event loop: one wake-up for all that waits to cross."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Sequence

from pageturner.service.core.outputs import ChoiceFinishedEvent, FinishedEvent, SchedulerStats, TokenEvent
from pageturner.service.engine.thread_messages import EngineOutput

MOST_BUSY = 1 / 3
"""The share of its time that the event loop may spend before tokens wait for it to rest."""
LONGEST_REST = 0.05
"""Seconds that tokens wait at most."""

_EVENTS = frozenset({TokenEvent, ChoiceFinishedEvent, FinishedEvent})

_Put = tuple[int, Sequence[EngineOutput], SchedulerStats]
Deliver = Callable[[Sequence[EngineOutput], SchedulerStats], None]


class Outbox:
    """`put` is for the engine thread, all else for the loop. What is put crosses in that order, save that an
    answer may overtake events: none of them is of the request that it opens.

    Answers to commands cross at once. So do events while the loop keeps up. It is behind when it was busy
    for more than MOST_BUSY of the time since events last crossed: the next ones then wait until that share
    is met. The tokens that pile up meanwhile become one message a stream, which costs little more than one
    of a single token, and the engine thread, which needs the same interpreter lock, gets on with its steps.

    deliver: takes what crosses, and the newest figures that have. cpu_seconds: of the calling thread.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        deliver: Deliver,
        cpu_seconds: Callable[[], float] = time.thread_time,
    ) -> None:
        self._loop = loop
        self._deliver = deliver
        self._cpu_seconds = cpu_seconds
        self._answers: deque[_Put] = deque()
        self._events: deque[_Put] = deque()
        self._num_put = 0
        self._is_asked = False
        self._newest: tuple[int, SchedulerStats] = (0, SchedulerStats())
        self._crossed_at = loop.time()
        self._cpu_then = cpu_seconds()

    def put(self, outputs: Sequence[EngineOutput], stats: SchedulerStats) -> None:
        """stats: of this moment; the loop knows them from when these outputs cross."""
        self._num_put += 1
        answers = [output for output in outputs if type(output) not in _EVENTS]
        if answers or not outputs:
            self._answers.append((self._num_put, answers, stats))
            self._call_soon(self._hand_over_answers)
            outputs = [output for output in outputs if type(output) in _EVENTS]
        if outputs:
            self._events.append((self._num_put, outputs, stats))
            # Cleared before the queue is emptied: what is added after the loop's last look asks anew.
            if not self._is_asked:
                self._is_asked = True
                self._call_soon(self._cross_in_time)

    def cross(self) -> None:
        """Hand over everything that was put."""
        self._is_asked = False
        self._crossed_at, self._cpu_then = self._loop.time(), self._cpu_seconds()
        while self._events:
            events = self._events.popleft()
            self._hand_over_answers()  # those that were put before
            self._hand_over(*events)

    def _hand_over_answers(self) -> None:
        while self._answers:
            self._hand_over(*self._answers.popleft())

    def _cross_in_time(self) -> None:
        busy = self._cpu_seconds() - self._cpu_then
        rested_at = self._crossed_at + min(busy / MOST_BUSY, LONGEST_REST)
        if self._loop.time() >= rested_at:
            self.cross()
        else:
            self._loop.call_at(rested_at, self.cross)

    def _hand_over(self, number: int, outputs: Sequence[EngineOutput], stats: SchedulerStats) -> None:
        if number > self._newest[0]:  # answers overtake events: figures never go back
            self._newest = number, stats
        self._deliver(outputs, self._newest[1])

    def _call_soon(self, callback: Callable[[], None]) -> None:
        # A loop that was closed over us has no readers left.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback)
