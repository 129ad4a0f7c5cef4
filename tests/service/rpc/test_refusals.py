"""Bad input of every kind: INVALID_ARGUMENT, and the path of the field in the request."""

from __future__ import annotations

import math
import tracemalloc
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest
from grpc_status import rpc_status
from support.fake_engine import MAX_MODEL_LEN, MAX_N, VOCAB_SIZE, FakeEngine, accepted
from support.serving import serving

from pageturner.service.engine.api import ChatMessage, ChatPrompt, Prompt, TextPrompt
from pageturner.service.errors import InvalidArgument
from pageturner.v1 import admin_pb2
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.admin_pb2_grpc import AdminServiceStub
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

LONG = "x" * 257

BAD_SAMPLING: tuple[tuple[dict[str, Any], str], ...] = (
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": -0.1}, "temperature"),
    ({"top_p": math.nan}, "top_p"),
    ({"top_p": 1.1}, "top_p"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": 2.0}, "min_p"),
    ({"repetition_penalty": 0.0}, "repetition_penalty"),
    ({"repetition_penalty": math.nan}, "repetition_penalty"),
    ({"presence_penalty": 2.5}, "presence_penalty"),
    ({"frequency_penalty": -2.5}, "frequency_penalty"),
    ({"logit_bias": {VOCAB_SIZE: 1.0}}, f"logit_bias[{VOCAB_SIZE}]"),
    ({"logit_bias": {5: math.nan}}, "logit_bias[5]"),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias"),
    ({"n": 0}, "n"),
    ({"n": MAX_N + 1}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
    ({"stop": ["ok", ""]}, "stop[1]"),
    ({"stop": ["x"] * 17}, "stop"),
    ({"stop_token_ids": [1, VOCAB_SIZE]}, "stop_token_ids[1]"),
    ({"stop": ["ok", "x" * 1025]}, "stop[1]"),
    ({"stop_token_ids": [1] * 1025}, "stop_token_ids"),
    ({"logprobs": 21}, "logprobs"),
)

BAD_REQUESTS: tuple[tuple[pb.GenerateRequest, str], ...] = (
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(prompt=pb.Prompt()), "prompt"),
    (pb.GenerateRequest(prompt=pb.Prompt(text="")), "prompt.text"),
    (pb.GenerateRequest(prompt=pb.Prompt(text="x" * MAX_MODEL_LEN)), "prompt.text"),
    (pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds())), "prompt.token_ids.ids"),
    (
        pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[7] * MAX_MODEL_LEN))),
        "prompt.token_ids.ids",
    ),
    (
        pb.GenerateRequest(prompt=pb.Prompt(token_ids=pb.TokenIds(ids=[1, 2, VOCAB_SIZE]))),
        "prompt.token_ids.ids[2]",
    ),
    (pb.GenerateRequest(prompt=pb.Prompt(chat=pb.Chat())), "prompt.chat.messages"),
    (
        pb.GenerateRequest(
            prompt=pb.Prompt(chat=pb.Chat(messages=[pb.ChatMessage(role="user"), pb.ChatMessage()]))
        ),
        "prompt.chat.messages[1].role",
    ),
    (
        pb.GenerateRequest(
            prompt=pb.Prompt(
                chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * MAX_MODEL_LEN)])
            )
        ),
        "prompt.chat.messages",
    ),
    (pb.GenerateRequest(prompt=pb.Prompt(text="x"), request_id=LONG), "request_id"),
    (pb.GenerateRequest(prompt=pb.Prompt(text="x"), model=LONG), "model"),
    (pb.GenerateRequest(prompt=pb.Prompt(text="x"), tenant=LONG), "tenant"),
    (pb.GenerateRequest(prompt=pb.Prompt(text="x"), cache_salt=LONG), "cache_salt"),
)


def _violations(error: grpc.aio.AioRpcError) -> list[str]:
    """As a client in any language reads them."""
    status = rpc_status.from_call(  # type: ignore[no-untyped-call] # grpcio-status has no types
        _SyncView(error)
    )
    bad = BadRequest()
    assert any(detail.Unpack(bad) for detail in status.details)
    return [violation.field for violation in bad.field_violations]


