"""`pageturner bench speculation`: a server that guesses ahead beside one that does not, in turns.

Two loads: `quote`, in which answers copy a text of their prompts word for word, greedily, as edits and code
do for the most part; and `story`, drawn at temperature 1, in which nothing comes twice but by chance. Each is
sent to both servers with the same seeds, first untimed, so that both know the prompts; what is timed is
decoding. Their tokens must be the same ones.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pageturner.service.client import Client, Completion
from pageturner.service.client.server_process import running_server
from pageturner.service.model.accuracy import packaged_text

SHOWN_WORDS, QUOTED_WORDS = 40, 110
"""Of the text that shows what is wanted, and of the one to be copied."""


@dataclass(frozen=True, slots=True)
class SpeculationLoad:
    """One load: num_requests at once, each of output_tokens."""

    kind: str
    num_requests: int
    output_tokens: int

    def requests(self) -> list[tuple[str, dict[str, Any]]]:
        """Prompts and options."""
        options: dict[str, Any] = {"max_tokens": self.output_tokens, "ignore_eos": True}
        if self.kind == "story":
            return [
                (f"Chapter {number}. Once upon a time", options | {"temperature": 1.0, "seed": number})
                for number in range(1, self.num_requests + 1)
            ]
        words = packaged_text().split()
        length = SHOWN_WORDS + QUOTED_WORDS
        step = max(1, (len(words) - length) // self.num_requests)
        pieces = [words[number * step : number * step + length] for number in range(self.num_requests)]
        return [
            (_quote(" ".join(p[:SHOWN_WORDS]), " ".join(p[SHOWN_WORDS:])), options | {"temperature": 0.0})
            for p in pieces
        ]


def _quote(shown: str, text: str) -> str:
    return f"Each text is copied word for word.\n\nText: {shown}\nCopy: {shown}\n\nText: {text}\nCopy:"


@dataclass(frozen=True, slots=True)
class SpeculationResult:
    """Output tokens/s of each round. num_drafted, num_accepted: guesses of one round, and those of them that
    came true. num_equal: answers whose tokens are the same on both servers, of num_requests."""

    load: SpeculationLoad
    plain: tuple[float, ...]
    drafting: tuple[float, ...]
    num_drafted: int
    num_accepted: int
    num_equal: int

    @property
    def ratio(self) -> float:
        """Of the medians: with guesses over without."""
        return statistics.median(self.drafting) / statistics.median(self.plain)


def measure_speculation(
    loads: Sequence[SpeculationLoad],
    rounds: int,
    arguments: Sequence[str],
    say: Callable[[str], None],
) -> tuple[SpeculationResult, ...]:
    """arguments: flags of both servers. say: told of each load. Raises PageturnerError if one fails."""
    drafting_flags = [*arguments, "--speculation-method=ngram"]
    with running_server(arguments) as plain, running_server(drafting_flags) as drafting:
        results = []
        for load in loads:
            results.append(asyncio.run(_measure(load, rounds, (plain.target, drafting.target))))
            say(f"{load.kind}, {load.num_requests} at once: ratio {results[-1].ratio:.2f}")
    return tuple(results)


async def _measure(load: SpeculationLoad, rounds: int, targets: tuple[str, str]) -> SpeculationResult:
    async with Client(targets[0]) as plain, Client(targets[1]) as drafting:
        clients = (plain, drafting)
        for client in clients:
            await _answers(client, load)
        rates: tuple[list[float], list[float]] = ([], [])
        answers: list[list[Completion]] = [[], []]
        for number in range(rounds):
            for side in (0, 1) if number % 2 else (1, 0):
                started = time.perf_counter()
                answers[side] = await _answers(clients[side], load)
                seconds = time.perf_counter() - started
                rates[side].append(sum(a.usage.num_output_tokens for a in answers[side]) / seconds)
    pairs = zip(*answers, strict=True)
    return SpeculationResult(
        load,
        tuple(rates[0]),
        tuple(rates[1]),
        num_drafted=sum(answer.usage.num_drafted_tokens for answer in answers[1]),
        num_accepted=sum(answer.usage.num_accepted_drafts for answer in answers[1]),
        num_equal=sum(_tokens(one) == _tokens(other) for one, other in pairs),
    )


async def _answers(client: Client, load: SpeculationLoad) -> list[Completion]:
    return await asyncio.gather(*(client.generate(prompt, **options) for prompt, options in load.requests()))


def _tokens(answer: Completion) -> list[int]:
    return [token.token_id for choice in answer.choices for token in choice.tokens]
