"""Prefill and decode apart, simulated: nothing is lost or kept, and where none asks it is the mixed fleet."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import pytest
from support.fleets_apart import (
    ALONE,
    BLOCK,
    MACHINE,
    QUICK,
    case_of,
    check_released,
    check_requests,
    check_run,
    lone_request,
    machine_of,
    run_of,
)
from support.planted_apart import BUGS, ApartBug

from pageturner.service.cli import main
from pageturner.service.flight.step_work import StepWork
from pageturner.service.routing.peers import longest_seconds
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.fleet_figures import figures_of_fleet
from pageturner.service.simulator.fleet_result import FleetResult
from pageturner.service.simulator.fleet_setup import FleetSetup
from pageturner.service.simulator.handover import Handover
from pageturner.service.simulator.machine import load_machine
from pageturner.service.simulator.prefill_replica import PrefillReplica
from pageturner.service.simulator.replica import SchedulerReplica
from pageturner.service.simulator.synthetic import Synthetic
from pageturner.service.simulator.workload import Segment

CASES = range(6)
TWO = FleetSetup(2, num_prefill=1, handover=QUICK)
CHATS = Synthetic(requests=16, rate=20, prompt=700, output=20, turns=2, think=0.2, groups=2, shared=256)
NUM_ASKED = (ALONE - 1) // BLOCK
"""Blocks of the lone prompt that are asked for: the last token is computed where it is decoded."""


# --- what holds of every run ------------------------------------------------------------------------------


def check_any(seed: int) -> None:
    recipe, setup, machine = case_of(seed)
    run, result = run_of(recipe, setup, machine, seed)
    check_run(run, result, machine)


def check_lone(link_gbs: float) -> None:
    """All that can be handed over is, and the first token comes no sooner than the work and the line allow,
    nor much later than one after the other."""
    handover = replace(QUICK, link_gbs=link_gbs)
    run, result = run_of(lone_request(), replace(TWO, handover=handover))
    check_run(run, result, MACHINE)
    assert result.handovers.num_failed == 0
    assert (result.handovers.num_calls, result.handovers.num_blocks) == (1, NUM_ASKED)
    assert result.num_handed_tokens == result.table.num_cached[0] == NUM_ASKED * BLOCK
    assert result.num_scheduled_tokens == (ALONE - NUM_ASKED * BLOCK + 3, NUM_ASKED * BLOCK)
    model, step = MACHINE.step_time, MACHINE.scheduler.max_num_batched_tokens
    first = model.seconds(StepWork(1, 1, step, 0, step, step * (step + 1) // 2))
    a_block = MACHINE.block_bytes / (link_gbs * 1e9)
    copying = NUM_ASKED * (model.a_swap_out + model.a_swap_in + MACHINE.block_bytes / (QUICK.copy_gbs * 1e9))
    took = result.table.first_at[0]
    assert took > first + NUM_ASKED * a_block + NUM_ASKED * model.a_swap_in
    assert took < 3 * first + NUM_ASKED * a_block + copying + 0.01


def check_loss() -> None:
    """The one server that prefills is lost amid its first prompts: who waits hears of it at once, and it is
    left alone from then on."""
    handover = replace(QUICK, loses_at=0.1)
    recipe = Synthetic(requests=12, rate=60, prompt=3000, prompt_sigma=0.2, output=8)
    run, result = run_of(recipe, replace(TWO, num_replicas=3, handover=handover))
    check_run(run, result, MACHINE)
    counts, table = result.handovers, result.table
    assert counts.num_failed > 0
    assert counts.num_calls < 12, "it was asked in its rest"
    waits = [first - at for first, at in zip(table.first_at, table.arrived_at, strict=True)]
    assert max(waits) < QUICK.patience_seconds, "somebody waited for a server that is no more"


def check_all() -> None:
    check_lone(50.0)
    check_lone(0.5)
    check_loss()
    for seed in CASES:
        check_any(seed)


@pytest.mark.parametrize("seed", CASES)
def test_each_request_gets_its_tokens_once_and_nothing_is_kept(seed: int) -> None:
    check_any(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 400))
def test_many_more_fleets_lose_and_keep_nothing(seed: int) -> None:
    check_any(seed)


@pytest.mark.parametrize("link_gbs", [50.0, 0.5])
def test_a_lone_prompt_comes_when_its_work_and_the_line_allow(link_gbs: float) -> None:
    check_lone(link_gbs)


def test_a_prompt_is_computed_where_it_is_decoded_once_its_prefill_server_is_lost() -> None:
    check_loss()


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_a_planted_bug_of_hand_overs_is_caught(bug: ApartBug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.method, bug.mistake(getattr(bug.owner, bug.method)))
    with pytest.raises(AssertionError):
        check_all()


# --- beside the mixed fleet -------------------------------------------------------------------------------


def test_without_servers_that_prefill_it_is_the_mixed_fleet_bit_for_bit() -> None:
    mixed = run_of(CHATS, FleetSetup(3))[1]
    none = run_of(CHATS, FleetSetup(3, num_prefill=0, handover=replace(QUICK, loses_at=0.1)))[1]
    assert figures_of_fleet(none) == figures_of_fleet(mixed)
    assert list(none.table.first_at) == list(mixed.table.first_at)
    assert none.gaps == mixed.gaps


def test_where_no_prompt_is_long_enough_the_others_are_a_mixed_fleet_bit_for_bit() -> None:
    """With the same host tier."""
    handover = replace(QUICK, min_tokens=100_000)
    machine = replace(MACHINE, cache=handover.with_host_tier(MACHINE.cache))
    mixed = run_of(CHATS, FleetSetup(2), machine)[1]
    apart = run_of(CHATS, FleetSetup(3, num_prefill=1, handover=handover))[1]
    assert list(apart.table.first_at) == list(mixed.table.first_at)
    assert list(apart.table.ended_at) == list(mixed.table.ended_at)
    assert list(apart.table.num_cached) == list(mixed.table.num_cached)
    assert apart.num_scheduled_tokens == (*mixed.num_scheduled_tokens, 0)
    assert apart.handovers.num_calls == 0


def test_the_same_seed_gives_the_same_run_and_another_another() -> None:
    recipe, setup, machine = case_of(1)
    runs = [run_of(recipe, setup, machine, seed)[1] for seed in (1, 1, 2)]
    assert list(runs[0].table.ended_at) == list(runs[1].table.ended_at)
    assert runs[0].gaps == runs[1].gaps
    assert list(runs[0].table.ended_at) != list(runs[2].table.ended_at)


def test_a_second_turn_asks_for_what_its_server_lacks() -> None:
    """Its own first turn is cached there, so fewer blocks than its prompt has go over the line; and another
    server that had the same beginning computed finds it in the cache of the one that prefills."""
    recipe = Synthetic(requests=1, prompt=1600, prompt_sigma=0, output=64, output_sigma=0, turns=2, think=1.0)
    run, result = run_of(recipe, TWO)
    check_run(run, result, MACHINE)
    first, second = (request.num_prompt_tokens for request in result.requests)
    assert result.handovers.num_blocks == (first - 1) // BLOCK + (second - 1) // BLOCK - (first + 63) // BLOCK
    shared = Synthetic(requests=2, rate=1.0, burstiness=0, prompt=200, output=400, groups=1, shared=1600)
    run, result = run_of(shared, FleetSetup(3, num_prefill=1, handover=QUICK))
    assert len(set(result.table.replica)) == 2
    assert result.num_hit_tokens == 1600
    assert figures_of_fleet(result)["prefix_hit_share"] == pytest.approx(
        1600 / sum(request.num_prompt_tokens for request in result.requests)
    )


def test_where_the_decoding_pool_is_full_what_came_waits_or_gives_way() -> None:
    """Ten prompts of half the pool each come at once: one after the other starts, none is lost, and of what
    found no room in the meantime the server computes the tokens itself."""
    recipe = Synthetic(
        requests=10, rate=1e6, prompt=1500, prompt_sigma=0, output=40, output_sigma=0, longest=4000
    )
    machine = machine_of(200)
    handover = replace(QUICK, receive_blocks=150, host_blocks=100)
    run, result = run_of(recipe, replace(TWO, handover=handover), machine)
    check_requests(run, result, machine)
    check_released(run)
    assert 0 < result.num_handed_tokens < 10 * 1500
    assert result.num_scheduled_tokens[0] + result.num_handed_tokens >= 10 * 1500


def test_a_caller_that_loses_patience_computes_the_rest_and_ends_the_work_for_it() -> None:
    handover = replace(QUICK, link_gbs=0.05, patience_seconds=0.03)
    run, result = run_of(lone_request(20_000), replace(TWO, handover=handover))
    check_run(run, result, MACHINE)
    assert result.handovers.num_failed == 1
    assert result.num_scheduled_tokens[1] < 20_000 - BLOCK, "the prompt was computed to its end for nobody"


def test_a_server_that_gives_block_after_block_for_too_long_is_left() -> None:
    """All would take four times what computing them may; the patience would bear twenty times each."""
    prompt = 20_000
    run, result = run_of(lone_request(prompt), replace(TWO, handover=QUICK))
    (decode,) = (each for each in run.replicas if not isinstance(each, PrefillReplica))
    assert isinstance(decode, SchedulerReplica)
    assert not result.handovers.num_failed
    allowed = longest_seconds(decode.rates, 0.0, prompt, 0)
    num_blocks = prompt // BLOCK
    a_block = 4 * allowed / num_blocks
    slow = replace(QUICK, link_gbs=MACHINE.block_bytes / a_block / 1e9, patience_seconds=20 * a_block)
    run, result = run_of(lone_request(prompt), replace(TWO, handover=slow))
    check_run(run, result, MACHINE)
    assert result.handovers.num_failed == 1
    assert num_blocks // 4 < result.handovers.num_blocks < num_blocks // 2


# --- beside the real thing --------------------------------------------------------------------------------


def test_streams_beside_long_prompts_fare_as_two_real_processes_showed() -> None:
    """`bench handoff`: on the same two cores, apart, streams' gaps are an order shorter, and the long prompts
    wait longer for their first token (loadtest/RESULTS.md). Together: one server on both cores; apart: one
    each."""
    core = load_machine("cpu-smollm2-135m")
    both = replace(core, step_time=core.step_time.scaled(0.5))
    alike = Synthetic(requests=4, prompt_sigma=0, output_sigma=0, burstiness=0)
    streams = replace(alike, rate=1e6, prompt=8, output=400).make("streams", 0)
    prompts = replace(alike, rate=1.0, prompt=1024, output=8).make("prompts", 0)
    others = tuple(
        replace(request, prompt=(Segment(1000 + number, 1024),))
        for number, request in enumerate(prompts.requests)
    )
    workload = replace(streams, requests=(*streams.requests, *others))
    handover = Handover(
        link_gbs=1.0, copy_gbs=1.0, host_blocks=1400, receive_blocks=700, patience_seconds=120
    )
    together = run_of(workload, FleetSetup(1), both)[1]
    apart = run_of(workload, FleetSetup(2, num_prefill=1, handover=handover), core)[1]

    def median_wait(result: FleetResult) -> float:
        table = result.table
        return median(table.first_at[index] - table.arrived_at[index] for index in range(4, 8))

    assert apart.handovers.num_failed == 0
    assert apart.num_handed_tokens == 4 * 1008
    assert figures_of_fleet(apart)["itl_p99"] < figures_of_fleet(together)["itl_p99"] / 3
    assert median_wait(apart) > 1.5 * median_wait(together)


# --- what can not be --------------------------------------------------------------------------------------


def test_what_could_not_be_run_is_refused() -> None:
    with pytest.raises(ValueError, match="num_prefill must be at least 0 and below num_replicas, not 2"):
        FleetSetup(2, num_prefill=2)
    with pytest.raises(ValueError, match="coarse servers hand nothing over"):
        FleetSetup(2, is_coarse=True, num_prefill=1)
    for name in ("link_gbs", "copy_gbs", "patience_seconds", "min_tokens", "host_blocks", "receive_blocks"):
        with pytest.raises(ValueError, match=name):
            Handover(**{name: 0})
    with pytest.raises(ValueError, match="loses_at"):
        Handover(loses_at=-1.0)
    machine = replace(MACHINE, cache=replace(MACHINE.cache, enable_prefix_caching=False))
    with pytest.raises(WorkloadError, match="enable_prefix_caching"):
        run_of(CHATS, TWO, machine)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--link-gbs=3"], "--link-gbs: needs --replicas N"),
        (["--replicas=2", "--prefill-replicas=2"], "--prefill-replicas: num_prefill must be"),
        (["--replicas=2", "--prefill-replicas=1", "--servers=coarse"], "coarse servers hand nothing over"),
        (["--replicas=2", "--prefill-replicas=1", "--link-gbs=0"], "--link-gbs: link_gbs must be"),
        (
            ["--replicas=2", "--prefill-replicas=1", "--link-latency=-1"],
            "--link-latency: link_seconds must be",
        ),
        (["--replicas=2", "--prefill-replicas=-1"], "--prefill-replicas: -1 is below 0"),
    ],
)
def test_a_mistake_is_named(words: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--workload=chat:requests=2", *words]) == 2
    assert told in capsys.readouterr().err


def test_servers_apart_are_simulated_and_swept(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--workload=chat:requests=4,turns=1", "--replicas=2", "--seeds=1", "--lose-prefill-at=9"]
    sweeps = ["--sweep=handover.link_gbs=1,50", "--sweep=fleet.num_prefill=0,1"]
    assert main(["simulate", *words, *sweeps]) == 0
    assert "handed over" in capsys.readouterr().out
