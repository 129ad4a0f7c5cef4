"""The last block of an ended answer is cached though it is not full: found, shared, copied, never misread."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, seed, settings
from hypothesis.stateful import run_state_machine_as_test
from support.core_harness import CoreHarness
from support.flight import record_of, recorded
from support.scenarios import OPTIONS, policies
from support.scheduler_machine import ConversingMachine

from pageturner.service.core.memory.block import OutOfBlocks
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.core.request import Sequence
from pageturner.service.core.scheduling.ledger import Ledger
from pageturner.service.errors import RequestAborted
from pageturner.service.flight.replay import replay

PROMPT = (0, 1, 2, 0, 1)
MOST_ROUNDS = 10


def harness(
    num_blocks: int = 32, block_size: int = 4, admission: str = "full-prompt", **options: Any
) -> CoreHarness:
    return CoreHarness(
        policies(admission=admission),
        num_blocks=num_blocks,
        block_size=block_size,
        options=OPTIONS,
        **{"reuse_partial_blocks": True, **options},
    )


def answered(
    h: CoreHarness, prompt: tuple[int, ...] = PROMPT, max_tokens: int = 6, **how: Any
) -> tuple[int, ...]:
    """The tokens of a conversation after one more answer."""
    request_id = h.submit(prompt, max_tokens=max_tokens, **how)
    h.run_to_end()
    return prompt + tuple(h.records[request_id].outputs[0])


def first_part(h: CoreHarness, prompt: tuple[int, ...], **how: Any) -> tuple[int, SchedulerOutput]:
    """Where the request starts to compute, and the step in which it does."""
    request_id = h.submit(prompt, max_tokens=4, **how)
    while True:
        output = h.step()
        for part in output.scheduled:
            if part.request_id == request_id:
                return part.start, output


@pytest.mark.parametrize("depth", [0, 1])
def test_the_next_turn_computes_from_the_last_token_whose_kv_is_there(depth: int) -> None:
    """5 + 6 tokens: the last one's KV was never made, so 10 are cached, 8 of them in full blocks."""
    h = harness(depth=depth)
    turn = answered(h)
    start, output = first_part(h, (*turn, 2, 2))
    assert start == 10
    assert not output.block_copies, "its one holder writes in place"
    h.run_to_end()
    h.check_finished()
    end = h.records["r1"].end
    assert end is not None
    assert end.usage.num_cached_prompt_tokens == 10


def test_switched_off_nothing_of_it_is_found() -> None:
    h = harness(reuse_partial_blocks=False)
    assert first_part(h, (*answered(h), 2, 2))[0] == 8


@pytest.mark.parametrize("how", [{"salt": "x"}, {"bypass": True}])
def test_no_other_tag_finds_it(how: dict[str, Any]) -> None:
    h = harness()
    assert first_part(h, (*answered(h), 2, 2), **how)[0] == 0


def test_a_prompt_that_parts_within_the_block_finds_nothing_of_it() -> None:
    h = harness()
    turn = answered(h)
    other = (*turn[:9], (turn[9] + 1) % 3, *turn[10:])
    assert first_part(h, other)[0] == 8


def test_a_prompt_that_it_covers_whole_computes_its_last_token_again() -> None:
    h = harness()
    turn = answered(h)
    start, output = first_part(h, turn[:10])
    (part,) = output.scheduled
    assert (start, part.end, part.write_start) == (9, 10, 10)
    h.run_to_end()
    h.check_finished()


def test_the_longest_of_several_is_taken() -> None:
    h = harness(num_blocks=64)
    turn = answered(h, max_tokens=7)
    answered(h, turn[:9], max_tokens=1)
    assert first_part(h, (*turn, 2))[0] == 11
    h.run_to_end()
    h.check_finished()


def test_a_second_holder_copies_it_before_the_first_write() -> None:
    """One holds it and has not written to it: its whole prompt was cached, it only computed logits."""
    h = harness()
    turn = answered(h)
    first = h.submit(turn[:10], max_tokens=4)
    h.step()
    (shared,) = (table[-1] for table in h.scheduler.manager.tables.values())
    second = h.submit((*turn, 2), max_tokens=4)
    output = h.step()
    starts = {part.request_id: part.start for part in output.scheduled}
    # The first one, booked before, writes in place in this very step; the second does without.
    assert starts == {first: 10, second: 8}
    assert not output.block_copies
    assert not h.scheduler.manager.device.is_cached(shared)
    h.run_to_end()
    h.check_finished()


def test_while_its_holder_is_paused_another_copies_it() -> None:
    h = harness()
    turn = answered(h)
    first = h.submit(turn[:10], max_tokens=4)
    h.step()
    h.scheduler.pause_request(first)
    start, output = first_part(h, (*turn, 2))
    assert start == 10
    assert len(output.block_copies.copies) == 1
    h.scheduler.resume_request(first)
    h.run_to_end()
    h.check_finished()


def both_covered_whole() -> None:
    """A pool without a block to spare: one holds the partial block and writes to it, another comes for it."""
    h = harness(num_blocks=3, admission="first-chunk")
    turn = answered(h)
    h.submit(turn[:10], max_tokens=2)
    h.step()
    h.submit(turn[:10], max_tokens=2)
    h.step()
    h.run_to_end()
    h.check_finished()


def test_a_block_written_in_place_is_claimed_by_no_other_in_that_step() -> None:
    both_covered_whole()


