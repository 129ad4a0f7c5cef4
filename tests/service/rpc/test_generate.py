"""Generate and GenerateStream over a scripted engine: what a client gets, and in which order."""

from __future__ import annotations

import asyncio

import pytest
from support.fake_engine import DRAWN_SEED, PAUSE, FakeEngine, Step, accepted, finished
from support.serving import serving

from pageturner.service.client import AcceptedEvent, ChoiceFinishedEvent, TokenEvent
from pageturner.service.core.outputs import (
    FinishReason,
    SampledToken,
    TokenLogprob,
)
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import AbortOutcome, ChatMessage, GenerationRequest
from pageturner.service.errors import (
    DuplicateRequest,
    EngineDead,
    ModelNotFound,
    NonFiniteLogits,
    PageturnerError,
    QueueFull,
    RequestAborted,
    SlowConsumer,
)
from pageturner.service.rpc.status import UnknownStatus
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub


def _request(text: str, request_id: str = "r", **sampling: object) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(
        request_id=request_id,
        prompt=pb.Prompt(text=text),
        sampling=pb.SamplingParams(**sampling),  # type: ignore[arg-type] # any field of the message
    )


async def test_a_stream_is_accepted_grows_and_finishes_in_order() -> None:
    async with serving(FakeEngine()) as served:
        call = GenerationServiceStub(served.channel).GenerateStream(_request("ab", max_tokens=3, seed=7))
        messages = [message async for message in call]
    assert [message.WhichOneof("event") for message in messages] == [
        "accepted", "delta", "delta", "delta", "choice_finished", "finished",
    ]  # fmt: skip
    assert [message.sequence_number for message in messages] == list(range(6))
    assert {message.request_id for message in messages} == {"r"}
    assert messages[0].accepted == pb.Accepted(seed=7, prompt_tokens=2, max_tokens=3)
    assert "".join(message.delta.text for message in messages) == "aba"
    assert [list(message.delta.token_ids) for message in messages[1:4]] == [[97], [98], [97]]
    assert messages[4].choice_finished == pb.ChoiceFinished(finish_reason=pb.FINISH_REASON_LENGTH)
    assert messages[5].finished == pb.Finished(
        usage=pb.Usage(prompt_tokens=2, cached_prompt_tokens=1, output_tokens=3),
        timings=pb.Timings(
            queue_seconds=0.25,
            prefill_seconds=0.5,
            decode_seconds=2.0,
            preemptions=pb.Preemptions(swaps=3, recomputes=2, tail_reclaims=1),
        ),
        policies={"queue": "fcfs", "admission": "full-prompt"},
    )


async def test_unary_gives_what_the_stream_gives() -> None:
    async with serving(FakeEngine()) as served:
        stub = GenerationServiceStub(served.channel)
        request = _request("abcd", n=3, max_tokens=9, stop=["d"], logprobs=2)
        messages = [message async for message in stub.GenerateStream(request)]
        whole = await stub.Generate(pb.GenerateRequest.FromString(request.SerializeToString()))
    for choice in whole.choices:
        deltas = [m.delta for m in messages if m.HasField("delta") and m.delta.index == choice.index]
        assert choice.text == "".join(delta.text for delta in deltas) == "abc"
        assert list(choice.token_ids) == [i for delta in deltas for i in delta.token_ids]
        assert list(choice.logprobs) == [p for delta in deltas for p in delta.logprobs]
        assert (choice.finish_reason, choice.stop_string) == (pb.FINISH_REASON_STOP, "d")
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert whole.usage == messages[-1].finished.usage
    assert whole.timings == messages[-1].finished.timings
    assert whole.policies == messages[-1].finished.policies
    assert (whole.request_id, whole.seed) == ("r", DRAWN_SEED)


async def test_several_tokens_in_one_event_are_one_message_with_all_logprobs() -> None:
    tokens = (
        SampledToken(5, -0.25, (TokenLogprob(5, -0.25), TokenLogprob(9, -2.0))),
        SampledToken(6, -0.5, (TokenLogprob(9, -0.125), TokenLogprob(6, -0.5))),
    )

    def script(request: GenerationRequest, token_ids: tuple[int, ...]) -> list[Step]:
        return [
            accepted(request, token_ids),
            TokenEvent(request.request_id, 0, tokens, "é"),
            ChoiceFinishedEvent(request.request_id, 0, FinishReason.STOP, matched=6),
            finished(request, 1, 2),
        ]

    async with serving(FakeEngine(script)) as served:
        call = GenerationServiceStub(served.channel).GenerateStream(_request("x", logprobs=2))
        messages = [message async for message in call]
    delta = messages[1].delta
    assert (delta.text, list(delta.token_ids)) == ("é", [5, 6])
    assert [p.chosen.token_id for p in delta.logprobs] == [5, 6]
    assert [[(t.token_id, t.logprob) for t in p.top] for p in delta.logprobs] == [
        [(5, -0.25), (9, -2.0)],
        [(9, -0.125), (6, -0.5)],
    ]
    assert messages[2].choice_finished.WhichOneof("matched") == "stop_token_id"
    assert messages[2].choice_finished.stop_token_id == 6


