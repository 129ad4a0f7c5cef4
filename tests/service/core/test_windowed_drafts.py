"""Drafts in tables whose beginning a sliding window gave back: what is rolled back is counted in places."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.at_length import AtLength
from support.drafting_machine import DraftsUnderWindows

from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.window import num_dropped

COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))


def test_tokens_and_books_of_drafts_under_sliding_windows() -> None:
    run_state_machine_as_test(
        DraftsUnderWindows, settings=settings(COMMON, max_examples=20, stateful_step_count=15)
    )


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_tokens_and_books_of_drafts_under_sliding_windows_at_length(at_length: AtLength) -> None:
    at_length.run(DraftsUnderWindows, COMMON, 2000, 50)


def test_a_roll_back_that_counts_only_blocks_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cuts to so many blocks that the table names, and leaves those of the wrong drafts."""
    original = BlockManager.truncate

    def truncate(self: BlockManager, sequence: Any, num_blocks: int, release: Any) -> None:
        original(self, sequence, num_blocks + num_dropped(self.table(sequence)), release)

    monkeypatch.setattr(BlockManager, "truncate", truncate)

    @seed(0)
    class Machine(DraftsUnderWindows):
        pass

    budget = settings(
        COMMON,
        max_examples=60,
        stateful_step_count=15,
        database=None,
        print_blob=False,
        phases=(Phase.generate,),
    )
    with pytest.raises(AssertionError, match="lookahead"):
        run_state_machine_as_test(Machine, settings=budget)
