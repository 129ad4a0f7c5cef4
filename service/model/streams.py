"""Queues of device work: the stream that computes, the stream that copies, and the moments between them.

Work of one stream runs in the order in which it was enqueued; two streams are ordered only where one waits
for an event of the other. On the CPU nothing is queued: work is done when it is given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

Work = Callable[[], object]


class Event(Protocol):
    """A moment in a stream: all that was enqueued before it is done."""

    def query(self) -> bool:
        """Whether it has come, without waiting for it."""
        ...

    def synchronize(self) -> None:
        """Return when it has come. From any thread."""
        ...


class Stream(Protocol):
    """One queue of device work."""

    def run(self, work: Work) -> None:
        """Enqueue here what `work` launches."""
        ...

    def record_event(self) -> Event:
        """The moment after all work so far."""
        ...

    def wait_event(self, event: Event) -> None:
        """Let work that is enqueued here from now on start after the event. The host does not wait."""
        ...


@dataclass(frozen=True, slots=True)
class Streams:
    """The two queues of one device. On the CPU both are the same."""

    compute: Stream
    copies: Stream


class _Come:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class ImmediateStream:
    """The CPU: work is done when `run` returns."""

    _COME = _Come()

    def run(self, work: Work) -> None:
        work()

    def record_event(self) -> Event:
        return self._COME

    def wait_event(self, event: Event) -> None:
        assert event.query()


class CurrentStream:
    """torch's current stream of a GPU, asked for at each use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def run(self, work: Work) -> None:
        work()

    def record_event(self) -> Event:
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        torch.cuda.current_stream(self._device).wait_event(event)


class SideStream:
    """A stream of its own on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch leaves it so

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record_event(self) -> Event:
        event: torch.cuda.Event = self._stream.record_event()
        return event

    def wait_event(self, event: Event) -> None:
        assert isinstance(event, torch.cuda.Event)
        self._stream.wait_event(event)


def streams_of(device: torch.device) -> Streams:
    """The queues of a device as torch has them."""
    if device.type == "cuda":
        return Streams(CurrentStream(device), SideStream(device))
    immediate = ImmediateStream()
    return Streams(immediate, immediate)
