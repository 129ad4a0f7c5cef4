"""`pageturner bench neighbours`: the service alone, beside busy programs on the same cores, and idle.

Rounds alone and beside neighbours take turns on one server. A neighbour is a loop that never waits.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pageturner.service.bench.throughput import ThroughputLoad, serve_round
from pageturner.service.client.server_process import running_server
from pageturner.service.errors import PageturnerError

_SETTLE_SECONDS = 1.0
"""Before idleness is measured: what ended last is put away by then."""


@dataclass(frozen=True, slots=True)
class NeighboursResult:
    """Output tokens/s of each round, and the share of one core that the idle server took."""

    workload: ThroughputLoad
    num_neighbours: int
    quiet: tuple[float, ...]
    beside: tuple[float, ...]
    idle_core_share: float

    def medians(self) -> dict[str, float]:
        """Output tokens/s alone and beside neighbours, and the second over the first."""
        quiet, beside = statistics.median(self.quiet), statistics.median(self.beside)
        return {
            "quiet_tokens_per_second": quiet,
            "beside_tokens_per_second": beside,
            "ratio": beside / quiet,
        }


def measure_neighbours(
    workload: ThroughputLoad,
    rounds: int,
    num_neighbours: int,
    idle_seconds: float,
    arguments: Sequence[str],
    say: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> NeighboursResult:
    """arguments: flags of the server. say: told of each round, and of the idle time.

    Raises PageturnerError if a request failed, or where the system does not tell a process's times.
    """
    quiet: list[float] = []
    beside: list[float] = []
    with running_server(arguments) as server:
        serve_round(server.target, workload, seed=0)  # warm
        for number in range(1, rounds + 1):
            quiet.append(serve_round(server.target, workload, seed=number))
            with busy_programs(num_neighbours):
                beside.append(serve_round(server.target, workload, seed=number))
            say(f"round {number}: {quiet[-1]:.1f} output tokens/s alone, {beside[-1]:.1f} beside")
        sleep(_SETTLE_SECONDS)
        before = processor_seconds(server.pid)
        sleep(idle_seconds)
        idle = (processor_seconds(server.pid) - before) / idle_seconds
        say(f"idle: {idle:.2%} of a core")
    return NeighboursResult(workload, num_neighbours, tuple(quiet), tuple(beside), idle)


@contextmanager
def busy_programs(count: int) -> Iterator[None]:
    """So many processes that never wait, ended on leaving."""
    command = [sys.executable, "-P", "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]  # noqa: S603  # our own Python
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


def processor_seconds(pid: int, proc: Path = Path("/proc")) -> float:
    """Processor time of a process so far, all of its threads. Raises PageturnerError where it is not told."""
    try:
        text = (proc / str(pid) / "stat").read_text(errors="replace")
    except OSError as error:
        raise PageturnerError(f"the processor time of process {pid} is not told: {error.strerror}") from error
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
