"""A record replays: every decision of any run comes out again, from its beginning or from a checkpoint."""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_harness import CoreHarness, NoText
from support.drafting_machine import SPECULATION, PlannedDrafter
from support.flight import record_of, recorded
from support.scheduler_machine import KNOWN, beam_searches, requests, scheduler_options

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.service.cli import main
from pageturner.service.core.decisions import Admitted, Ended, PolicyFault, PolicyReplaced, Preempted, Refused
from pageturner.service.core.options import NO_SPECULATION, SchedulerOptions
from pageturner.service.core.outputs import SampledSequence, SampledToken
from pageturner.service.errors import InvalidArgument, QueueFull, RequestAborted, TextFailed
from pageturner.service.flight import flight_file
from pageturner.service.flight.flight_file import NotAFlightRecord
from pageturner.service.flight.records import (
    Aborted,
    Added,
    Failed,
    FlightRecord,
    PoliciesSet,
    Scheduled,
    Updated,
)
from pageturner.service.flight.replay import CannotReplay, replay
from pageturner.service.flight.ring import ENTRIES_A_STEP

AMPLE = 1 << 16


@st.composite
def policy_sets(draw: st.DrawFn) -> PolicySet:
    """Built-ins only: junk has a random source of its own, which no record can hold."""
    often = {"admission": ("first-chunk",) * 4, "reclaim": ("always-swap",) * 4}
    return registry.create_set(
        {axis: draw(st.sampled_from(often.get(axis, ()) + registry.names(axis))) for axis in AXES}
    )


@st.composite
def requests_of_all_kinds(draw: st.DrawFn) -> dict[str, Any]:
    """Some are resumed, some search beams."""
    kinds = st.none() | KNOWN.map(lambda known: {"known": known}) | beam_searches()
    return draw(requests()) | (draw(kinds) or {})


