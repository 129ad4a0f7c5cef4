"""Policies replaced while requests run: nothing is lost, orders and memories are the new policies'."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
from support.core_harness import CoreHarness
from support.junk_policies import junk_policies

from pageturner.policies import registry
from pageturner.policies.events import PolicyEvent, RequestEnded, RequestQueued, RequestStarted, StepServed
from pageturner.policies.interfaces import AXES, KeyChange, PolicySet, Reclaim, SortKey
from pageturner.policies.views import BlockView, LoadView, Rates, RequestView
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.scheduling.waiting_queue import WaitingQueue
from pageturner.service.policy_host.calls import PolicyCaller

OPTIONS = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=8)


def harness(policies: PolicySet | None = None, **sizes: Any) -> CoreHarness:
    given: dict[str, Any] = {
        "num_blocks": 24,
        "block_size": 2,
        "num_host_blocks": 12,
        "options": OPTIONS,
    } | sizes
    return CoreHarness(policies or registry.default_policies(), **given)


def swap(live: CoreHarness, shadows: Mapping[str, object] | None = None, **policies: Any) -> None:
    """Put these policies in force; the other axes keep theirs, and so do all shadows unless given."""
    host = live.scheduler.policy_host
    watched = host.shadows if shadows is None else shadows
    live.scheduler.set_policies(replace(host.policies, **policies), live.now, shadows=watched)
    live.check()


@dataclass(frozen=True)
class ByName:
    """Requests by their ids, or the other way round; keys are texts, which compare with no number."""

    key_change: ClassVar[KeyChange] = KeyChange.NEVER
    is_reversed: bool = False

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        name = request.request_id
        return ("".join(chr(0x7F - ord(letter)) for letter in name) if self.is_reversed else name,)


@dataclass(frozen=True)
class Newest:
    """A number for a key, and the latest first."""

    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (-int(request.request_id[1:]),)


@dataclass(frozen=True)
class ByBlock:
    """Evicts the smallest number first, or the largest."""

    sign: int = 1

    def score(self, block: BlockView) -> float:
        return float(self.sign * block.block_id)


@dataclass(frozen=True)
class Fails:
    """Raises, whatever it is asked, on any axis."""

    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def _fail(self, *_: object) -> Any:
        raise ValueError("planted")

    key = decide = split = rank = choose = score = _fail


@dataclass(frozen=True)
class Remembers:
    """Its state is every event that it was told."""

    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME
    mark: str = ""

    def initial_state(self) -> tuple[PolicyEvent, ...]:
        return ()

    def fold(self, state: tuple[PolicyEvent, ...], event: PolicyEvent) -> tuple[PolicyEvent, ...]:
        return (*state, event)

    def key(self, request: RequestView, load: LoadView, *, state: tuple[PolicyEvent, ...] = ()) -> SortKey:
        return (len(state),)


@dataclass(frozen=True)
class TakesOver(Remembers):
    """Its own state made from that of the one before."""

    def migrate(self, predecessor: object) -> tuple[PolicyEvent, ...] | None:
        return predecessor[-1:] if isinstance(predecessor, tuple) else None


def queued(live: CoreHarness) -> list[str]:
    return [request.request_id for request in live.scheduler.state.waiting]


def state_of(live: CoreHarness) -> Any:
    return live.scheduler.policy_host.states["queue"]


# --- nothing is lost ----------------------------------------------------------------------------------


NAMES = {axis: registry.names(axis) for axis in AXES}


def random_policies(rng: random.Random) -> PolicySet:
    """Any built-in of each axis, or nonsense."""
    if rng.random() < 0.1:
        return junk_policies(rng.randrange(1000))
    return registry.create_set({axis: rng.choice(NAMES[axis]) for axis in AXES})


@pytest.mark.parametrize("depth", [0, 1])
def test_every_axis_is_swapped_thousands_of_times_under_load(depth: int) -> None:
    """One axis a time, or all; sometimes a shadow. Tokens and books are checked after every move."""
    rng = random.Random(depth)
    live = harness(depth=depth, options=replace(OPTIONS, max_policy_faults=5))
    num_swaps: dict[str, int] = dict.fromkeys(AXES, 0)
    while min(num_swaps.values()) < 350:
        if len(live.scheduler.state.requests) < 10:
            prompt = tuple(rng.choice((0, 0, 1)) for _ in range(rng.randint(1, 12)))
            live.submit(
                prompt, max_tokens=rng.randint(1, 16), n=rng.choice((1, 1, 2)), priority=rng.randrange(3)
            )
        axes = AXES if rng.random() < 0.1 else (rng.choice(AXES),)
        chosen = random_policies(rng)
        shadows = {axis: getattr(random_policies(rng), axis) for axis in AXES if rng.random() < 0.2}
        swap(live, shadows, **{axis: getattr(chosen, axis) for axis in axes})
        for axis in axes:
            num_swaps[axis] += 1
        if rng.random() < 0.7:
            live.step()
    live.run_to_end()
    live.check_finished()
    stats = live.scheduler.stats()
    assert stats.num_recompute_preemptions_total > 0
    assert stats.num_swap_preemptions_total > 0
    assert live.scheduler.policy_host.report().revision > 1000


def test_requests_say_what_decided_in_the_end_and_whether_it_changed() -> None:
    live = harness()
    early = live.submit((0,), max_tokens=6)
    live.step()
    swap(live, queue=ByName())
    late = live.submit((1,), max_tokens=3)
    live.run_to_end()
    ends = {name: live.records[name].end for name in (early, late)}
    for end in ends.values():
        assert end is not None
        assert end.policies["queue"].endswith(":ByName")
        assert end.policies["victim"] == registry.DEFAULTS["victim"]
    assert [end.policies_changed for end in ends.values() if end is not None] == [True, False]


def test_changed_options_count_as_a_policy_change_and_a_shadow_does_not() -> None:
    live = harness()
    watched = live.submit((0,), max_tokens=3)
    swap(live, {"victim": registry.create("victim", "last-arrived")})
    assert live.scheduler.policy_host.report().revision == 2
    live.run_to_end()
    changed = live.submit((0,), max_tokens=3)
    swap(live, reclaim=registry.create("reclaim", "cost-model", {"swap_weight": 3.0}))
    live.run_to_end()
    ends = [live.records[name].end for name in (watched, changed)]
    assert [end is not None and end.policies_changed for end in ends] == [False, True]


# --- orders -------------------------------------------------------------------------------------------


def check_queue_is_sorted_anew() -> None:
    live = harness(options=replace(OPTIONS, max_num_seqs=1))
    for _ in range(5):
        live.submit((0, 1), max_tokens=4)
    live.step()
    swap(live, queue=ByName(is_reversed=True))
    assert queued(live) == ["r4", "r3", "r2", "r1"]
    swap(live, queue=ByName())
    assert queued(live) == ["r1", "r2", "r3", "r4"]
    swap(live, queue=Newest())
    live.submit((0, 1), max_tokens=4)
    assert queued(live) == ["r5", "r4", "r3", "r2", "r1"], "old keys and new ones are in one order"
    live.run_to_end()


def check_running_requests_are_ordered_anew() -> None:
    live = harness()
    names = [live.submit((index, 1), max_tokens=9) for index in range(3)]
    live.step()
    assert not queued(live)
    swap(live, queue=Newest())
    live.abort(names[0])  # was the guarded request; the next one is first by the policy in force
    live.step()
    assert live.scheduler.guarded_id == names[2]
    live.run_to_end()


def check_a_key_that_was_fixed_is_asked_for_again() -> None:
    """fcfs asks once; a policy whose keys move must see a preempted request anew."""
    live = harness(registry.create_set({"queue": "fcfs"}))
    for _ in range(2):
        live.submit((0, 1), max_tokens=9)
    swap(live, queue=Remembers())
    live.step()
    live.fail()
    keys = [request.queue_entry[0] for request in live.scheduler.state.waiting if request.queue_entry]
    num_told = len(state_of(live))
    assert keys == [((0, num_told - 1),), ((0, num_told),)]
    live.run_to_end()


def check_cached_blocks_are_scored_anew() -> None:
    for sign in (1, -1):
        live = harness(registry.create_set({"eviction": "lru"}), num_blocks=8)
        for letter in range(4):  # chains of one block each: a longer one is evicted from its end
            live.submit((letter, letter), max_tokens=1)
        live.run_to_end()
        device = live.scheduler.manager.device
        cached = [b for b in range(8) if device.is_cached(b)]
        assert len(cached) == 4
        swap(live, eviction=ByBlock(sign))
        device.allocate(device.num_free)
        order = [device.allocate(1)[0] for _ in cached]
        assert order == sorted(cached, reverse=sign < 0)


def check_a_memory_is_not_another_policys() -> None:
    live = harness(registry.create_set({}))
    swap(live, queue=Remembers())
    live.submit((0, 1), max_tokens=2)
    live.run_to_end()
    assert len(state_of(live)) > 3
    swap(live, queue=Remembers(mark="other"))
    assert state_of(live) == (), "it remembers what only its predecessor was told"


CHECKS = (
    check_queue_is_sorted_anew,
    check_running_requests_are_ordered_anew,
    check_a_key_that_was_fixed_is_asked_for_again,
    check_cached_blocks_are_scored_anew,
    check_a_memory_is_not_another_policys,
)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_what_a_swap_must_renew(check: Callable[[], None]) -> None:
    check()


def _no_rekey(self: WaitingQueue, running: object, *, is_key_fixed: bool) -> None:
    self._is_key_fixed = is_key_fixed


def _only_waiting(self: WaitingQueue, running: object, *, is_key_fixed: bool) -> None:
    self._is_key_fixed = is_key_fixed
    self.resort()


def _still_fixed(self: WaitingQueue, running: Any, *, is_key_fixed: bool) -> None:
    self.resort()
    for request in running:
        self._make_entry(request, self._load())


def _no_rescore(self: BlockPool) -> None:
    return None


def _keeps_any_state(self: PolicyCaller, predecessor: PolicyCaller, history: object) -> None:
    self.state = predecessor.state


@pytest.mark.parametrize(
    ("owner", "method", "mistake"),
    [
        (WaitingQueue, "rekey", _no_rekey),
        (WaitingQueue, "rekey", _only_waiting),
        (WaitingQueue, "rekey", _still_fixed),
        (BlockPool, "rescore", _no_rescore),
        (PolicyCaller, "inherit", _keeps_any_state),
    ],
    ids=["queue-not-sorted", "running-not-keyed", "keys-still-fixed", "heap-not-scored", "state-of-another"],
)
def test_a_planted_bug_of_the_swap_is_caught(
    owner: Any, method: str, mistake: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, method, mistake)
    caught = 0
    for check in CHECKS:
        try:
            check()
        except (AssertionError, KeyError, TypeError):  # or where a memory of the wrong kind was quarantined
            caught += 1
    assert caught


# --- memories -----------------------------------------------------------------------------------------


def test_policies_with_a_memory_get_events_in_order() -> None:
    live = harness(replace(registry.default_policies(), queue=Remembers()))
    name = live.submit((0, 1, 0), max_tokens=2)
    live.run_to_end()
    told = state_of(live)
    kinds = [type(event) for event in told]
    assert kinds == [RequestQueued, RequestStarted, StepServed, RequestEnded, StepServed]
    assert told[0] == RequestQueued(0.0, name, "t0", 3, True)
    assert told[1] == RequestStarted(1.0, name, "t0", 3, 0, True)
    (share,) = told[2].shares
    assert (share.tenant, share.num_prompt_tokens, share.num_output_tokens) == ("t0", 3, 1)
    (share,) = told[4].shares
    assert (share.num_prompt_tokens, share.num_output_tokens, share.num_recomputed_tokens) == (0, 1, 0)


@pytest.mark.parametrize("reclaim", ["always-swap", "always-recompute", "tail-first"])
@pytest.mark.parametrize("depth", [0, 1])
def test_events_keep_their_order_under_any_moves(reclaim: str, depth: int) -> None:
    """Under pressure, with aborts, deadlines and failed steps: each request is told of as the events'
    definition says, time never falls, and no token is counted twice or left out."""
    rng = random.Random(f"{reclaim} {depth}")
    policies = registry.create_set({"reclaim": reclaim, "admission": "first-chunk"})
    live = harness(
        replace(policies, queue=Remembers()), depth=depth, num_blocks=12, enable_prefix_caching=False
    )
    for _ in range(150):
        if len(live.scheduler.state.requests) < 8:
            live.submit(
                tuple(rng.choice((0, 1, 2)) for _ in range(rng.randint(1, 9))),
                max_tokens=rng.randint(1, 12),
                priority=rng.randrange(3),
                deadline=live.now + 25 if rng.random() < 0.2 else None,
            )
        live.step()
        if rng.random() < 0.05:
            live.fail()
        if rng.random() < 0.05 and live.scheduler.state.requests:
            live.abort(rng.choice(list(live.scheduler.state.requests)))
    live.run_to_end()
    told: Any = state_of(live)
    assert [event.now for event in told] == sorted(event.now for event in told)
    letters = {RequestQueued: "q", RequestStarted: "s", RequestEnded: "e"}
    lives: dict[str, str] = dict.fromkeys(live.records, "")
    for event in told:
        if not isinstance(event, StepServed):
            lives[event.request_id] += letters[type(event)]
    assert all(re.fullmatch("(qs)+e|(qs)*qe", seen) for seen in lives.values()), lives
    assert any(len(seen) > 4 for seen in lives.values()), "no request yielded"
    firsts = [e.request_id for e in told if isinstance(e, RequestQueued | RequestStarted) and e.is_first]
    assert max(map(firsts.count, firsts)) == 2
    for tenant in ("t0", "t1", "t2"):
        shares = [s for e in told if isinstance(e, StepServed) for s in e.shares if s.tenant == tenant]
        mine = [record for record in live.records.values() if record.new.tenant == tenant]
        outputs = sum(len(tokens) for record in mine for tokens in record.outputs.values())
        assert sum(share.num_output_tokens for share in shares) == outputs
        prompts = sum(len(record.new.prompt_token_ids) for record in mine)
        whole = sum(len(record.new.prompt_token_ids) for record in mine if record.outputs)
        assert whole <= sum(share.num_prompt_tokens for share in shares) <= prompts
    assert sum(s.num_recomputed_tokens for e in told if isinstance(e, StepServed) for s in e.shares) > 0


def test_tokens_computed_twice_are_told_apart() -> None:
    live = harness(replace(registry.default_policies(), queue=Remembers()), enable_prefix_caching=False)
    name = live.submit((0, 1, 0, 2), max_tokens=8)
    live.submit((0,), max_tokens=8, priority=1)  # fails with it, so that neither is the culprit
    for _ in range(3):
        live.step()
    live.fail()
    live.run_to_end()
    told = state_of(live)
    shares = [share for event in told if isinstance(event, StepServed) for share in event.shares]
    assert all(
        first.tenant <= second.tenant
        for e in told
        if isinstance(e, StepServed)
        for first, second in zip(e.shares, e.shares[1:], strict=False)
    )
    mine = [share for share in shares if share.tenant == "t0"]
    assert sum(share.num_prompt_tokens for share in mine) == 4
    assert sum(share.num_output_tokens for share in mine) == len(live.records[name].outputs[0])
    assert sum(share.num_recomputed_tokens for share in mine) == 4 + 2
    again = [
        event
        for event in told
        if isinstance(event, RequestQueued | RequestStarted) and event.request_id == name
    ]
    assert [event.is_first for event in again] == [True, True, False, False]


def test_a_memory_stays_for_an_equal_policy_moves_to_one_that_takes_it_and_else_begins_anew() -> None:
    live = harness(replace(registry.default_policies(), queue=Remembers()))
    first = live.submit((0, 1), max_tokens=20)
    live.step()
    second = live.submit((0, 1), max_tokens=20)
    before = state_of(live)
    swap(live, queue=Remembers())
    assert state_of(live) == before
    swap(live, queue=TakesOver())
    assert state_of(live) == before[-1:]
    swap(live, queue=Remembers(mark="new"))
    assert state_of(live) == (
        RequestQueued(live.now, first, "t0", 2, False),
        RequestStarted(live.now, first, "t0", 2, 0, False),
        RequestQueued(live.now, second, "t0", 2, True),
    )
    live.run_to_end()


# --- quarantine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", AXES)
def test_a_policy_that_keeps_failing_is_quarantined(axis: str) -> None:
    live = harness(
        replace(registry.default_policies(), **{axis: Fails()}),
        num_blocks=10,
        options=replace(OPTIONS, max_policy_faults=4),
    )
    for _ in range(4):
        for _ in range(4):
            live.submit((0, 1, 0, 2), max_tokens=12)
        live.run_to_end()
    (report,) = [report for report in live.scheduler.policy_host.report().axes if report.axis == axis]
    assert report.is_quarantined
    assert report.num_faults == live.scheduler.policy_host.faults[axis] == 4, "it is not asked any more"
    assert report.last_fault == "raised ValueError('planted')"
    assert report.name.endswith(":Fails")
    assert [told.axis for told in live.scheduler.policy_host.take_quarantined()] == [axis]
    assert live.scheduler.policy_host.take_quarantined() == ()
    assert live.scheduler.policy_host.names[axis] == registry.DEFAULTS[axis]
    assert live.scheduler.policy_host.report().revision == 2
    assert any(record.end is not None and record.end.policies_changed for record in live.records.values())
    default: Any = registry.create(axis, registry.DEFAULTS[axis])
    swap(live, **{axis: default})
    (report,) = [report for report in live.scheduler.policy_host.report().axes if report.axis == axis]
    assert (report.is_quarantined, report.num_faults, report.last_fault) == (False, 0, "")


@dataclass(frozen=True)
class FailsToRemember(Remembers):
    """Cannot take in that a request ended."""

    def fold(self, state: tuple[PolicyEvent, ...], event: PolicyEvent) -> tuple[PolicyEvent, ...]:
        assert not isinstance(event, RequestEnded)
        return super().fold(state, event)


def test_a_memory_that_fails_keeps_what_it_had_and_is_told_nothing_in_quarantine() -> None:
    live = harness(
        replace(registry.default_policies(), queue=FailsToRemember()),
        options=replace(OPTIONS, max_policy_faults=2),
    )
    live.submit((0,), max_tokens=1)
    live.run_to_end()
    told: Any = state_of(live)
    assert [type(event) for event in told] == [RequestQueued, RequestStarted, StepServed]
    for _ in range(3):
        live.submit((0,), max_tokens=1)
        live.run_to_end()
    report = live.scheduler.policy_host.report().axes[0]
    assert (report.is_quarantined, report.num_faults) == (True, 2)
    swap(live, queue=FailsToRemember())
    assert state_of(live) == (), "what it knew is older than what happened since"


def test_a_swap_elsewhere_leaves_a_quarantine_alone() -> None:
    live = harness(
        replace(registry.default_policies(), queue=Fails()), options=replace(OPTIONS, max_policy_faults=1)
    )
    live.submit((0,), max_tokens=1)
    swap(live, victim=registry.create("victim", "last-arrived"))
    report = live.scheduler.policy_host.report().axes[0]
    assert (report.is_quarantined, report.num_faults) == (True, 1)


def test_quarantine_renews_the_order() -> None:
    """The keys that the failing policy gave before are replaced by the default's."""

    @dataclass(frozen=True)
    class FailsAtSeven(Newest):
        def key(self, request: RequestView, load: LoadView) -> SortKey:
            assert request.request_id != "r4"
            return super().key(request, load)

    live = harness(
        replace(registry.default_policies(), queue=FailsAtSeven()),
        options=replace(OPTIONS, max_policy_faults=1, max_num_seqs=1),
    )
    for _ in range(5):
        live.submit((0, 1), max_tokens=2)
    live.step()
    assert queued(live) == ["r1", "r2", "r3", "r4"]


