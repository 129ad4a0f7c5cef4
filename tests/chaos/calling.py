"""One streamed request, held to the contract of its stream by the client that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import grpc

from chaos.ledger import Ledger
from pageturner.v1 import generation_pb2 as pb

if TYPE_CHECKING:
    from pageturner.v1.generation_pb2_grpc import GenerationServiceAsyncStub

END_SECONDS = 90.0
"""A stream that has no end after so long has none."""

OK = frozenset({"OK"})
REFUSED = frozenset({"RESOURCE_EXHAUSTED"})
DEADLINE = frozenset({"DEADLINE_EXCEEDED"})
LEFT = frozenset({"CANCELLED"})
GONE = frozenset({"UNAVAILABLE"})
ABORTED = frozenset({"ABORTED"})
UNPROVEN = frozenset({"UNAUTHENTICATED"})


def request(
    request_id: str, prompt: tuple[int, ...], *, max_tokens: int, seed: int = 1, n: int = 1
) -> pb.GenerateStreamRequest:
    """A sampled answer that only its length ends."""
    return pb.GenerateStreamRequest(
        request_id=request_id,
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=prompt)),
        sampling=pb.SamplingParams(max_tokens=max_tokens, seed=seed, n=n, ignore_eos=True),
    )


@dataclass
class Answer:
    """What came of a stream. code: its status. tokens: by choice."""

    code: str = ""
    details: str = ""
    is_accepted: bool = False
    is_finished: bool = False
    num_messages: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    num_usage_tokens: int = 0


Metadata = tuple[tuple[str, str], ...]
Reading = Callable[[Answer], Awaitable[bool | None]]
"""Called after each message; True leaves the stream."""


async def stream(
    stub: GenerationServiceAsyncStub,
    ledger: Ledger,
    asked: pb.GenerateStreamRequest,
    may_end: frozenset[str] = OK,
    *,
    metadata: Metadata = (),
    timeout: float | None = None,  # noqa: ASYNC109  # the call's deadline, which the server obeys
    on_message: Reading | None = None,
) -> Answer:
    """Read a stream to its end. What breaks the contract, or ends as it may not, is a problem."""
    answer = Answer()
    ledger.num_requests += 1
    finished_choices: set[int] = set()
    broken = ""
    call = stub.GenerateStream(asked, timeout=timeout, metadata=metadata)
    try:
        async with asyncio.timeout(END_SECONDS):
            async for message in call:
                broken = broken or _look(message, answer, finished_choices)
                if on_message is not None and await on_message(answer):
                    call.cancel()
            answer.code = (await call.code()).name
    except TimeoutError:
        call.cancel()
        answer.code = "NONE"
    except asyncio.CancelledError:
        call.cancel()
        if asyncio.current_task().cancelling():  # type: ignore[union-attr] # a coroutine runs in a task
            raise
        answer.code = "CANCELLED"
    except grpc.aio.AioRpcError as error:
        answer.code, answer.details = error.code().name, error.details() or ""
    ledger.codes[answer.code] += 1
    ledger.num_accepted += answer.is_accepted
    name = asked.request_id
    if answer.code == "NONE":
        ledger.lost(f"{name}: no end after {END_SECONDS:g} s")
    elif answer.code == "OK" and not answer.is_finished:
        ledger.lost(f"{name}: status OK without a Finished")
    elif answer.code not in may_end:
        ledger.problem(f"{name}: ended {answer.code} ({answer.details}), not {'|'.join(sorted(may_end))}")
    if broken:
        ledger.problem(f"{name}: {broken}")
    if answer.is_finished and answer.num_usage_tokens != sum(map(len, answer.tokens.values())):
        ledger.problem(f"{name}: {answer.num_usage_tokens} tokens of usage, {answer.tokens} seen")
    return answer


def _look(message: pb.GenerateStreamResponse, answer: Answer, finished_choices: set[int]) -> str:
    """Take a message; what is wrong with it, or nothing."""
    wrong = ""
    if message.sequence_number != answer.num_messages:
        wrong = f"message {message.sequence_number} came as number {answer.num_messages}"
    elif answer.is_finished:
        wrong = "a message after Finished"
    answer.num_messages += 1
    kind = message.WhichOneof("event")
    if kind == "accepted":
        wrong = wrong or ("accepted twice" if answer.is_accepted else "")
        answer.is_accepted = True
    elif not answer.is_accepted:
        wrong = wrong or f"{kind} before Accepted"
    if kind == "delta":
        if message.delta.index in finished_choices:
            wrong = wrong or "a token of a choice that had ended"
        answer.tokens.setdefault(message.delta.index, []).extend(message.delta.token_ids)
    elif kind == "choice_finished":
        finished_choices.add(message.choice_finished.index)
    elif kind == "finished":
        answer.is_finished = True
        answer.num_usage_tokens = message.finished.usage.output_tokens
    return wrong
