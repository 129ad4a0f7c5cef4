"""The scheduler's own benchmark measures what it says: every size, with and without a queue and a cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageturner.service.bench.block_operations import measure_block_operations
from pageturner.service.bench.engine_step import measure_engine_steps
from pageturner.service.bench.scheduler import measure_scheduler
from pageturner.service.bench.scheduler_peer import compare_with_vllm
from pageturner.service.errors import ConfigError


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


def test_the_parts_of_the_engines_step_are_measured_at_each_size() -> None:
    costs = list(measure_engine_steps((1, 3), num_steps=16))
    assert [cost.num_running for cost in costs] == [1, 3]
    for cost in costs:
        assert cost.scheduler_microseconds > 0
        assert cost.batch_microseconds > 0


def stand_in(folder: Path, script: str) -> Path:
    """A program in the place of a Python that has vLLM."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return program


def test_a_peer_is_asked_in_turns_for_the_same_sizes_and_steps(tmp_path: Path) -> None:
    python = stand_in(tmp_path, "echo ready; while read size steps; do echo $((size * 1000 + steps)); done")
    said: list[str] = []
    costs = compare_with_vllm(python, said.append, sizes=(2, 3), rounds=2)
    assert [(cost.num_running, cost.vllm_microseconds) for cost in costs] == [(2, 2100.0), (3, 3100.0)]
    assert all(cost.ratio == cost.step_microseconds / cost.vllm_microseconds for cost in costs)
    assert len(said) == 4


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo No module named vllm >&2; exit 1", "No module named vllm"), ("exit 3", "exit code 3")],
)
def test_a_peer_that_cannot_run_is_named_with_its_last_words(
    tmp_path: Path, script: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        compare_with_vllm(stand_in(tmp_path, script), lambda text: None)
    with pytest.raises(ConfigError, match="No such file"):
        compare_with_vllm(tmp_path / "missing", lambda text: None)
