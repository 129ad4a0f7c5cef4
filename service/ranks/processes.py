"""The processes of the other ranks: how they are started, why they ended, and that none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
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


@dataclass(frozen=True, slots=True)
class RankProcess:
    """One rank's process, and rank 0's ends of the two sockets that it was born with."""

    rank: int
    process: subprocess.Popen[bytes]
    channel: Channel
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
    """Start one. program: its command line, to which the numbers of its two sockets are added.

    It inherits no other socket, so that each end is closed when its one owner ends. Nobody else can speak to
    it, and it needs neither a port nor a secret. Raises OSError where the system refuses it.
    """
    ours, theirs = socket.socketpair()
    pulse, their_pulse = socket.socketpair()
    with theirs, their_pulse:
        try:
            process = subprocess.Popen(  # noqa: S603 # the program of this very environment
                [*program, str(theirs.fileno()), str(their_pulse.fileno())],
                pass_fds=(theirs.fileno(), their_pulse.fileno()),
                stdin=subprocess.DEVNULL,
                # Standard output is rank 0's to speak on, and whoever reads it waits for its end.
                stdout=subprocess.DEVNULL,
                # Ctrl-C in the terminal is for rank 0, which ends the others in order.
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            pulse.close()
            raise
    return RankProcess(rank, process, Channel(ours), pulse)


def begin(steps: str, pulse: str) -> Channel:
    """What any program of a rank does first: it outlives no rank 0, and what else ends it is rank 0's to say.

    steps, pulse: the numbers of its sockets.
    """
    for number in OURS_TO_IGNORE:
        signal.signal(number, signal.SIG_IGN)
    # Not sys.exit: the thread that computes may wait in a collective for ever.
    Pulse(_inherited(int(pulse)), lambda: os._exit(EXIT_ORPHANED)).start()
    return Channel(_inherited(int(steps)))


def _inherited(number: int) -> socket.socket:
    """One of the two, which no process that this one starts is to hold open."""
    os.set_inheritable(number, False)
    return socket.socket(fileno=number)
