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
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from typing import cast

from pageturner.loadtest.client import Outcome, RequestRecord, send
from pageturner.loadtest.errors import LoadtestError, OptionError, ServerError, WorkerDied
from pageturner.loadtest.server import Target, connect
from pageturner.loadtest.workload import LoadtestWorkload, PlannedRequest, plan_requests
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

OnRecord = Callable[[RequestRecord], None]
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
        return self.workload.rate is not None

    def concurrency_of(self, part: int) -> int:
        """What one of the processes contributes to the concurrency of the closed loop."""
        return self.concurrency // self.num_processes + (part < self.concurrency % self.num_processes)


def execute(run: Run, on_record: OnRecord) -> list[RequestRecord]:
    """Send everything; on_record hears of each request as it ends. The records by index.

    Raises ServerError if the server cannot be reached or refuses the warm-up, WorkerDied.
    """
    if run.warmup:
        asyncio.run(warm_up(run))
    if run.num_processes == 1:
        records = asyncio.run(run_part(run, 0, time.monotonic, on_record))
    else:
        records = _run_processes(run, on_record)
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
                for _ in range(run.concurrency_of(part)):
                    tasks.create_task(follow(queue, start))
    return records


def _forget(record: RequestRecord) -> None:
    """What the warm-up does with its records as they come."""


def _run_processes(run: Run, on_record: OnRecord) -> list[RequestRecord]:
    """Start the processes, let them begin together, and gather what they report."""
    records: list[RequestRecord] = []
    with _processes(run) as connections:
        for connection in connections:
            _receive(connection)  # it is ready
        start = time.monotonic() + _START_DELAY_SECONDS
        for connection in connections:
            connection.send(start)
        working = set(connections)
        while working:
            for connection in cast(list[Connection], wait(list(working))):
                record = _receive(connection)
                if record is None:
                    working.remove(connection)
                else:
                    records.append(record)
                    on_record(record)
    return records


@contextmanager
def _processes(run: Run) -> Iterator[Sequence[Connection]]:
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
        yield [parent for parent, _ in pipes]
        for process in processes:
            process.join()
    finally:
        for process, (parent, _) in zip(processes, pipes, strict=True):
            parent.close()
            if process.is_alive():
                process.terminate()
                process.join()


def _receive(connection: Connection) -> RequestRecord | None:
    """A record, or None for a sign: ready, or done. Raises what went wrong in the process."""
    try:
        received = connection.recv()
    except EOFError:
        raise WorkerDied("a client process ended before its work was done") from None
    if isinstance(received, LoadtestError):
        raise received
    assert received is None or isinstance(received, RequestRecord)
    return received


def _work(run: Run, part: int, connection: Connection) -> None:
    """The life of one client process: ready, begin, a record for each request, done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the first process's, which ends this one

    def begin() -> float:
        connection.send(None)
        start = connection.recv()
        assert isinstance(start, float)
        return start

    try:
        asyncio.run(run_part(run, part, begin, connection.send))
        connection.send(None)
    except ServerError as error:
        connection.send(error)
