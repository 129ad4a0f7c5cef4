"""The server under test, as a process: its configuration, its log, and what the system says of it."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types

from chaos.ledger import Ledger
from pageturner.service.client.server_process import PROGRAM, READY

CONFIG = """
[model]
device = "cpu"
dtype = "float32"
deterministic = true
num_threads = 1

[cache]
num_blocks = 256
swap_space = "4MiB"

[scheduler]
max_model_len = 4096
max_num_seqs = 8
max_waiting = 64

[engine]
stream_buffer_tokens = 256
slow_consumer_timeout_seconds = 2.0

[server]
keepalive_seconds = 2.0
keepalive_timeout_seconds = 2.0
max_connection_idle_seconds = 3.0
handshake_timeout_seconds = 2.0
drain_seconds = 2.0

[log]
level = "debug"
format = "json"
"""
"""Little memory, few slots and short patience, so that each bound is met."""

GRPC_LINE = re.compile(r"[IWE]\d{4} [\d:.]+ +\d+ \w+\.cc:\d+\]")
"""How gRPC's core begins a line of its own: what it makes of a peer's frames."""

START_SECONDS = 150.0
"""After so many it hangs: a start takes a second of processor time, and neighbours may leave it little."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What the process holds."""

    resident_bytes: int
    num_descriptors: int
    num_threads: int


@dataclass
class ServerProcess:
    """target: host:port. log: the file that its standard error goes to, or None."""

    process: Process
    target: str
    config: Path
    log: LogReader | None

    @property
    def pid(self) -> int:
        """Of the process."""
        return self.process.pid

    def figures(self) -> Figures:
        """As of now."""
        process = psutil.Process(self.pid)
        with process.oneshot():
            return Figures(process.memory_info().rss, process.num_fds(), process.num_threads())

    def forget_peak(self) -> None:
        """From now on the peak is that of what follows."""
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    @property
    def peak_bytes(self) -> int:
        """The most memory that was resident since."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def signal(self, number: signal.Signals) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    async def logged(self, event: str) -> None:
        """Wait until its log has this event since the last look at it."""
        assert self.log is not None, "a server whose log is read"
        while all(name != event for name, _ in self.log.events):
            await asyncio.sleep(0.05)  # another process writes it
            self.log.read()

    def check_log(self, ledger: Ledger, expected_faults: frozenset[str] = frozenset()) -> None:
        """When nothing is to come any more: an end of each accepted request, no fault but those expected."""
        assert self.log is not None, "a server whose log is read"
        self.log.read()
        if not self.log.num_lost_lines:
            for request_id in self.log.open_ids:
                ledger.lost(f"{request_id}: accepted, and no end in the log")
        for entry in self.log.faults:
            if entry["event"] not in expected_faults:
                ledger.problem(f"the server logged {entry}")
        self.log.forget()

    async def wait(self, seconds: float) -> int | None:
        """Its exit code; None if it has not ended in time."""
        try:
            async with asyncio.timeout(seconds):
                return await self.process.wait()
        except TimeoutError:
            return None


@dataclass
class LogReader:
    """The lines of a server's log, read as they come: requests without an end, and faults of the server."""

    path: Path
    _position: int = 0
    _unread: str = ""
    open_ids: set[str] = field(default_factory=set)
    num_accepted: int = 0
    num_finished: int = 0
    num_lost_lines: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    """Lines of level error and above, and what is no JSON."""
    events: list[tuple[str, str]] = field(default_factory=list)
    """All events since `forget`, with their request's id or none."""

    def read(self) -> None:
        """Take in what was written since."""
        with self.path.open(errors="backslashreplace") as file:
            file.seek(self._position)
            text = self._unread + file.read()
            self._position = file.tell()
        lines, _, self._unread = text.rpartition("\n")
        for line in lines.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                if GRPC_LINE.match(line) is None and not line.startswith("draining"):
                    self.faults.append({"event": "no JSON", "line": line})
            else:
                self._take(entry)

    def forget(self) -> None:
        """Events and faults so far were looked at."""
        self.events.clear()
        self.faults.clear()

    def _take(self, entry: dict[str, Any]) -> None:
        event, request_id = entry["event"], entry.get("request_id", "")
        self.events.append((event, request_id))
        if event == "accepted":
            self.num_accepted += 1
            if request_id in self.open_ids:
                self.faults.append(entry | {"why": "accepted while it lived"})
            self.open_ids.add(request_id)
        elif event == "finished":
            self.num_finished += 1
            if request_id not in self.open_ids:
                self.faults.append(entry | {"why": "an end of what was not accepted, or a second end"})
            self.open_ids.discard(request_id)
        elif event == "log_lines_lost":
            self.num_lost_lines += entry["count"]
        elif entry["level"] in ("error", "critical"):
            self.faults.append(entry)


@asynccontextmanager
async def running(
    model: Path | str,
    folder: Path,
    *,
    flags: Sequence[str] = (),
    wrapper: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> AsyncIterator[ServerProcess]:
    """A server of this model, ready on entry, killed on leaving. folder: for its configuration and log.

    log: in place of a file in the folder, and not read. wrapper: a command that runs the server as its own.
    """
    config = folder / "server.toml"
    config.write_text(CONFIG)
    path = folder / "server.log" if log is None else log
    with path.open("w") as stderr:
        process = await asyncio.create_subprocess_exec(
            *(*wrapper, *PROGRAM, "serve", "--port=0", f"--model={model}", f"--config={config}", *flags),
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=stderr,
            env=dict(os.environ) | dict(environment or {}),
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        try:
            async with asyncio.timeout(START_SECONDS):
                ready = (await process.stdout.readline()).decode()
        except TimeoutError:
            ready = ""
        if not ready.startswith(READY):
            raise RuntimeError(f"the server did not start: {path.read_text()[-2000:] if log is None else ''}")
        reader = LogReader(path) if log is None else None
        yield ServerProcess(process, ready.split()[-1], config, reader)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