def submit(harness: CoreHarness, wanted: dict[str, Any]) -> None:
    arguments = {name: wanted[name] for name in wanted if name not in ("copies", "seconds", "is_cut")}
    if wanted["is_cut"]:
        num_slots = harness.cache.num_blocks * harness.cache.block_size
        arguments["prompt"] = wanted["prompt"][: max(1, num_slots // 2)]
        search = wanted.get("beam_search")
        num_sequences = wanted["n"] if search is None else search.width
        room = max(1, (num_slots - len(arguments["prompt"])) // num_sequences)
        arguments["max_tokens"] = min(wanted["max_tokens"], room)
        arguments["min_tokens"] = min(wanted["min_tokens"], arguments["max_tokens"])
    seconds = wanted["seconds"]
    with contextlib.suppress(InvalidArgument, QueueFull):  # recorded and replayed like the rest
        harness.submit(**arguments, deadline=None if seconds is None else harness.now + seconds)


@settings(max_examples=60, deadline=None)
@given(
    policies=policy_sets(),
    options=scheduler_options(),
    num_blocks=st.sampled_from((8, 6, 10, 12, 5, 4)),
    block_size=st.integers(1, 4),
    num_host_blocks=st.sampled_from((24, 8, 0)),
    depth=st.integers(0, 1),
    enable_prefix_caching=st.sampled_from((True, True, True, False)),
    reuse_partial_blocks=st.sampled_from((True, True, False)),
    wanted=st.lists(requests_of_all_kinds(), min_size=2, max_size=10),
    num_steps=st.sampled_from((AMPLE, AMPLE, 3, 8)),
    seed=st.integers(0, 1 << 16),
    drafts=st.booleans(),
)
def test_every_decision_of_a_random_run_comes_out_again(
    policies: PolicySet,
    options: SchedulerOptions,
    num_blocks: int,
    block_size: int,
    num_host_blocks: int,
    depth: int,
    enable_prefix_caching: bool,
    reuse_partial_blocks: bool,
    wanted: list[dict[str, Any]],
    num_steps: int,
    seed: int,
    drafts: bool,
) -> None:
    depth = 0 if drafts else depth
    harness = CoreHarness(
        policies,
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        depth=depth,
        options=options,
        enable_prefix_caching=enable_prefix_caching,
        reuse_partial_blocks=reuse_partial_blocks,
        speculation=SPECULATION if drafts else NO_SPECULATION,
        drafter=PlannedDrafter,
    )
    recorder = recorded(harness, num_steps)
    choice = random.Random(seed)
    for arguments in wanted:
        submit(harness, arguments)
        for _ in range(choice.randint(0, 4)):
            harness.step()
        live = [name for name, seen in harness.records.items() if seen.end is None]
        if live:
            disturb(harness, choice, choice.choice(live))
    for _ in range(10):
        harness.step()
    record = record_of(harness)
    assert len(record.entries) <= max(4, num_steps * ENTRIES_A_STEP)
    assert record.num_dropped + len(record.entries) == len(recorder)
    read = flight_file.load(flight_file.dump(record))
    assert read == record
    if read.start is None:
        assert depth == 1, "a checkpoint can be taken whenever no step is in flight"
        with pytest.raises(CannotReplay, match="its beginning is lost"):
            replay(read)
        return
    result = replay(read)
    assert result.difference is None
    assert result.num_entries == len(record.entries)


def disturb(harness: CoreHarness, choice: random.Random, request_id: str) -> None:
    """One thing in three that an engine may do between two steps."""
    match choice.randint(0, 14):
        case 0:
            harness.abort(request_id)
        case 1:
            harness.scheduler.pause_request(request_id)
        case 2:
            harness.fail()
        case 3:
            harness.model.poisoned_requests.add(request_id)
        case 4:
            axis = choice.choice(AXES)
            change: Any = {axis: registry.create(axis, choice.choice(registry.names(axis)), {})}
            harness.scheduler.set_policies(
                replace(harness.scheduler.policy_host.policies, **change), harness.now
            )
        case 5:
            harness.scheduler.quarantine(choice.choice(AXES), "took too long", harness.now)
        case 6:
            harness.fail_behind()


def pressed(num_steps: int = AMPLE, num_requests: int = 6) -> FlightRecord:
    """A run in which everything is scarce: swaps, refusals, hits, stops, an abort, a failed step, a swap
    of policies."""
    policies = registry.create_set({"admission": "first-chunk", "reclaim": "always-swap"})
    harness = CoreHarness(policies, num_blocks=6, block_size=2, num_host_blocks=8)
    recorded(harness, num_steps)
    for number in range(num_requests):
        harness.submit((0, 1, number % 3), max_tokens=6, stop_ids=(2,), min_tokens=3)
        harness.step()
    harness.abort(next(name for name, seen in harness.records.items() if seen.end is None))
    harness.fail()
    change = replace(
        harness.scheduler.policy_host.policies, victim=registry.create("victim", "last-arrived", {})
    )
    harness.scheduler.set_policies(change, harness.now)
    harness.run_to_end()
    return record_of(harness)


def test_the_pressed_run_holds_every_kind_of_entry() -> None:
    record = pressed()
    kinds = {type(entry) for entry in record.entries}
    assert {Added, Aborted, Failed, PoliciesSet, Scheduled, Updated} <= kinds
    decided = {type(decision) for entry in record.entries for decision in entry.decisions}
    assert {Admitted, Refused, Preempted} <= decided
    assert replay(record).difference is None


def test_a_changed_decision_is_found_at_its_step() -> None:
    record = pressed()
    index, entry = next(
        (index, entry)
        for index, entry in enumerate(record.entries)
        if isinstance(entry, Scheduled) and any(isinstance(d, Preempted) for d in entry.decisions)
    )
    assert isinstance(entry, Scheduled)
    planted = replace(entry, decisions=entry.decisions[:-1])
    changed = replace(record, entries=(*record.entries[:index], planted, *record.entries[index + 1 :]))
    difference = replay(changed).difference
    assert difference is not None
    assert (difference.index, difference.step_id) == (index, entry.step_id)
    assert (difference.recorded, difference.replayed) == (planted, entry)


def test_a_changed_prompt_changes_what_is_cached_and_is_found() -> None:
    """The names of blocks decide: another name where two prompts shared a block, and no hit comes out."""
    harness = CoreHarness(registry.default_policies(), num_blocks=8, block_size=2)
    recorded(harness)
    harness.submit((0, 1, 2, 0, 1), max_tokens=2)
    harness.run_to_end()
    harness.submit((0, 1, 2, 0, 1), max_tokens=2)
    harness.run_to_end()
    record = record_of(harness)
    index = max(i for i, entry in enumerate(record.entries) if isinstance(entry, Added))
    added = record.entries[index]
    assert isinstance(added, Added)
    other = tuple(name + 1 for name in added.request.block_names)
    planted = replace(added, request=replace(added.request, block_names=other))
    changed = replace(record, entries=(*record.entries[:index], planted, *record.entries[index + 1 :]))
    difference = replay(changed).difference
    assert difference is not None
    assert isinstance(difference.recorded, Scheduled)
    cached = [d.num_cached_tokens for d in difference.recorded.decisions if isinstance(d, Admitted)]
    assert cached == [4]


def test_a_full_ring_still_begins_at_a_checkpoint() -> None:
    record = pressed(num_steps=4)
    assert record.num_dropped > 0
    assert len(record.entries) <= 4 * ENTRIES_A_STEP
    assert record.start is not None
    assert record.start.checkpoint is not None
    assert replay(record).difference is None


@pytest.mark.parametrize("num_steps", [AMPLE, 3])
def test_faults_and_a_quarantine_come_out_again(num_steps: int) -> None:
    policies = registry.create_set({"admission": "first-chunk", "victim": "support.flight:ThrowingVictim"})
    options = SchedulerOptions(
        max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8, max_policy_faults=2, watermark=0.0
    )
    harness = CoreHarness(policies, num_blocks=6, block_size=2, options=options)
    recorder = recorded(harness, num_steps)
    for number in range(6):
        harness.submit((0, 1, number % 3), max_tokens=6)
        harness.step()
    harness.run_to_end()
    record = flight_file.load(flight_file.dump(record_of(harness)))
    assert replay(record).difference is None
    assert (len(recorder) > len(record.entries)) is (num_steps != AMPLE)
    if num_steps == AMPLE:
        decided = [decision for entry in record.entries for decision in entry.decisions]
        assert PolicyFault("victim", "support.flight:ThrowingVictim", 1) in decided
        assert PolicyReplaced("victim", "support.flight:ThrowingVictim", "least-computed") in decided


def test_nothing_that_was_written_can_be_read_from_a_dump() -> None:
    """Every token id is one that would show: nine digits, and the record is searched for each."""
    harness = CoreHarness(registry.default_policies(), num_blocks=32, block_size=2)
    recorded(harness, num_steps=2)
    scheduler = harness.scheduler
    tokens = list(range(123_456_001, 123_456_040))
    prompt = tuple(tokens[:9])
    harness.submit(prompt, max_tokens=8, stop_ids=(tokens[30],), salt="a secret salt")
    for number in range(8):
        output = scheduler.schedule(float(number))
        results = tuple(
            SampledSequence(row.seq_id, row.epoch, (SampledToken(tokens[10 + number]),))
            for part in output.scheduled
            for row in part.samples
        )
        scheduler.update(output, results, float(number))
    record = record_of(harness)
    assert any(isinstance(entry, Updated) and entry.results for entry in record.entries), "no block was named"
    assert record.start is not None
    assert record.start.checkpoint is not None, (
        "the ring must have wrapped, so that a checkpoint is searched too"
    )
    text = "\n".join(flight_file.lines(record))
    for token in tokens:
        assert str(token) not in text
        assert f"{token:x}" not in text
    assert "salt" not in text


def test_equal_prompts_have_equal_names_and_others_have_not() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=32, block_size=2)
    recorded(harness)
    for prompt, salt in (((0, 1, 2, 0), ""), ((0, 1, 1, 0), ""), ((0, 1, 2, 0), "x"), ((0, 1, 2, 0, 1), "")):
        harness.submit(prompt, max_tokens=2, salt=salt)
    first, parts, salted, longer = (
        entry.request.block_names for entry in record_of(harness).entries if isinstance(entry, Added)
    )
    assert first == longer
    assert first[0] == parts[0]
    assert first[1] != parts[1]
    assert not set(first) & set(salted)


def test_a_fault_of_the_scheduler_is_recorded_and_comes_out_again() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=8, block_size=2)
    recorded(harness)
    harness.submit((0, 1, 2), max_tokens=4)
    harness.scheduler.schedule(1.0)
    with pytest.raises(AssertionError):
        harness.scheduler.schedule(2.0)  # the step before was never ended
    record = record_of(harness)
    assert record.entries[-1].raised == "AssertionError"
    assert replay(record).difference is None


@pytest.mark.fault("G")
def test_faults_in_decoding_text_are_recorded_and_come_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=16, block_size=2)
    recorded(harness)
    faulty = {"append": {1}, "start": {3}}
    for name in faulty:

        def raising(seq_id: int, *arguments: Any, _name: str = name, **options: Any) -> Any:
            if seq_id in faulty[_name]:
                raise KeyError(seq_id)
            return getattr(NoText, _name)(harness.text, seq_id, *arguments, **options)

        monkeypatch.setattr(harness.text, name, raising)
    harness.submit((0, 1, 2), max_tokens=4)
    harness.submit((0, 1, 1), max_tokens=4, n=2)
    with contextlib.suppress(TextFailed):
        harness.submit((0, 2, 2), max_tokens=4)
    for _ in range(8):
        output = harness.scheduler.schedule(harness.now)
        if output:
            harness.scheduler.update(output, harness.model.run(output), harness.now)
    record = flight_file.load(flight_file.dump(record_of(harness)))
    ends = [d.error for entry in record.entries for d in entry.decisions if isinstance(d, Ended)]
    assert sorted(ends) == ["", "TextFailed"]
    assert [entry.refusal for entry in record.entries if isinstance(entry, Added)] == ["", "", "TextFailed"]
    assert replay(record).difference is None


