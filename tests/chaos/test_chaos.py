"""Faults of every kind on a real server process: bounded here, for an hour by the mark `slow`."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

import pytest
from support.model_folders import save_chat_model

from chaos.faults import FAULTS, strangers
from chaos.run import ALONE, EVERYTHING, run, waves

SEED = int(os.environ.get("CHAOS_SEED", "1"))
"""Of the bounded run: `CHAOS_SEED=7 pytest tests/chaos`."""

SOAK_MINUTES = float(os.environ.get("CHAOS_MINUTES", "60"))
"""Of the soak: `CHAOS_MINUTES=10 pytest -m slow tests/chaos`."""

MOST_GROWTH = 48 << 20
"""Bytes that the server may hold more at the end of a soak than when each fault had been done once."""

BOUNDED = (*FAULTS, "SIGTERM in mid-stream", "kill -9 in mid-stream", *strangers.FAULTS)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_chat_model(tmp_path_factory.mktemp("tiny-llama"))


def test_every_fault_is_in_one_wave() -> None:
    found = waves(tuple(EVERYTHING), 6, Random(0))
    assert sorted(name for wave in found for name in wave) == sorted(EVERYTHING)
    assert all(len(wave) == 1 for wave in found if ALONE & set(wave))


async def test_every_fault_leaves_a_server_as_it_was(model: Path, tmp_path: Path) -> None:
    report = await run(model, tmp_path, seed=SEED, names=BOUNDED, at_once=8)
    assert not report.problems, "\n".join(report.problems)
    assert report.num_lost == 0
    assert report.faults == dict.fromkeys(sorted(BOUNDED), 1)


@pytest.mark.slow
@pytest.mark.timeout(SOAK_MINUTES * 60 + 600)
async def test_a_soak_of_faults_loses_nothing_and_keeps_nothing(model: Path, tmp_path: Path) -> None:
    report = await run(model, tmp_path, seed=2, seconds=SOAK_MINUTES * 60, at_once=2)
    assert not report.problems, "\n".join(report.problems)
    assert report.num_lost == 0
    assert report.after.resident_bytes - report.before.resident_bytes < MOST_GROWTH
