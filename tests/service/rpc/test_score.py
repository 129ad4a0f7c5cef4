"""Score, prompt_logprobs and best_of on the wire, over the real engine and a model that hashes."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from support.fake_model import Stop, expected_score, expected_tokens
from support.real_service import real_service

from pageturner.policies import registry
from pageturner.service.client import (
    AcceptedEvent,
    ChoiceFinishedEvent,
    FinishedEvent,
    ScoredTokensEvent,
    TokenEvent,
)
from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.errors import DeadlineExceeded, InvalidArgument, RequestAborted
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub

PROMPT = (0, 1, 2, 0, 1, 1, 2, 2, 0, 0, 1)
CONTINUATIONS = [(0, 1), (2,), (1, 1, 1, 2), (0,), (2, 2), (1, 0, 2, 1, 0), (0, 0, 0), (1,), (2, 1), (0, 2)]


def prompt_scores(prompt: tuple[int, ...]) -> list[float]:
    return [expected_score(list(prompt[: end + 1])) for end in range(1, len(prompt))]


@pytest.mark.parametrize("reclaim", registry.names("reclaim"))
async def test_scores_are_those_of_unlimited_memory_beside_others(reclaim: str) -> None:
    policies = registry.create_set({"reclaim": reclaim, "admission": "first-chunk"})
    async with real_service(
        num_blocks=12, num_host_blocks=24, policies=policies, max_n=4, max_scored_rows=3
    ) as service:
        client = service.client

        async def chatter() -> None:
            await client.generate(PROMPT[:6], max_tokens=16, n=2, seed=1)

        others = asyncio.gather(*(chatter() for _ in range(3)))
        answers = await asyncio.gather(*(client.score(PROMPT, CONTINUATIONS) for _ in range(3)))
        await others
        for answer in answers:
            for continuation, score in zip(CONTINUATIONS, answer.scores, strict=True):
                expected = [
                    expected_score([*PROMPT, *continuation[: end + 1]]) for end in range(len(continuation))
                ]
                assert [token.logprob for token in score.tokens] == expected
                assert score.logprob == sum(expected)
                assert tuple(token.token_id for token in score.tokens) == continuation
            assert answer.usage.num_prompt_tokens == len(PROMPT)
            assert answer.usage.num_output_tokens == sum(map(len, CONTINUATIONS))
        await service.until_idle()
        num_scored = service.metrics.snapshot().counters["scored_tokens_total"]
        assert num_scored == 3 * sum(map(len, CONTINUATIONS))


async def test_what_is_left_or_aborted_frees_all_that_it_held() -> None:
    async with real_service(max_n=4) as service:
        service.hold_steps()
        left = asyncio.create_task(service.client.score(PROMPT, CONTINUATIONS))
        aborted = asyncio.create_task(service.client.score(PROMPT, CONTINUATIONS, request_id="mine"))
        await service.until(lambda: service.num_live == 2)
        left.cancel()
        await service.client.abort("mine")
        service.release_steps()
        with pytest.raises(RequestAborted):
            await aborted
        with pytest.raises(asyncio.CancelledError):
            await left
        await service.until_idle()
        assert (await service.client.score(PROMPT, [(1,)])).scores


async def test_a_deadline_reaches_every_group_of_a_call() -> None:
    async with real_service(max_n=2) as service:
        service.hold_steps()
        with pytest.raises(DeadlineExceeded):
            await service.client.score(PROMPT, CONTINUATIONS, timeout_seconds=0.2)
        service.release_steps()
        await service.until_idle()


@pytest.mark.parametrize(
    ("continuations", "field"),
    [
        ([], "continuations"),
        ([pb.Continuation(text="a"), pb.Continuation()], "continuations[1]"),
        ([pb.Continuation(text="")], "continuations[0].text"),
        ([pb.Continuation(token_ids=pb.TokenIds())], "continuations[0].token_ids.ids"),
        ([pb.Continuation(token_ids=pb.TokenIds(ids=[1, 421]))], "continuations[0].token_ids.ids[1]"),
        ([pb.Continuation(token_ids=pb.TokenIds(ids=[1] * 60))], "continuations[0]"),
    ],
)
async def test_bad_fields_are_named_by_their_paths(continuations: list[Any], field: str) -> None:
    async with real_service() as service:
        prompt = pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT))
        request = pb.ScoreRequest(prompt=prompt, continuations=continuations)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await GenerationServiceStub(service.channel).Score(request)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert str(refused.value.details()).startswith(f"{field}:")


async def test_a_stream_tells_the_prompts_scores_in_pieces_before_the_first_token() -> None:
    async with real_service(max_scored_rows=4) as service:
        events = [event async for event in service.client.stream(PROMPT, prompt_logprobs=0, max_tokens=3)]
    kinds = [type(event) for event in events]
    scored = [event for event in events if isinstance(event, ScoredTokensEvent)]
    assert kinds[0] is AcceptedEvent
    assert kinds[1 : 1 + len(scored)] == [ScoredTokensEvent] * len(scored)
    assert len(scored) > 2
    assert [token.logprob for event in scored for token in event.tokens] == prompt_scores(PROMPT)
    ends = [event.start + len(event.tokens) for event in scored]
    assert [event.start for event in scored] == [1, *ends[:-1]]


async def test_a_stream_that_broke_off_between_scores_goes_on_where_it_was() -> None:
    async with real_service(max_scored_rows=4) as service:
        request = pb.GenerateStreamRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)),
            sampling=pb.SamplingParams(prompt_logprobs=0, max_tokens=3, seed=5),
        )
        stub = GenerationServiceStub(service.channel)
        whole = [message async for message in stub.GenerateStream(request)]
        for cut in range(1, len(whole) + 1):
            answer = PartialAnswer(request)
            events = [event for message in whole[:cut] if (event := answer.take(message)) is not None]
            async for message in stub.GenerateStream(answer.next_request()):
                event = answer.take(message)
                if event is not None and not (cut == len(whole) and isinstance(event, FinishedEvent)):
                    events.append(event)
            scores = [e for e in events if isinstance(e, ScoredTokensEvent)]
            tokens = [t.token_id for e in events if isinstance(e, TokenEvent) for t in e.tokens]
            assert [t.logprob for e in scores for t in e.tokens] == prompt_scores(PROMPT), cut
            assert tokens == expected_tokens(PROMPT, 5, 0, Stop(3)), cut


async def test_the_best_choices_come_at_the_end_and_are_not_resumed_in_part() -> None:
    async with real_service() as service:
        options: Any = {"max_tokens": 4, "n": 2, "best_of": 4, "seed": 7}
        events = [event async for event in service.client.stream(PROMPT, **options)]
        kinds = [type(event) for event in events]
        assert kinds == [AcceptedEvent, *[TokenEvent, ChoiceFinishedEvent] * 2, FinishedEvent]
        accepted = events[0]
        assert isinstance(accepted, AcceptedEvent)
        request = pb.GenerateStreamRequest(
            prompt=pb.Prompt(token_ids=pb.TokenIds(ids=PROMPT)),
            sampling=pb.SamplingParams(max_tokens=4, n=2, best_of=4),
            resume=pb.Resume(
                seed=accepted.seed,
                fingerprint=accepted.fingerprint,
                choices=[pb.ReceivedChoice(token_ids=[1]), pb.ReceivedChoice()],
            ),
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [message async for message in GenerationServiceStub(service.channel).GenerateStream(request)]
        assert "resume.choices[0]" in str(refused.value.details())
        del request.resume.choices[0].token_ids[:]
        again = [message async for message in GenerationServiceStub(service.channel).GenerateStream(request)]
        tokens = [event.tokens for event in events if isinstance(event, TokenEvent)]
        received = [tuple(message.delta.token_ids) for message in again if message.HasField("delta")]
        assert received == [tuple(token.token_id for token in choice) for choice in tokens]


async def test_best_of_is_refused_over_the_limit_of_choices() -> None:
    async with real_service(max_n=3) as service:
        with pytest.raises(InvalidArgument) as refused:
            await service.client.generate(PROMPT, best_of=4)
        assert refused.value.field == "sampling.best_of"
