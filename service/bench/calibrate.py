"""Time the steps of a real server under a spread of load, and fit a machine to simulate.

The server records itself while batches of one to many, short and long prompts, shortage and plenty pass by,
so what is fitted holds the whole step as clients see it: scheduler, copies, forward, sampler, loop.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.runner import Run, execute
from pageturner.loadtest.server import ServedModel, Target, discover
from pageturner.loadtest.workload import Lengths, LoadtestWorkload
from pageturner.policies import registry
from pageturner.service.client.server_process import running_server
from pageturner.service.errors import PageturnerError
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.recordings import MachineFit, fit_machine
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

_PROMPT_TOKENS_A_STEP = 32


@dataclass(frozen=True, slots=True)
class Load:
    """A closed loop; lengths are drawn evenly between their bounds."""

    requests: int
    concurrency: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    shared_prefix_tokens: int = 0
    seed: int = 0

    @property
    def work(self) -> float:
        """About how long it takes, in steps: an output token of all that run at once is one, and so are a few
        tokens of a prompt."""
        prompt, output = sum(self.prompt_tokens) / 2, sum(self.output_tokens) / 2
        return self.requests * (output / self.concurrency + prompt / _PROMPT_TOKENS_A_STEP)

    def to_run(self, target: str, model: ServedModel) -> Run:
        """The load as the load test sends it to `target`."""
        workload = LoadtestWorkload(
            num_requests=self.requests,
            prompt_lengths=Lengths(*self.prompt_tokens),
            output_lengths=Lengths(*self.output_tokens),
            token_ids=model.token_ids,
            seed=self.seed,
            shared_prefix_tokens=self.shared_prefix_tokens,
        )
        return Run(Target(target), workload, self.concurrency)


CALIBRATION: tuple[Load, ...] = (
    Load(6, 1, (8, 400), (4, 24), seed=1),
    Load(12, 4, (8, 200), (8, 48), seed=2),
    Load(40, 16, (8, 300), (4, 64), seed=3),
    Load(48, 32, (8, 64), (8, 48), seed=4),
    Load(6, 3, (500, 900), (8, 24), seed=5),
)
"""Batches of 1 to 32, contexts of 8 to 900; in a pool that does not hold the larger of them."""

CALIBRATION_FLAGS = ("--num-blocks=96", "--swap-space=64MiB", "--reclaim-policy=always-swap")


CALIBRATION_WORK = sum(load.work for load in CALIBRATION)
"""What `calibrate` reports as done, all in all."""


def calibrate(arguments: Sequence[str], on_work: Callable[[str, float], None]) -> MachineFit:
    """Start `pageturner serve ARGUMENTS`, load it, fit it. Raises PageturnerError.

    on_work: told what was done, and how much of CALIBRATION_WORK that is.
    """
    with tempfile.TemporaryDirectory() as folder:
        recording = Path(folder) / "recording.jsonl"
        flags = [*arguments, *CALIBRATION_FLAGS, f"--record={recording}"]
        observed: list[tuple[Load, list[RequestRecord]]] = []
        with running_server(flags) as server:
            on_work("the server is ready", 0.0)
            for load in CALIBRATION:
                observed.append((load, measure(load, server.target)))
                on_work(f"timed {load.requests} requests, {load.concurrency} at once", load.work)
        found = fit_machine(recording)
    machine = replace(found.machine, request_seconds=_request_seconds(found.machine, *observed[0]))
    return replace(found, machine=machine)


def measure(load: Load, target: str) -> list[RequestRecord]:
    """Send the load to a real server. Raises PageturnerError unless every request ended well."""
    import asyncio

    model = asyncio.run(discover(Target(target), load.seed))
    records = execute(load.to_run(target, model), lambda _: None)
    for record in records:
        if record.outcome is not Outcome.OK:
            raise PageturnerError(f"request {record.index} was {record.outcome.value}: {record.error}")
    return records


def to_workload(load: Load) -> SimulatedWorkload:
    """The same requests for the simulator: as many tokens, shared as far; which tokens plays no part."""
    from pageturner.loadtest.workload import plan_requests

    run = load.to_run("", _NO_MODEL)
    prefix = (Segment(1, load.shared_prefix_tokens),) if load.shared_prefix_tokens else ()
    requests = []
    for planned in plan_requests(run.workload):
        num_own = len(planned.prompt_token_ids) - load.shared_prefix_tokens
        own = (Segment(2 * planned.index + 2, num_own),) if num_own else ()
        requests.append(
            WorkloadRequest(0.0, (*prefix, *own), Segment(2 * planned.index + 3, planned.output_tokens))
        )
    return SimulatedWorkload("load test", tuple(requests), load.concurrency)


_NO_MODEL = ServedModel("", "", "", "", "", "", 0, token_ids=(0,))


def _request_seconds(machine: SimulatedMachine, load: Load, records: Sequence[RequestRecord]) -> float:
    """What a lone request takes beyond its steps: the wire, both ways; from the first of the loads."""
    result = simulate(to_workload(load), machine, registry.default_policies())
    seen = [record.time_to_first_token for record in records]
    extra = [
        real - (simulated.token_times[0] - simulated.arrived_at)
        for real, simulated in zip(seen, result.requests, strict=True)
        if real is not None
    ]
    return max(0.0, statistics.median(extra))
