"""Records of answers that began elsewhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.core_harness import CoreHarness
from support.flight import record_of, recorded

from pageturner.policies import registry
from pageturner.service.core.request import ResumedChoice
from pageturner.service.errors import InvalidArgument
from pageturner.service.flight import flight_file
from pageturner.service.flight.explain import explain
from pageturner.service.flight.records import Added, FlightRecord
from pageturner.service.flight.replay import replay

PROMPT = (0, 1, 2)


def run(num_steps: int = 1 << 16) -> CoreHarness:
    """Answers that are resumed at every place, each twice: the second finds the blocks of the first."""
    harness = CoreHarness(registry.default_policies(), num_blocks=14, block_size=2)
    recorded(harness, num_steps)
    for seed in range(6):
        for known in ((1,), (5, 0), (98,), (99, 2)):
            for _ in range(2):
                harness.submit(
                    PROMPT, max_tokens=9 - seed, stop_ids=(2,), seed=seed, n=len(known), known=known
                )
            harness.step()
        harness.run_to_end()
    return harness


def replayed(record: FlightRecord) -> FlightRecord:
    """The record, as a file gives it back; asserts that every decision comes out again."""
    read = flight_file.load(flight_file.dump(record))
    assert replay(read).difference is None
    return read


def test_every_decision_about_resumed_answers_comes_out_again() -> None:
    harness = run()
    assert harness.scheduler.stats().num_prefix_hit_tokens_total > 0
    read = replayed(record_of(harness))
    choices = [
        choice for entry in read.entries if isinstance(entry, Added) for choice in entry.request.resumed
    ]
    kinds = {(choice.is_stopped, choice.is_told) for choice in choices}
    assert kinds == {(False, False), (False, True), (True, False), (True, True)}
    assert any(choice.block_names for choice in choices)


@pytest.mark.parametrize("num_steps", [8, 20])
def test_a_record_that_forgot_its_beginning_replays_from_a_checkpoint(num_steps: int) -> None:
    read = replayed(record_of(run(num_steps)))
    assert read.num_dropped


def lacking(record: FlightRecord, **changes: object) -> FlightRecord:
    """The record without a part of what it says of resumed choices."""
    entries = tuple(
        replace(
            entry,
            request=replace(
                entry.request,
                resumed=tuple(replace(c, **changes) for c in entry.request.resumed),  # type: ignore[arg-type] # by name
            ),
        )
        if isinstance(entry, Added)
        else entry
        for entry in record.entries
    )
    return replace(record, entries=entries)


@pytest.mark.parametrize("changes", [{"block_names": ()}, {"is_stopped": False}, {"num_tokens": 1}])
def test_a_replay_needs_all_that_is_recorded_of_resumed_choices(changes: dict[str, object]) -> None:
    assert replay(lacking(record_of(run()), **changes)).difference is not None


def test_what_is_refused_for_its_tokens_is_refused_again() -> None:
    harness = run()
    new = harness.records["r0"].new
    for choice in (
        ResumedChoice((0, 2, 1)),  # 2 ends it
        ResumedChoice((0, 1), is_finished=True),
        ResumedChoice((0,) * 10),
        ResumedChoice((0, 1), num_characters=1),  # this harness has no text
    ):
        with pytest.raises(InvalidArgument, match=r"resume\.choices\[0\]"):
            harness.scheduler.add_request(replace(new, request_id="bad", resumed=(choice,)))
        harness.check()
    assert not harness.text.live
    read = replayed(record_of(harness))
    refusals = [entry.refusal for entry in read.entries if isinstance(entry, Added) and entry.refusal]
    assert refusals == ["InvalidArgument"] * 4


def test_an_explanation_says_that_an_answer_was_resumed() -> None:
    lines = [line.text for line in explain(record_of(run()), "r0")]
    assert lines[0] == "queued: 3 prompt tokens, at most 9 output tokens, resumed with 1 of them, tenant t0"
