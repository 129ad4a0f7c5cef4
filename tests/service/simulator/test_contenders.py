"""Policy sets and sweeps as they are written become contenders, or say what is wrong with them."""

from __future__ import annotations

import pytest

from pageturner.policies.admission import FullPrompt
from pageturner.policies.queue import Fcfs, PriorityWithAging
from pageturner.policies.reclaim import AlwaysRecompute, AlwaysSwap
from pageturner.policies.victim import LastArrived, LeastComputed
from pageturner.service.errors import ConfigError
from pageturner.service.simulator.contenders import parse_policies, sweep
from pageturner.service.simulator.machine import load_machine

MACHINE = load_machine("h100-8b")


def test_axes_left_out_keep_their_default() -> None:
    contender = parse_policies("victim=last-arrived; reclaim=always-swap").on(MACHINE)
    assert contender.policies.victim == LastArrived()
    assert contender.policies.reclaim == AlwaysSwap()
    assert contender.policies.queue == Fcfs()
    assert contender.machine == MACHINE


@pytest.mark.parametrize("text", ["priority:aging_seconds=5", '{name="priority",aging_seconds=5}'])
def test_options_are_written_in_either_way(text: str) -> None:
    assert parse_policies(f"queue={text}").on(MACHINE).policies.queue == PriorityWithAging(5.0)


def test_a_preset_is_a_set_that_may_be_changed() -> None:
    contender = parse_policies("preset=vllm-v1;victim=least-computed").on(MACHINE)
    assert contender.policies.victim == LeastComputed()
    assert contender.policies.reclaim == AlwaysRecompute()
    assert contender.policies.admission == FullPrompt()
    assert contender.machine.scheduler.watermark == 0.0


def test_sweeps_multiply() -> None:
    setups = sweep([parse_policies("victim=last-arrived")], "reclaim=always-swap,always-recompute")
    setups = sweep(setups, "cache.num_blocks=100,200")
    assert [setup.name for setup in setups] == [
        f"victim=last-arrived;reclaim={reclaim};cache.num_blocks={num_blocks}"
        for reclaim in ("always-swap", "always-recompute")
        for num_blocks in (100, 200)
    ]
    assert [setup.on(MACHINE).machine.cache.num_blocks for setup in setups] == [100, 200, 100, 200]


def test_a_sweep_of_an_option_keeps_the_others() -> None:
    base = parse_policies('queue={name="priority"}')
    contenders = [setup.on(MACHINE) for setup in sweep([base], "queue.aging_seconds=1,10")]
    assert [contender.policies.queue for contender in contenders] == [
        PriorityWithAging(1.0),
        PriorityWithAging(10.0),
    ]


def test_a_sweep_takes_tables() -> None:
    text = 'queue=fcfs,{name="priority",aging_seconds=5}'
    queues = [setup.on(MACHINE).policies.queue for setup in sweep([parse_policies("")], text)]
    assert queues == [Fcfs(), PriorityWithAging(5.0)]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("victims=last-arrived", "no policy axis 'victims'"),
        ("victim=last", "last-arrived"),
        ('queue={name="priority",speed=1}', "speed"),
        ("queue={aging_seconds=1}", "has no name"),
        ("preset=vllm", "vllm-v1"),
    ],
)
def test_a_set_that_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_policies(text).on(MACHINE)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("reclaim", "is not KEY=VALUE"),
        ("block_size=4", "no axis"),
        ("cache.size=4", "cache.size is unknown"),
        ("step_time.a_token=-1", "a_token"),
        ("cache.num_blocks=many", "cache.num_blocks: 'many' is not a whole number"),
        ("cache.num_blocks=0", "cache.num_blocks must be at least 1, not 0"),
        ("cache.block_size=0", "cache.block_size must be at least 1"),
        ("cache.num_host_blocks=-1", "cache.num_host_blocks must be at least 0"),
        ("cache.num_blocks=1e400", "num_blocks: "),
        ("cache.enable_prefix_caching=maybe", "cache.enable_prefix_caching: 'maybe' is not true or false"),
        ("scheduler.max_num_batched_tokens=0", "max_num_batched_tokens must be at least 1"),
        ("scheduler.watermark=2", "scheduler.watermark must be below 1"),
        ("scheduler.starvation_seconds=nan", "scheduler.starvation_seconds"),
        ("step_time.a_token=inf", "step_time.a_token"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        [setup.on(MACHINE) for setup in sweep([parse_policies("")], text)]


@pytest.mark.fault("L")
@pytest.mark.parametrize(
    ("text", "name", "queue"),
    [
        ("mine: queue=fcfs", "mine", Fcfs()),
        ("a b:queue=priority:aging_seconds=5", "a b", PriorityWithAging(5.0)),
        ('x: queue={name="priority",aging_seconds=5}', "x", PriorityWithAging(5.0)),
        ("queue=priority:aging_seconds=5", "queue=priority:aging_seconds=5", PriorityWithAging(5.0)),
        ("only:", "only", Fcfs()),
        ("", "defaults", Fcfs()),
    ],
)
def test_a_name_ends_at_a_colon_before_any_axis(text: str, name: str, queue: object) -> None:
    contender = parse_policies(text).on(MACHINE)
    assert (contender.name, contender.policies.queue) == (name, queue)
