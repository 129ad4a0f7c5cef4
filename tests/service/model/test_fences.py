"""Blocks that one stream copies while another computes, when either runs as late as it may.

The works of both streams move plain numbers. Whenever a device gets round to them, every block must end
with, and every read must see, what the same steps give when each is done at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from support.lazy_streams import LazyEvent, LazyStream

from pageturner.service.model.fences import BlockIds, Fences
from pageturner.service.model.streams import Event, ImmediateStream, Stream, Streams, Work

NUM_BLOCKS = 6
NUM_HOST_BLOCKS = 4
Pairs = Sequence[tuple[int, int]]


class Pools:
    """Two pools of numbers behind fences. `seen` is what compute read."""

    def __init__(self, fences: Fences) -> None:
        self.device = list(range(NUM_BLOCKS))
        self.host = [-1 - block for block in range(NUM_HOST_BLOCKS)]
        self.seen: list[list[int]] = []
        self.fences = fences

    def write(self, blocks: Sequence[int], value: int) -> None:
        self.fences.compute(blocks, lambda: _move([value] * len(blocks), self.device, blocks))

    def read(self, blocks: Sequence[int]) -> None:
        self.fences.compute(blocks, lambda: self.seen.append([self.device[block] for block in blocks]))

    def copy(self, pairs: Pairs) -> None:
        blocks = [block for pair in pairs for block in pair]
        self.fences.compute(blocks, lambda: _transfer(self.device, self.device, pairs))

    def swap_out(self, pairs: Pairs) -> None:
        blocks = [source for source, _ in pairs]
        self.fences.copy(blocks, lambda: _transfer(self.device, self.host, pairs))

    def swap_in(self, pairs: Pairs) -> None:
        blocks = [destination for _, destination in pairs]
        self.fences.copy(blocks, lambda: _transfer(self.host, self.device, pairs))


def _move(values: Sequence[int], pool: list[int], blocks: Sequence[int]) -> None:
    for value, block in zip(values, blocks, strict=True):
        pool[block] = value


def _transfer(source: list[int], destination: list[int], pairs: Pairs) -> None:
    _move([source[block] for block, _ in pairs], destination, [block for _, block in pairs])


def pairs_of(num_sources: int, num_destinations: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    pair = st.tuples(st.integers(0, num_sources - 1), st.integers(0, num_destinations - 1))
    return st.lists(pair, min_size=1, max_size=3, unique_by=lambda pair: pair[1])


BLOCKS = st.lists(st.integers(0, NUM_BLOCKS - 1), min_size=1, max_size=3, unique=True)
OUTS, INS = pairs_of(NUM_BLOCKS, NUM_HOST_BLOCKS), pairs_of(NUM_HOST_BLOCKS, NUM_BLOCKS)


class Steps(RuleBasedStateMachine):
    """The same steps on lazy streams and at once, and a device that gets on with its work as it pleases."""

    make_fences: Callable[[Streams, int], Fences] = Fences
    make_pools: Callable[[Fences], Pools] = Pools
    make_copies: Callable[[], LazyStream] = LazyStream

    def __init__(self) -> None:
        super().__init__()
        kind = type(self)
        self.compute, self.copies = LazyStream(), kind.make_copies()
        self.lazy = kind.make_pools(kind.make_fences(Streams(self.compute, self.copies), NUM_BLOCKS))
        at_once = ImmediateStream()
        self.prompt = Pools(Fences(Streams(at_once, at_once), NUM_BLOCKS))
        self.num_writes = 0

    @rule(blocks=BLOCKS)
    def write(self, blocks: list[int]) -> None:
        self.num_writes += 1
        self._both(lambda pools: pools.write(blocks, 100 + self.num_writes))

    @rule(blocks=BLOCKS)
    def read(self, blocks: list[int]) -> None:
        self._both(lambda pools: pools.read(blocks))

    @rule(pairs=pairs_of(NUM_BLOCKS, NUM_BLOCKS))
    def copy(self, pairs: Pairs) -> None:
        self._both(lambda pools: pools.copy(pairs))

    @rule(pairs=OUTS)
    def swap_out(self, pairs: Pairs) -> None:
        self._both(lambda pools: pools.swap_out(pairs))

    @rule(pairs=INS)
    def swap_in(self, pairs: Pairs) -> None:
        self._both(lambda pools: pools.swap_in(pairs))

    @rule(pairs=OUTS)
    def swap_out_in_a_step_that_fails(self, pairs: Pairs) -> None:
        """What was enqueued before the host met the error runs all the same."""
        self.copies.fail_after_next = True
        with pytest.raises(RuntimeError, match="refuses"):
            self.lazy.swap_out(pairs)
        self.prompt.swap_out(pairs)

    @rule(count=st.integers(1, 3))
    def compute_gets_on(self, count: int) -> None:
        self.compute.run_some(count)

    @rule(count=st.integers(1, 3))
    def copies_get_on(self, count: int) -> None:
        self.copies.run_some(count)

    @invariant()
    def no_event_outlives_its_copy(self) -> None:
        fences = self.lazy.fences
        fences.touch([])
        assert fences.num_events or not fences.fenced
        assert not (self.copies.is_idle and fences.num_events)

    def teardown(self) -> None:
        self.compute.finish()
        self.copies.finish()
        assert self.lazy.seen == self.prompt.seen
        assert (self.lazy.device, self.lazy.host) == (self.prompt.device, self.prompt.host)

    def _both(self, step: Callable[[Pools], None]) -> None:
        step(self.lazy)
        step(self.prompt)


def run(machine: type[Steps], max_examples: int) -> None:
    quick = settings(
        max_examples=max_examples,
        stateful_step_count=20,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine, settings=quick)


def test_any_steps_give_what_they_give_at_once() -> None:
    run(Steps, max_examples=300)


class Hasty(ImmediateStream):
    """Compute that is said to have finished."""

    def __init__(self, compute: Stream) -> None:
        self._compute = compute

    def run(self, work: Work) -> None:
        self._compute.run(work)

    def wait_event(self, event: Event) -> None:
        self._compute.wait_event(event)

    def record_event(self) -> LazyEvent:
        return LazyEvent(LazyStream(), 0)


class CopiesDoNotWait(Fences):
    """A swap starts beside the step that still writes its block."""

    def __init__(self, streams: Streams, num_blocks: int) -> None:
        super().__init__(Streams(Hasty(streams.compute), streams.copies), num_blocks)


class ComputeDoesNotWait(Fences):
    """A step reads a block that its swap-in has not reached, or writes one that is still being read."""

    def touch(self, blocks: BlockIds) -> None:
        self._settle_finished()


class FenceDroppedByTheNextCopy(Fences):
    """Only the last copy is remembered."""

    def copy(self, blocks: BlockIds, work: Work) -> None:
        self._settle(len(self._unsettled))
        super().copy(blocks, work)


class WaitsForTheOldestCopy(Fences):
    """The first unfinished copy is awaited, whichever touches the block, and all are taken for done."""

    def touch(self, blocks: BlockIds) -> None:
        self._settle_finished()
        if self._unsettled and self._last_copy[list(blocks)].max(initial=0) > self._num_settled:
            self._streams.compute.wait_event(self._unsettled[0])
            self._settle(len(self._unsettled))


class FailedCopyIsNotFenced(Fences):
    """A step that failed is taken for one that did nothing."""

    def copy(self, blocks: BlockIds, work: Work) -> None:
        copies = self._streams.copies
        copies.wait_event(self._streams.compute.record_event())
        copies.run(work)
        self._unsettled.append(copies.record_event())
        self._num_copies += 1
        self._last_copy[list(blocks)] = self._num_copies


class SwapOutIsNotFenced(Pools):
    """A block that is being swapped out is taken for free."""

    def swap_out(self, pairs: Pairs) -> None:
        self.fences.copy([], lambda: _transfer(self.device, self.host, pairs))


class SwapInIsNotFenced(Pools):
    def swap_in(self, pairs: Pairs) -> None:
        self.fences.copy([], lambda: _transfer(self.host, self.device, pairs))


class CopyReadsWithoutWaiting(Pools):
    """Only what a copy-on-write writes is looked up."""

    def copy(self, pairs: Pairs) -> None:
        self.fences.compute([to for _, to in pairs], lambda: _transfer(self.device, self.device, pairs))


class TwoLanes(LazyStream):
    """Copies on two streams by turns: a block of the host is read before it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.lanes = [LazyStream(), LazyStream()]

    @property
    def is_idle(self) -> bool:
        return all(lane.is_idle for lane in self.lanes)

    def run(self, work: Work) -> None:
        self.lanes.reverse()
        self.lanes[0].fail_after_next, self.fail_after_next = self.fail_after_next, False
        self.lanes[0].run(work)

    def record_event(self) -> LazyEvent:
        return self.lanes[0].record_event()

    def wait_event(self, event: Event) -> None:
        for lane in self.lanes:
            lane.wait_event(event)

    def run_some(self, count: int) -> None:
        for lane in self.lanes:
            lane.run_some(count)

    def finish(self) -> None:
        for lane in self.lanes:
            lane.finish()


MUTANTS = {
    "make_fences": (
        CopiesDoNotWait,
        ComputeDoesNotWait,
        FenceDroppedByTheNextCopy,
        WaitsForTheOldestCopy,
        FailedCopyIsNotFenced,
    ),
    "make_pools": (SwapOutIsNotFenced, SwapInIsNotFenced, CopyReadsWithoutWaiting),
    "make_copies": (TwoLanes,),
}


@pytest.mark.parametrize(
    ("part", "mutant"), [(part, mutant) for part, mutants in MUTANTS.items() for mutant in mutants]
)
def test_a_planted_bug_is_caught(part: str, mutant: type) -> None:
    machine = type(mutant.__name__, (Steps,), {part: mutant})
    with pytest.raises(AssertionError):
        run(machine, max_examples=300)
