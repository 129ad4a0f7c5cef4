"""One run: time passes as the model says, arrivals are honoured, and nothing is left to chance."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from pageturner.policies import registry
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.errors import DeadlineExceeded, InvalidArgument
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.simulation import SimulationResult, simulate
from pageturner.service.simulator.step_time import StepTimeModel
from pageturner.service.simulator.synthetic import Synthetic
from pageturner.service.simulator.tenancy import TenantLedger
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest

A_SECOND_A_STEP = SimulatedMachine(
    name="a second a step",
    derivation=(),
    step_time=StepTimeModel(a_step=1.0),
    block_bytes=1 << 20,
    cache=CacheOptions(num_blocks=64, block_size=4),
    scheduler=SchedulerOptions(max_model_len=256, max_num_seqs=4, max_num_batched_tokens=64),
)


def request(at_seconds: float, num_prompt: int, num_output: int, key: int = 1) -> WorkloadRequest:
    return WorkloadRequest(at_seconds, (Segment(key, num_prompt),), Segment(key + 1, num_output))


def run(
    *requests: WorkloadRequest, machine: SimulatedMachine = A_SECOND_A_STEP, concurrency: int | None = None
) -> SimulationResult:
    return simulate(SimulatedWorkload("test", requests, concurrency), machine, registry.default_policies())


def test_a_lone_request_takes_a_step_a_token() -> None:
    (record,) = run(request(5.0, 8, 4)).requests
    assert list(record.token_times) == [6.0, 7.0, 8.0, 9.0]
    assert (record.arrived_at, record.ended_at, record.num_output_tokens) == (5.0, 9.0, 4)


def test_an_arrival_during_a_step_waits_for_its_end() -> None:
    _, late = run(request(0.0, 8, 4), request(0.5, 8, 1, key=3)).requests
    assert list(late.token_times) == [2.0]


def test_a_closed_loop_sends_the_next_when_one_ends() -> None:
    result = run(*(request(0.0, 4, 2, key=2 * i + 1) for i in range(3)), concurrency=1)
    assert [record.arrived_at for record in result.requests] == [0.0, 2.0, 4.0]


def test_what_lies_between_client_and_queue_counts_for_the_client() -> None:
    (record,) = run(request(1.0, 4, 1), machine=replace(A_SECOND_A_STEP, request_seconds=0.25)).requests
    assert record.token_times[0] - record.arrived_at == 1.25


def test_a_conversation_goes_on_after_its_answer_and_finds_it_in_the_cache() -> None:
    first = request(0.0, 8, 8)
    second = WorkloadRequest(3.0, (*first.prompt, first.output, Segment(9, 4)), Segment(10, 1), follows=0)
    one, two = run(first, second).requests
    assert one.ended_at == 8.0
    assert two.arrived_at == 11.0
    assert two.num_cached_tokens == 12  # the prompt and half of the answer; its last token was never computed


def test_a_request_stops_by_itself_before_the_max_tokens_it_asked_for() -> None:
    (record,) = run(replace(request(0.0, 4, 3), max_tokens=50)).requests
    assert record.num_output_tokens == 3


def test_a_deadline_ends_a_request_and_an_impossible_one_is_refused() -> None:
    late, never = run(
        replace(request(0.0, 4, 100), deadline_seconds=2.5), request(0.0, 300, 1, key=3)
    ).requests
    assert isinstance(late.error, DeadlineExceeded)
    assert late.ended_at == 3.0
    assert isinstance(never.error, InvalidArgument)


def test_tokens_computed_again_are_counted() -> None:
    """Two requests that do not fit together: one yields, and what it had computed is computed again."""
    tiny = replace(
        A_SECOND_A_STEP,
        cache=CacheOptions(num_blocks=8, block_size=4, enable_prefix_caching=False),
        scheduler=replace(A_SECOND_A_STEP.scheduler, watermark=0.0),
    )
    policies = registry.create_set({"reclaim": "always-recompute"})
    workload = SimulatedWorkload("test", (request(0.0, 8, 16), request(0.0, 8, 16, key=3)))
    result = simulate(workload, tiny, policies)
    assert result.stats.num_recompute_preemptions_total > 0
    # Whatever was not computed twice was computed once: all but the last token of each request.
    assert result.num_scheduled_tokens - result.num_recomputed_tokens == 2 * (8 + 16 - 1)
    assert result.num_recomputed_tokens >= 8
    assert all(record.num_output_tokens == 16 for record in result.requests)


def test_policies_weigh_the_machine_as_it_was_measured() -> None:
    """A link that has become slow is still trusted by the cost model, and copies take what they take."""
    slow = StepTimeModel(a_step=1.0, a_token=0.1, a_swap_out=50.0, a_swap_in=50.0)
    machine = replace(
        A_SECOND_A_STEP,
        step_time=slow,
        cache=CacheOptions(num_blocks=8, block_size=4, num_host_blocks=8, enable_prefix_caching=False),
        scheduler=replace(A_SECOND_A_STEP.scheduler, watermark=0.0),
    )
    workload = SimulatedWorkload("test", (request(0.0, 8, 16), request(0.0, 8, 16, key=3)))
    policies = registry.default_policies()
    knowing = simulate(workload, machine, policies)
    trusting = simulate(
        workload, replace(machine, measured=replace(slow, a_swap_out=0.01, a_swap_in=0.01)), policies
    )
    assert knowing.stats.num_swap_preemptions_total == 0
    assert trusting.stats.num_swap_preemptions_total > 0
    assert trusting.seconds > knowing.seconds + 100


def test_every_request_ends_in_a_pool_far_too_small() -> None:
    recipe = Synthetic(
        requests=60, rate=50, prompt=40, output=40, turns=2, groups=2, shared=16, tenants=3, longest=100
    )
    machine = replace(A_SECOND_A_STEP, cache=CacheOptions(num_blocks=64, block_size=4, num_host_blocks=64))
    result = simulate(recipe.make("small", 0), machine, registry.default_policies())
    assert all(record.ended_at is not None for record in result.requests)
    assert result.stats.num_blocks_used == result.stats.num_host_blocks_used == 0
    assert len(result.samples) <= 256


def test_the_gap_is_that_of_a_stretch_in_which_both_wait() -> None:
    ledger = TenantLedger(["a", "b"])
    ledger.arrived("a")
    ledger.served("a", num_prompt=100, num_output=0)
    ledger.end_step([])  # b asks for nothing: no gap, however much a is served
    assert ledger.largest_gap == 0
    ledger.arrived("b")
    ledger.end_step([])
    ledger.served("b", num_prompt=10, num_output=5)
    ledger.end_step([])
    assert ledger.largest_gap == 20  # an output token counts for two
    ledger.ended("a")
    ledger.end_step([])
    ledger.served("b", num_prompt=1000, num_output=0)
    ledger.end_step([])
    assert ledger.largest_gap == 20


def test_the_same_seed_gives_the_same_json_in_another_process(tmp_path: Path) -> None:
    sets = ("--policies=", "--policies=victim=last-arrived;reclaim=always-swap")
    words = ["simulate", "--workload=two-tenants:requests=40,turns=2", "--seeds=2", "--json", *sets]
    words.append("--sweep=cache.num_blocks=400")
    outputs = [
        subprocess.run(
            [*PROGRAM, *words],
            capture_output=True,
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert b'"preemptions"' in outputs[0]


def test_the_simulator_needs_no_numpy_and_no_torch() -> None:
    code = (
        "import sys, pageturner.service.simulator.experiment, pageturner.service.simulator.report\n"
        "import pageturner.service.simulator.recordings, pageturner.service.simulator.plots\n"
        "heavy = {'torch', 'numpy', 'grpc', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
