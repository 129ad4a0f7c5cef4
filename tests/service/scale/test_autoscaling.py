"""Replicas come by the tokens that wait, and go only where those that are left have room."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.scale.autoscaling import BUSY, QUEUED_TOKENS, Demand, QueuedTokens, wanted_replicas

demands = st.lists(st.builds(Demand, st.floats(0, 1e5), st.floats(0, 3)), max_size=12)


@given(demands, st.integers(1, 12), st.floats(1, 1e4), st.floats(0.1, 1))
def test_as_many_as_keep_the_queue_at_its_target_and_the_rest_at_work(
    told: list[Demand], current: int, target: float, busy: float
) -> None:
    wanted = wanted_replicas(told, current, target, busy)
    queued, used = sum(each.queued_tokens for each in told), sum(min(1.0, each.busy) for each in told)
    assert wanted >= 1
    assert queued <= wanted * target * (1 + 1e-9), "more wait at each than the target"
    if wanted < current:
        assert used <= wanted * busy * (1 + 1e-9), "those that are left have no room"
    if wanted > current:
        assert queued > (wanted - 1) * target * (1 - 1e-9), "one less would have done"


@given(demands, st.integers(1, 12))
def test_without_tokens_that_wait_none_is_added(told: list[Demand], current: int) -> None:
    idle = [Demand(0.0, each.busy) for each in told]
    assert wanted_replicas(idle, current, 100.0, 0.8) <= current


@pytest.mark.parametrize(
    ("told", "current", "wanted"),
    [
        ([Demand(0, 0)], 1, 1),
        ([Demand(2500, 1.0)], 1, 3),
        ([Demand(0, 1.0), Demand(0, 1.0), Demand(0, 1.0)], 3, 3),
        ([Demand(0, 0.2), Demand(0, 0.1), Demand(0, 0.1)], 3, 1),
        ([Demand(0, 0.8), Demand(0, 0.4), Demand(0, 0.3)], 3, 2),
    ],
)
def test_cases(told: list[Demand], current: int, wanted: int) -> None:
    assert wanted_replicas(told, current, 1000, 0.8) == wanted


def test_ray_is_told_what_replicas_said() -> None:
    policy = QueuedTokens(target_queued_tokens=1000, target_busy=0.8)
    context = SimpleNamespace(
        current_num_replicas=1,
        target_num_replicas=1,
        aggregated_metrics={QUEUED_TOKENS: {"a": 2100.0}, BUSY: {"a": 1.0, "b": 0.0}},
    )
    assert policy(context) == (3, {})
    context.aggregated_metrics = None
    assert policy(context) == (1, {})
    context.target_num_replicas = 3
    context.aggregated_metrics = {QUEUED_TOKENS: {"a": 0.0, "b": 0.0, "c": 0.0}, BUSY: {"a": 0.5}}
    assert policy(context) == (1, {}), "who has not told how busy it is has no work"
