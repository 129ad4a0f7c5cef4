"""A server as a child process that can be stopped for a while and let go on."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO

from pageturner.loadtest.errors import ServerError
from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.peer import Peer

_STOP_SECONDS = 20.0
_LOG_LINES = 15


def free_port() -> int:
    """One that nothing listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server and the processes that it started, one group of them. port: it serves at."""

    name: str
    port: int
    popen: subprocess.Popen[bytes]
    log: IO[bytes]

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def group(self) -> int:
        """The id of its process group, and of its session."""
        return self.popen.pid

    def check_alive(self) -> None:
        """Raises ServerError with the end of its log where it has ended."""
        if self.popen.poll() is not None:
            self.log.seek(0)
            lines = self.log.read().decode(errors="replace").splitlines()[-_LOG_LINES:]
            raise ServerError(f"{self.name} ended (exit code {self.popen.returncode})\n" + "\n".join(lines))

    @contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run; on leaving, all its threads stand still."""
        self._signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._signal(signal.SIGSTOP)
            if self.popen.returncode is None:
                # Left for Popen to see, if it has ended instead.
                os.waitid(os.P_PID, self.group, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def end(self) -> None:
        """SIGTERM, time to leave, then SIGKILL for all of the group."""
        self._signal(signal.SIGTERM)
        self._signal(signal.SIGCONT)
        with suppress(subprocess.TimeoutExpired):
            self.popen.wait(_STOP_SECONDS)
        self._signal(signal.SIGKILL)
        self.popen.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):  # all of it has ended
            os.killpg(self.group, number)


@contextmanager
def started(peer: Peer, demand: Demand) -> Iterator[ServerProcess]:
    """Start it in a group of its own; on leaving, end all of the group. Raises ServerError where its program
    cannot be run."""
    port = free_port()
    command = peer.command(port, demand)
    with tempfile.TemporaryFile() as log:
        try:
            popen = subprocess.Popen(  # noqa: S603  # the program that the caller named
                command.words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **command.environment},
                start_new_session=True,
            )
        except OSError as error:
            raise ServerError(f"{peer.name} cannot be started: {error}") from error
        process = ServerProcess(peer.name, port, popen, log)
        try:
            yield process
        finally:
            process.end()