async def test_the_engine_is_told_what_the_request_says() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        await served.client.generate(
            "x",
            request_id="mine",
            model="echo",
            priority=-3,
            tenant="t",
            cache_salt="s",
            bypass_prefix_cache=True,
            timeout_seconds=60,
            temperature=0.0,
            top_k=0,
            top_p=0.0,
            min_p=0.25,
            repetition_penalty=1.5,
            presence_penalty=-1.0,
            frequency_penalty=2.0,
            logit_bias={9: -1.5, 3: 2.0},
            seed=2**64 - 1,
            n=2,
            max_tokens=5,
            min_tokens=1,
            stop=["a", "b"],
            stop_token_ids=[4, 2],
            ignore_eos=True,
            include_stop=True,
            logprobs=0,
        )
        await served.client.generate((97, 98))
        await served.client.generate((ChatMessage("system", "be brief"), ChatMessage("user", "")))
    first, second, third = engine.requests
    assert first.params == SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=0.0,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=-1.0,
        frequency_penalty=2.0,
        logit_bias=((3, 2.0), (9, -1.5)),
        seed=2**64 - 1,
        n=2,
        max_tokens=5,
        min_tokens=1,
        stop=("a", "b"),
        stop_token_ids=(4, 2),
        ignore_eos=True,
        include_stop=True,
        logprobs=0,
    )
    assert (first.request_id, first.model, first.priority, first.tenant) == ("mine", "echo", -3, "t")
    assert (first.cache_salt, first.bypass_prefix_cache) == ("s", True)
    assert first.deadline_seconds is not None
    assert 59 < first.deadline_seconds < 61
    assert (second.prompt, second.params, second.deadline_seconds) == ((97, 98), SamplingParams(), None)
    assert third.prompt == (ChatMessage("system", "be brief"), ChatMessage("user", ""))
    assert second.request_id != third.request_id != ""


async def test_64_streams_at_once_each_get_their_own() -> None:
    async with serving(FakeEngine()) as served:
        stub = GenerationServiceStub(served.channel)

        async def read(number: int) -> tuple[list[int], str]:
            request = _request(f"<{number}>", request_id=f"r{number}", max_tokens=50)
            messages = [message async for message in stub.GenerateStream(request)]
            assert {message.request_id for message in messages} == {f"r{number}"}
            return [m.sequence_number for m in messages], "".join(m.delta.text for m in messages)

        results = await asyncio.gather(*map(read, range(64)))
    for number, (sequence, text) in enumerate(results):
        assert sequence == list(range(53))
        assert text == (f"<{number}>" * 50)[:50]


async def test_an_id_in_use_is_refused_and_its_owner_unharmed() -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), PAUSE, finished(s, 1, 0)])
    async with serving(engine) as served:
        first = asyncio.create_task(served.client.generate("x", request_id="twin"))
        await engine.reached("paused twin")
        for _ in range(2):
            with pytest.raises(DuplicateRequest) as caught:
                await served.client.generate("y", request_id="twin")
            assert caught.value.request_id == "twin"
        engine.resume("twin")
        assert (await first).request_id == "twin"
        again = asyncio.create_task(served.client.generate("y", request_id="twin"))
        await engine.reached("paused twin")
        engine.resume("twin")
        assert (await again).request_id == "twin", "free again once its owner ended"
    assert engine.aborts == []


async def test_an_unknown_model_is_not_found() -> None:
    async with serving(FakeEngine()) as served:
        with pytest.raises(ModelNotFound, match=r"'gpt'.*'echo'"):
            await served.client.generate("x", model="gpt")
        with pytest.raises(ModelNotFound):
            await served.client.tokenize("x", model="gpt")
        with pytest.raises(ModelNotFound):
            await served.client.detokenize([1], model="gpt")


