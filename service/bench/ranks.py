"""`pageturner bench ranks`: what it costs to have several processes compute one step.

What rank 0 adds to a step: its bytes, the time to write and to read them, and the time until all ranks that
do nothing have answered. What the model adds: sums over ranks. What comes of it: tokens/s on one rank and on
more, on the same cores, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import torch
from structlog.typing import FilteringBoundLogger

from pageturner.service.bench.idle_rank import ADDITIONS, HIDDEN, PROGRAM, add_up
from pageturner.service.client import Client
from pageturner.service.client.server_process import running_server
from pageturner.service.core.outputs import SampleRow, ScheduledSequence, SchedulerOutput
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model.tensor_parallel.meeting import exchange_library, meet
from pageturner.service.ranks.codec import StepDecoder, StepEncoder
from pageturner.service.ranks.leader import Leader
from pageturner.service.ranks.meeting import RenewedCollectives, open_store
from pageturner.service.ranks.messages import Assignment, Ready
from pageturner.service.ranks.ranked_steps import Ranks

DECODES = (1, 16, 64, 256)
CONTEXT, BLOCK_SIZE = 1024, 16
_STEPS = 300
_ROUNDS_OF_ADDITIONS = 12


@dataclass(frozen=True, slots=True)
class StepCost:
    """Of a step of so many decodes, each in a context of CONTEXT tokens; times as `_microseconds` has them.

    whole_bytes: of the first step of its sequences. step_bytes: of the next ones. exchange: from rank 0 to
    all others and their answers back, nothing being computed. addition: of that many rows, over all ranks.
    """

    num_decodes: int
    whole_bytes: int
    step_bytes: int
    encode: float
    decode: float
    exchange: float
    addition: float


@dataclass(frozen=True, slots=True)
class RankedRates:
    """Output tokens/s of each round, by the number of ranks."""

    num_requests: int
    rates: dict[int, tuple[float, ...]]

    def median(self, size: int) -> float:
        """Of a server of so many ranks."""
        return statistics.median(self.rates[size])


def decodes(num_decodes: int, step_id: int) -> SchedulerOutput:
    """A step in which so many sequences decode. A block is added to each every BLOCK_SIZE steps."""
    position = CONTEXT + step_id
    num_blocks = position // BLOCK_SIZE + 1
    rows = (SampleRow(0, 0, 0, 0, SamplingParams()),)
    return SchedulerOutput(
        step_id,
        tuple(
            ScheduledSequence(
                number,
                f"request-{number}",
                0,
                (step_id % 1000,),
                position,
                position,
                _table(number, num_blocks),
                rows,
            )
            for number in range(num_decodes)
        ),
    )


@cache
def _table(number: int, num_blocks: int) -> tuple[int, ...]:
    """The scheduler's own is one object, too, until a block is added."""
    return tuple(range(number * 1000, number * 1000 + num_blocks))


def measure_steps(
    size: int,
    hidden: int,
    cache_dir: Path,
    logger: FilteringBoundLogger,
    counts: Sequence[int] = DECODES,
) -> Iterator[StepCost]:
    """One after the other. hidden: width of the rows that are added up, in float32. cache_dir: of compiled
    kernels. Raises PageturnerError."""
    with _idle_ranks(size, hidden, cache_dir, logger) as (ranks, collectives):
        for count in counts:
            whole_bytes, step_bytes, encode, decode = _code(count)
            yield StepCost(
                count,
                whole_bytes,
                step_bytes,
                encode,
                decode,
                _exchange(ranks, count),
                _addition(ranks, partial(add_up, collectives, hidden), count),
            )


def _code(count: int) -> tuple[int, int, float, float]:
    encoder, decoder = StepEncoder(), StepDecoder()
    sizes, encodings, decodings = [], [], []
    for step_id in range(_STEPS):
        step = decodes(count, step_id)
        before = time.perf_counter()
        encoded = encoder.encode(step, _known)
        between = time.perf_counter()
        decoder.decode(encoded)
        sizes.append(len(encoded))
        encodings.append(between - before)
        decodings.append(time.perf_counter() - between)
    return sizes[0], round(statistics.median(sizes[1:])), _microseconds(encodings), _microseconds(decodings)