@pytest.mark.parametrize(
    ("owner", "method", "answer", "caught_by"),
    [
        (Ledger, "is_overwritten", False, "available"),
        (BlockManager, "prepare_write", None, "write"),
        (BlockPool, "is_private", True, "write"),
    ],
)
def test_that_case_can_fail(
    owner: type, method: str, answer: object, caught_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Planted: the copy that was not booked; a write where a hash still finds the block, by either way."""
    monkeypatch.setattr(owner, method, lambda *_: answer)
    with pytest.raises((OutOfBlocks, AssertionError), match=caught_by):
        both_covered_whole()


def test_choices_of_one_request_share_it_and_copy_on_write() -> None:
    h = harness(num_blocks=64)
    turn = answered(h)
    start, _ = first_part(h, (*turn, 2), n=3)
    assert start == 10
    h.run_to_end()
    h.check_finished()


def test_an_aborted_answer_leaves_none() -> None:
    h = harness()
    request_id = h.submit(PROMPT, max_tokens=12)
    for _ in range(6):
        h.step()
    h.take(h.scheduler.abort_request(request_id, RequestAborted("gone")))
    turn = PROMPT + tuple(h.records[request_id].outputs[0])
    assert len(turn) == 11
    assert first_part(h, (*turn, 2, 2))[0] == 8


def test_a_prompt_waits_for_the_full_block_that_another_computes() -> None:
    """A partial block at hand must not make it compute what it could have whole a step later."""
    h = harness(num_blocks=64)
    turn = answered(h)
    longer = (*turn, 2, 2, 1, 1, 0, 0, 1)
    h.submit(longer, max_tokens=2)
    h.submit(longer, max_tokens=2)
    first, second = h.step(), h.step()
    assert [part.request_id for part in first.scheduled] == ["r1"]
    assert {part.request_id: part.start for part in second.scheduled} == {"r1": 18, "r2": 16}
    h.run_to_end()
    h.check_finished()


def test_it_goes_before_the_blocks_that_it_continues() -> None:
    h = harness(num_blocks=4, block_size=4)
    turn = answered(h)
    manager = h.scheduler.manager
    assert (manager.device.num_free, manager.device.num_evictable) == (1, 3)
    answered(h, (2, 2, 2, 2, 2), max_tokens=3)
    assert first_part(h, (*turn[:10], 2))[0] == 8, "the partial block alone was overwritten"


def test_a_block_that_a_step_in_flight_may_write_to_is_not_claimed() -> None:
    """At depth 1 a step past the answer's end is in flight; its slot is behind the cached tokens."""
    h = harness(depth=1)
    request_id = h.submit(PROMPT, max_tokens=20, stop_ids=(0, 1, 2))
    while h.records[request_id].end is None:
        h.step()
    assert len(h.in_flight) == 1
    assert h.scheduler.manager.device.num_pending == 2
    assert first_part(h, (*PROMPT, 2, 2))[0] == 4
    assert first_part(h, (*PROMPT, 2, 2))[0] == 5, "once that step has ended it is"
    h.run_to_end()
    h.check_finished()


def test_a_copy_that_a_failed_step_never_made_is_not_cached() -> None:
    """Its request ended before the step with the copy failed, and had cached the copy for its next turn."""
    h = harness(depth=1, num_blocks=64)
    request_id = h.submit(PROMPT, max_tokens=20, n=2, stop_ids=(0, 1, 2))
    h.now += 1
    ended = h.scheduler.schedule(h.now)
    sampled = h.model.run(ended)
    failing = h.scheduler.schedule(h.now)
    assert failing.block_copies.copies, "the choices part"
    (copy,) = failing.block_copies.copies
    h.take(h.scheduler.update(ended, sampled, h.now))
    assert h.records[request_id].end is not None
    h.take(h.scheduler.fail_step(failing, RuntimeError("planted"), h.now))
    h.check()
    assert not h.scheduler.manager.device.is_cached(copy.destination)


def test_a_record_of_conversations_replays() -> None:
    h = harness(depth=1)
    recorder = recorded(h, 1 << 12)
    turn = answered(h)
    for extra in ((2, 2), (1,), (0, 0, 1)):
        turn = answered(h, (*turn, *extra), max_tokens=5)
    record = record_of(h)
    names = [n for e in record.entries for n in getattr(e, "partial_names", ())]
    assert len(names) > 4
    assert len(recorder) == len(record.entries)
    assert replay(record).difference is None


def test_tokens_and_books_of_conversations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The general machine, and prompts that continue what was answered, which find partial blocks often."""
    num_hits = 0
    original = BlockManager.claim

    def claim(self: BlockManager, sequence: Sequence, block_ids: list[int], num_full: int) -> None:
        nonlocal num_hits
        num_hits += len(block_ids) > num_full
        original(self, sequence, block_ids, num_full)

    monkeypatch.setattr(BlockManager, "claim", claim)
    common = settings(deadline=None, suppress_health_check=list(HealthCheck))
    for number in range(MOST_ROUNDS):

        @seed(number)  # or each round would be the first again where examples are derandomized
        class Machine(ConversingMachine):
            """A round's own."""

        run_state_machine_as_test(
            Machine, settings=settings(common, max_examples=80, stateful_step_count=20, derandomize=False)
        )
        if num_hits > 20:
            return
    raise AssertionError(f"only {num_hits} partial blocks were claimed in {MOST_ROUNDS} rounds")
