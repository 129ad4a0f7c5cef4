"""`pageturner bench throughput`: the service under a closed loop, and generate() on a batch of that size.

Both are loaded and warm; they run in turns, each alone while the other sleeps, on the same number of threads.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pageturner.service.client.server_process import PROGRAM, running_server, stop
from pageturner.service.errors import ModelError, PageturnerError
from pageturner.service.model.options import ModelOptions

REQUESTS_PER_CLIENT = 2
"""Requests that each of the closed loop's clients sends in one round."""


@dataclass(frozen=True, slots=True)
class ThroughputLoad:
    """concurrency: requests in flight, and generate()'s batch."""

    concurrency: int
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class ThroughputResult:
    """Output tokens/s of each round."""

    workload: ThroughputLoad
    dtype: str
    num_threads: int | None
    service: tuple[float, ...]
    baseline: tuple[float, ...]

    def medians(self) -> dict[str, float]:
        """Output tokens/s of both, and the service's over the baseline's."""
        service, baseline = statistics.median(self.service), statistics.median(self.baseline)
        return {
            "service_tokens_per_second": service,
            "baseline_tokens_per_second": baseline,
            "ratio": service / baseline,
        }


def measure_throughput(
    workload: ThroughputLoad,
    rounds: int,
    model: ModelOptions,
    cache_dir: Path,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> ThroughputResult:
    """arguments: flags of the server. Raises PageturnerError if a round has a request that failed."""
    served: list[float] = []
    generated: list[float] = []
    num_tokens = workload.concurrency * workload.output_tokens
    with running_server(arguments) as server, _baseline(workload, model, cache_dir) as run_batch:
        serve_round(server.target, workload, seed=0)  # warm, as the baseline is
        for number in range(1, rounds + 1):
            served.append(serve_round(server.target, workload, seed=number))
            generated.append(num_tokens / run_batch())
            say(f"round {number}: {served[-1]:.1f} output tokens/s, generate() {generated[-1]:.1f}")
    return ThroughputResult(workload, model.dtype, model.num_threads, tuple(served), tuple(generated))


def serve_round(target: str, workload: ThroughputLoad, seed: int) -> float:
    """Output tokens/s of a closed loop. Raises PageturnerError if a request fails."""
    command = [
        *PROGRAM,
        "loadtest",
        f"--target={target}",
        f"--concurrency={workload.concurrency}",
        f"--requests={workload.concurrency * REQUESTS_PER_CLIENT}",
        f"--prompt-tokens={workload.prompt_tokens}",
        f"--output-tokens={workload.output_tokens}",
        f"--seed={seed}",
        "--json",
    ]
    finished = subprocess.run(command, capture_output=True, text=True)  # noqa: S603  # our own program
    if finished.returncode:
        raise PageturnerError(f"the load test failed: {finished.stderr.strip() or finished.stdout.strip()}")
    return float(json.loads(finished.stdout)["results"]["output_tokens_per_second"])


@contextmanager
def _baseline(
    workload: ThroughputLoad, model: ModelOptions, cache_dir: Path
) -> Iterator[Callable[[], float]]:
    """generate() in a process of its own; the function runs one batch and returns its seconds."""
    command = [
        sys.executable,
        "-P",
        "-m",
        "pageturner.service.bench.baseline",
        model.source,
        f"--cache-dir={cache_dir}",
        f"--dtype={model.dtype}",
        f"--batch={workload.concurrency}",
        f"--prompt-tokens={workload.prompt_tokens}",
        f"--output-tokens={workload.output_tokens}",
        f"--threads={model.num_threads or 0}",
    ]
    process = subprocess.Popen(  # noqa: S603  # our own program
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    requests, answers = process.stdin, process.stdout

    def answer() -> str:
        line = answers.readline()
        if not line:
            raise ModelError(f"the generate() process ended (exit code {process.wait()})")
        return line.strip()

    def run_batch() -> float:
        requests.write("\n")
        requests.flush()
        return float(answer())

    try:
        assert answer() == "ready"
        yield run_batch
    finally:
        stop(process)
        requests.close()