def test_what_only_the_moment_made_impossible_is_no_reason_for_quarantine() -> None:
    live = harness(
        replace(registry.create_set({"admission": "first-chunk"}), reclaim=AlwaysSwaps()),
        num_blocks=8,
        num_host_blocks=0,
        options=replace(OPTIONS, max_policy_faults=2),
    )
    for _ in range(6):
        live.submit((0, 1, 0, 2), max_tokens=10)
    live.run_to_end()
    report = next(report for report in live.scheduler.policy_host.report().axes if report.axis == "reclaim")
    assert report.num_faults > 2
    assert not report.is_quarantined


# --- shadows ------------------------------------------------------------------------------------------


def shadow_report(live: CoreHarness, axis: str) -> Any:
    return next(report.shadow for report in live.scheduler.policy_host.report().axes if report.axis == axis)


def test_a_shadow_is_asked_compared_and_not_obeyed() -> None:
    def run(shadows: dict[str, object]) -> tuple[CoreHarness, list[object]]:
        live = harness(
            registry.create_set({"reclaim": "always-recompute", "admission": "first-chunk"}),
            num_blocks=8,
        )
        swap(live, shadows)
        for _ in range(6):
            live.submit((0, 1, 0, 2), max_tokens=10)
        outputs: list[object] = []
        while live.scheduler.has_work() or live.in_flight:
            outputs.append(live.step())
        return live, outputs

    alone, outputs = run({})
    watched, same_outputs = run({axis: Fails() for axis in AXES} | {"reclaim": AlwaysSwaps()})
    assert outputs == same_outputs
    report = shadow_report(watched, "reclaim")
    assert report.num_compared == report.num_disagreements > 0
    assert len(report.samples) == min(8, report.num_disagreements)
    sample = report.samples[-1]
    assert (sample.axis, sample.obeyed, sample.shadow) == ("reclaim", "recompute", "swap")
    assert sample.subject in watched.records
    for axis in ("queue", "admission", "batch", "victim", "eviction"):
        report = shadow_report(watched, axis)
        assert report.num_faults > 0, axis
        assert (report.num_compared, report.num_disagreements) == (0, 0)
        assert report.last_fault == "raised ValueError('planted')"
    assert watched.scheduler.policy_host.faults == alone.scheduler.policy_host.faults, (
        "a shadow's faults are its own"
    )


