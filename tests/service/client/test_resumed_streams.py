"""A stream that is cut behind any of its messages goes on elsewhere as if it had not been."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.resumed_streams import SPOKEN, SpokenService, completion, request_of, taken

from pageturner.policies import registry
from pageturner.service.client.partial_answer import PartialAnswer
from pageturner.service.client.values import Completion
from pageturner.service.core.scheduling.views import num_peak_blocks

RECLAIMS = registry.names("reclaim")
STOPS = ("ab", "b a", "日", "aé", "ba", "b", "é")


@st.composite
def samplings(draw: st.DrawFn) -> dict[str, Any]:
    max_tokens = draw(st.integers(1, 9))
    return {
        "max_tokens": max_tokens,
        "min_tokens": draw(st.sampled_from((0, 0, min(2, max_tokens), max_tokens))),
        "n": draw(st.sampled_from((1, 1, 2, 3))),
        "seed": draw(st.integers(0, 1 << 64 - 1)),
        "stop": draw(st.lists(st.sampled_from(STOPS), max_size=2, unique=True)),
        "stop_token_ids": draw(st.sampled_from(((), (), (100,)))),
        "ignore_eos": draw(st.booleans()),
        "include_stop": draw(st.booleans()),
        "logprobs": draw(st.sampled_from((None, None, 0, 2))),
        "frequency_penalty": draw(st.sampled_from((0.0, 0.0, 1.0))),
    }


@st.composite
def services(draw: st.DrawFn) -> dict[str, Any]:
    block_size = draw(st.integers(1, 4))
    names = {"reclaim": draw(st.sampled_from(RECLAIMS))}
    names["admission"] = draw(st.sampled_from(("first-chunk", "full-prompt")))
    return {
        "block_size": block_size,
        "num_spare_blocks": draw(st.integers(0, 4)),
        "num_host_blocks": draw(st.sampled_from((0, 24))),
        "depth": draw(st.integers(0, 1)),
        "max_num_batched_tokens": draw(st.integers(6, 12)),
        "policies": registry.create_set(names),
    }


prompts = st.lists(st.sampled_from(SPOKEN[:-1]), min_size=1, max_size=8)


def without_service(answer: Completion) -> Completion:
    """What does not hang on the services that gave it."""
    timings = replace(answer.timings, num_swaps=0, num_recomputes=0, num_tail_reclaims=0)
    usage = replace(answer.usage, num_cached_prompt_tokens=0, num_resumed_tokens=0)
    return replace(answer, timings=timings, usage=usage, policies={})


def with_a_pool(service: dict[str, Any], num_prompt: int, max_tokens: int, n: int) -> dict[str, Any]:
    """Blocks for the request alone or a neighbour alone, hardly for all of them."""
    block_size = service["block_size"]
    needed = num_peak_blocks(num_prompt, max_tokens, n, block_size), num_peak_blocks(9, 9, 1, block_size)
    num_blocks = max(needed) + service["num_spare_blocks"]
    return {name: service[name] for name in service if name != "num_spare_blocks"} | {
        "num_blocks": num_blocks
    }


def check_every_cut(
    prompt: list[int], sampling: dict[str, Any], service: dict[str, Any], neighbour: list[int], again: int
) -> None:
    request = request_of("r", prompt, **sampling)
    service = with_a_pool(service, len(prompt), sampling["max_tokens"], sampling["n"])
    others = [request_of(f"n{i}", [*neighbour, i + 2], max_tokens=9, seed=i) for i in range(2)]
    messages, *_ = SpokenService().streams(request)
    whole = without_service(completion(taken(PartialAnswer(request), messages)))
    for cut in range(len(messages)):
        answer = PartialAnswer(request)
        events = taken(answer, messages[:cut])
        # Its neighbours come before it and behind it.
        rest = SpokenService(**service).streams(others[0], answer.next_request(), others[1])[1]
        second = again % len(rest)
        events += taken(answer, rest[:second])
        last = SpokenService(**service).streams(answer.next_request())[0]
        events += taken(answer, last)
        found = completion(events)
        assert without_service(found) == whole, f"cut behind message {cut}, then behind {second} more"
        sampled = sum(len(message.delta.token_ids) for message in last)
        assert found.usage.num_output_tokens - found.usage.num_resumed_tokens == sampled


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompts, samplings(), services(), prompts, st.integers(0, 99))
def test_a_stream_cut_behind_any_message_goes_on_as_if_it_had_not_been(
    prompt: list[int], sampling: dict[str, Any], service: dict[str, Any], neighbour: list[int], again: int
) -> None:
    check_every_cut(prompt, sampling, service, neighbour, again)


@pytest.mark.slow
@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(prompts, samplings(), services(), prompts, st.integers(0, 99))
def test_a_stream_cut_behind_any_message_goes_on_as_if_it_had_not_been_at_length(
    prompt: list[int], sampling: dict[str, Any], service: dict[str, Any], neighbour: list[int], again: int
) -> None:
    check_every_cut(prompt, sampling, service, neighbour, again)
