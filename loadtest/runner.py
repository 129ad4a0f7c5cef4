"""Sends a workload: in a closed loop, where a request follows another's end, or open, when it is due.

One process can fall behind a high rate, which shows as send lag; several share the requests by index,
begin at one moment, and report to the first.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import cast

from pageturner.loadtest.client import Outcome, RequestRecord, send
from pageturner.loadtest.errors import LoadtestError, OptionError, ServerError, WorkerDied
from pageturner.loadtest.interruption import Interruption
from pageturner.loadtest.server import Target, connect
from pageturner.loadtest.workload import LoadtestWorkload, PlannedRequest, plan_requests
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

OnRecord = Callable[[RequestRecord], None]
_DIED = "a client process ended before its work was done"
_START_DELAY_SECONDS = 0.1  # so that the word to begin reaches every process before the first is due


@dataclass(frozen=True, slots=True)
class Run:
    """A workload and how it is sent. concurrency: of the closed loop; unused where the workload has a
    rate. warmup: requests sent and forgotten beforehand. Raises OptionError."""

    target: Target
    workload: LoadtestWorkload
    concurrency: int = 1
    num_processes: int = 1
    warmup: int = 0

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise OptionError("concurrency", f"must be at least 1, not {self.concurrency}")
        if self.num_processes < 1:
            raise OptionError("processes", f"must be at least 1, not {self.num_processes}")
        if self.workload.rate is None and self.num_processes > self.concurrency:
            raise OptionError(
                "processes", f"{self.num_processes} cannot share a concurrency of {self.concurrency}"
            )
        if self.warmup < 0:
            raise OptionError("warmup", f"must not be negative, not {self.warmup}")

    @property
    def is_open(self) -> bool:
        """Requests are sent when due, not when another ended."""
        return self.workload.rate is not None

    def concurrency_of(self, part: int) -> int:
        """What one of the processes contributes to the concurrency of the closed loop."""
        return self.concurrency // self.num_processes + (part < self.concurrency % self.num_processes)


def execute(run: Run, on_record: OnRecord, interruption: Interruption | None = None) -> list[RequestRecord]:
    """Send everything; on_record hears of each request as it ends. The records by index.

    interruption: what may end the run early; then the requests that had not ended are cancelled on the server
    and have no record. Raises ServerError if the server cannot be reached or refuses the warm-up, WorkerDied.
    """
    interruption = interruption or Interruption()
    records: list[RequestRecord] = []

    def keep(record: RequestRecord) -> None:
        records.append(record)
        on_record(record)

    if run.warmup:
        interruption.run(warm_up(run))
    if interruption.number is None:
        if run.num_processes == 1:
            interruption.run(run_part(run, 0, time.monotonic, keep))
        else:
            _run_processes(run, keep, interruption)
    return sorted(records, key=lambda record: record.index)


async def warm_up(run: Run) -> None:
    """A few requests like those to come, but of another seed: none may find its prompt cached."""
    workload = replace(run.workload, num_requests=run.warmup, rate=None, seed=~run.workload.seed)
    warm = replace(run, workload=workload, concurrency=min(run.concurrency, run.warmup), num_processes=1)
    for record in await run_part(warm, 0, time.monotonic, _forget):
        if record.outcome is not Outcome.OK:
            raise ServerError(f"a warm-up request was {record.outcome.value}: {record.error}")


async def run_part(
    run: Run, part: int, begin: Callable[[], float], on_record: OnRecord
) -> list[RequestRecord]:
    """Send the requests of one process. `begin` is called once all is ready; it returns the start."""
    planned = list(plan_requests(run.workload, part, run.num_processes))
    records: list[RequestRecord] = []
    async with connect(run.target) as channel:
        stub = GenerationServiceStub(channel)

        async def send_one(request: PlannedRequest, scheduled_at: float) -> RequestRecord:
            record = await send(
                stub,
                request,
                model=run.target.model,
                scheduled_at=scheduled_at,
                timeout_seconds=run.target.timeout_seconds,
                now=time.monotonic,
            )
            records.append(record)
            on_record(record)
            return record

        async def follow(queue: Iterator[PlannedRequest], free_since: float) -> None:
            for request in queue:
                free_since = (await send_one(request, free_since)).ended_at

        start = begin()
        async with asyncio.TaskGroup() as tasks:
            if run.is_open:
                for request in planned:
                    due = start + request.at_seconds
                    await asyncio.sleep(max(0.0, due - time.monotonic()))
                    tasks.create_task(send_one(request, due))
            else:
                queue = iter(planned)
                for _ in range(min(run.concurrency_of(part), len(planned))):
                    tasks.create_task(follow(queue, start))
    return records


def _forget(record: RequestRecord) -> None:
    """What the warm-up does with its records as they come."""


def _run_processes(run: Run, on_record: OnRecord, interruption: Interruption) -> None:
    """Start the processes, let them begin together, and gather what they report."""
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
                if received is None:
                    working.remove(connection)
                else:
                    on_record(received)
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


def _receive(connection: Connection) -> RequestRecord | None:
    """A record, or None for a sign: ready, or done. Raises what went wrong in the process."""
    try:
        received = connection.recv()
    except (EOFError, OSError):
        raise WorkerDied(_DIED) from None
    if isinstance(received, LoadtestError):
        raise received
    assert received is None or isinstance(received, RequestRecord)
    return received


def _work(run: Run, part: int, connection: Connection) -> None:
    """The life of one client process: ready, begin, a record for each request, done."""
    # A terminal's signals are for the first process, which ends this one.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)

    def begin() -> float:
        connection.send(None)
        start = connection.recv()
        assert isinstance(start, float)
        return start

    try:
        asyncio.run(run_part(run, part, begin, connection.send))
        connection.send(None)
    except LoadtestError as error:
        connection.send(error)
