"""Requests with their tokens, as one client process sends them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pageturner.loadtest.workload.conduct import PROMPT_READER, Conduct
from pageturner.loadtest.workload.load import LoadtestWorkload
from pageturner.loadtest.workload.shapes import Shape, TokenRun, Turn, plan_shapes


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request to be sent. at_seconds: after the start of the run; 0 for all in a closed loop. turn: its
    place in its conversation, from 0."""

    index: int
    at_seconds: float
    prompt_token_ids: tuple[int, ...]
    output_tokens: int
    priority: int
    tenant: str
    conduct: Conduct = PROMPT_READER
    turn: int = 0


@dataclass(frozen=True, slots=True)
class FollowUp:
    """A later turn of a conversation, whose prompt waits for the answer before it."""

    index: int
    think_seconds: float
    new_token_ids: tuple[int, ...]
    output_tokens: int
    conduct: Conduct

    def after(self, previous: PlannedRequest, answer: Sequence[int]) -> PlannedRequest:
        """The request, its prompt all that was said before and then what is new. answer: the tokens that
        came, however the request before it ended."""
        return replace(
            previous,
            index=self.index,
            prompt_token_ids=(*previous.prompt_token_ids, *answer, *self.new_token_ids),
            output_tokens=self.output_tokens,
            conduct=self.conduct,
            turn=previous.turn + 1,
        )


@dataclass(frozen=True, slots=True)
class PlannedConversation:
    """Requests that follow each other: one, or several turns."""

    first: PlannedRequest
    follow_ups: tuple[FollowUp, ...] = ()

    @property
    def num_requests(self) -> int:
        """Over all turns."""
        return 1 + len(self.follow_ups)


def plan_conversations(
    workload: LoadtestWorkload, part: int = 0, num_parts: int = 1
) -> Iterator[PlannedConversation]:
    """Every conversation of the workload whose number is `part` modulo `num_parts`, in order of time."""
    shapes, _ = plan_shapes(workload)
    times = _times(workload, len(shapes))
    for number in range(part, len(shapes), num_parts):
        yield _with_tokens(workload, shapes[number], times[number])


def plan_requests(workload: LoadtestWorkload, part: int = 0, num_parts: int = 1) -> Iterator[PlannedRequest]:
    """The same of a workload without further turns: each conversation is one request."""
    for conversation in plan_conversations(workload, part, num_parts):
        assert not conversation.follow_ups, "the prompts of later turns wait for answers"
        yield conversation.first


def arrivals(workload: LoadtestWorkload) -> Sequence[float]:
    """Seconds after the start at which each conversation is due; 0 in a closed loop."""
    return _times(workload, len(plan_shapes(workload)[0]))


def _times(workload: LoadtestWorkload, count: int) -> Sequence[float]:
    if workload.arrivals is None:
        return [0.0] * count
    return workload.arrivals.times(count, random.Random(f"{workload.seed}/arrivals"))


def _with_tokens(workload: LoadtestWorkload, shape: Shape, at_seconds: float) -> PlannedConversation:
    first, *rest = shape.turns
    request = PlannedRequest(
        index=first.index,
        at_seconds=at_seconds,
        prompt_token_ids=_token_ids(workload, first.new),
        output_tokens=first.output_tokens,
        priority=shape.priority,
        tenant=shape.tenant,
        conduct=first.conduct,
    )
    return PlannedConversation(request, tuple(_follow_up(workload, turn) for turn in rest))


def _follow_up(workload: LoadtestWorkload, turn: Turn) -> FollowUp:
    token_ids = _token_ids(workload, turn.new)
    return FollowUp(turn.index, turn.think_seconds, token_ids, turn.output_tokens, turn.conduct)


def _token_ids(workload: LoadtestWorkload, runs: Sequence[TokenRun]) -> tuple[int, ...]:
    drawn: list[int] = []
    for run in runs:
        drawn += random.Random(f"{workload.seed}/{run.key}").choices(workload.token_ids, k=run.num_tokens)
    return tuple(drawn)