class _SyncView:
    """rpc_status.from_call wants the accessors of a call, which an AioRpcError almost has."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        self.code = error.code
        self.details = error.details
        self.trailing_metadata = lambda: tuple(error.trailing_metadata() or ())


async def test_every_bad_sampling_value_is_refused_by_its_path() -> None:
    """Unary and streamed; the engine aborts nothing, as nothing began."""
    engine = FakeEngine()
    async with serving(engine) as served:
        stub = GenerationServiceStub(served.channel)
        for values, path in BAD_SAMPLING:
            prompt, sampling = pb.Prompt(text="x"), pb.SamplingParams(**values)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(pb.GenerateRequest(prompt=prompt, sampling=sampling))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert _violations(caught.value) == [f"sampling.{path}"]
            assert f"sampling.{path}" in str(caught.value.details())
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                _ = [m async for m in stub.GenerateStream(
                    pb.GenerateStreamRequest(prompt=prompt, sampling=sampling)
                )]  # fmt: skip
            assert _violations(caught.value) == [f"sampling.{path}"]
        assert (await stub.Generate(pb.GenerateRequest(prompt=prompt))).choices[0].text == "xxxx"
    assert engine.aborts == []


@pytest.mark.parametrize(("request_", "path"), BAD_REQUESTS, ids=[path for _, path in BAD_REQUESTS])
async def test_every_bad_request_is_refused_by_its_path(request_: pb.GenerateRequest, path: str) -> None:
    async with serving(FakeEngine()) as served:
        stub = GenerationServiceStub(served.channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request_)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert _violations(caught.value) == [path]


async def test_a_number_costs_no_memory_before_it_is_checked() -> None:
    """Of n alone, 2^32 - 1 is six bytes on the wire; room for as many choices was the end of the server."""
    request = pb.GenerateRequest(prompt=pb.Prompt(text="x"), sampling=pb.SamplingParams(n=1_000_000))
    async with serving(FakeEngine()) as served:
        stub = GenerationServiceStub(served.channel)
        tracemalloc.start()
        try:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert _violations(caught.value) == ["sampling.n"]
    assert peak < 10_000_000


@pytest.mark.parametrize("bad", [b"\xff\xff\xff", b"\x1a\x04\x0a\x02\xc3\x28"], ids=["corrupt", "no UTF-8"])
async def test_bytes_that_are_no_message_are_refused_as_such(bad: bytes) -> None:
    async with serving(FakeEngine()) as served:
        unary: Any = served.channel.unary_unary("/pageturner.v1.GenerationService/Generate")
        stream: Any = served.channel.unary_stream("/pageturner.v1.GenerationService/GenerateStream")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await unary(bad)
        with pytest.raises(grpc.aio.AioRpcError) as streamed:
            _ = [message async for message in stream(bad)]
        reflection: Any = served.channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        )
        with pytest.raises(grpc.aio.AioRpcError) as reflected:
            _ = [message async for message in reflection(iter([b"\xff\xff\xff"]))]
        for error in (caught.value, streamed.value, reflected.value):
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert _violations(error) == ["request"]
            assert "protobuf" not in str(error.details())
        assert [entry["code"] for entry in served.log.entries if entry["event"] == "rpc"] == [
            "INVALID_ARGUMENT", "INVALID_ARGUMENT", "INVALID_ARGUMENT",
        ]  # fmt: skip


async def test_the_python_client_raises_what_the_server_raised() -> None:
    async with serving(FakeEngine()) as served:
        with pytest.raises(InvalidArgument) as caught:
            await served.client.generate("x", top_p=2.0)
        assert (caught.value.field, caught.value.reason) == ("sampling.top_p", "2.0 is not in [0, 1]")
        with pytest.raises(InvalidArgument) as caught:
            _ = [item async for item in served.client.chat([ChatMessage("", "hi")])]
        assert caught.value.field == "prompt.chat.messages[0].role"


async def test_the_other_methods_check_their_input_too() -> None:
    async with serving(FakeEngine(), max_abort_ids=3, min_watch_seconds=0.5, max_watch_seconds=2.0) as served:
        client = served.client
        cases = (
            (client.tokenize(""), "prompt.text"),
            (client.tokenize((1, VOCAB_SIZE)), "prompt.token_ids.ids[1]"),
            (client.detokenize((VOCAB_SIZE,)), "token_ids[0]"),
            (client.abort(), "request_ids"),
            (client.abort("a", "b", "c", "d"), "request_ids"),
        )
        for call, path in cases:
            with pytest.raises(InvalidArgument) as caught:
                await call
            assert caught.value.field == path
        stub = AdminServiceStub(served.channel)
        for interval in (0.0, 0.4, 2.1, -1.0, math.nan, math.inf):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                _ = [
                    load
                    async for load in stub.WatchLoad(admin_pb2.WatchLoadRequest(interval_seconds=interval))
                ]
            assert _violations(refused.value) == ["interval_seconds"]


@pytest.mark.parametrize(
    ("prompt", "named", "path"),
    [
        ("x", "top_p", "sampling.top_p"),
        ("x", "stop[3]", "sampling.stop[3]"),
        ("x", "prompt", "prompt.text"),
        ((7,), "prompt", "prompt.token_ids.ids"),
        ((ChatMessage("user", "x"),), "prompt", "prompt.chat.messages"),
        ("x", "prompt.text", "prompt.text"),
        ((7,), "prompt.token_ids[2]", "prompt.token_ids.ids[2]"),
        ((ChatMessage("user", "x"),), "prompt.chat", "prompt.chat.messages"),
        (TextPrompt("x", parse_special=False), "prompt", "prompt.text"),
        (ChatPrompt((ChatMessage("user", "x"),)), "prompt", "prompt.chat.messages"),
        (
            ChatPrompt((ChatMessage("user", "x"),), {"a": 1}),
            "prompt.chat.template_variables[a]",
            "prompt.chat.template_variables[a]",
        ),
        ("x", "tenant", "tenant"),
    ],
)
async def test_what_the_engine_names_becomes_a_path_of_the_request(
    prompt: Prompt, named: str, path: str
) -> None:
    """At submit, and when it is only found out later."""
    engine = FakeEngine(lambda s, t: [accepted(s, t), InvalidArgument(named, "no")])
    async with serving(engine) as served:
        for refusal in (InvalidArgument(named, "no"), None):
            engine.refusal = refusal
            with pytest.raises(InvalidArgument) as caught:
                await served.client.generate(prompt)
            assert caught.value.field == path
