"""`pageturner bench scheduler --vllm-python PYTHON`: a step of our scheduler and of vLLM's, in turns."""

from __future__ import annotations

import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pageturner.service.bench.scheduler import measure_step
from pageturner.service.client.server_process import stop
from pageturner.service.errors import ConfigError

CHILD = Path(__file__).with_name("vllm_scheduler.py")
SIZES = (64, 256, 1024)
ROUNDS = 3
MOST_STEPS = 100


@dataclass(frozen=True, slots=True)
class PeerCost:
    """Microseconds of a step with `num_running` decodes, prefix cache on: medians of rounds in turns."""

    num_running: int
    step_microseconds: float
    vllm_microseconds: float

    @property
    def ratio(self) -> float:
        """Ours over theirs."""
        return self.step_microseconds / self.vllm_microseconds


def compare_with_vllm(
    python: Path, say: Callable[[str], None], sizes: tuple[int, ...] = SIZES, rounds: int = ROUNDS
) -> list[PeerCost]:
    """python: of an environment that has vLLM. say: told of each round. Raises ConfigError if it has none."""
    costs = []
    with _vllm(python) as measure_theirs:
        for size in sizes:
            num_steps = max(20, min(MOST_STEPS, 50_000 // size))
            ours, theirs = [], []
            for _ in range(rounds):
                ours.append(measure_step(size, 0, num_steps).step_microseconds)
                theirs.append(measure_theirs(size, num_steps))
                say(f"{size} running: {ours[-1]:.0f} us a step, vLLM {theirs[-1]:.0f}")
            costs.append(PeerCost(size, statistics.median(ours), statistics.median(theirs)))
    return costs


@contextmanager
def _vllm(python: Path) -> Iterator[Callable[[int, int], float]]:
    """vLLM's scheduler in a process of its own; the function times so many steps of so many requests."""
    with tempfile.TemporaryFile("w+") as errors:
        try:
            process = subprocess.Popen(  # noqa: S603  # the interpreter that the operator named
                [os.fspath(python), "-P", os.fspath(CHILD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        except OSError as error:
            raise ConfigError("--vllm-python", f"{python}: {error.strerror}") from error
        assert process.stdin is not None
        assert process.stdout is not None
        requests, answers = process.stdin, process.stdout

        def answer() -> str:
            line = answers.readline()
            if not line:
                code = process.wait()
                errors.seek(0)
                last = errors.read().strip().splitlines()[-1:] or [f"exit code {code}"]
                raise ConfigError("--vllm-python", f"{python} cannot run vLLM's scheduler: {last[0]}")
            return line.strip()

        def measure(num_running: int, num_steps: int) -> float:
            requests.write(f"{num_running} {num_steps}\n")
            requests.flush()
            return float(answer())

        try:
            if answer() != "ready":
                raise ConfigError("--vllm-python", f"{python} does not run {CHILD.name}")
            yield measure
        finally:
            stop(process)
            requests.close()
