"""What a hostile reading of the core found, one scenario each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
from support.core_harness import CoreHarness, NoText

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, KeyChange, PolicySet
from pageturner.policies.views import BlockView, LoadView, Rates, RequestView
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import (
    FinishedEvent,
    SampledSequence,
    SampledToken,
    SchedulerOutput,
    TextDelta,
)
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import NonFiniteLogits, PageturnerError, TextFailed

OPTIONS = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, watermark=0.0)


def policies(**chosen: str) -> PolicySet:
    return registry.create_set({axis: chosen.get(axis, registry.DEFAULTS[axis]) for axis in AXES})


@dataclass(frozen=True)
class Scores:
    """An eviction policy that shows what it was shown."""

    seen: list[BlockView]

    def score(self, block: BlockView) -> float:
        self.seen.append(block)
        return block.released_at


@dataclass(frozen=True)
class HugeNumbers:
    """Integers that no float holds: math.isnan and math.isfinite raise on them."""

    key_change: ClassVar[KeyChange] = KeyChange.WITH_REQUEST

    def key(self, request: RequestView, load: LoadView) -> tuple[int]:
        return (10**400,)

    def score(self, block: BlockView) -> int:
        return 10**400


def schedule(h: CoreHarness) -> SchedulerOutput:
    h.now += 1.0
    output = h.scheduler.schedule(h.now)
    h.check()
    return output


def test_requests_touched_by_the_step_after_a_failed_one_start_over_too() -> None:
    """The swap-out never happens; the swap-in of the next step, already scheduled, brings nothing back."""
    h = CoreHarness(
        policies(reclaim="always-swap"),
        num_blocks=16,
        block_size=2,
        num_host_blocks=8,
        depth=1,
        options=replace(OPTIONS, max_num_seqs=2),
        enable_prefix_caching=False,
    )
    guarded = h.submit((0,) * 4, max_tokens=12)
    low = h.submit((1,) * 4, max_tokens=12)
    h.step()
    h.step()
    h.update()
    urgent = h.submit((2,) * 4, max_tokens=1, priority=1)
    failing = schedule(h)
    assert failing.block_copies.swap_outs
    h.abort(urgent)
    h.abort(guarded)
    following = schedule(h)
    assert following.block_copies.swap_ins
    assert [part.request_id for part in following.scheduled] == [low]
    sampled = h.model.run(following)
    h.take(h.scheduler.fail_step(failing, RuntimeError("the copy failed"), h.now))
    h.check()
    h.take(h.scheduler.update(following, sampled, h.now))
    h.check()
    h.run_to_end()
    h.check_finished()
    assert h.error_of(low) is None


def test_non_finite_kv_in_the_cache_fails_one_request_and_no_later_one() -> None:
    """The request that made it was aborted before it sampled; the next hit takes it out of the cache."""
    h = CoreHarness(policies(), num_blocks=16, block_size=4, options=OPTIONS)
    prompt = (0, 1, 2, 0) * 3
    maker = h.submit(prompt, max_tokens=4)
    h.step()
    h.abort(maker)
    hit = h.submit(prompt, max_tokens=4, seed=1)
    h.model.poisoned_requests.add(hit)  # as it would find: the fault is in the blocks it claims
    h.step()
    assert isinstance(h.error_of(hit), NonFiniteLogits)
    last = h.submit(prompt, max_tokens=4, seed=2)
    h.run_to_end()
    h.check_finished()
    end = h.records[last].end
    assert end is not None
    assert (end.error, end.usage.num_cached_prompt_tokens) == (None, 0)


@pytest.mark.parametrize("axis", ["queue", "eviction"])
def test_numbers_that_no_float_holds_end_nothing(axis: str) -> None:
    h = CoreHarness(
        replace(policies(), **{axis: HugeNumbers()}),  # type: ignore[arg-type]  # the axis is a field
        num_blocks=4,
        block_size=2,
        options=OPTIONS,
    )
    for index in range(3):
        h.submit((index,) * 3, max_tokens=3)
    h.run_to_end()
    h.check_finished()


@pytest.mark.parametrize("depth", [0, 1])
def test_an_eviction_policy_sees_owner_and_chain_also_of_blocks_that_settle_later(depth: int) -> None:
    scores = Scores([])
    h = CoreHarness(
        replace(policies(), eviction=scores), num_blocks=8, block_size=2, depth=depth, options=OPTIONS
    )
    h.submit((0, 1, 2, 0, 1, 2), max_tokens=3, priority=2)
    h.run_to_end()
    assert [view.depth for view in scores.seen] == [3, 2, 1, 0]
    assert {(view.tenant, view.priority, view.num_chain_blocks) for view in scores.seen} == {("t2", 2, 4)}


def test_longest_prefix_match_sees_what_the_cache_came_to_hold_while_a_request_waits() -> None:
    h = CoreHarness(
        policies(queue="longest-prefix-match"),
        num_blocks=32,
        block_size=4,
        options=replace(OPTIONS, max_num_seqs=1),
    )
    shared = (0, 1, 2, 0) * 3
    h.submit((*shared, 1), max_tokens=2)
    h.step()
    h.submit((2,) * 12, max_tokens=2)
    cached = h.submit((*shared, 2), max_tokens=2)
    order: list[str] = []
    while h.scheduler.has_work():
        order += [part.request_id for part in h.step().scheduled]
    assert order.index(cached) < order.index("r1")
    h.check_finished()


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    h = CoreHarness(policies(), num_blocks=8, block_size=4, options=OPTIONS)
    for index in range(300):
        h.abort(h.submit((0,), max_tokens=1, deadline=1e9 + index))
    assert len(h.scheduler._deadlines._looks) <= 66
    h.check_finished()


@pytest.mark.parametrize("limit", [1, 2])
def test_after_max_preemptions_a_request_yields_to_the_guarded_one_alone(limit: int) -> None:
    """The bound itself: a request yields exactly `limit` times to urgent ones that keep coming."""
    h = CoreHarness(
        policies(reclaim="always-recompute"),
        num_blocks=32,
        block_size=4,
        options=replace(OPTIONS, max_num_seqs=2, max_preemptions=limit),
    )
    h.submit((0,) * 2, max_tokens=40)  # the guarded request
    low = h.submit((1,) * 2, max_tokens=20)
    h.step()
    for index in range(limit + 3):
        h.submit((2,) * 2, max_tokens=2, priority=1, seed=index)
        for _ in range(4):
            h.step()
    request = h.scheduler.state.requests[low]
    assert request.num_preemptions == limit
    h.run_to_end()
    h.check_finished()


class FaultyText(NoText):
    """Raises in one of its calls for the given sequence."""

    def __init__(self, seq_id: int, faulty: str) -> None:
        super().__init__()
        self.seq_id, self.faulty = seq_id, faulty

    def _fail(self, seq_id: int, call: str) -> None:
        if seq_id == self.seq_id and call in self.faulty:
            raise KeyError(f"{call} of {seq_id}")

    def start(self, seq_id: int, request: NewRequest) -> None:
        self._fail(seq_id, "start")
        super().start(seq_id, request)

    def append(self, seq_id: int, token_id: int, *, may_stop: bool, is_stop_token: bool) -> TextDelta:
        self._fail(seq_id, "append")
        return super().append(seq_id, token_id, may_stop=may_stop, is_stop_token=is_stop_token)

    def finish(self, seq_id: int) -> str:
        rest = super().finish(seq_id)
        self._fail(seq_id, "finish")
        return rest


def ends(scheduler: Scheduler) -> dict[str, type[PageturnerError] | None]:
    """Run to the end with a model that samples token 0; how each request ended."""
    ended: dict[str, type[PageturnerError] | None] = {}
    while scheduler.has_work():
        output = scheduler.schedule(0.0)
        rows = [row for part in output.scheduled for row in part.samples]
        sampled = tuple(SampledSequence(row.seq_id, row.epoch, (SampledToken(0),)) for row in rows)
        for event in scheduler.update(output, sampled, 0.0):
            if isinstance(event, FinishedEvent):
                ended[event.request_id] = type(event.error) if event.error else None
        scheduler.check_integrity()
    return ended


@pytest.mark.fault("G")
@pytest.mark.parametrize("faulty", ["append", "finish", "append finish"])
def test_a_text_that_cannot_be_decoded_fails_its_request_alone(faulty: str) -> None:
    text = FaultyText(1, faulty)
    scheduler = Scheduler(OPTIONS, CacheOptions(16, 4), policies(), text, Rates())
    for number in range(3):
        params = SamplingParams(n=2 if number == 0 else 1, max_tokens=3)
        scheduler.add_request(NewRequest(f"r{number}", (number,) * 3, params, 0, 0.0))
    assert ends(scheduler) == {"r0": TextFailed, "r1": None, "r2": None}
    assert not text.live
    assert scheduler.stats().num_blocks_used == 0


@pytest.mark.fault("G")
def test_a_request_whose_text_cannot_be_begun_is_refused_and_leaves_nothing() -> None:
    text = FaultyText(2, "start")
    scheduler = Scheduler(OPTIONS, CacheOptions(16, 4), policies(), text, Rates())
    new = NewRequest("a", (1, 2, 3), SamplingParams(n=3, max_tokens=2), 0, 0.0)
    with pytest.raises(TextFailed, match="start of 2"):
        scheduler.add_request(new)
    assert not text.live
    assert not scheduler.has_work()
    assert not scheduler.state.sequences
    scheduler.add_request(replace(new, params=SamplingParams(max_tokens=2)))
    assert ends(scheduler) == {"a": None}
