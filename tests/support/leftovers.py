"""What a test file leaves behind for those that run after it, in this process and beside it.

A test that passes alone and fails behind another, or on a machine where others run, most often meets what the
other left. So each file ends as it began (`pytest --leftovers`): no process, no thread of ours, no memory
shared with processes that are gone. What `pageturner` as a program changes of its process, where a test runs
a command in this one, is put back: the environment, and the handlers of signals.
"""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest

SECONDS_TO_END = 60.0
"""For what has been told to end, on a machine that has much else to do. What stays, stays for ever."""

OUR_THREADS = "pageturner-"
"""How the names of ours begin. Those of libraries, such as gRPC's poller, live as long as the process."""

PROCESSES_OF_LIBRARIES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "/ray/")
"""Found in their command lines. They end with the process that started them."""

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def processes() -> frozenset[str]:
    """Those that this one has started and not collected."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        try:
            process_ids = (task / "children").read_text().split()
        except OSError:  # the thread has ended
            continue
        for process_id in process_ids:
            try:
                command = Path(f"/proc/{process_id}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
            if not any(name in command for name in PROCESSES_OF_LIBRARIES):
                found.add(f"process {process_id} ({command[:120] or 'ended, and not waited for'})")
    return frozenset(found)


def threads() -> frozenset[str]:
    return frozenset(
        f"thread {thread.name} ({thread.ident})"
        for thread in threading.enumerate()
        if thread.name.startswith(OUR_THREADS)
    )


def shared_memory() -> frozenset[str]:
    """Files of /dev/shm that this process maps: those of others are none of its business."""
    with open("/proc/self/maps") as maps:
        return frozenset(
            f"shared memory {line.split(maxsplit=5)[5].strip()}"
            for line in maps
            if "/dev/shm/pageturner-" in line
        )


def handlers() -> dict[signal.Signals, Any]:
    """Of signals, as they are now."""
    return {number: signal.getsignal(number) for number in SIGNALS}


@dataclass
class Leftovers:
    """Of one test file, from its first test on. seconds: given to what is about to end."""

    seconds: float = field(default_factory=lambda: SECONDS_TO_END)
    sleep: Callable[[float], None] = sleep
    _living: frozenset[str] = field(default_factory=lambda: processes() | threads())
    _environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    _handlers: dict[signal.Signals, Any] = field(default_factory=handlers)
    _first_seen: dict[str, str] = field(default_factory=dict)

    def note(self, test: str) -> None:
        """A test has ended; its file's fixtures may live on."""
        for thing in (processes() | threads()) - self._living:
            self._first_seen.setdefault(thing, test)

    def put_back(self) -> None:
        """The environment and the handlers, when the file has ended."""
        for name in os.environ.keys() - self._environment.keys():
            del os.environ[name]
        os.environ.update(self._environment)
        for number, handler in self._handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)

    def found(self) -> list[str]:
        """What is left when the file's fixtures are gone, with the test behind which it was seen first."""
        ends = monotonic() + self.seconds
        while (left := (processes() | threads()) - self._living) and monotonic() < ends:
            self.sleep(0.01)
        if mapped := shared_memory():
            gc.collect()  # tensors in a circle hold it
            mapped = shared_memory()
        return [
            f"{thing}, first seen behind {self._first_seen.get(thing, 'the last test')}"
            for thing in sorted(left | mapped)
        ]


class LeftoversGuard:
    """A plugin: the last test of a file that is run here has an error if the file leaves something behind."""

    def __init__(self) -> None:
        self._of_file: Leftovers | None = None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Generator[None, bool, bool]:
        """The first test of a file is about to be set up."""
        if self._of_file is None:
            self._of_file = Leftovers()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
        """A test is torn down, and with the last one the fixtures of its file."""
        yield
        leftovers = self._of_file
        assert leftovers is not None, "set up before"
        leftovers.note(item.nodeid)
        if nextitem is not None and nextitem.path == item.path:
            return
        self._of_file = None
        leftovers.put_back()
        if left := leftovers.found():
            pytest.fail(f"{item.path.name} leaves behind:\n" + "\n".join(left), pytrace=False)
