"""Beam searches over the wire: the answers of the search, settled text early, refusals by field."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from support.beam_reference import expected_answers
from support.fake_model import Stop
from support.real_service import RealService, real_service

from pageturner.service.client import (
    BeamSearch,
    ChoiceFinishedEvent,
    Completion,
    EarlyStopping,
    FinishedEvent,
    FinishReason,
    StreamEvent,
    SyncClient,
    TokenEvent,
)
from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.api import GenerationRequest
from pageturner.service.errors import InvalidArgument, RequestAborted
from pageturner.service.identity import Identity, TenantLimits
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

PROMPT = (0, 1, 2, 0)
SEARCH = BeamSearch(3, 0.5, EarlyStopping.NEVER)
OPTIONS: dict[str, Any] = {"max_tokens": 9, "stop_token_ids": (5,), "n": 3}
ANSWERS = expected_answers(PROMPT, SEARCH, Stop(9, 0, (5,)))


def assert_expected(completion: Completion) -> None:
    assert [[token.token_id for token in choice.tokens] for choice in completion.choices] == [
        tokens for tokens, _ in ANSWERS
    ]
    assert [choice.score for choice in completion.choices] == [score for _, score in ANSWERS]
    assert completion.usage.num_output_tokens == sum(len(tokens) for tokens, _ in ANSWERS)


async def test_whole_answers_come_best_first_with_their_scores() -> None:
    async with real_service() as service:
        completion = await service.client.generate(PROMPT, beam_search=SEARCH, **OPTIONS)
        assert_expected(completion)
        for choice, (tokens, _) in zip(completion.choices, ANSWERS, strict=True):
            is_stopped = tokens[-1] == 5
            assert choice.reason is (FinishReason.STOP if is_stopped else FinishReason.LENGTH)
            assert choice.matched == (5 if is_stopped else None)
        load = await service.client.load()
        assert load.num_beam_selections_total > 0
        assert 0 < load.num_beam_blocks_total < load.num_beam_table_entries_total


async def test_the_client_without_a_loop_takes_a_mapping() -> None:
    async with real_service() as service:

        def ask() -> Completion:
            with SyncClient(service.target) as client:
                return client.generate(
                    PROMPT,
                    beam_search={"width": 3, "length_penalty": 0.5, "early_stopping": "never"},
                    **OPTIONS,
                )

        assert_expected(await asyncio.to_thread(ask))


async def test_a_stream_tells_early_what_all_answers_begin_with() -> None:
    async with real_service() as service:
        events = [e async for e in service.client.stream(PROMPT, beam_search=SEARCH, **OPTIONS)]
        told: dict[int, list[int]] = {0: [], 1: [], 2: []}
        ends = [event for event in events if isinstance(event, ChoiceFinishedEvent)]
        for event in events:
            if isinstance(event, TokenEvent):
                told[event.index] += [token.token_id for token in event.tokens]
        assert [told[index] for index in range(3)] == [tokens for tokens, _ in ANSWERS]
        assert [event.score for event in ends] == [score for _, score in ANSWERS]
        assert isinstance(events[-1], FinishedEvent)


async def test_tokens_that_are_settled_come_before_the_search_ends() -> None:
    async with real_service() as service:
        service.hold_steps()  # events of steps that follow each other at once come joined
        settled = 0
        for first in range(3):
            stream = service.client.stream((first, 1), max_tokens=12, beam_search=BeamSearch(2))

            async def read(stream: AsyncIterator[StreamEvent] = stream) -> list[StreamEvent]:
                return [event async for event in stream]

            reading = asyncio.create_task(read())
            await service.until(lambda: service.num_live == 1)
            while service.num_live:
                await service.finish_step()
            told = [event for event in await reading if isinstance(event, TokenEvent) and event.tokens]
            settled += len(told) > 1
        assert settled


async def test_log_probabilities_come_with_the_tokens_that_were_chosen() -> None:
    async with real_service() as service:
        options = OPTIONS | {"logprobs": 2}
        completion = await service.client.generate(PROMPT, beam_search=SEARCH, **options)
        assert_expected(completion)
        for choice, (tokens, score) in zip(completion.choices, ANSWERS, strict=True):
            total = sum(token.logprob or 0.0 for token in choice.tokens)
            assert total / len(tokens) ** 0.5 == pytest.approx(score)
            assert {len(token.top_logprobs) for token in choice.tokens} == {2}


async def test_a_search_that_is_aborted_leaves_nothing() -> None:
    async with real_service() as service:
        service.hold_steps()
        stream = service.client.stream(PROMPT, beam_search=SEARCH, request_id="gone", **OPTIONS)
        events = aiter(stream)
        await anext(events)
        await service.run_steps(3)
        await service.client.abort("gone")
        service.release_steps()
        with pytest.raises(RequestAborted):
            [event async for event in events]
        await service.until_idle()


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("sampling.beam_search.width", {"beam_search": BeamSearch(9)}),
        ("sampling.beam_search.width", {"beam_search": {}}),
        ("sampling.beam_search.length_penalty", {"beam_search": BeamSearch(2, float("inf"))}),
        ("sampling.n", {"beam_search": BeamSearch(2), "n": 3}),
        ("sampling.temperature", {"beam_search": BeamSearch(2), "temperature": 0.5}),
        ("sampling.stop", {"beam_search": BeamSearch(2), "stop": "x"}),
        ("sampling.beam_search.early_stopping", {"beam_search": {"width": 2, "early_stopping": "soon"}}),
        ("sampling.beam_search.width", {"beam_search": {"width": -1}}),
        ("sampling.beam_search.width", {"beam_search": {"width": 2.5}}),
        ("sampling.max_tokens", {"beam_search": BeamSearch(8), "max_tokens": 40}),
    ],
)
async def test_what_cannot_be_searched_is_refused_by_its_field(field: str, options: dict[str, Any]) -> None:
    async with real_service() as service:
        with pytest.raises(InvalidArgument) as caught:
            await service.client.generate(PROMPT, **options)
        assert caught.value.field == field
        await service.until_idle()


async def test_an_option_that_a_search_has_not_is_a_programming_error() -> None:
    async with real_service() as service:
        with pytest.raises(TypeError, match="no option 'beams'"):
            await service.client.generate(PROMPT, beam_search={"beams": 2})  # type: ignore[arg-type]


def request_of(**sampling: Any) -> pb.GenerateStreamRequest:
    return pb.GenerateStreamRequest(
        request_id="r",
        prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)),
        sampling=pb.SamplingParams(
            max_tokens=9, n=2, logprobs=1, beam_search=pb.BeamSearch(width=3), **sampling
        ),
    )


async def sent(service: RealService, request: pb.GenerateStreamRequest) -> list[pb.GenerateStreamResponse]:
    return [message async for message in GenerationServiceStub(service.channel).GenerateStream(request)]


def joined(messages: list[pb.GenerateStreamResponse]) -> dict[int, tuple[list[int], str, int, list[float]]]:
    """Tokens, text, number of log-probabilities and scores of each choice."""
    whole: dict[int, tuple[list[int], str, int, list[float]]] = {0: ([], "", 0, []), 1: ([], "", 0, [])}
    for message in messages:
        if message.HasField("delta"):
            tokens, text, count, ends = whole[message.delta.index]
            tokens += message.delta.token_ids
            count += len(message.delta.logprobs)
            whole[message.delta.index] = (tokens, text + message.delta.text, count, ends)
        if message.HasField("choice_finished"):
            whole[message.choice_finished.index][3].append(message.choice_finished.score)
    return whole


async def test_a_search_that_broke_off_anywhere_is_told_to_its_end_each_part_once() -> None:
    async with real_service() as service:
        request = request_of()
        messages = await sent(service, request)
        assert len(messages) > 5
        for num_received in range(1, len(messages) - 1):
            answer = PartialAnswer(request, allow_inexact=True)
            for message in messages[:num_received]:
                answer.take(message)
            assert answer.can_be_resumed
            rest = await sent(service, answer.next_request())
            assert joined(messages[:num_received] + rest) == joined(messages)
            assert rest[-1].finished.usage.output_tokens == messages[-1].finished.usage.output_tokens
            assert not rest[-1].finished.usage.resumed_tokens


async def test_a_part_of_a_token_s_text_is_not_told_twice() -> None:
    async with real_service() as service:
        request = request_of()
        messages = await sent(service, request)
        answer = PartialAnswer(request, allow_inexact=True)
        for message in messages:
            answer.take(message)
        again = answer.next_request()
        for choice in again.resume.choices:
            choice.finished = False
            choice.text_characters -= 1
        whole, rest = joined(messages), joined(await sent(service, again))
        for index in (0, 1):
            assert rest[index] == ([], whole[index][1][-1], 0, whole[index][3])


async def test_a_search_that_comes_to_other_tokens_ends_and_says_so() -> None:
    async with real_service() as service:
        request = request_of()
        answer = PartialAnswer(request, allow_inexact=True)
        for message in await sent(service, request):
            answer.take(message)
        again = answer.next_request()
        again.resume.choices[1].token_ids[0] += 1
        with pytest.raises(grpc.aio.AioRpcError, match="other tokens than choice 1") as caught:
            await sent(service, again)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        again.resume.choices[1].token_ids[0] -= 1
        again.resume.choices[1].token_ids.append(3)
        with pytest.raises(grpc.aio.AioRpcError, match=r"resume\.choices\[1\]\.token_ids: 10 tokens"):
            await sent(service, again)
        await service.until_idle()


async def test_the_characters_that_were_received_of_a_search_are_to_be_stated() -> None:
    async with real_service() as service:
        request = request_of()
        answer = PartialAnswer(request, allow_inexact=True)
        answer.take((await sent(service, request))[0])
        again = answer.next_request()
        again.resume.choices[0].ClearField("text_characters")
        with pytest.raises(grpc.aio.AioRpcError, match="text_characters: is to be stated") as caught:
            await sent(service, again)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("num_more", [1, 10**9])
async def test_more_characters_than_the_tokens_of_a_search_show_are_refused_by_name(num_more: int) -> None:
    """Such a number would have all text that follows left out, and the stream end as if it were whole."""
    async with real_service() as service:
        request = request_of()
        messages = await sent(service, request)
        answer = PartialAnswer(request, allow_inexact=True)
        for message in messages[: len(messages) // 2]:
            answer.take(message)
        again = answer.next_request()
        again.resume.choices[1].text_characters += num_more
        wanted = r"resume\.choices\[1\]\.text_characters: \d+ characters; these tokens show"
        with pytest.raises(grpc.aio.AioRpcError, match=wanted) as caught:
            await sent(service, again)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        again.resume.choices[1].text_characters -= num_more
        assert joined(messages[: len(messages) // 2] + await sent(service, again)) == joined(messages)
        await service.until_idle()


async def test_all_beams_are_on_their_tenants_account() -> None:
    """Four were computed for the one answer that is told."""
    caller = Identity("alice", limits=TenantLimits(tokens_per_minute=600))
    async with real_service() as service:
        params = SamplingParams(max_tokens=9, beam_search=BeamSearch(4))
        stream = await service.engine.submit(GenerationRequest(PROMPT, params, identity=caller))
        finished = [event async for event in stream][-1]
        assert isinstance(finished, FinishedEvent)
        (report,) = (each for each in service.engine.tenants(9).tenants if each.tenant == "alice")
        assert finished.usage.num_output_tokens == 9
        assert report.tokens_left is not None
        assert 600 - report.tokens_left == pytest.approx(len(PROMPT) + 4 * 9, abs=8)  # some come back by time
