"""Resume on the wire, over the real engine: what is missing comes, and what was never sent is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo
from google.rpc.status_pb2 import Status
from support.real_service import TOKENIZER, RealService, real_service

from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import GenerationRequest, ResumedChoice, Resumption
from pageturner.service.errors import InvalidArgument
from pageturner.service.identity import Identity, TenantLimits
from pageturner.service.rpc.from_wire import MAX_RESUMED_CHOICES
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

TEXT = "Grüße, 日本! stop here 😀 and go on for ever and ever"


@asynccontextmanager
async def talking() -> AsyncIterator[RealService]:
    """A service whose every choice says TEXT."""
    async with real_service(num_blocks=64) as service:
        service.model.script = tuple(TOKENIZER.encode(TEXT, add_special_tokens=False))
        yield service


def request_of(**sampling: Any) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(
        request_id="r",
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[5])),
        sampling=pb.SamplingParams(**{"max_tokens": 40, **sampling}),
    )


async def sent(service: RealService, request: pb.GenerateStreamRequest) -> list[pb.GenerateStreamResponse]:
    return [message async for message in GenerationServiceStub(service.channel).GenerateStream(request)]


def text_of(messages: list[pb.GenerateStreamResponse], index: int = 0) -> str:
    return "".join(m.delta.text for m in messages if m.HasField("delta") and m.delta.index == index)


def broken(request: pb.GenerateStreamRequest, messages: list[pb.GenerateStreamResponse]) -> Any:
    """The request for what is missing behind these messages."""
    answer = PartialAnswer(request)
    for message in messages:
        answer.take(message)
    return answer.next_request()


def behind(
    request: pb.GenerateStreamRequest, whole: list[pb.GenerateStreamResponse], num_tokens: int
) -> pb.GenerateStreamRequest:
    """The request for what is missing behind so many tokens of each choice, and all that they show."""
    again: pb.GenerateStreamRequest = broken(request, whole)
    for choice in again.resume.choices:
        del choice.token_ids[num_tokens:]
        choice.ClearField("text_characters")
        choice.finished = False
    return again


async def test_accepted_carries_what_a_client_sends_to_go_on() -> None:
    async with talking() as service:
        accepted = (await sent(service, request_of(max_tokens=1)))[0].accepted
        info = await service.client.server_info()
    assert accepted.exact
    assert info.exact_resume
    server, _, prompt = accepted.fingerprint.rpartition(";")
    assert server == info.fingerprint == "weights=w;tokenizer=t;kernels=fake"
    assert prompt.startswith("prompt=")


@pytest.mark.parametrize("stop", [[], ["stop here"], ["日本!"]])
async def test_text_goes_on_within_characters_and_held_back_stops(stop: list[str]) -> None:
    async with talking() as service:
        request = request_of(stop=stop)
        whole = await sent(service, request)
        for cut in range(1, len(whole)):
            rest = await sent(service, broken(request, whole[:cut]))
            assert text_of(whole[:cut]) + text_of(rest) == text_of(whole)
            ends = [m.choice_finished for m in (*whole[:cut], *rest) if m.HasField("choice_finished")]
            assert ends == [m.choice_finished for m in whole if m.HasField("choice_finished")]
            usage, given = rest[-1].finished.usage, broken(request, whole[:cut]).resume.choices[0]
            assert usage.output_tokens == whole[-1].finished.usage.output_tokens
            assert usage.resumed_tokens == len(given.token_ids)


async def test_the_text_that_a_client_lacks_comes_first() -> None:
    async with talking() as service:
        request = request_of(max_tokens=12)
        whole = await sent(service, request)
        again = behind(request, whole, 5)
        rest = text_of(await sent(service, again))
        received = text_of(whole).removesuffix(rest)
        assert received
        assert rest
        for count in (0, 1, len(received)):
            again.resume.choices[0].text_characters = count
            assert received[:count] + text_of(await sent(service, again)) == text_of(whole)


async def test_a_choice_that_ended_is_told_its_end_once_and_computes_nothing() -> None:
    async with talking() as service:
        request = request_of(max_tokens=3, n=2)
        whole = await sent(service, request)
        before = service.model.num_forwards
        for cut in range(len(whole) - 1, len(whole) - 3, -1):
            rest = await sent(service, broken(request, whole[:cut]))
            assert [m.WhichOneof("event") for m in rest] == [
                "accepted",
                *(m.WhichOneof("event") for m in whole[cut:]),
            ]
        assert service.model.num_forwards == before
        await service.until_idle()


async def test_generate_gives_what_is_missing_and_how_every_choice_ended() -> None:
    async with talking() as service:
        request = request_of(max_tokens=4, n=2)
        whole = await sent(service, request)
        again = behind(request, whole, 1)
        again.resume.choices[1].CopyFrom(broken(request, whole).resume.choices[1])
        fields = {field.name: value for field, value in again.ListFields()}
        answer = await GenerationServiceStub(service.channel).Generate(pb.GenerateRequest(**fields))
    assert [len(choice.token_ids) for choice in answer.choices] == [3, 0]
    assert [choice.finish_reason for choice in answer.choices] == [pb.FINISH_REASON_LENGTH] * 2
    assert text_of(whole).endswith(answer.choices[0].text)
    assert (answer.usage.output_tokens, answer.usage.resumed_tokens) == (8, 5)


Change = Callable[[pb.GenerateStreamRequest], object]


def setting(path: str, value: object) -> Change:
    def change(request: pb.GenerateStreamRequest) -> None:
        *parents, name = path.split(".")
        message: Any = request
        for parent in parents:
            message = getattr(message, parent)
        setattr(message, name, value)

    return change


def choices(*received: pb.ReceivedChoice) -> Change:
    def change(request: pb.GenerateStreamRequest) -> None:
        del request.resume.choices[:]
        request.resume.choices.extend(received)

    return change


REFUSED: dict[str, tuple[Change, str]] = {
    "another seed": (setting("sampling.seed", 99), "resume.seed"),
    "another bound": (setting("resume.max_tokens", 7), "resume.max_tokens"),
    "more than the bound": (choices(pb.ReceivedChoice(token_ids=[66] * 13)), "resume.choices[0].token_ids"),
    "more than the context": (choices(pb.ReceivedChoice(token_ids=[66] * 64)), "resume.choices[0].token_ids"),
    "no token": (
        choices(pb.ReceivedChoice(token_ids=[66, 1 << 31])),
        "resume.choices[0].token_ids[1]",
    ),
    "no choice": (choices(), "resume.choices"),
    "a choice too many": (choices(pb.ReceivedChoice(), pb.ReceivedChoice()), "resume.choices"),
    "far too many choices": (
        choices(*[pb.ReceivedChoice()] * (MAX_RESUMED_CHOICES + 1)),
        "resume.choices",
    ),
    "tokens behind a stop": (
        choices(pb.ReceivedChoice(token_ids=TOKENIZER.encode("a 日本! b", add_special_tokens=False))),
        "resume.choices[0].token_ids[",
    ),
    "an end that is none": (
        choices(pb.ReceivedChoice(token_ids=[66], finished=True)),
        "resume.choices[0].finished",
    ),
    "more text than tokens show": (
        choices(pb.ReceivedChoice(token_ids=[66], text_characters=2)),
        "resume.choices[0].text_characters",
    ),
    "a fingerprint without end": (setting("resume.fingerprint", "a=b;" * 1000), "resume.fingerprint"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_no_stream_can_have_sent_is_refused_by_its_path(name: str) -> None:
    change, path = REFUSED[name]
    async with talking() as service:
        request = request_of(max_tokens=12, stop=["日本!"])
        again = behind(request, await sent(service, request), 3)
        change(again)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sent(service, again)
        await service.until_idle()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    bad = BadRequest()
    assert any(detail.Unpack(bad) for detail in status_of(caught.value).details)
    assert bad.field_violations[0].field.startswith(path)


def status_of(error: grpc.aio.AioRpcError) -> Status:
    (packed,) = [value for key, value in error.trailing_metadata() or () if key == "grpc-status-details-bin"]
    assert isinstance(packed, bytes)
    return Status.FromString(packed)


@pytest.mark.parametrize(
    ("part", "allow_inexact", "differing"),
    [
        ("weights=other;tokenizer=t;kernels=fake", True, "weights"),
        ("weights=w;tokenizer=t;kernels=cuda", False, "kernels"),
        ("weights=w;tokenizer=t;kernels=cuda", True, None),
        ("weights=w;tokenizer=t", False, "kernels"),
        ("weights=w;tokenizer=t;kernels=fake;machine=m", False, "machine"),
        ("", False, "fingerprint"),
        ("weights", False, "fingerprint"),
    ],
)
async def test_a_server_where_other_things_hold_names_them(
    part: str, allow_inexact: bool, differing: str | None
) -> None:
    async with talking() as service:
        request = request_of(max_tokens=12)
        whole = await sent(service, request)
        again = behind(request, whole, 3)
        prompt = again.resume.fingerprint.rpartition(";")[2]
        again.resume.fingerprint = f"{part};{prompt}" if part else ""
        again.resume.allow_inexact = allow_inexact
        if differing is None:
            assert text_of(whole).endswith(text_of(await sent(service, again)))
            return
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await sent(service, again)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    info = ErrorInfo()
    assert any(detail.Unpack(info) for detail in status_of(caught.value).details)
    assert (info.reason, info.metadata["differing"]) == ("NOT_RESUMABLE", differing)


async def test_another_prompt_is_told_from_the_one_that_was_answered() -> None:
    async with talking() as service:
        request = request_of(max_tokens=12)
        again = behind(request, await sent(service, request), 3)
        again.prompt.token_ids.ids[:] = [6]
        with pytest.raises(grpc.aio.AioRpcError, match="other tokens here") as caught:
            await sent(service, again)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_resumed_answer_that_is_refused_is_on_its_tenants_account() -> None:
    """Its tokens were read by the engine, which all wait for."""
    caller = Identity("alice", limits=TenantLimits(tokens_per_minute=600, max_queued_tokens=500))
    async with talking() as service:
        accepted = (await sent(service, request_of(max_tokens=1)))[0].accepted
        known = service.model.script[:20]
        request = GenerationRequest(
            (5,),
            SamplingParams(max_tokens=40),
            identity=caller,
            resume=Resumption(accepted.seed, accepted.fingerprint, (ResumedChoice(known, 1000),)),
        )
        with pytest.raises(InvalidArgument, match="text_characters"):
            await service.engine.submit(request)
        (report,) = (each for each in service.engine.tenants(9).tenants if each.tenant == "alice")
        assert (report.num_requests, report.num_queued_tokens) == (0, 0)
        assert report.tokens_left is not None
        assert 570 < report.tokens_left < 600
