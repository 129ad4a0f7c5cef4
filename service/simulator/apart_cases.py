"""Loads of four servers, and the ways in which those may share prompts and answers.

Rates are for four servers of an 8B model on an H100 each: `light` has prompts take a sixth of what all four
can compute, `heavy` two fifths. Lengths are lognormal around their median. The lines are 400 Gbit/s each way
where nothing else is said: what a server of that kind has for each GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pageturner.policies import registry
from pageturner.service.simulator.experiment import Contender
from pageturner.service.simulator.figures import Slo
from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.handover import Handover
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.synthetic import Synthetic

NUM_SERVERS = 4

SLO = Slo(ttft_seconds=1.5, tpot_seconds=0.015)
"""For goodput: what a reader waits for, and 67 tokens a second from then on."""

SMALL_BUDGET = 512

BLOCK_SIZE = 64
"""Tokens of a block: of 8 MiB here, few and large enough for lines to be full."""

HOST_BLOCKS = 1024
"""Of each server's host tier, and of what came and waits: 8 GiB."""


@dataclass(frozen=True, slots=True)
class Arrangement:
    """A way to use the servers. num_prefill: of them compute prompts for the others. budget: tokens of a
    step; None for the machine's own."""

    name: str
    num_prefill: int = 0
    budget: int | None = None

    @property
    def is_apart(self) -> bool:
        """Whether some prefill for the others."""
        return self.num_prefill > 0


ARRANGEMENTS: tuple[Arrangement, ...] = (
    Arrangement("together"),
    Arrangement("together, small steps", budget=SMALL_BUDGET),
    *(Arrangement(f"{count}:{NUM_SERVERS - count}", count) for count in range(1, NUM_SERVERS)),
)
"""Those apart are named by how many prefill and how many decode. Small steps are what one server has against
prompts that come between tokens."""


@dataclass(frozen=True, slots=True)
class ApartCase:
    """One load. recipe: what is asked. link_gbs: as of `Handover`."""

    name: str
    recipe: Synthetic
    link_gbs: float = 50.0

    def contenders(self, machine: SimulatedMachine) -> tuple[Contender, ...]:
        """Each arrangement, on equally many servers with equal host tiers."""
        handover = Handover(
            link_gbs=self.link_gbs, copy_gbs=20.0, host_blocks=HOST_BLOCKS, receive_blocks=HOST_BLOCKS
        )
        machine = in_blocks_of(BLOCK_SIZE, machine)
        machine = replace(machine, cache=handover.with_host_tier(machine.cache))
        return tuple(
            Contender(
                arrangement.name,
                registry.default_policies(),
                _with_budget(machine, arrangement.budget),
                FleetSetup(NUM_SERVERS, num_prefill=arrangement.num_prefill, handover=handover),
                registry.create("routing", "least-tokens"),
            )
            for arrangement in ARRANGEMENTS
        )


def in_blocks_of(block_size: int, machine: SimulatedMachine) -> SimulatedMachine:
    """The same memory and the same copies in blocks of so many tokens, a multiple of the machine's."""
    cache, steps = machine.cache, machine.step_time
    factor = block_size // cache.block_size
    return replace(
        machine,
        block_bytes=machine.block_bytes * factor,
        step_time=replace(
            steps,
            a_swap_out=steps.a_swap_out * factor,
            a_swap_in=steps.a_swap_in * factor,
            a_copy=steps.a_copy * factor,
        ),
        cache=replace(
            cache,
            block_size=block_size,
            num_blocks=cache.num_blocks // factor,
            num_host_blocks=cache.num_host_blocks // factor,
            num_host_cache_blocks=cache.num_host_cache_blocks // factor,
        ),
    )


def _with_budget(machine: SimulatedMachine, budget: int | None) -> SimulatedMachine:
    if budget is None:
        return machine
    return replace(machine, scheduler=replace(machine.scheduler, max_num_batched_tokens=budget))


def _load(prompt: int, output: int, rate: float) -> Synthetic:
    spread = Synthetic(requests=40, prompt_sigma=0.5, output_sigma=0.5, longest=24000)
    return replace(spread, rate=rate, prompt=prompt, output=output)


_RATES = {1000: (24.0, 60.0), 4000: (5.0, 12.0), 8000: (2.5, 6.0)}

CASES: tuple[ApartCase, ...] = (
    *(
        ApartCase(f"{prompt:,} in, {output} out, {word}", _load(prompt, output, rate))
        for prompt, rates in _RATES.items()
        for output in (50, 300)
        for word, rate in zip(("light", "heavy"), rates, strict=True)
    ),
    *(
        ApartCase(f"4,000 in, 300 out, heavy, {link:g} GB/s", _load(4000, 300, 12.0), link)
        for link in (1.0, 5.0)
    ),
)
