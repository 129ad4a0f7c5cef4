"""The general machine: any moves, any policies, tiny pools, every invariant after every move.

One machine for the honest scheduler and for every planted bug, so that a bug is caught by what guards the
real code and not by a test written for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.policies.views import Rates
from pageturner.service.core.options import NO_SPECULATION, SchedulerOptions
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.core.scheduling.speculation import Drafter
from pageturner.service.errors import InvalidArgument, QueueFull
from support.core_harness import CoreHarness
from support.junk_policies import junk_policies

PROMPTS = st.lists(st.sampled_from((0, 0, 0, 1, 2)), min_size=1, max_size=12).map(tuple)
"""A three-letter alphabet, lopsided, so that prompts share prefixes often."""


NAMES = {axis: registry.names(axis) for axis in AXES}
"""Asked once: finding what is installed takes milliseconds."""


@st.composite
def policy_sets(draw: st.DrawFn) -> PolicySet:
    """Any combination of built-ins, or junk on every axis. Those that lead to pressure come often."""
    if draw(st.integers(0, 7)) == 7:
        return junk_policies(draw(st.integers(0, 100)))
    often = {"admission": ("first-chunk",) * 4, "reclaim": ("always-swap",) * 4}
    return registry.create_set(
        {axis: draw(st.sampled_from(often.get(axis, ()) + NAMES[axis])) for axis in AXES}
    )


@st.composite
def scheduler_options(draw: st.DrawFn) -> SchedulerOptions:
    max_num_seqs = draw(st.sampled_from((4, 3, 5, 2, 1)))
    return SchedulerOptions(
        max_model_len=40,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=draw(st.integers(max_num_seqs, 10)),
        watermark=draw(st.sampled_from((0.0, 0.0, 0.03, 0.2))),
        max_preemptions=draw(st.sampled_from((16, 4, 1))),
        max_bypasses=draw(st.sampled_from((1, 4, 64))),
        max_skips=draw(st.sampled_from((0, 2, 8))),
        starvation_seconds=draw(st.sampled_from((5.0, 50.0))),
        share_between_tenants=draw(st.booleans()),
        max_policy_fault_share=1.0,  # junk is to be asked for long
    )


@st.composite
def requests(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of CoreHarness.submit, and how many such requests come at once."""
    max_tokens = draw(st.sampled_from((12, 9, 15, 6, 3, 2, 1)))
    return {
        "prompt": draw(PROMPTS),
        "max_tokens": max_tokens,
        "min_tokens": min(max_tokens, draw(st.sampled_from((0, 0, 1, 2)))),
        "stop_ids": draw(st.sampled_from(((), (), (), (2,)))),
        "n": draw(st.sampled_from((1, 1, 2, 1, 3))),
        "priority": draw(st.sampled_from((0, 0, 0, 1, 2))),
        "tenant": draw(st.sampled_from(("t0", "t0", "t1"))),
        "salt": draw(st.sampled_from(("", "", "x"))),
        "bypass": draw(st.sampled_from((False, False, False, True))),
        "seconds": draw(st.sampled_from((None, None, None, 3.0, 20.0))),
        "seed": draw(st.integers(0, 3)),
        "penalty": draw(st.sampled_from((0.0, 0.0, 1.0))),
        "copies": draw(st.sampled_from((2, 3, 1))),
        "is_cut": draw(st.sampled_from((True, True, True, True, False))),
    }


KNOWN = st.sampled_from(((1,), (2, 0), (0,), (3, 1, 0), (99,), (4, 98)))
"""How much is known of a request that is resumed: `CoreHarness.submit`."""


@st.composite
def beam_searches(draw: st.DrawFn) -> dict[str, Any]:
    """What makes a search of a request."""
    width = draw(st.sampled_from((2, 3, 4)))
    search = BeamSearch(
        width, draw(st.sampled_from((1.0, 0.0, 2.0, -1.0))), draw(st.sampled_from(tuple(EarlyStopping)))
    )
    return {
        "beam_search": search,
        "n": draw(st.integers(1, width)),
        "stop_ids": draw(st.sampled_from(((5,), (5, 6), ()))),
        "penalty": 0.0,
    }