def _known(part: ScheduledSequence) -> int:
    """No token of these steps is unknown."""
    raise AssertionError(part)


def _nothing(output: SchedulerOutput) -> None:
    """What rank 0 computes while it waits for the others."""


def _exchange(ranks: Ranks, count: int) -> float:
    """By steps that ask for no addition, whose numbers are even."""
    seconds = []
    forward = ranks.together(_nothing)
    for number in range(_STEPS):
        step = decodes(count, 2 * number)
        before = time.perf_counter()
        forward(step)
        seconds.append(time.perf_counter() - before)
    return _microseconds(seconds)


def _addition(ranks: Ranks, add: Callable[[SchedulerOutput], None], count: int) -> float:
    seconds = []

    def timed(output: SchedulerOutput) -> None:
        before = time.perf_counter()
        add(output)
        seconds.append((time.perf_counter() - before) / ADDITIONS)

    for number in range(_ROUNDS_OF_ADDITIONS):
        ranks.together(timed)(decodes(count, 2 * number + 1))
    return _microseconds(seconds[1:])  # the first waits for who starts late


def _microseconds(seconds: Sequence[float]) -> float:
    """The tenth percentile: what takes longer on a shared machine is its neighbours'."""
    return sorted(seconds)[len(seconds) // 10] * 1e6


@contextmanager
def _idle_ranks(
    size: int, hidden: int, cache_dir: Path, logger: FilteringBoundLogger
) -> Iterator[tuple[Ranks, RenewedCollectives]]:
    torch.set_num_threads(1)
    leader = Leader(size, PROGRAM, logger, time.monotonic)
    try:
        leader.greet()
        loading = timedelta(seconds=leader.patience.loading)
        store, port = open_store(0, loading)
        leader.tell(lambda rank: Assignment(rank, size, port, str(cache_dir), {HIDDEN: hidden}, "cpu", ()))
        library = exchange_library(torch.device("cpu"), cache_dir)
        meet_here = partial(meet, torch.device("cpu"), rank=0, size=size, library=library)
        collectives = RenewedCollectives(0, size, store, lambda at, timeout: meet_here(at, timeout=timeout))
        collectives.meet(0, loading)
        leader.hear(Ready)
        yield Ranks(leader, collectives), collectives
        collectives.close()
    finally:
        leader.close()


def measure_rates(
    sizes: Sequence[int],
    num_requests: int,
    output_tokens: int,
    rounds: int,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> RankedRates:
    """Servers of so many ranks, one after the other, so that neither is in the other's way.

    arguments: flags of all. say: told of each round. Raises PageturnerError if one fails.
    """
    rates: dict[int, list[float]] = {size: [] for size in sizes}
    for size in sizes:
        with running_server([*arguments, f"--tensor-parallel-size={size}"]) as server:
            asyncio.run(_answer(server.target, num_requests, output_tokens))
            for _ in range(rounds):
                rates[size].append(asyncio.run(_answer(server.target, num_requests, output_tokens)))
                say(f"{size} ranks: {rates[size][-1]:.1f} tokens/s")
    return RankedRates(num_requests, {size: tuple(found) for size, found in rates.items()})


async def _answer(target: str, num_requests: int, output_tokens: int) -> float:
    """Output tokens/s of so many requests at once."""
    async with Client(target) as client:
        before = time.perf_counter()
        answers = await asyncio.gather(
            *(
                client.generate(
                    [number + 1, *range(5, 36)], max_tokens=output_tokens, temperature=0.0, ignore_eos=True
                )
                for number in range(num_requests)
            )
        )
        return sum(each.usage.num_output_tokens for each in answers) / (time.perf_counter() - before)
