"""The one message of a Generate call, gathered from an answer's events."""

from __future__ import annotations

from collections.abc import AsyncIterator

from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    ScoredTokensEvent,
    TokenEvent,
)
from pageturner.service.engine.api import AcceptedEvent, StreamEvent
from pageturner.service.rpc import convert
from pageturner.v1 import generation_pb2 as pb


async def gathered(events: AsyncIterator[StreamEvent], request_id: str, n: int) -> pb.GenerateResponse:
    """All of an answer of n choices. Raises what the events raise."""
    response = pb.GenerateResponse(request_id=request_id)
    texts: list[list[str]] = []
    async for event in events:
        match event:
            case AcceptedEvent():
                response.seed = event.seed
                response.rendered_prompt = event.rendered_prompt
                # Not before: an n that the engine refuses must cost no memory.
                for index in range(n):
                    response.choices.add(index=index)
                    texts.append([])
            case ScoredTokensEvent():
                response.prompt_logprobs.extend(convert.from_logprobs(event.tokens))
            case TokenEvent():
                choice = response.choices[event.index]
                texts[event.index].append(event.text)
                choice.token_ids.extend(token.token_id for token in event.tokens)
                choice.logprobs.extend(convert.from_logprobs(event.tokens))
            case ChoiceFinishedEvent():
                convert.set_finish(response.choices[event.index], event)
            case FinishedEvent():
                response.usage.CopyFrom(convert.from_usage(event.usage))
                response.timings.CopyFrom(convert.from_timings(event.timings))
                response.policies.update(event.policies)
                response.policies_changed = event.policies_changed
    for choice, parts in zip(response.choices, texts, strict=True):
        choice.text = "".join(parts)
    return response
