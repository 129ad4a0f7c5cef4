"""The core harness for scenarios by name: policies by their names, and a record of every decision."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES, PolicySet
from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.core.memory.block_manager import blocks_for
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.core.request import NewRequest, Request
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.core.scheduling import views
from support.core_harness import CoreHarness, Record
from support.fake_model import Stop

OPTIONS = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, watermark=0.0)

Chosen = str | tuple[str, Mapping[str, object]]


def policies(**chosen: Chosen) -> PolicySet:
    """The defaults, but for the axes named: a policy's name, or its name and options."""
    pairs = {axis: chosen.get(axis, registry.DEFAULTS[axis]) for axis in AXES}
    return registry.create_set({a: p if isinstance(p, str) else PolicySpec(*p) for a, p in pairs.items()})


@dataclass(frozen=True, slots=True)
class Decision:
    """What one call of `schedule` found, and what it did.

    num_available, num_pending: device blocks before. held: blocks of each live request before, and by how
    many of its tables. ref_counts: of those blocks. lacking: blocks that each running request lacked for
    one more token of each of its sequences (copies on write not counted). only_decodes: no request that ran
    lacked more than one token. known: blocks that hold all known
    tokens of each request that runs now. preempted, started: requests that left or entered the running.
    guarded: at the time.
    """

    output: SchedulerOutput
    num_available: int
    num_pending: int
    running: tuple[str, ...]
    held: dict[str, Counter[int]]
    ref_counts: dict[int, int]
    lacking: dict[str, int]
    only_decodes: bool
    known: dict[str, int]
    preempted: tuple[str, ...]
    started: tuple[str, ...]
    guarded: str | None

    @property
    def scheduled(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(part.request_id for part in self.output.scheduled))

    def is_needless(self, victim: str) -> bool:
        """Whether all who run could have had their next tokens without this victim, blocks that fall free
        with the step in flight counted. For decisions in which all decode and none starts."""
        others = [request_id for request_id in self.preempted if request_id != victim]
        need = sum(lacking for request_id, lacking in self.lacking.items() if request_id not in others)
        return self.num_available + self.num_pending + self.freed_by(*others) >= need

    def freed_by(self, *request_ids: str) -> int:
        """Device blocks without a holder if all of these give up all they held."""
        given_up: Counter[int] = Counter()
        for request_id in request_ids:
            given_up.update(self.held[request_id])
        return sum(self.ref_counts[block] == count for block, count in given_up.items())


class WatchedScheduler(Scheduler):
    """The scheduler, unchanged; each decision is noted."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.decisions: list[Decision] = []

    def live_requests(self) -> list[Request]:
        return [*self.state.running.values(), *self.state.waiting]

    def _num_lacking(self, request: Request) -> int:
        manager = self.manager
        return sum(
            max(
                0,
                blocks_for(sequence.num_computed_tokens + 1, manager.block_size)
                - manager.num_blocks(sequence),
            )
            for sequence in request.computing
            if sequence.num_remaining
        )

    def schedule(self, now: float) -> SchedulerOutput:
        device = self.manager.device
        before = {request: request.num_preemptions for request in self.live_requests()}
        running = tuple(request.request_id for request in self.state.running.values())
        held = {request.request_id: self.manager.references(request) for request in before}
        ref_counts = {block: device.ref_count(block) for blocks in held.values() for block in blocks}
        num_available, num_pending = device.num_available, device.num_pending
        lacking = {r.request_id: self._num_lacking(r) for r in self.state.running.values() if not r.is_paused}
        only_decodes = all(s.num_remaining <= 1 for r in self.state.running.values() for s in r.computing)
        output = super().schedule(now)
        now_running = [request.request_id for request in self.state.running.values()]
        self.decisions.append(
            Decision(
                output,
                num_available,
                num_pending,
                running,
                held,
                ref_counts,
                lacking,
                only_decodes,
                known={
                    request.request_id: views.num_known_blocks(request, device.block_size)
                    for request in self.state.running.values()
                },
                preempted=tuple(r.request_id for r, count in before.items() if r.num_preemptions > count),
                started=tuple(request_id for request_id in now_running if request_id not in running),
                guarded=self.guarded_id,
            )
        )
        return output


class Scenario(CoreHarness):
    """A harness over a `WatchedScheduler`."""

    @property
    def watched(self) -> WatchedScheduler:
        assert isinstance(self.scheduler, WatchedScheduler)
        return self.scheduler

    @property
    def decisions(self) -> list[Decision]:
        return self.watched.decisions

    @property
    def num_preemptions(self) -> int:
        return sum(len(decision.preempted) for decision in self.decisions)

    def request(self, request_id: str) -> Request:
        """The scheduler's own record of a live request."""
        return next(r for r in self.watched.live_requests() if r.request_id == request_id)

    def submit_new(self, new: NewRequest) -> str:
        """For fields that `submit` does not offer. The request must state its max_tokens."""
        assert new.params.max_tokens is not None
        self.scheduler.add_request(new)
        stop = Stop(new.params.max_tokens, new.params.min_tokens, new.stop_ids)
        self.records[new.request_id] = Record(new, stop)
        self.check()
        return new.request_id

    def finish_all(self, max_steps: int = 3000) -> None:
        """Every request finishes without an error, and every block is back."""
        self.run_to_end(max_steps)
        self.check_finished()
        for request_id in self.records:
            assert self.error_of(request_id) is None

    def has_ended(self, request_id: str) -> bool:
        return self.records[request_id].end is not None

    def num_tokens_of(self, request_id: str) -> int:
        """Tokens that its client has seen."""
        return sum(map(len, self.records[request_id].outputs.values()))


def scenario(
    num_blocks: int = 8,
    block_size: int = 4,
    *,
    num_host_blocks: int = 0,
    depth: int = 0,
    caching: bool = True,
    rates: Rates | None = None,
    options: Mapping[str, Any] | None = None,
    chosen: PolicySet | None = None,
    **axes: Chosen,
) -> Scenario:
    """options: over OPTIONS. chosen: policies that have no name."""
    return Scenario(
        chosen or policies(**axes),
        num_blocks=num_blocks,
        block_size=block_size,
        num_host_blocks=num_host_blocks,
        depth=depth,
        options=replace(OPTIONS, **(options or {})),
        enable_prefix_caching=caching,
        rates=rates,
        scheduler_class=WatchedScheduler,
    )
