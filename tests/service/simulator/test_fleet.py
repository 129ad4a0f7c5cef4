"""Several servers: one of them is `simulate`, coarse ones are the scheduler, and all chance is the seed's."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from random import Random
from typing import Any

import pytest
from support.planted_coarse import BUGS, CoarseBug

from pageturner.policies import registry
from pageturner.service.core.options import CacheOptions
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.figures import figures_of
from pageturner.service.simulator.fleet import simulate_fleet
from pageturner.service.simulator.fleet_figures import figures_of_fleet
from pageturner.service.simulator.fleet_result import FleetResult
from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.machine import SimulatedMachine, load_machine
from pageturner.service.simulator.simulation import simulate
from pageturner.service.simulator.synthetic import Synthetic
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

MACHINE = load_machine("h100-8b")
LRU = registry.create_set({"eviction": "lru"})
CHAT = Synthetic(requests=24, rate=30, prompt=200, output=60, turns=3, think=0.5, groups=2, shared=256)
MANY = replace(CHAT, requests=150, rate=400)


def run(
    recipe: Synthetic,
    setup: FleetSetup,
    routing: str = "round-robin",
    machine: SimulatedMachine = MACHINE,
    seed: int = 0,
) -> FleetResult:
    policy = registry.create("routing", routing)
    return simulate_fleet(recipe.make("test", seed), machine, LRU, setup, policy, seed)


@pytest.mark.parametrize("num_blocks", [24700, 200])
def test_a_fleet_of_one_gives_the_figures_of_one_server(num_blocks: int) -> None:
    """To the last digit: refusals, deadlines and preemptions included."""
    machine = replace(MACHINE, cache=replace(MACHINE.cache, num_blocks=num_blocks))
    recipe = replace(CHAT, deadline=2.0, tight_share=0.3, prompt_sigma=1.2, longest=5000)
    workload = recipe.make("test", 1)
    alone = simulate(workload, machine, LRU)
    table = simulate_fleet(
        workload, machine, LRU, FleetSetup(1), registry.create("routing", "prefix-aware")
    ).table
    for index, record in enumerate(alone.requests):
        assert record.arrived_at == table.arrived_at[index]
        assert record.ended_at == table.ended_at[index]
        assert record.num_cached_tokens == table.num_cached[index]
        assert (record.error is not None) == table.has_failed[index]
        assert not record.token_times or record.token_times[0] == table.first_at[index]
    assert num_blocks > 200 or any(table.has_failed)


def test_the_figures_of_a_fleet_of_one_are_those_of_one_server() -> None:
    workload = CHAT.make("test", 2)
    alone = figures_of(simulate(workload, MACHINE, LRU))
    fleet = figures_of_fleet(
        simulate_fleet(workload, MACHINE, LRU, FleetSetup(1), registry.create("routing", "session"))
    )
    assert fleet["imbalance"] == 1.0
    same = [name for name in fleet if name in alone]
    assert len(same) > 15
    for name in same:
        assert fleet[name] == pytest.approx(alone[name], rel=1e-9), name


# --- the coarse replica -----------------------------------------------------------------------------------


def recipe_of(seed: int) -> Synthetic:
    """Nothing is shared but by turns: of a prefix that is under way a coarse replica knows nothing."""
    rng = Random(seed)
    return Synthetic(
        requests=14,
        rate=rng.choice((5, 30, 100)),
        concurrency=rng.choice((0, 0, 8)),
        burstiness=rng.choice((1, 4)),
        prompt=rng.choice((30, 300, 3000)),
        output=rng.choice((1, 20, 90)),
        prompt_sigma=rng.choice((0, 0.8)),
        output_sigma=rng.choice((0, 0.8)),
        turns=rng.choice((1, 3, 3)),
        think=rng.choice((0, 0.3)),
        longest=8000,
    )


@cache
def by_scheduler(seed: int) -> FleetResult:
    return run(recipe_of(seed), setup_of(seed), routing_of(seed), machine_of(seed), seed)


def setup_of(seed: int) -> FleetSetup:
    return FleetSetup(1 + seed % 3, chunk_tokens=16)


def routing_of(seed: int) -> str:
    names = registry.names("routing")
    return names[seed % len(names)]


def machine_of(seed: int) -> SimulatedMachine:
    bounds: Any = {"max_num_seqs": (4, 256)[seed % 2], "max_num_batched_tokens": (512, 2048)[seed // 2 % 2]}
    return replace(MACHINE, scheduler=replace(MACHINE.scheduler, **bounds))


def check_coarse_is_the_scheduler(seed: int) -> None:
    exact = by_scheduler(seed).table
    setup = replace(setup_of(seed), is_coarse=True)
    coarse = run(recipe_of(seed), setup, routing_of(seed), machine_of(seed), seed).table
    assert list(coarse.replica) == list(exact.replica)
    assert list(coarse.num_cached) == list(exact.num_cached)
    assert list(coarse.num_output) == list(exact.num_output)
    assert list(coarse.first_at) == pytest.approx(list(exact.first_at), abs=1e-9)
    assert list(coarse.ended_at) == pytest.approx(list(exact.ended_at), abs=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_a_coarse_replica_is_the_scheduler_while_blocks_last(seed: int) -> None:
    """In chunks of a block, each request's first and last token come when the scheduler lets them."""
    check_coarse_is_the_scheduler(seed)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_the_coarse_replica_is_caught(
    bug: CoarseBug, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed in range(8):
        by_scheduler(seed)
    monkeypatch.setattr(bug.owner, bug.method, bug.mistake(getattr(bug.owner, bug.method)))

    def check_all() -> None:
        for seed in range(8):
            check_coarse_is_the_scheduler(seed)

    with pytest.raises(AssertionError):
        check_all()


@pytest.mark.parametrize("num_blocks", [130, 400])
def test_a_coarse_replica_ends_every_request_in_a_pool_too_small(num_blocks: int) -> None:
    """And counts its blocks right: none is held at the end, never more than there are."""
    machine = replace(MACHINE, cache=replace(MACHINE.cache, num_blocks=num_blocks))
    recipe = replace(CHAT, requests=60, rate=100, output=150, longest=1200)
    workload = recipe.make("small", 0)
    setup = FleetSetup(2, is_coarse=True, chunk_tokens=64)
    result = simulate_fleet(workload, machine, LRU, setup, registry.create("routing", "prefix-aware"))
    assert all(ended == ended for ended in result.table.ended_at)
    assert sum(result.num_preemptions) > 0
    too_long = [request.num_prompt_tokens + 16 > 16 * num_blocks for request in workload.requests]
    assert list(result.table.has_failed) == too_long
    done = [r for r, failed in zip(workload.requests, too_long, strict=True) if not failed]
    assert sum(result.table.num_output) == sum(request.output.num_tokens for request in done)


def test_a_prompt_beyond_the_model_is_refused_and_the_conversation_goes_on() -> None:
    first = WorkloadRequest(0.0, (Segment(1, 40_000),), Segment(2, 5))
    second = WorkloadRequest(1.0, (Segment(3, 10),), Segment(4, 5), follows=0)
    for is_coarse in (False, True):
        setup = FleetSetup(2, is_coarse)
        policy = registry.create("routing", "least-tokens")
        table = simulate_fleet(SimulatedWorkload("w", (first, second)), MACHINE, LRU, setup, policy).table
        assert list(table.has_failed) == [1, 0]
        assert math.isnan(table.first_at[0])
        assert table.num_output[1] == 5


@pytest.mark.parametrize("change", [{"deadline": 5.0}, {"choices": 2}])
def test_what_coarse_replicas_do_not_know_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(WorkloadError, match="neither deadlines nor several choices"):
        run(replace(CHAT, **change), FleetSetup(2, is_coarse=True))


# --- routing ----------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    setup = FleetSetup(5, is_coarse=True, num_routers=3, report_seconds=0.5)
    runs = [run(MANY, setup, "power-of-two", seed=seed) for seed in (1, 1, 2)]
    assert list(runs[0].table.ended_at) == list(runs[1].table.ended_at)
    assert list(runs[0].table.replica) != list(runs[2].table.replica)


def test_a_conversation_is_one_session() -> None:
    result = run(MANY, FleetSetup(7, is_coarse=True), "session")
    homes: dict[int, set[int]] = {}
    first: dict[int, int] = {}
    for index, request in enumerate(result.requests):
        first[index] = index if request.follows is None else first[request.follows]
        homes.setdefault(first[index], set()).add(result.table.replica[index])
    assert len(homes) == 150
    assert all(len(home) == 1 for home in homes.values())


def test_prefix_aware_routing_finds_what_conversations_left() -> None:
    found = {
        name: figures_of_fleet(run(MANY, FleetSetup(6, is_coarse=True, chunk_tokens=32), name))
        for name in ("round-robin", "prefix-aware")
    }
    assert found["prefix-aware"]["prefix_hit_share"] > found["round-robin"]["prefix_hit_share"] + 0.15
    assert found["prefix-aware"]["ttft_mean"] < found["round-robin"]["ttft_mean"]


def test_many_routers_with_old_reports_run_together_to_the_idlest_and_two_choices_do_not() -> None:
    """The herd: each of 40 routers sends all that comes between two reports to the same few servers."""
    recipe = Synthetic(requests=1500, rate=250, prompt=1500, output=40)
    setup = FleetSetup(12, is_coarse=True, num_routers=40, report_seconds=1.0)
    found = {
        name: figures_of_fleet(run(recipe, setup, name))["ttft_mean"]
        for name in ("least-tokens", "power-of-two")
    }
    alone = figures_of_fleet(run(recipe, replace(setup, num_routers=1), "least-tokens"))["ttft_mean"]
    assert alone < found["power-of-two"] < found["least-tokens"]


def test_a_policy_that_fails_is_replaced_and_counted() -> None:
    class Junk:
        def route(self, *asked: Any) -> Any:
            return None

    junk: Any = Junk()
    result = simulate_fleet(CHAT.make("w", 0), MACHINE, LRU, FleetSetup(3, is_coarse=True), junk)
    assert result.num_faults == 8, "then it was quarantined"
    assert not any(result.table.has_failed)


@pytest.mark.parametrize(
    "bad",
    [{"num_replicas": 0}, {"num_routers": 0}, {"report_seconds": -1.0}, {"report_seconds": math.inf}],
)
def test_what_could_not_be_run_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(bad))):
        FleetSetup(**{"num_replicas": 1, **bad})


def test_without_a_prefix_cache_nothing_is_found() -> None:
    cache_options = CacheOptions(num_blocks=24700, block_size=16, enable_prefix_caching=False)
    result = run(MANY, FleetSetup(2, is_coarse=True), "prefix-aware", replace(MACHINE, cache=cache_options))
    assert sum(result.table.num_cached) == 0
