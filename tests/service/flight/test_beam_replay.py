"""Records of beam searches: the same beams are chosen again, from the beginning or from within a search."""

from __future__ import annotations

import pytest
from support.core_harness import CoreHarness
from support.flight import record_of, recorded

from pageturner.policies import registry
from pageturner.service.core.decisions import Ended
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import TextDelta
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.flight import flight_file
from pageturner.service.flight.records import Checkpoint, FlightRecord
from pageturner.service.flight.replay import replay

PROMPT = (0, 1, 2, 0, 1)


def run(num_steps: int = 1 << 16, reclaim: str = "always-recompute") -> CoreHarness:
    """Searches that crowd a pool which is too small for them, beside plain requests."""
    policies = registry.create_set(
        {"admission": "first-chunk", "reclaim": reclaim, "queue": "virtual-token-counter"}
    )
    harness = CoreHarness(
        policies,
        num_blocks=9,
        block_size=4,
        num_host_blocks=12,
        options=SchedulerOptions(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=8),
        reuse_partial_blocks=True,
    )
    recorded(harness, num_steps)
    for number, stopping in enumerate((*EarlyStopping, *EarlyStopping)):
        harness.submit(
            PROMPT[number % 3 :],
            max_tokens=8,
            stop_ids=(5,),
            n=2,
            beam_search=BeamSearch(2 + number % 2, 1.0, stopping),
        )
        harness.submit(PROMPT, max_tokens=6, seed=number)
        harness.step()
    harness.run_to_end()
    return harness


def replayed(record: FlightRecord) -> FlightRecord:
    """The record, as a file gives it back; asserts that every decision comes out again."""
    read = flight_file.load(flight_file.dump(record))
    assert read == record
    assert replay(read).difference is None
    return read


@pytest.mark.parametrize("reclaim", ["always-recompute", "always-swap", "tail-first"])
def test_every_decision_about_searches_comes_out_again(reclaim: str) -> None:
    harness = run(reclaim=reclaim)
    stats = harness.scheduler.stats()
    assert stats.num_recompute_preemptions_total + stats.num_swap_preemptions_total > 2
    assert stats.num_prefix_hit_tokens_total
    replayed(record_of(harness))


@pytest.mark.parametrize("num_steps", [6, 8, 11, 16, 30])
def test_a_record_that_forgot_its_beginning_replays_from_within_a_search(num_steps: int) -> None:
    read = replayed(record_of(run(num_steps)))
    assert read.num_dropped
    assert read.start is not None
    checkpoint = read.start.checkpoint
    assert isinstance(checkpoint, Checkpoint)


def test_a_record_of_searches_holds_no_token() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=40, block_size=2)
    recorded(harness, 4)
    for _ in range(3):
        harness.submit(PROMPT, max_tokens=12, n=2, stop_ids=(5,), beam_search=BeamSearch(3))
        for _ in range(6):
            harness.step()
    start = record_of(harness).start
    assert start is not None
    assert start.checkpoint is not None
    states = [request.beams for request in start.checkpoint.requests if request.beams is not None]
    assert any(state.forks for state in states), "the checkpoint was taken within a search"


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_text_that_fails_ends_its_search_alone_and_comes_out_again(
    faulty: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """faulty: of the two answers that are told, the one whose text can't be decoded."""
    harness = CoreHarness(registry.default_policies(), num_blocks=40, block_size=2)
    recorded(harness)

    def append(seq_id: int, token_id: int, **options: bool) -> TextDelta:
        if seq_id == faulty:
            raise KeyError(token_id)
        return TextDelta("")

    monkeypatch.setattr(harness.text, "append", append)
    harness.submit(PROMPT, max_tokens=6, n=2, beam_search=BeamSearch(3))
    harness.submit(PROMPT, max_tokens=6, n=2, beam_search=BeamSearch(2))
    scheduler = harness.scheduler
    while output := scheduler.schedule(harness.now):
        scheduler.update(output, harness.model.run(output), harness.now)
        scheduler.check_integrity()
    read = replayed(record_of(harness))
    ends = [d.error for entry in read.entries for d in entry.decisions if isinstance(d, Ended)]
    assert sorted(ends) == ["", "TextFailed"]
    assert scheduler.stats().num_blocks_used == 0
    assert not harness.text.live
