"""A load test from warm-up to last record, in one process or several.

One process can fall behind a high rate, which shows as send lag; `processes.py` shares the work out.
"""

from __future__ import annotations

import time
from dataclasses import replace

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.errors import ServerError
from pageturner.loadtest.interruption import Interruption
from pageturner.loadtest.processes import run_processes
from pageturner.loadtest.sending import OnCost, OnRecord, Run, forget_cost, run_part
from pageturner.loadtest.workload.conduct import ConductMix
from pageturner.loadtest.workload.load import ONE_TURN

__all__ = ["OnRecord", "Run", "execute", "run_part", "warm_up"]


def execute(
    run: Run,
    on_record: OnRecord,
    interruption: Interruption | None = None,
    on_cost: OnCost = forget_cost,
) -> list[RequestRecord]:
    """Send everything; on_record hears of each request as it ends, on_cost of each process. The records by
    index.

    interruption: what may end the run early; then the requests that had not ended are cancelled on the server
    and have no record, and several processes tell no cost. Raises ServerError if the server cannot be reached
    or refuses the warm-up, WorkerDied.
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
            interruption.run(run_part(run, 0, time.monotonic, keep, on_cost))
        else:
            run_processes(run, keep, on_cost, interruption)
    return sorted(records, key=lambda record: record.index)


async def warm_up(run: Run) -> None:
    """A few requests like those to come, but of another seed: none may find its prompt cached."""
    workload = replace(
        run.workload,
        num_requests=run.warmup,
        arrivals=None,
        turns=ONE_TURN,
        conduct=ConductMix(),
        seed=~run.workload.seed,
    )
    warm = replace(run, workload=workload, concurrency=min(run.concurrency, run.warmup), num_processes=1)
    records: list[RequestRecord] = []
    await run_part(warm, 0, time.monotonic, records.append)
    for record in records:
        if record.outcome is not Outcome.OK:
            raise ServerError(f"a warm-up request was {record.outcome.value}: {record.error}")
