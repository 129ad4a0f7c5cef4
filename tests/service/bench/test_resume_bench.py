"""A server is killed in the middle of 32 streams, and no client notices but by the time."""

from __future__ import annotations

import pytest
from support.fake_engine import FakeEngine
from support.model_folders import save_chat_model
from support.serving import serving

from pageturner.service.bench.resume import ResumeLoad, ResumeRound, kill_in_the_middle, measure_resume
from pageturner.service.errors import PageturnerError


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = save_chat_model(tmp_path_factory.mktemp("tiny"))
    return [f"--model={folder}", "--num-blocks=512", "--swap-space=0", "--device=cpu", "--num-threads=1"]


def check(found: ResumeRound) -> None:
    assert (found.num_lost, found.num_twice, found.num_different) == (0, 0, 0)
    assert found.num_resumed == len(found.seconds)


def test_a_server_that_is_killed_costs_its_32_streams_no_token(flags: list[str]) -> None:
    told: list[str] = []
    load = ResumeLoad(num_streams=32, output_tokens=24)
    result = measure_resume(load, 1, [*flags, "--deterministic=true", "--dtype=float32"], told.append)
    (found,) = result.rounds
    check(found)
    assert found.num_resumed >= 16, "the server was killed in the middle"
    assert found.num_recomputed > 0
    assert result.figures()["resume_seconds_p99"] > 0
    assert told == [f"round 1: {found.num_resumed} resumed, 0 tokens lost, 0 twice"]


@pytest.mark.slow
def test_kill_after_kill_costs_many_streams_no_token(flags: list[str]) -> None:
    load = ResumeLoad(num_streams=96, output_tokens=32)
    result = measure_resume(load, 2, [*flags, "--deterministic=true", "--dtype=float32"], print)
    for found in result.rounds:
        check(found)
    assert result.figures()["num_resumed"] > 48


async def test_servers_that_promise_nothing_are_not_measured() -> None:
    async with serving(FakeEngine()) as served:
        target = f"127.0.0.1:{served.port}"
        with pytest.raises(PageturnerError, match="deterministic is off"):
            await kill_in_the_middle(ResumeLoad(2, 4), target, target, lambda: None)