async def test_vllm_18826_13395_a_full_queue_refuses_at_once_and_says_when_to_come_back() -> None:
    engine = FakeEngine()
    engine.refusal = QueueFull("64 requests wait already", 1.5)
    async with serving(engine) as served:
        with pytest.raises(QueueFull, match="64 requests") as caught:
            await served.client.generate("x")
        assert caught.value.retry_after_seconds == 1.5
        with pytest.raises(QueueFull):
            _ = [item async for item in served.client.stream("x")]
        engine.refusal = None
        assert (await served.client.generate("x")).text == "xxxx"


@pytest.mark.parametrize(
    "error",
    [NonFiniteLogits("NaN logits"), SlowConsumer("not read for 30 s"), RequestAborted("gone")],
    ids=lambda error: type(error).__name__,
)
async def test_an_error_of_a_request_ends_its_call_with_its_status(error: PageturnerError) -> None:
    def script(request: GenerationRequest, token_ids: tuple[int, ...]) -> list[Step]:
        return [
            accepted(request, token_ids),
            TokenEvent(request.request_id, 0, (SampledToken(97),), "a"),
            ChoiceFinishedEvent(request.request_id, 0, FinishReason.ABORTED),
            error,
        ]

    async with serving(FakeEngine(script)) as served:
        stream = served.client.stream("x")
        for kind in (AcceptedEvent, TokenEvent, ChoiceFinishedEvent):
            assert isinstance(await anext(stream), kind), "what came before the error is delivered"
        with pytest.raises(type(error), match=str(error)):
            await anext(stream)
        with pytest.raises(type(error), match=str(error)):
            await served.client.generate("x")


async def test_a_fault_of_ours_leaks_no_text_and_is_in_the_log() -> None:
    secret = RuntimeError("/etc/secret is not readable")
    engine = FakeEngine(lambda s, t: [accepted(s, t), secret])
    async with serving(engine) as served:
        with pytest.raises(UnknownStatus) as caught:
            await served.client.generate("x", request_id="poor")
        assert caught.value.code == "INTERNAL"
        assert "secret" not in str(caught.value)
        assert "Traceback" not in str(caught.value)
        [entry] = [entry for entry in served.log.entries if entry["event"] == "rpc_error"]
        assert entry["exc_info"] is secret
        assert entry["request_id"] == "poor"
        engine.script = lambda s, t: [accepted(s, t), finished(s, 1, 0)]
        await served.client.generate("x")


async def test_a_crashed_engine_ends_every_stream_with_a_status_that_leaks_nothing() -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), PAUSE])
    async with serving(engine) as served:
        calls = [asyncio.create_task(served.client.generate("x", request_id=f"r{i}")) for i in range(8)]
        for i in range(8):
            await engine.reached(f"paused r{i}")
        engine.die()
        for call in calls:
            with pytest.raises(EngineDead) as caught:
                await call
            assert "secret" not in str(caught.value)


async def test_abort_tells_what_became_of_each_id() -> None:
    engine = FakeEngine(lambda s, t: [accepted(s, t), PAUSE, finished(s, 1, 0)])
    async with serving(engine) as served:
        done = asyncio.create_task(served.client.generate("x", request_id="done"))
        await engine.reached("paused done")
        engine.resume("done")
        await done
        live = asyncio.create_task(served.client.generate("x", request_id="live"))
        await engine.reached("paused live")
        response = await GenerationServiceStub(served.channel).Abort(
            pb.AbortRequest(request_ids=["live", "done", "never", "live"])
        )
        assert [(result.request_id, result.outcome) for result in response.results] == [
            ("live", pb.ABORT_OUTCOME_ABORTED),
            ("done", pb.ABORT_OUTCOME_ALREADY_FINISHED),
            ("never", pb.ABORT_OUTCOME_NOT_FOUND),
            ("live", pb.ABORT_OUTCOME_ALREADY_FINISHED),
        ]
        with pytest.raises(RequestAborted):
            await live


async def test_lmcache_4185_aborting_an_unknown_id_changes_no_request() -> None:
    async with serving(FakeEngine()) as served:
        assert await served.client.abort("x", "") == {
            "x": AbortOutcome.NOT_FOUND,
            "": AbortOutcome.NOT_FOUND,
        }
        assert (await served.client.generate("ok", max_tokens=2)).text == "ok"


async def test_tokenize_and_detokenize() -> None:
    async with serving(FakeEngine()) as served:
        client = served.client
        assert await client.tokenize("^né") == (94, 110, 233)
        assert await client.tokenize("^né", add_special_tokens=False) == (110, 233)
        assert await client.tokenize((5, 6)) == (5, 6)
        assert await client.tokenize((ChatMessage("u", "a"),)) == tuple(map(ord, "<u>a"))
        assert await client.detokenize((110, 233)) == "né"
        assert await client.detokenize(()) == ""
