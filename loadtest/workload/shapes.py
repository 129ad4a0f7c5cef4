"""Conversations before they have tokens: how much is said, and what is shared. Cheap to make all of."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from pageturner.loadtest.workload.conduct import PROMPT_READER, Conduct
from pageturner.loadtest.workload.lengths import draw_pair
from pageturner.loadtest.workload.load import LoadtestWorkload


@dataclass(frozen=True, slots=True)
class TokenRun:
    """`num_tokens` tokens that `key` alone decides: one text, or the head of it."""

    key: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Turn:
    """One request. index: its number in the run. think_seconds: after the answer before it. new: what its
    prompt adds to all before it."""

    index: int
    think_seconds: float
    new: tuple[TokenRun, ...]
    output_tokens: int
    conduct: Conduct = PROMPT_READER

    @property
    def num_new_tokens(self) -> int:
        """Of the prompt."""
        return sum(run.num_tokens for run in self.new)


@dataclass(frozen=True, slots=True)
class Shape:
    """One conversation. index: its number among them. turns: at least one."""

    index: int
    turns: tuple[Turn, ...]
    priority: int
    tenant: str


@dataclass(frozen=True, slots=True)
class Cuts:
    """What the model's context made shorter. conversations: those that lost turns at their end."""

    prompts: int = 0
    outputs: int = 0
    conversations: int = 0

    def __str__(self) -> str:
        parts = (
            f"{count:,} {name}"
            for name, count in (
                ("prompts", self.prompts),
                ("outputs", self.outputs),
                ("conversations", self.conversations),
            )
            if count
        )
        return ", ".join(parts) or "nothing"


def plan_shapes(workload: LoadtestWorkload) -> tuple[tuple[Shape, ...], Cuts]:
    """Every conversation of the workload, in order, and what had to be cut."""
    shapes: list[Shape] = []
    cuts = Cuts()
    num_planned = 0
    for number in range(workload.num_requests):
        if num_planned == workload.num_requests:
            break
        drawn = _traced(workload, number) if workload.trace else _drawn(workload, number)
        shape, cut = _fitted(drawn, workload.max_context)
        cuts = Cuts(
            cuts.prompts + cut.prompts, cuts.outputs + cut.outputs, cuts.conversations + cut.conversations
        )
        turns = shape.turns[: workload.num_requests - num_planned]
        shapes.append(replace(shape, turns=tuple(_numbered(workload, turns, num_planned))))
        num_planned += len(turns)
    return tuple(shapes), cuts


def _drawn(workload: LoadtestWorkload, number: int) -> Shape:
    rng = random.Random(f"{workload.seed}/conversation/{number}")
    priority, tenant = workload.priorities.draw(rng), workload.tenants.draw(rng)
    num_turns = workload.turns.at(rng.random())
    lengths = [
        draw_pair(rng, workload.prompt_lengths, workload.output_lengths, workload.correlation)
        for _ in range(num_turns)
    ]
    thinks = [rng.expovariate(1.0) * workload.think_seconds for _ in range(num_turns)]
    turns = []
    for turn, ((num_new, num_output), think) in enumerate(zip(lengths, thinks, strict=True)):
        own = TokenRun(f"conversation/{number}/{turn}", num_new)
        new: tuple[TokenRun, ...] = (own,)
        if turn == 0:
            shared = workload.shared_prefix_tokens
            own = replace(own, num_tokens=num_new - shared)
            new = (*_system_prompt(workload, rng), TokenRun("prefix", shared), own)
        turns.append(Turn(0, think if turn else 0.0, tuple(run for run in new if run.num_tokens), num_output))
    return Shape(number, tuple(turns), priority, tenant)


def _system_prompt(workload: LoadtestWorkload, rng: random.Random) -> tuple[TokenRun, ...]:
    prompts = workload.system_prompts
    if prompts is None:
        return ()
    (chosen,) = rng.choices(range(prompts.count), prompts.weights)
    length_rng = random.Random(f"{workload.seed}/system/{chosen}/length")
    return (TokenRun(f"system/{chosen}", prompts.tokens.at(length_rng.random())),)


def _traced(workload: LoadtestWorkload, number: int) -> Shape:
    request = workload.trace[number]
    new = tuple(TokenRun(f"trace/{piece.key}", piece.num_tokens) for piece in request.prompt)
    turn = Turn(0, 0.0, new, request.answer.num_tokens)
    return Shape(number, (turn,), request.labels.priority, request.labels.tenant)


def _fitted(shape: Shape, limit: int | None) -> tuple[Shape, Cuts]:
    """The first answer keeps half of the context at most, the first prompt what is left of it; the
    conversation ends before the turn that would not fit."""
    if limit is None:
        return shape, Cuts()
    first, *rest = shape.turns
    output_tokens = min(first.output_tokens, max(1, limit // 2))
    new = _head(first.new, limit - output_tokens)
    turns = [replace(first, new=new, output_tokens=output_tokens)]
    length = turns[0].num_new_tokens + output_tokens
    for turn in rest:
        length += turn.num_new_tokens + turn.output_tokens
        if length > limit:
            break
        turns.append(turn)
    cuts = Cuts(
        int(turns[0].num_new_tokens < first.num_new_tokens),
        int(output_tokens < first.output_tokens),
        int(len(turns) < len(shape.turns)),
    )
    return replace(shape, turns=tuple(turns)), cuts


def _head(runs: tuple[TokenRun, ...], num_tokens: int) -> tuple[TokenRun, ...]:
    kept: list[TokenRun] = []
    for run in runs:
        if num_tokens > 0:
            kept.append(replace(run, num_tokens=min(run.num_tokens, num_tokens)))
            num_tokens -= kept[-1].num_tokens
    return tuple(kept)


def _numbered(workload: LoadtestWorkload, turns: tuple[Turn, ...], first: int) -> Iterator[Turn]:
    """With numbers in the run, and what the reader of each answer does."""
    for index, turn in enumerate(turns, first):
        rng = random.Random(f"{workload.seed}/conduct/{index}")
        yield replace(turn, index=index, conduct=workload.conduct.draw(rng, turn.output_tokens))
