"""Searches, samples, forms, adapters and scores that are wrong, left, or too many for the pool."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from random import Random

import grpc
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status
from grpc.aio import UnaryStreamMultiCallable, UnaryUnaryMultiCallable

from chaos.asking import Asked, asked
from chaos.calling import END_SECONDS, REFUSED
from chaos.faults.kind import Fault
from chaos.site import Site
from pageturner.v1 import generation_pb2 as pb

NUM_CALLS = 40
NUM_AT_ONCE = 12
"""More of them than sequences run at once, several choices each, and fewer than may wait."""

Message = pb.GenerateResponse | pb.GenerateStreamResponse | pb.ScoreResponse

READERS: Mapping[str, Callable[[bytes], Message]] = {
    "Generate": pb.GenerateResponse.FromString,
    "GenerateStream": pb.GenerateStreamResponse.FromString,
    "Score": pb.ScoreResponse.FromString,
}
NAMED = frozenset({"INVALID_ARGUMENT", "NOT_FOUND"})
"""How what is bad is refused."""


async def of_all_kinds(site: Site, random: Random) -> None:
    """Each is answered whole, or what is bad in it is refused by name."""
    site.tolerate(REFUSED)
    await _all(site, random, may_leave=False)


async def left(site: Site, random: Random) -> None:
    """The same, of which most are cancelled or late, at any moment."""
    site.tolerate(REFUSED)
    await _all(site, random, may_leave=True)


async def _all(site: Site, random: Random, *, may_leave: bool) -> None:
    slots = asyncio.Semaphore(NUM_AT_ONCE)

    async def one() -> None:
        request = asked(site.ledger.new_id("feature"), random)
        patience = random.random() * 0.4 if may_leave and random.random() < 0.8 else END_SECONDS
        is_deadline = random.random() < 0.5
        async with slots:
            await _ask(site, request, patience, is_deadline=is_deadline)

    await asyncio.gather(*(one() for _ in range(NUM_CALLS)))


async def _ask(site: Site, request: Asked, patience: float, *, is_deadline: bool) -> None:
    """One call. patience: seconds until it is late or its client leaves."""
    site.ledger.num_requests += 1
    path = f"/pageturner.v1.GenerationService/{request.method}"
    read, timeout = READERS[request.method], patience if is_deadline else None
    messages: list[Message] = []
    code, details, trailers = "OK", "", b""
    try:
        async with asyncio.timeout(END_SECONDS if is_deadline else patience):
            if request.method == "GenerateStream":
                streamed: UnaryStreamMultiCallable[bytes, Message] = site.channel.unary_stream(
                    path, response_deserializer=read
                )
                async for message in streamed(request.body, timeout=timeout):
                    messages.append(message)
            else:
                whole: UnaryUnaryMultiCallable[bytes, Message] = site.channel.unary_unary(
                    path, response_deserializer=read
                )
                messages.append(await whole(request.body, timeout=timeout))
    except TimeoutError:
        code = "CANCELLED" if patience < END_SECONDS else "NONE"
    except grpc.aio.AioRpcError as error:
        code, details = error.code().name, error.details() or ""
        found = dict(error.trailing_metadata() or ())
        trailers = bytes(found.get("grpc-status-details-bin", b""))
    site.ledger.codes[code] += 1
    told = f"{request.method} with {request.bad or 'nothing bad'}: {code}: {details[:200]}"
    late = {"CANCELLED", "DEADLINE_EXCEEDED"} if patience < END_SECONDS else set()
    good = set() if request.bad else {"OK"}
    if code not in {*late, *good, *REFUSED, *(NAMED if request.bad else ())}:
        site.ledger.problem(f"{told}; {request.body[:400]!r}")
    if code == "INVALID_ARGUMENT" and not _fields(trailers):
        site.ledger.problem(f"{told}: no field is named")
    if code == "OK" and (wrong := _wrong(request, messages)):
        site.ledger.problem(f"{told}: {wrong}; {request.body[:400]!r}")


def _fields(trailers: bytes) -> list[str]:
    """The bad fields that a status names."""
    status, bad = Status.FromString(trailers), BadRequest()
    for detail in status.details:
        if detail.Unpack(bad):
            return [violation.field for violation in bad.field_violations if violation.field]
    return []


def _wrong(request: Asked, messages: list[Message]) -> str:
    """What is wrong with a whole answer, or nothing."""
    if not messages:
        return "no message"
    texts: dict[int, str] = {}
    ended: set[int] = set()
    for message in messages:
        match message:
            case pb.ScoreResponse():
                scores = [score.logprob for score in message.scores]
                if len(scores) != request.num_choices or not all(map(_is_logprob, scores)):
                    return f"{len(scores)} scores of {request.num_choices}: {scores[:5]}"
                return ""
            case pb.GenerateResponse():
                texts = {choice.index: choice.text for choice in message.choices}
                ended = {c.index for c in message.choices if c.finish_reason == pb.FINISH_REASON_STOP}
            case _:
                delta, end = message.delta, message.choice_finished
                if message.HasField("delta"):
                    texts[delta.index] = texts.get(delta.index, "") + delta.text
                elif message.HasField("choice_finished"):
                    texts.setdefault(end.index, "")
                    ended |= {end.index} if end.finish_reason == pb.FINISH_REASON_STOP else set()
    last = messages[-1]
    if isinstance(last, pb.GenerateStreamResponse) and not last.HasField("finished"):
        return "no Finished"
    if request.is_of_a_form:
        if len(texts) > request.num_choices:  # a search may find fewer
            return f"{len(texts)} choices of {request.num_choices}"
    elif sorted(texts) != list(range(request.num_choices)):
        return f"choices {sorted(texts)} of {request.num_choices}"
    if request.choices and (strays := {texts[index] for index in ended} - request.choices):
        return f"texts of no choice: {strays}"
    return ""


def _is_logprob(value: float) -> bool:
    return math.isfinite(value) and value <= 1e-3


FAULTS: Mapping[str, Fault] = {
    "requests of all kinds": of_all_kinds,
    "requests of all kinds, left": left,
}