class SchedulerMachine(RuleBasedStateMachine):
    """scheduler_class: the one under test; planted bugs replace it or patch the core below it.

    favoured: arguments of every request that replace what was drawn, and policies by axis; a rare kind
    of load is met often that way, everything else stays as general as it is. speculation, drafter: as
    CoreHarness's, at depth 0.
    """

    scheduler_class: type[Scheduler] = Scheduler
    speculation = NO_SPECULATION
    drafter: Callable[[CoreHarness], Drafter] | None = None
    harness_class: type[CoreHarness] = CoreHarness
    favoured_request: tuple[tuple[str, Any], ...] = ()
    favoured_policies: tuple[tuple[str, str], ...] = ()
    max_scored_rows: int = SchedulerOptions().max_scored_rows

    def __init__(self) -> None:
        super().__init__()
        self.harness: CoreHarness | None = None

    @initialize(
        policies=policy_sets(),
        options=scheduler_options(),
        num_blocks=st.sampled_from((8, 6, 10, 12, 9, 7, 5, 4, 3, 2, 1)),
        block_size=st.integers(1, 4),
        num_host_blocks=st.sampled_from((24, 24, 8, 2, 0)),
        depth=st.integers(0, 1),
        enable_prefix_caching=st.sampled_from((True, True, True, False)),
        reuse_partial_blocks=st.sampled_from((True, True, False)),
        swap_is_fast=st.booleans(),
        load=st.lists(requests(), min_size=2, max_size=4),
        num_steps=st.sampled_from((8, 4, 12, 20, 0)),
    )
    def start(
        self,
        policies: PolicySet,
        options: SchedulerOptions,
        num_blocks: int,
        block_size: int,
        num_host_blocks: int,
        depth: int,
        enable_prefix_caching: bool,
        reuse_partial_blocks: bool,
        swap_is_fast: bool,
        load: list[dict[str, Any]],
        num_steps: int,
    ) -> None:
        """A fresh scheduler under load from the start: an idle one has little to get wrong."""
        favoured: dict[str, Any] = {
            axis: registry.create(axis, name) for axis, name in self.favoured_policies
        }
        policies = replace(policies, **favoured)
        speed = 1e12 if swap_is_fast else 1e3
        self.harness = self.harness_class(
            policies,
            num_blocks=num_blocks,
            block_size=block_size,
            num_host_blocks=num_host_blocks,
            depth=depth if self.speculation.method == "none" else 0,
            options=replace(options, max_scored_rows=self.max_scored_rows),
            enable_prefix_caching=enable_prefix_caching,
            reuse_partial_blocks=reuse_partial_blocks,
            rates=Rates(swap_out_bytes_per_second=speed, swap_in_bytes_per_second=speed),
            scheduler_class=self.scheduler_class,
            speculation=self.speculation,
            drafter=type(self).drafter,
            window=self.window_of(num_blocks, options),
        )
        for wanted in load:
            self._submit(wanted)
        for _ in range(num_steps):
            self.live.step()

    def window_of(self, num_blocks: int, options: SchedulerOptions) -> int | None:
        """Positions that each one sees; None for all."""
        return None

    @property
    def live(self) -> CoreHarness:
        assert self.harness is not None
        return self.harness

    def _some(self, pick: int) -> str | None:
        ids = [rid for rid, record in self.live.records.items() if record.end is None]
        return ids[pick % len(ids)] if ids else None

    @rule(wanted=requests())
    def submit(self, wanted: dict[str, Any]) -> None:
        self._submit(wanted)

    def _submit(self, wanted: dict[str, Any]) -> None:
        wanted = wanted | dict(self.favoured_request)
        seconds = wanted["seconds"]
        deadline = None if seconds is None else self.live.now + seconds
        arguments = {
            name: wanted[name] for name in wanted if name not in ("copies", "seconds", "seed", "is_cut")
        }
        if wanted["is_cut"]:  # most requests fit, and a few are refused
            num_slots = self.live.model.kv_cache.num_blocks * self.live.model.block_size
            arguments["prompt"] = wanted["prompt"][: max(1, num_slots // 2)]
            search = wanted.get("beam_search")
            num_sequences = wanted["n"] if search is None else search.width
            room = max(1, (num_slots - len(arguments["prompt"])) // num_sequences)
            arguments["max_tokens"] = min(wanted["max_tokens"], room)
            arguments["min_tokens"] = min(wanted["min_tokens"], arguments["max_tokens"])
        for copy in range(wanted["copies"]):
            try:
                self.live.submit(**arguments, deadline=deadline, seed=wanted["seed"] + copy)
            except (InvalidArgument, QueueFull):
                self.live.check()

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.live.step()

    @precondition(lambda self: len(self.live.records) > 1)
    @rule(pick=st.integers(0, 99))
    def abort(self, pick: int) -> None:
        request_id = self._some(pick)
        if request_id is not None:
            self.live.abort(request_id)

    @rule(pick=st.integers(0, 99), pause=st.booleans())
    def pause_or_resume(self, pick: int, pause: bool) -> None:
        request_id = self._some(pick) or "unknown"
        scheduler = self.live.scheduler
        (scheduler.pause_request if pause else scheduler.resume_request)(request_id)

    @precondition(lambda self: self.live.num_steps > 8)
    @rule()
    def fail_a_step(self) -> None:
        self.live.fail()

    @precondition(lambda self: len(self.live.records) > 4)
    @rule(pick=st.integers(0, 99))
    def poison_logits(self, pick: int) -> None:
        request_id = self._some(pick)
        if request_id is not None:
            self.live.model.poisoned_requests.add(request_id)

    @invariant()
    def books_agree(self) -> None:
        if self.harness is not None:
            self.live.check()

    def teardown(self) -> None:
        """Whatever happened, everything left can be finished and every block comes back."""
        if self.harness is None or self.harness.is_broken:
            return
        for request_id in self.live.records:
            self.live.scheduler.resume_request(request_id)
        self.live.run_to_end(3000)
        self.live.check_finished()


class SwappingMachine(SchedulerMachine):
    """The same, and other policies come into force at any moment, one axis or more, with shadows or not; and
    a step may fail behind which the next is planned.

    A machine of its own, since the planted bugs were searched for with the moves of the other.
    """

    @precondition(lambda self: self.live.depth == 1 and self.live.num_steps > 8)
    @rule()
    def fail_a_step_with_one_behind(self) -> None:
        self.live.fail_behind()

    @rule(
        policies=policy_sets(),
        axes=st.sets(st.sampled_from(AXES)),
        shadows=policy_sets(),
        watch=st.booleans(),
    )
    def swap_policies(self, policies: PolicySet, axes: set[str], shadows: PolicySet, watch: bool) -> None:
        host = self.live.scheduler.policy_host
        chosen: dict[str, Any] = {axis: getattr(policies, axis) for axis in axes}
        watched = {axis: getattr(shadows, axis) for axis in AXES} if watch else host.shadows
        self.live.scheduler.set_policies(replace(host.policies, **chosen), self.live.now, shadows=watched)


class ConversingMachine(SchedulerMachine):
    """The same, and prompts that continue what was answered, all of it or a part, with other tokens behind.

    A machine of its own, for the same reason.
    """

    @precondition(lambda self: any(record.outputs for record in self.live.records.values()))
    @rule(
        wanted=requests(),
        pick=st.integers(0, 99),
        num_dropped=st.sampled_from((0, 1, 1, 2, 3)),
        extra=st.lists(st.sampled_from((0, 1, 2)), max_size=3),
    )
    def follow_up(self, wanted: dict[str, Any], pick: int, num_dropped: int, extra: list[int]) -> None:
        answered = [record for record in self.live.records.values() if record.outputs]
        record = answered[pick % len(answered)]
        outputs = record.outputs[min(record.outputs)]
        turn = (*record.new.prompt_token_ids, *outputs)
        prompt = (*turn[: max(1, len(turn) - num_dropped)], *extra)
        found = {"salt": record.new.cache_salt, "tenant": record.new.tenant, "bypass": False}
        self._submit(wanted | {"prompt": prompt, "copies": 2} | found)


class ResumingMachine(SchedulerMachine):
    """The same, and requests whose answers began elsewhere. A machine of its own, for the same reason."""

    @rule(wanted=requests(), known=KNOWN)
    def resume(self, wanted: dict[str, Any], known: tuple[int, ...]) -> None:
        self._submit(wanted | {"known": known})


class SearchingMachine(SchedulerMachine):
    """The same, and beam searches beside it. A machine of its own, for the same reason."""

    @rule(wanted=requests(), search=beam_searches())
    def search(self, wanted: dict[str, Any], search: dict[str, Any]) -> None:
        self._submit(wanted | search)


class ScoringMachine(SchedulerMachine):
    """The same, and requests whose prompts are scored, of which the best choices are wanted, or that have
    continuations scored in place of an answer. A machine of its own, for the same reason."""

    max_scored_rows = 3

    @rule(wanted=requests(), extra=st.sampled_from((None, 1, 2)))
    def score_prompt(self, wanted: dict[str, Any], extra: int | None) -> None:
        best_of = None if extra is None else wanted["n"] + extra
        self._submit(wanted | {"scores_prompt": True, "best_of": best_of})

    @rule(
        wanted=requests(),
        continuations=st.lists(PROMPTS.map(lambda tokens: tokens[:6]), min_size=1, max_size=4).map(tuple),
    )
    def score(self, wanted: dict[str, Any], continuations: tuple[tuple[int, ...], ...]) -> None:
        self._submit(wanted | {"continuations": continuations, "n": len(continuations)})


class AdaptedMachine(SchedulerMachine):
    """The same, and requests with adapters beside those with none. A machine of its own, for the same
    reason."""

    @rule(wanted=requests(), adapters=st.lists(st.sampled_from(("", "a", "b")), min_size=1, max_size=3))
    def submit_adapted(self, wanted: dict[str, Any], adapters: list[str]) -> None:
        """One prompt, with each of them: blocks that hold the same tokens and other KV."""
        for adapter in adapters:
            self._submit(wanted | {"copies": 1, "adapter": adapter})


class WindowMachine(ConversingMachine, SearchingMachine, ScoringMachine, AdaptedMachine):
    """All of these under a sliding window: prompts of twice the length, some longer than the pool."""

    def window_of(self, num_blocks: int, options: SchedulerOptions) -> int | None:
        """Of what was drawn anyway: another draw would change what the planted bugs' searches meet."""
        return (2, 3, 4, 6, 9)[(num_blocks + options.max_num_batched_tokens) % 5]

    def _submit(self, wanted: dict[str, Any]) -> None:
        super()._submit(wanted | {"prompt": wanted["prompt"] * 2, "is_cut": False})

    @rule(wanted=requests(), known=KNOWN)
    def resume(self, wanted: dict[str, Any], known: tuple[int, ...]) -> None:
        self._submit(wanted | {"known": known})
