"""The processes of the other ranks: how they are started, why they ended, and that none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from pageturner.service.ranks.channel import Channel
from pageturner.service.ranks.pulse import Pulse

KILLED_WITHIN_SECONDS = 5.0
"""The system takes back what a process had."""

EXIT_ORPHANED = 3
"""Rank 0 is gone."""

OURS_TO_IGNORE = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A supervisor sends them to all processes of a service at once: rank 0 drains, and needs its ranks
meanwhile."""


_NUM_SOCKETS = 3


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank's process, and rank 0's ends of the sockets that it was born with: of steps, of adapters, and
    of signs of life."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
    adapters: Channel
    pulse: socket.socket

    @property
    def name(self) -> str:
        """For the log."""
        return f"rank {self.rank} (process {self.process.pid})"

    def why_it_ended(self, timeout: float) -> str:
        """Of a process whose sockets are closed, in words. Waits so many seconds for its end."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout)
        code = self.process.returncode
        if code is None:
            return "its connection is closed"
        if code < 0:
            return f"it was ended by {_signal_name(-code)}"
        return f"it ended with exit code {code}"

    def close(self) -> None:
        """Let go of the channels. Closing twice is no error."""
        self.channel.close()
        self.adapters.close()

    def kill(self) -> None:
        """At once, if it lives; a stopped process too."""
        self.process.kill()

    def await_end(self, timeout: float) -> None:
        """Wait so many seconds for its own end, then kill it."""
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            with suppress(subprocess.TimeoutExpired):  # in a driver's call it may last
                self.process.wait(KILLED_WITHIN_SECONDS)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def start_rank(rank: int, program: Sequence[str]) -> RankProcess:
    """Start one. program: its command line, to which the numbers of its sockets are added.

    It inherits no other socket, so that each end is closed when its one owner ends. Nobody else can speak to
    it, and it needs neither a port nor a secret. Raises OSError where the system refuses it, and leaves
    nothing then.
    """
    with ExitStack() as ours, ExitStack() as theirs:
        pairs = []
        for _ in range(_NUM_SOCKETS):
            mine, its = socket.socketpair()
            pairs.append((ours.enter_context(mine), theirs.enter_context(its)))
        numbers = [its.fileno() for _, its in pairs]
        process = subprocess.Popen(  # noqa: S603 # the program of this very environment
            [*program, *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            # Standard output is rank 0's to speak on, and whoever reads it waits for its end.
            stdout=subprocess.DEVNULL,
            # Ctrl-C in the terminal is for rank 0, which ends the others in order.
            start_new_session=True,
        )
        ours.pop_all()
    steps, adapters, pulse = (mine for mine, _ in pairs)
    return RankProcess(rank, process, Channel(steps), Channel(adapters), pulse)


@dataclass(frozen=True, slots=True)
class Channels:
    """A rank's ends of the sockets of steps and of adapters."""

    steps: Channel
    adapters: Channel


def begin(steps: str, adapters: str, pulse: str) -> Channels:
    """What any program of a rank does first: it outlives no rank 0, and what else ends it is rank 0's to say.

    Its arguments are those of the program: the numbers of its sockets.
    """
    for number in OURS_TO_IGNORE:
        signal.signal(number, signal.SIG_IGN)
    # Not sys.exit: the thread that computes may wait in a collective for ever.
    Pulse(_inherited(int(pulse)), lambda: os._exit(EXIT_ORPHANED)).start()
    return Channels(Channel(_inherited(int(steps))), Channel(_inherited(int(adapters))))


def _inherited(number: int) -> socket.socket:
    """One of them, which no process that this one starts is to hold open."""
    os.set_inheritable(number, False)
    return socket.socket(fileno=number)
