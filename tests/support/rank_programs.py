"""Ranks without a model: processes that follow rank 0 as the real ones do, and misbehave as they are told.

Run as a program, with the numbers of its sockets behind its own arguments: `python rank_programs.py NAME
...`.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from socket import socket

import structlog

from pageturner import __version__
from pageturner.service.core.outputs import BlockCopies, SchedulerOutput
from pageturner.service.errors import RankLost
from pageturner.service.ranks import messages
from pageturner.service.ranks.channel import Channel
from pageturner.service.ranks.codec import FORMAT
from pageturner.service.ranks.follower import Follower
from pageturner.service.ranks.messages import END, Hello, Ready, Refused
from pageturner.service.ranks.pulse import Pulse

BEAT = 0.05
FAILS, HANGS, DIES = 66, 77, 88
"""Tokens at which a step fails, hangs, or ends the process."""


def program(name: str, *arguments: str) -> tuple[str, ...]:
    """The command line of a rank; it has the `src` of this process."""
    return (sys.executable, "-P", str(Path(__file__)), name, *arguments)


class Group:
    """Collectives of nothing. absent: the number under which it does not meet the others."""

    def __init__(self, absent: int = -1) -> None:
        self._absent = absent

    def meet(self, generation: int, timeout: timedelta) -> None:
        if generation == self._absent:
            raise RankLost("nobody is there")

    def close(self) -> None:
        """There is nothing to leave."""


class Model:
    """Carries out steps by their first token, and keeps what it was told in a file."""

    def __init__(self, told: Path | None) -> None:
        self._told = told

    def apply(self, copies: BlockCopies) -> None:
        if FAILS in copies.clears:
            raise RuntimeError("planted: the blocks could not be moved")

    def forward(self, output: SchedulerOutput) -> None:
        token = output.scheduled[0].token_ids[0]
        if token == FAILS:
            raise RuntimeError("planted: the forward failed")
        if token == HANGS:
            time.sleep(3600)
        if token == DIES:
            os._exit(7)
        if self._told is not None:
            with self._told.open("a") as file:
                file.write(f"{output.step_id} {token}\n")


def main() -> None:
    name, *arguments, steps, _, pulse = sys.argv[1:]
    channel = Channel(socket(fileno=int(steps)))
    Pulse(socket(fileno=int(pulse)), lambda: os._exit(3), BEAT).start()
    if name == "of another version":
        messages.send(channel, Hello(FORMAT, "0.0.1"))
    elif name == "of another format":
        messages.send(channel, Hello(FORMAT + 1, __version__))
    else:
        messages.send(channel, Hello(FORMAT, __version__))
    if name == "that refuses":
        messages.send(channel, Refused("it has no GPU", "model.device"))
    if name == "that gives up":
        messages.send(channel, Ready())
        channel.receive()
        messages.send(channel, Refused("nobody met it again", detail="where it was"))
    if name == "that speaks nonsense":
        channel.send(200, b"?")
    if name == "that follows":
        told = Path(arguments[0]) if arguments else None
        model = Model(told)
        Follower(channel, model, model.forward, Group(absent=99), structlog.get_logger(), 1.0).run()
        return
    while channel.receive() != END:
        pass


if __name__ == "__main__":
    main()
