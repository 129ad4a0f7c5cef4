"""Several client processes: they share the requests, begin at one moment, and report to the first."""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from pageturner.loadtest.client import RequestRecord
from pageturner.loadtest.errors import LoadtestError, WorkerDied
from pageturner.loadtest.interruption import Interruption
from pageturner.loadtest.meter import ClientCost
from pageturner.loadtest.sending import OnCost, OnRecord, Run, run_part

_DIED = "a client process ended before its work was done"
_START_DELAY_SECONDS = 0.1  # so that the word to begin reaches every process before the first is due


def run_processes(run: Run, on_record: OnRecord, on_cost: OnCost, interruption: Interruption) -> None:
    """Start the processes, let them begin together, and gather what they report. Raises WorkerDied, and what
    went wrong in any of them."""
    with _processes(run) as (processes, connections), _wakeup(interruption) as wakeup:
        for connection in connections:
            if wakeup in wait([connection, wakeup]):
                return
            _receive(connection)  # it is ready
        start = time.monotonic() + _START_DELAY_SECONDS
        for connection in connections:
            _begin(connection, start)
        working = set(connections)
        while working:
            ready = cast(list[Connection], wait([*working, wakeup]))
            if wakeup in ready:
                for process in processes:
                    _end(process)
                for record in chain.from_iterable(map(_told, working)):
                    on_record(record)
                return
            for connection in ready:
                received = _receive(connection)
                if isinstance(received, RequestRecord):
                    on_record(received)
                    continue
                working.remove(connection)
                assert received is not None
                on_cost(received)
        for process in processes:
            process.join()


def _told(connection: Connection) -> Iterator[RequestRecord]:
    """The records that a process had told before it was ended; one that it was telling is lost."""
    with suppress(EOFError, OSError):
        while True:
            received = connection.recv()
            if isinstance(received, RequestRecord):
                yield received


def _end(process: SpawnProcess) -> None:
    """Its connection to the server goes with it, and the server cancels what it had asked for."""
    if process.is_alive():
        process.terminate()
        process.join()


@contextmanager
def _wakeup(interruption: Interruption) -> Iterator[Connection]:
    """A connection that has something to read once a signal has come."""
    reader, writer = multiprocessing.Pipe(duplex=False)
    with reader, writer, interruption.stopping(lambda: writer.send(None)):
        yield reader


@contextmanager
def _processes(run: Run) -> Iterator[tuple[Sequence[SpawnProcess], Sequence[Connection]]]:
    """The client processes, started, and a connection to each; those that still run at the end are ended."""
    # Spawned, since a process that has used gRPC must not be forked.
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(run.num_processes)]
    processes = [
        context.Process(target=_work, args=(run, part, child), daemon=True)
        for part, (_, child) in enumerate(pipes)
    ]
    try:
        for process, (_, child) in zip(processes, pipes, strict=True):
            process.start()
            child.close()  # else its end would never be seen here
        yield processes, [parent for parent, _ in pipes]
    finally:
        for process, (parent, _) in zip(processes, pipes, strict=True):
            parent.close()
            _end(process)


def _begin(connection: Connection, start: float) -> None:
    """Tell a process when the run starts. Raises WorkerDied if it is no longer there to be told."""
    try:
        connection.send(start)
    except OSError:
        raise WorkerDied(_DIED) from None


def _receive(connection: Connection) -> RequestRecord | ClientCost | None:
    """None when it is ready, then records, at last what it cost. Raises what went wrong in the process."""
    try:
        received = connection.recv()
    except (EOFError, OSError):
        raise WorkerDied(_DIED) from None
    if isinstance(received, LoadtestError):
        raise received
    assert received is None or isinstance(received, RequestRecord | ClientCost)
    return received


def _work(run: Run, part: int, connection: Connection) -> None:
    """The life of one client process: ready, begin, a record for each request, what it cost."""
    # A terminal's signals are for the first process, which ends this one.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def begin() -> float:
        connection.send(None)
        start = connection.recv()
        assert isinstance(start, float)
        return start

    try:
        asyncio.run(run_part(run, part, begin, connection.send, connection.send))
    except LoadtestError as error:
        connection.send(error)
