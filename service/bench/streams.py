"""`pageturner bench streams`: thousands of streams open at once, each of which has to end once and whole.

A model that takes a fixed time a step stands behind the real server, so that all streams run side by side.
Some clients may hang: they accept an answer and read nothing of it.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pageturner.service.bench.child_process import child_process
from pageturner.service.bench.front import server_words
from pageturner.service.bench.null_service import NullLoad
from pageturner.service.bench.stream_clients import StreamCounts, StreamTask
from pageturner.service.client import SyncClient

PROMPT_TOKENS = 16
PATIENCE_SECONDS = 60.0
"""For requests whose clients hang: twice as long as the server's own."""
ALL_OPEN, ALL_ENDED = "all open", "all ended"


@dataclass(frozen=True, slots=True)
class StreamsPlan:
    """streams: that are read. unread: beside them, by clients that hang. connections: of those that are read.
    client_processes: that make them. step_seconds: of the model."""

    streams: int
    unread: int
    connections: int
    client_processes: int
    output_tokens: int
    step_seconds: float


@dataclass(frozen=True, slots=True)
class ServerUsage:
    """Of the server's process: resident memory now and at most since it began, and its open files."""

    resident_bytes: int
    most_resident_bytes: int
    descriptors: int


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """usage: before any client, with all streams open, and when the server has ended all of them, those
    unread too. seconds: until all were open, from then to the last that was read, and to that end. faults: of
    streams that were read, by what was wrong: none is as it should be. num_left: requests that the server
    still had PATIENCE_SECONDS later."""

    plan: StreamsPlan
    whole: int
    faults: dict[str, int]
    num_left: int
    seconds: tuple[float, float, float]
    before: ServerUsage
    open: ServerUsage
    after: ServerUsage

    @property
    def is_without_loss(self) -> bool:
        """Every stream that was read ended once, with all its tokens, and the server is rid of the others."""
        return self.whole == self.plan.streams and not self.num_left


def measure_streams(plan: StreamsPlan, cache_dir: Path, say: Callable[[str], None]) -> StreamsResult:
    """Raises ModelError where a process fails."""
    count = plan.streams + plan.unread
    # All of them may come within one step, before any of them runs.
    load = NullLoad(count, PROMPT_TOKENS, plan.output_tokens, plan.step_seconds, max_waiting=count)
    with ExitStack() as stack:
        server = stack.enter_context(child_process(*server_words(load, cache_dir)))
        target = server.read()["target"]
        Path(f"/proc/{server.pid}/clear_refs").write_text("5")  # the most is that of what follows
        before, moments = usage_of(server.pid), [time.monotonic()]
        tasks = [_part(plan, number) for number in range(plan.client_processes)]
        if plan.unread:
            tasks.append(StreamTask(plan.unread, 1 + plan.unread // 4, plan.output_tokens, is_read=False))
        clients = [
            stack.enter_context(child_process("pageturner.service.bench.stream_clients", target))
            for _ in tasks
        ]
        for client, task in zip(clients, tasks, strict=True):
            client.write_json(asdict(task))
        for client in clients:
            assert client.read() == "open"
        moments.append(time.monotonic())
        at_once = usage_of(server.pid)
        say(ALL_OPEN)
        counts = [StreamCounts(**client.read()) for client in clients[: plan.client_processes]]
        moments.append(time.monotonic())
        num_left = _wait_until_idle(target)
        moments.append(time.monotonic())
        say(ALL_ENDED)
        after = usage_of(server.pid)
        for client in clients[plan.client_processes :]:
            client.write("leave")
            client.read()
    faults = Counter[str]()
    for one in counts:
        faults.update(one.faults)
    whole = sum(one.whole for one in counts)
    opening, reading, ending = (b - a for a, b in pairwise(moments))
    return StreamsResult(
        plan, whole, dict(faults), num_left, (opening, reading, ending), before, at_once, after
    )


def _wait_until_idle(target: str) -> int:
    """The requests that are left after PATIENCE_SECONDS, or none as soon as that is so."""
    until = time.monotonic() + PATIENCE_SECONDS
    with SyncClient(target) as client:
        while True:
            load = client.load()
            num_left = load.num_running + load.num_waiting
            if not num_left or time.monotonic() > until:
                return num_left
            time.sleep(0.1)


def _part(plan: StreamsPlan, number: int) -> StreamTask:
    """Of one client process."""

    def share(count: int) -> int:
        return len(range(number, count, plan.client_processes))

    return StreamTask(share(plan.streams), max(1, share(plan.connections)), plan.output_tokens, is_read=True)


def usage_of(pid: int) -> ServerUsage:
    """As of now, by proc(5)."""
    sizes = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            sizes[name] = 1024 * int(rest.split()[0])
    return ServerUsage(sizes["VmRSS"], sizes["VmHWM"], len(os.listdir(f"/proc/{pid}/fd")))


def document(result: StreamsResult) -> dict[str, Any]:
    """The figures for JSON."""
    return {**asdict(result), "is_without_loss": result.is_without_loss}
