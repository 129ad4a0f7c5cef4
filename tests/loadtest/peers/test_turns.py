"""Turns of engines that are processes: OpenVINO's server over a fake pipeline."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_completions import fake_openvino_python

from pageturner.loadtest.errors import ServerError
from pageturner.loadtest.peers.cases import CASE_SETS, Case
from pageturner.loadtest.peers.openvino import OpenVino
from pageturner.loadtest.peers.turns import Contender, Slice, contenders, take_turns
from pageturner.loadtest.workload import plan_requests

CASES = (Case("one", 8, 3, concurrency=1, num_requests=2), Case("four", 8, 5, concurrency=4, num_requests=6))
TOKENS = (1, 2, 3)


@pytest.fixture
def peer(tmp_path: Path) -> OpenVino:
    return OpenVino(fake_openvino_python(tmp_path), Path("model"))


def state_of(contender: Contender) -> str:
    """As the system names it: T is stopped."""
    return Path(f"/proc/{contender.process.group}/stat").read_text().rpartition(") ")[2].split()[0]


def test_engines_take_turns_and_stand_still_between(peer: OpenVino) -> None:
    peers = [replace(peer, name=name) for name in "ABC"]
    told: list[str] = []
    heard: list[Slice] = []
    with contenders(peers, CASES, told.append) as ready:
        assert [state_of(each) for each in ready] == ["T", "T", "T"]

        @contextmanager
        def turn() -> Iterator[None]:
            assert [state_of(each) for each in ready] == ["T", "T", "T"]
            yield

        slices = take_turns(ready, CASES, 2, TOKENS, heard.append, turn)
        groups = [each.process.group for each in ready]
    assert told == ["A", "B", "C"]
    assert slices == heard
    assert [(each.round, each.case.name, each.engine) for each in slices] == [
        (number, case, engine)
        for number, order in ((1, "BCA"), (2, "CAB"))
        for case in ("one", "four")
        for engine in order
    ]
    for each in slices:
        assert each.summary.num_ok == each.case.num_requests
        assert each.summary.num_output_tokens == each.case.num_requests * each.case.output_tokens
        assert each.other_cores >= 0.0
    for group in groups:
        with pytest.raises(ProcessLookupError):
            os.killpg(group, 0)


def test_a_server_that_ends_is_an_error_with_the_end_of_its_log(peer: OpenVino) -> None:
    broken = replace(peer, model=Path("broken"))
    with (
        pytest.raises(ServerError, match=r"(?s)OpenVINO ended .*no such model"),
        contenders([broken], CASES, print),
    ):
        pass


def test_a_program_that_is_not_there_is_an_error(peer: OpenVino) -> None:
    nowhere = replace(peer, python=Path("/nowhere/python"))
    with pytest.raises(ServerError, match="cannot be started"), contenders([nowhere], CASES, print):
        pass


def test_a_case_draws_the_same_prompts_for_a_round_and_others_for_the_next() -> None:
    first, again, second = (
        [each.prompt_token_ids for each in plan_requests(CASES[1].workload(TOKENS, seed))]
        for seed in (1, 1, 2)
    )
    assert first == again != second


def test_no_case_repeats_the_prompts_of_another_whose_cache_it_would_find() -> None:
    """Requests are drawn by seed and index: with one seed for all, later cases would hit earlier ones."""
    cases = [case for cases in CASE_SETS.values() for case in cases]
    heads = [
        request.prompt_token_ids[:16]
        for case in cases
        for seed in (1, 2)
        for request in plan_requests(case.workload(tuple(range(1000)), seed))
    ]
    assert len(set(heads)) == len(heads)
