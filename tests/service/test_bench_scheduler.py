"""The scheduler's own benchmark measures what it says: every size, with and without a queue and a cache."""

from __future__ import annotations

from pageturner.service.bench.block_operations import measure_block_operations
from pageturner.service.bench.scheduler import measure_scheduler


def test_each_size_is_measured_with_none_and_ten_times_as_many_waiting() -> None:
    costs = list(measure_scheduler((1, 3)))
    assert [(cost.num_running, cost.num_waiting, cost.caches_prefixes) for cost in costs] == [
        (running, factor * running, caching)
        for caching in (True, False)
        for factor in (0, 10)
        for running in (1, 3)
    ]
    for cost in costs:
        assert 0 < cost.policy_microseconds < cost.step_microseconds
        assert cost.step_microseconds == cost.schedule_microseconds + cost.update_microseconds


def test_each_block_operation_touches_blocks() -> None:
    costs = {cost.name: cost.nanoseconds for cost in measure_block_operations()}
    assert costs.keys() == {"allocate", "fork", "hash", "publish", "free cached", "hit"}
    assert all(nanoseconds > 0 for nanoseconds in costs.values())