def test_an_abort_by_id_is_recorded_with_its_reason_only() -> None:
    harness = CoreHarness(registry.default_policies(), num_blocks=8, block_size=2)
    recorded(harness)
    name = harness.submit((0, 1, 2), max_tokens=4)
    harness.scheduler.abort_request(name, RequestAborted("because of what it said"))
    text = "\n".join(flight_file.lines(record_of(harness)))
    assert "RequestAborted" in text
    assert "because" not in text


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not a pageturner flight record"),
        (b"{}", "not a pageturner flight record"),
        (b"\xff\xfe", "not readable"),
        (b"\x1f\x8b cut off", "not readable"),
        (b'{"format":"pageturner flight record","version":99}', "version 99"),
        (b"[" * 100_000, "not a pageturner flight record"),
    ],
)
def test_other_files_are_refused(content: bytes, complaint: str) -> None:
    with pytest.raises(NotAFlightRecord, match=complaint):
        flight_file.load(content)


def test_a_damaged_line_is_named() -> None:
    lines = list(flight_file.lines(pressed()))
    damaged = [*lines[:4], lines[4].replace('"now"', '"then"', 1), *lines[5:]]
    with pytest.raises(NotAFlightRecord, match="line 5"):
        flight_file.load("\n".join(damaged).encode())


