"""Small fleets in which some servers prefill for the others, and what holds of each of their runs."""

from __future__ import annotations

from dataclasses import replace
from random import Random

from pageturner.policies import registry
from pageturner.service.simulator.fleet import FleetRun
from pageturner.service.simulator.fleet_result import FleetResult
from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.handover import Handover
from pageturner.service.simulator.machine import SimulatedMachine, load_machine
from pageturner.service.simulator.prefill_replica import PrefillReplica
from pageturner.service.simulator.replica import SchedulerReplica
from pageturner.service.simulator.synthetic import Synthetic
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

MACHINE = load_machine("h100-8b")
BLOCK = MACHINE.cache.block_size
QUICK = Handover(link_gbs=50, copy_gbs=50, min_tokens=64)

ALONE = 4096
"""Tokens of the lone prompt, of two steps."""


def machine_of(num_blocks: int) -> SimulatedMachine:
    """One with so many blocks, on which little is worth computing."""
    return replace(MACHINE, cache=replace(MACHINE.cache, num_blocks=num_blocks))


def case_of(seed: int) -> tuple[Synthetic, FleetSetup, SimulatedMachine]:
    """Any: pools and rooms too small, links too slow, servers that are lost, callers that lose patience."""
    rng = Random(seed)
    recipe = Synthetic(
        requests=10,
        rate=rng.choice((8, 40)),
        prompt=rng.choice((200, 700, 1500)),
        prompt_sigma=0.7,
        output=rng.choice((1, 8, 30)),
        turns=rng.choice((1, 1, 3)),
        think=0.1,
        groups=rng.choice((0, 2)),
        shared=rng.choice((64, 400)),
        longest=3500,
    )
    handover = Handover(
        link_gbs=rng.choice((0.5, 12.5, 100)),
        copy_gbs=rng.choice((10, 50)),
        min_tokens=rng.choice((32, 256)),
        patience_seconds=rng.choice((0.05, 10)),
        host_blocks=rng.choice((8, 500)),
        receive_blocks=rng.choice((12, 500)),
        loses_at=rng.choice((None, None, 0.2)),
    )
    num_prefill = rng.choice((1, 1, 2))
    setup = FleetSetup(num_prefill + rng.choice((1, 2)), num_prefill=num_prefill, handover=handover)
    return recipe, setup, machine_of(rng.choice((300, 600, 24700)))


def run_of(
    recipe: Synthetic | SimulatedWorkload,
    setup: FleetSetup,
    machine: SimulatedMachine = MACHINE,
    seed: int = 0,
) -> tuple[FleetRun, FleetResult]:
    """The run that ended, and what came of it."""
    workload = recipe.make("apart", seed) if isinstance(recipe, Synthetic) else recipe
    routing = registry.create("routing", "least-tokens")
    run = FleetRun(workload, machine, registry.default_policies(), setup, routing, seed)
    return run, run.run()


def lone_request(num_prompt: int = ALONE, num_output: int = 4) -> SimulatedWorkload:
    """One request."""
    return SimulatedWorkload(
        "one", (WorkloadRequest(0.0, (Segment(1, num_prompt),), Segment(2, num_output)),)
    )


def check_run(run: FleetRun, result: FleetResult, machine: SimulatedMachine) -> None:
    """What holds of every run: each request ended once with its own tokens, and nothing is kept for any."""
    check_requests(run, result, machine)
    check_released(run)


def check_requests(run: FleetRun, result: FleetResult, machine: SimulatedMachine) -> None:
    """Every token was told once, in order, by the server to which the request was sent."""
    table, room = result.table, BLOCK * machine.cache.num_blocks
    for index, request in enumerate(result.requests):
        replica = run.replicas[table.replica[index]]
        assert isinstance(replica, SchedulerReplica)
        assert not isinstance(replica, PrefillReplica), "a request was sent to a server that prefills"
        record = replica.records[index]
        if request.num_prompt_tokens + request.output.num_tokens - 1 > room:  # the last one's KV is not kept
            assert table.has_failed[index], "what is beyond the pool was taken"
            continue
        assert not table.has_failed[index], f"request {index} failed: {record.error}"
        num_tokens = request.output.num_tokens
        assert (table.num_output[index], len(record.token_times)) == (num_tokens, num_tokens)
        assert list(record.token_times) == sorted(record.token_times)
        assert record.token_times[0] == table.first_at[index]
        assert table.arrived_at[index] < table.first_at[index] <= table.ended_at[index] <= result.seconds
    holders = [
        index
        for replica in run.replicas
        if isinstance(replica, SchedulerReplica) and not isinstance(replica, PrefillReplica)
        for index in replica.records
    ]
    assert sorted(holders) == list(range(len(table))), "a request was with no server, or with two"


def check_released(run: FleetRun) -> None:
    """Pools of servers that live are empty but for what is cached, and nobody waits for anything."""
    handovers = run.handovers
    for number, replica in enumerate(run.replicas):
        assert isinstance(replica, SchedulerReplica)
        if handovers is not None and number in handovers.lost:
            continue
        replica.check_integrity()
        stats = replica.stats()
        assert stats.num_blocks_used == 0, f"server {number} keeps {stats.num_blocks_used} blocks"
        assert stats.num_host_blocks_used == 0, (
            f"server {number} keeps {stats.num_host_blocks_used} host blocks"
        )
        assert replica.num_moving_blocks == 0, f"server {number} has transfers that do not end"
        if isinstance(replica, PrefillReplica):
            assert replica.sender.is_idle, f"server {number} holds blocks for callers that left"
    if handovers is not None:
        assert handovers.is_idle, "a call is under way when all have ended"
