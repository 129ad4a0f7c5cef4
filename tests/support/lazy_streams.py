"""Streams whose work is done as late as they may: only when an event after it is waited for.

A GPU is free to run enqueued work at once or much later. Work that is put off until the last moment, and
then finds what it reads overwritten, or overwrites what was to be read, shows the wait that is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from pageturner.service.model.streams import Event, ImmediateStream, Streams, Work


@dataclass(eq=False, slots=True)
class LazyEvent:
    """The moment after the first `after` works of a stream. It comes when something waits for it."""

    stream: LazyStream
    after: int

    def query(self) -> bool:
        return self.stream.num_done >= self.after

    def synchronize(self) -> None:
        self.come()

    def come(self) -> None:
        self.stream.run_until(self.after)


class LazyStream:
    """Keeps its work until it is pressed. A wait is work, too: it presses the other stream in its turn.

    fail_after_next: the host's call of the next `run` fails, though its work is in the queue by then.
    """

    def __init__(self) -> None:
        self._queue: deque[Callable[[], object]] = deque()
        self.num_done = 0
        self.fail_after_next = False

    @property
    def is_idle(self) -> bool:
        return not self._queue

    def run(self, work: Work) -> None:
        self._queue.append(work)
        if self.fail_after_next:
            self.fail_after_next = False
            raise RuntimeError("the driver refuses")

    def record_event(self) -> LazyEvent:
        return LazyEvent(self, self.num_done + len(self._queue))

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, LazyEvent)
        self._queue.append(event.come)

    def run_until(self, count: int) -> None:
        """Do the first `count` works, and as little as that of any other stream's."""
        while self.num_done < count:
            self.num_done += 1
            self._queue.popleft()()

    def run_some(self, count: int) -> None:
        self.run_until(self.num_done + min(count, len(self._queue)))

    def finish(self) -> None:
        self.run_some(len(self._queue))


class PressingStream(ImmediateStream):
    """Compute that is done at once, beside copies that are lazy: what it waits for must happen now."""

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, LazyEvent)
        event.come()

    def record_event(self) -> LazyEvent:
        return LazyEvent(LazyStream(), 0)


def lazy_copies() -> Streams:
    """Compute at once, copies at the last moment."""
    return Streams(PressingStream(), LazyStream())