@dataclass(frozen=True)
class AlwaysSwaps:
    def choose(self, victim: Any, num_blocks_short: int, rates: Rates, load: LoadView) -> Reclaim:
        return Reclaim.SWAP


def test_ranks_are_compared_by_pairs() -> None:
    live = harness(replace(registry.default_policies(), queue=ByName()))
    swap(live, {"queue": ByName(is_reversed=True)})
    for _ in range(5):
        live.submit((0,), max_tokens=1)
    report = shadow_report(live, "queue")
    assert (report.num_compared, report.num_disagreements) == (4, 4)
    assert report.samples[-1].subject == "r4"
    swap(live, {"queue": ByName()})
    for _ in range(3):
        live.submit((0,), max_tokens=1)
    report = shadow_report(live, "queue")
    assert (report.num_compared, report.num_disagreements) == (2, 0), "another shadow counts from nought"
    live.run_to_end()


def test_a_shadow_remembers_for_itself() -> None:
    live = harness()
    live.submit((0,), max_tokens=9)
    shadow = Remembers()
    swap(live, {"queue": shadow})
    live.step()
    told: Any = live.scheduler.policy_host.shadow_states["queue"]
    assert [type(event) for event in told] == [RequestQueued, RequestStarted, StepServed]
    swap(live, {})
    assert live.scheduler.policy_host.shadows == {}
    live.run_to_end()
