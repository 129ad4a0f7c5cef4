"""Records of prompts and continuations that are scored, and of choices of which the best are wanted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.core_harness import CoreHarness
from support.flight import record_of, recorded

from pageturner.policies import registry
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.flight import flight_file
from pageturner.service.flight.explain import explain
from pageturner.service.flight.records import Added, FlightRecord
from pageturner.service.flight.replay import replay

PROMPT = (0, 1, 2, 2, 1, 0, 0)
CONTINUATIONS = ((0, 1, 2, 2), (1,), (0, 1, 1))


def run(num_steps: int = 1 << 16, *, reclaim: str = "cost-model", depth: int = 0) -> CoreHarness:
    """Under pressure, beside plain requests: blocks run short, and rows that are wanted are cached."""
    options = SchedulerOptions(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=8, max_scored_rows=3)
    policies = registry.create_set({"reclaim": reclaim, "admission": "first-chunk"})
    harness = CoreHarness(
        policies, num_blocks=12, block_size=2, num_host_blocks=24, depth=depth, options=options
    )
    recorded(harness, num_steps)
    for seed in range(5):
        harness.submit(PROMPT, max_tokens=6, seed=seed, scores_prompt=True, n=2)
        harness.submit(PROMPT, max_tokens=1, continuations=CONTINUATIONS)
        harness.submit(PROMPT[: 3 + seed % 3], max_tokens=6, seed=seed, best_of=3)
        for _ in range(2):
            harness.step()
        harness.submit(PROMPT, max_tokens=1, continuations=CONTINUATIONS[:1])
        if seed == 2:
            harness.model.poisoned_requests.add("r5")
        harness.run_to_end()
    return harness


def replayed(record: FlightRecord) -> FlightRecord:
    """The record, as a file gives it back; asserts that every decision comes out again."""
    read = flight_file.load(flight_file.dump(record))
    assert replay(read).difference is None
    return read


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("reclaim", registry.names("reclaim"))
def test_every_decision_about_scores_comes_out_again(reclaim: str, depth: int) -> None:
    read = replayed(record_of(run(reclaim=reclaim, depth=depth)))
    requests = [entry.request for entry in read.entries if isinstance(entry, Added)]
    kinds = {(request.is_scoring, request.scores_prompt, request.n) for request in requests}
    assert kinds == {(False, True, 2), (True, False, 3), (True, False, 1), (False, False, 3)}


@pytest.mark.parametrize("num_steps", [6, 10, 20])
def test_a_record_that_forgot_its_beginning_replays_from_a_checkpoint(num_steps: int) -> None:
    assert replayed(record_of(run(num_steps))).num_dropped


@pytest.mark.parametrize("changes", [{"is_scoring": False}, {"scores_prompt": False}])
def test_a_replay_needs_what_is_recorded_of_scores(changes: Any) -> None:
    record = record_of(run())
    entries = tuple(
        replace(entry, request=replace(entry.request, **changes)) if isinstance(entry, Added) else entry
        for entry in record.entries
    )
    assert replay(replace(record, entries=entries)).difference is not None


def test_a_request_that_is_scored_can_be_explained() -> None:
    record = record_of(run())
    first = [explain(record, name)[0].text for name in ("r0", "r1")]
    assert first == [
        "queued: 7 prompt tokens, at most 6 output tokens, 2 choices, the prompt to score, tenant t0",
        "queued: 7 prompt tokens, 8 tokens of 3 continuations to score, tenant t0",
    ]
