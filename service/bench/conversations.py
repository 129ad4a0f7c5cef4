"""What conversations save by the partial blocks of their answers: the real scheduler, in the simulator."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pageturner.loadtest.workload.lengths import draw_pair
from pageturner.loadtest.workload.named import NAMED
from pageturner.policies import registry
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

BLOCK_SIZES = (16, 32, 64, 128)
_CONCURRENCY = 16


@dataclass(frozen=True, slots=True)
class Reuse:
    """Prompt tokens of conversations, all in all and those that had to be computed: with full blocks cached
    alone, and with the last block of each answer too."""

    block_size: int
    num_requests: int
    prompt_tokens: int
    computed_full_blocks: int
    computed_with_partial: int

    @property
    def saved(self) -> float:
        """Share of the computed tokens that partial blocks save."""
        return 1 - self.computed_with_partial / self.computed_full_blocks


def conversations(num_requests: int, seed: int, longest: int) -> SimulatedWorkload:
    """The load test's `chat`: each prompt holds all that came before it, up to `longest` tokens."""
    chat, rng = NAMED["chat"], random.Random(seed)
    made: list[WorkloadRequest] = []
    while len(made) < num_requests:
        prefix: tuple[Segment, ...] = ()
        follows: int | None = None
        num_tokens = 0
        for _ in range(chat.turns.at(rng.random())):
            prompt, answer = draw_pair(rng, chat.prompt_lengths, chat.output_lengths, chat.correlation)
            num_tokens += prompt + answer
            if num_tokens > longest or len(made) == num_requests:
                break
            key = 2 * len(made) + 1
            asked, answered = (*prefix, Segment(key, prompt)), Segment(key + 1, answer)
            think = 0.0 if follows is None else chat.think_seconds
            made.append(WorkloadRequest(think, asked, answered, follows=follows))
            follows, prefix = len(made) - 1, (*asked, answered)
    return SimulatedWorkload("chat", tuple(made), concurrency=_CONCURRENCY)


def measure_reuse(
    machine: SimulatedMachine, num_requests: int, seed: int, block_sizes: tuple[int, ...] = BLOCK_SIZES
) -> Iterator[Reuse]:
    """One for each block size, in a pool that keeps every block."""
    longest = machine.scheduler.max_model_len
    workload = conversations(num_requests, seed, longest)
    num_slots = sum(request.num_prompt_tokens + request.output.num_tokens for request in workload.requests)
    for block_size in block_sizes:
        cache = replace(
            machine.cache,
            block_size=block_size,
            num_blocks=2 * (num_slots // block_size + num_requests),
            num_host_blocks=0,
        )
        computed = []
        for reuses in (False, True):
            chosen = replace(machine, cache=replace(cache, reuse_partial_blocks=reuses))
            result = simulate(workload, chosen, registry.default_policies())
            computed.append(sum(r.num_prompt_tokens - r.num_cached_tokens for r in result.requests))
        total = sum(request.num_prompt_tokens for request in workload.requests)
        yield Reuse(block_size, num_requests, total, *computed)
