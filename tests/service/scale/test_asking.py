"""Answers of all replicas: one that hangs, or is dead, takes nobody else's away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from pageturner.service.scale.asking import all_of, any_of

SECONDS = 0.02


async def hangs() -> Any:
    await asyncio.Event().wait()


async def fails() -> Any:
    raise RuntimeError("dead")


async def says(answer: object) -> object:
    return answer


async def test_the_answers_of_the_others_come_where_one_hangs_and_one_is_dead() -> None:
    first, hung, dead, last = await all_of([says(1), hangs(), fails(), says(0)], SECONDS)
    assert (first, last) == (1, 0)
    assert isinstance(hung, TimeoutError)
    assert isinstance(dead, RuntimeError)
    assert await all_of([], SECONDS) == []


async def test_nothing_is_left_waiting() -> None:
    before = asyncio.all_tasks()
    await all_of([hangs()], SECONDS)
    assert await any_of([hangs(), says(True)], bool, SECONDS)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before


@pytest.mark.parametrize(
    ("calls", "found"),
    [
        ([hangs, lambda: says(True)], True),
        ([lambda: says(False), lambda: says(True), fails], True),
        ([fails, lambda: says(False)], False),
        ([hangs, lambda: says(False)], False),
        ([], False),
    ],
)
async def test_one_that_is_ready_is_enough(calls: Any, found: bool) -> None:
    assert await any_of([call() for call in calls], bool, SECONDS) is found
