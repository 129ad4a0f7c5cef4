"""The memory study: runs of blocks are given out once, and every contender serves the whole trace."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.policies.views import Rates
from pageturner.service.bench.conversations import conversations, measure_reuse
from pageturner.service.bench.memory import BLOCK_SIZE, PAGING, chat_trace, num_runs, study_memory
from pageturner.service.bench.memory_study import (
    ModelledSteps,
    StudyRun,
    StudySetting,
    TracedRequest,
    run_contender,
)
from pageturner.service.bench.reservations import DEMANDS, Lengths, RunAllocator
from pageturner.service.core.memory.block import NO_RELEASE
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.simulator.machine import load_machine

LIMITS = SchedulerOptions(max_model_len=256, max_num_seqs=32, max_num_batched_tokens=256, max_waiting=1000)
STEPS = ModelledSteps(load_machine("h100-8b"))


def setting(trace: tuple[TracedRequest, ...], num_slots: int = 2048) -> StudySetting:
    return StudySetting(trace, num_slots, LIMITS, Rates())


def a_trace(num_requests: int = 60) -> tuple[TracedRequest, ...]:
    rng = random.Random(1)
    return tuple(TracedRequest(rng.randint(1, 90), (rng.randint(1, 90),)) for _ in range(num_requests))


@pytest.mark.parametrize("name", [*DEMANDS, PAGING])
def test_every_contender_serves_the_whole_trace(name: str) -> None:
    trace = a_trace()
    run = run_contender(name, setting(trace), STEPS, DEMANDS.get(name), BLOCK_SIZE)
    use = run.use
    assert run.total_tokens_per_second * run.seconds == pytest.approx(
        sum(sum(request.answer_tokens) for request in trace)
    )
    assert use.tokens + use.reserved + use.unused + use.free == pytest.approx(1)


def test_what_each_contender_wastes_is_what_it_sets_aside_in_vain() -> None:
    """At the longest sequence 2048 / 256 run; an oracle leaves less than a block a request unused."""
    runs = {
        name: run_contender(name, setting(a_trace()), STEPS, demand, BLOCK_SIZE)
        for name, demand in [*DEMANDS.items(), (PAGING, None)]
    }
    assert runs["max length"].batch == pytest.approx(8, abs=0.1)
    assert runs["max length"].use.free == 0
    useful = [runs[name].use.useful for name in ("max length", "power of two", "oracle", PAGING)]
    assert useful == sorted(useful)
    assert runs["oracle"].use.unused < BLOCK_SIZE / 45
    assert runs[PAGING].use.unused < BLOCK_SIZE / 45
    assert runs[PAGING].num_preemptions > 0


def test_choices_share_their_prompt_and_copy_its_last_block() -> None:
    trace = tuple(TracedRequest(40, (20, 20, 20, 20)) for _ in range(20))
    run = run_contender("4 choices", setting(trace, 1024), STEPS, None, BLOCK_SIZE)
    # Of 40 + 20 tokens two full blocks are shared: at the end 4 x 4 entries name 2 + 4 x 2 blocks.
    assert 0.35 < run.shared < 0.75
    assert run.num_copies >= 60
    assert run_contender("1", setting(a_trace()), STEPS, None, BLOCK_SIZE).shared == 0


def test_larger_blocks_waste_more() -> None:
    runs = [run_contender("", setting(a_trace()), STEPS, None, size) for size in (1, 4, 16, 64)]
    wasted = [1 - run.use.useful for run in runs]
    assert wasted[0] == pytest.approx(0)
    assert wasted == sorted(wasted)


def test_the_study_has_every_run_that_it_says() -> None:
    told: list[StudyRun] = []
    chat = replace(setting(chat_trace(12, 0, 256), 4096), limits=replace(LIMITS, max_num_seqs=64))
    report = study_memory(chat, STEPS, STEPS, 0, told.append)
    assert len(told) == num_runs()
    assert [run.name for run in report.contenders] == [*DEMANDS, PAGING]
    assert report.speedup > 0
    assert sorted(report.sharing) == [2, 4, 6]


@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), max_size=60),
    st.sampled_from((1, 4, 16)),
)
def test_runs_are_consecutive_and_given_out_once(moves: list[tuple[int, bool]], block_size: int) -> None:
    pool = BlockPool(24, block_size)
    runs = RunAllocator(pool)
    held: list[list[int]] = []
    for num_tokens, gives_back in moves:
        if gives_back and held:
            for block_id in held.pop(num_tokens % len(held)):
                pool.release(block_id, NO_RELEASE)
            runs.collect()
            continue
        run = runs.take(num_tokens)
        in_use = {block_id for table in held for block_id in table}
        if run is None:
            assert not any(
                set(range(first, first + -(-num_tokens // block_size))).isdisjoint(in_use)
                for first in range(24 - -(-num_tokens // block_size) + 1)
            )
            continue
        assert run == list(range(run[0], run[0] + -(-num_tokens // block_size)))
        assert in_use.isdisjoint(run)
        held.append(run)
    assert runs.num_free == 24 - sum(map(len, held))


def test_the_shortest_run_that_fits_is_taken() -> None:
    pool = BlockPool(10, 1)
    runs = RunAllocator(pool)
    first, second, third = runs.take(4), runs.take(1), runs.take(2)
    assert (first, second, third) == ([0, 1, 2, 3], [4], [5, 6])
    for block_id in (0, 1, 2, 3):
        pool.release(block_id, NO_RELEASE)
    runs.collect()
    assert runs.take(3) == [7, 8, 9]


def test_what_is_reserved() -> None:
    lengths = Lengths(prompt=100, answer=33, longest=2048)
    assert [DEMANDS[name](lengths) for name in DEMANDS] == [2048, 164, 133]
    assert DEMANDS["power of two"](Lengths(2000, 33, 2048)) == 2048


def test_partial_blocks_save_more_the_larger_blocks_are() -> None:
    """On average half a block of each answer but a conversation's last."""
    workload = conversations(80, 0, 4096)
    num_follow_ups = sum(request.follows is not None for request in workload.requests)
    reuses = list(measure_reuse(load_machine("h100-8b"), 80, 0, (8, 32)))
    assert [reuse.block_size for reuse in reuses] == [8, 32]
    for reuse in reuses:
        saved = reuse.computed_full_blocks - reuse.computed_with_partial
        assert saved == pytest.approx(num_follow_ups * (reuse.block_size - 1) / 2, rel=0.3)
    assert reuses[0].computed_with_partial == pytest.approx(reuses[1].computed_with_partial, rel=0.01)