def test_a_line_nested_too_deeply_is_named() -> None:
    lines = list(flight_file.lines(pressed()))
    with pytest.raises(NotAFlightRecord, match="line 5"):
        flight_file.load("\n".join([*lines[:4], "[" * 100_000, *lines[5:]]).encode())


@pytest.mark.fault("11")
def test_a_cut_file_is_read_up_to_its_last_whole_line_wherever_it_was_cut() -> None:
    """Every byte of the packed file, and many of the plain one: the readable part, or one line of refusal."""
    record = pressed(num_requests=3)
    plain = ("\n".join(flight_file.lines(record)) + "\n").encode()
    head_end = plain.index(b"\n")
    refusals: set[str] = set()
    for content, step in ((flight_file.dump(record), 1), (plain, 97)):
        nums_read = []
        for end in range(0, len(content), step):
            try:
                part = flight_file.load(content[:end])
            except NotAFlightRecord as error:
                refusals.add(str(error))
                continue
            assert part.entries == record.entries[: len(part.entries)]
            if len(part.entries) < len(record.entries):
                assert part.lost.startswith(
                    f"the file was cut off: {len(part.entries)} of {len(record.entries)} "
                )
            nums_read.append(len(part.entries))
        assert nums_read == sorted(nums_read)
        assert nums_read, "what follows the first line can be read"
    assert len(refusals) <= 4
    assert not any("\n" in refusal for refusal in refusals)
    assert flight_file.load(plain[: head_end + 1]).entries == ()
    assert replace(flight_file.load(plain[: plain.index(b"\n", len(plain) // 2) + 9]), lost="") != record


@functools.cache
def pressed_file() -> bytes:
    return flight_file.dump(pressed())


@pytest.mark.fault("11")
@settings(max_examples=40, deadline=None)
@given(share=st.floats(0.0, 1.0), is_packed=st.booleans())
def test_replay_and_explain_of_a_cut_file_are_the_readable_part_or_one_line(
    share: float, is_packed: bool
) -> None:
    content = pressed_file() if is_packed else gzip.decompress(pressed_file())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cut.jsonl"
        path.write_bytes(content[: int(share * len(content))])
        for words in (["replay", str(path)], ["explain", "r0", "--file", str(path)]):
            out, err = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = main(words)
            assert err.getvalue().count("\n") <= 2  # a note that the file was cut, and an error
            assert "Traceback" not in err.getvalue()
            assert code in (0, 2)
            assert bool(out.getvalue()) is (code == 0)


@pytest.mark.fault("11")
def test_blank_lines_of_a_flight_record_are_skipped() -> None:
    record = pressed()
    lines = list(flight_file.lines(record))
    text = "\r\n".join((*lines[:3], "", *lines[3:], "", ""))
    assert flight_file.load(text.encode()) == record


@pytest.mark.parametrize(("name", "num_steps"), [("whole", 17), ("from_checkpoint", 6)])
def test_a_file_of_version_1_is_read_and_replays(name: str, num_steps: int) -> None:
    """Runs without pressure: where the scheduler decides otherwise since, a replay rightly says so."""
    content = (Path(__file__).parent / "version_1" / f"{name}.jsonl.gz").read_bytes()
    assert gzip.decompress(content).startswith(b'{"format":"pageturner flight record","version":1,')
    result = replay(flight_file.load(content))
    assert (result.num_steps, result.difference) == (num_steps, None)
