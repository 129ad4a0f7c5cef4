"""`pageturner bench resume`: one of two servers is killed in the middle of many streams.

Each request is answered once undisturbed, on the server that will be killed. Then all are sent again, and
once half of the tokens have come that server gets SIGKILL, or SIGTERM, on which it drains. What the clients
then miss or get twice shows beside the first answers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pageturner.service.bench.front import quantile
from pageturner.service.client import ChatMessage, Client, Completion, Retried, TokenEvent
from pageturner.service.client.server_process import running_server
from pageturner.service.client.values import CompletionBuilder, PromptLike
from pageturner.service.errors import PageturnerError

KILL_AT = 0.5
"""The share of all tokens that have come when the server is killed."""


@dataclass(frozen=True, slots=True)
class ResumeLoad:
    """num_streams at once, each of at most output_tokens for every choice."""

    num_streams: int = 32
    output_tokens: int = 96

    def requests(self) -> tuple[tuple[PromptLike, dict[str, Any]], ...]:
        """Prompts and options: every kind of thing that a broken stream must keep, in turns."""
        kinds: tuple[tuple[PromptLike, dict[str, Any]], ...] = (
            ("Once upon a time", {"temperature": 0.0}),
            ("The sea is", {"temperature": 0.9, "top_p": 0.95}),
            ("A list of words:", {"temperature": 1.1, "n": 3, "logprobs": 2}),
            ("She said", {"temperature": 0.8, "stop": [". ", "and the", "\n\n"]}),
            ("In the beginning", {"temperature": 0.0, "frequency_penalty": 0.6, "repetition_penalty": 1.1}),
            ([ChatMessage("user", "Tell me a story.")], {"temperature": 0.7, "n": 2, "min_tokens": 8}),
            ("Grüße aus", {"temperature": 1.2, "logprobs": 0, "ignore_eos": True}),
            ("1, 2, 3,", {"temperature": 0.0, "stop": ["12"], "include_stop": True}),
        )
        return tuple(
            (prompt, options | {"seed": number, "max_tokens": self.output_tokens})
            for number in range(self.num_streams)
            for prompt, options in (kinds[number % len(kinds)],)
        )


@dataclass(frozen=True, slots=True)
class ResumeRound:
    """One kill. Tokens are counted over all streams and choices.

    num_lost, num_twice: that were missing, or came once more than they should. num_different: streams whose
    tokens, text, log-probabilities or ends are not those of the undisturbed answer. seconds: from a stream's
    break to what came next. num_recomputed: tokens that clients brought along.
    """

    num_streams: int
    num_resumed: int
    num_tokens: int
    num_lost: int
    num_twice: int
    num_different: int
    num_recomputed: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ResumeResult:
    """All rounds."""

    load: ResumeLoad
    rounds: tuple[ResumeRound, ...]

    def figures(self) -> dict[str, float]:
        """Sums over the rounds, and the times of all streams that were resumed."""
        names = [name for name in ResumeRound.__slots__ if name != "seconds"]
        sums = {name: float(sum(getattr(each, name) for each in self.rounds)) for name in names}
        seconds = sorted(value for each in self.rounds for value in each.seconds)
        times = {f"resume_seconds_p{share}": quantile(seconds, share / 100) for share in (50, 99)}
        return sums | times if seconds else sums


@dataclass(slots=True)
class _Stream:
    """One answer under way."""

    builder: CompletionBuilder = field(default_factory=CompletionBuilder)
    broken_at: float | None = None
    seconds: list[float] = field(default_factory=list)
    num_resumes: int = 0


def measure_resume(
    load: ResumeLoad,
    rounds: int,
    arguments: Sequence[str],
    say: Callable[[str], None],
    sent: signal.Signals = signal.SIGKILL,
) -> ResumeResult:
    """arguments: flags of both servers. say: told of each round. sent: what ends the server.

    Raises PageturnerError if a stream failed, or where the servers do not promise exact tokens.
    """
    found = []
    with running_server(arguments) as survivor:
        for number in range(1, rounds + 1):
            with running_server(arguments) as victim:
                kill = Kill(victim.pid, sent)
                found.append(asyncio.run(kill_in_the_middle(load, victim.target, survivor.target, kill)))
            last = found[-1]
            counts = f"{last.num_resumed} resumed, {last.num_lost} tokens lost, {last.num_twice} twice"
            say(f"round {number}: {counts}")
    return ResumeResult(load, tuple(found))


@dataclass(slots=True)
class Kill:
    """A signal to a process, once."""

    pid: int
    sent: signal.Signals
    is_done: bool = False

    def __call__(self) -> None:
        if not self.is_done:
            self.is_done = True
            os.kill(self.pid, self.sent)


async def kill_in_the_middle(
    load: ResumeLoad,
    victim: str,
    survivor: str,
    kill: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> ResumeRound:
    """The round. victim, survivor: targets. kill: called with each token once half of them have come."""
    requests = load.requests()
    async with Client(victim) as client:
        if not (await client.server_info()).exact_resume:
            raise PageturnerError("these servers promise no exact tokens: model.deterministic is off")
        whole = await _answers(client, requests, [_Stream() for _ in requests], lambda: None)
    num_tokens = sum(map(_num_tokens, whole))
    num_left = int(num_tokens * KILL_AT)

    def count() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left <= 0:
            kill()

    streams = [_Stream() for _ in requests]

    def note(retried: Retried) -> None:
        if retried.is_resumed:
            stream = streams[int(retried.request_id)]
            if stream.broken_at is None:
                stream.broken_at = clock()

    async with Client([victim, survivor], on_retry=note) as client:
        again = await _answers(client, requests, streams, count, clock)
    pairs = list(zip(whole, again, strict=True))
    return ResumeRound(
        num_streams=len(requests),
        num_resumed=sum(stream.num_resumes > 0 for stream in streams),
        num_tokens=num_tokens,
        num_lost=sum(max(0, _num_tokens(one) - _num_tokens(other)) for one, other in pairs),
        num_twice=sum(max(0, _num_tokens(other) - _num_tokens(one)) for one, other in pairs),
        num_different=sum(one.choices != other.choices for one, other in pairs),
        num_recomputed=sum(answer.usage.num_resumed_tokens for answer in again),
        seconds=tuple(seconds for stream in streams for seconds in stream.seconds),
    )


async def _answers(
    client: Client,
    requests: Iterable[tuple[PromptLike, dict[str, Any]]],
    streams: Sequence[_Stream],
    on_token: Callable[[], None],
    clock: Callable[[], float] = time.monotonic,
) -> list[Completion]:
    """All at once. on_token: called for each token that comes."""

    async def read(number: int, prompt: PromptLike, options: dict[str, Any], stream: _Stream) -> Completion:
        async with client.stream(prompt, request_id=str(number), **options) as events:
            async for event in events:
                if stream.broken_at is not None:
                    stream.seconds.append(clock() - stream.broken_at)
                    stream.broken_at = None
                stream.builder.add(event)
                for _ in event.tokens if isinstance(event, TokenEvent) else ():
                    on_token()
            stream.num_resumes = events.num_resumes
        return stream.builder.build()

    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(read(number, prompt, options, stream))
            for number, ((prompt, options), stream) in enumerate(zip(requests, streams, strict=True))
        ]
    return [task.result() for task in tasks]


def _num_tokens(answer: Completion) -> int:
    return sum(len(choice.tokens) for choice in answer.choices)
