"""The client of OpenAI's completions against a server in this process that plays a script."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest
from support.fake_completions import SSE, chunked, event, serve_completions, until_closed

from pageturner.loadtest.client import Outcome, RequestRecord
from pageturner.loadtest.peers.cases import Demand
from pageturner.loadtest.peers.completions import completion, completions, count_token_ids
from pageturner.loadtest.peers.llamacpp import LlamaCpp
from pageturner.loadtest.peers.vllm import Vllm
from pageturner.loadtest.workload import PlannedRequest

REQUEST = PlannedRequest(3, 0.0, (11, 12, 13), output_tokens=4, priority=0, tenant="")
DONE = b"data: [DONE]\n\n"


async def record_of(pieces: Iterable[bytes], timeout_seconds: float = 30.0) -> RequestRecord:
    async with (
        serve_completions(lambda _: pieces) as address,
        completions(address, completion, count_token_ids, timeout_seconds) as send,
    ):
        return await send(REQUEST, time.monotonic())


@pytest.mark.parametrize("cut", [1, 7, 64, 10_000])
async def test_tokens_are_counted_however_the_answer_is_cut(cut: int) -> None:
    record = await record_of(chunked(event(1), event(), event(2, 3), event(4), cut=cut))
    assert (record.outcome, record.error, record.index) == (Outcome.OK, "", 3)
    assert [arrival.num_tokens for arrival in record.arrivals] == [1, 2, 1]
    assert record.num_prompt_tokens == 3
    assert record.sent_at <= record.arrivals[0].at <= record.arrivals[-1].at <= record.ended_at


async def test_an_answer_that_ends_with_its_connection_is_read_too() -> None:
    assert (await record_of(until_closed(event(1, 2), event(3, 4)))).num_output_tokens == 4


@pytest.mark.parametrize(
    ("pieces", "error"),
    [
        (until_closed(event(1, 2, 3)), "3 tokens came, 4 were asked for"),
        (until_closed(event(1, 2, 3, 4, 5)), "5 tokens came, 4 were asked for"),
        ([SSE + b"\r\n", event(1, 2, 3, 4)], "without [DONE]"),
        ([SSE + b"Transfer-Encoding: chunked\r\n\r\n", b"5\r\ndata"], "IncompleteReadError"),
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n", b"loading"], "503 Service Unavailable: loading"),
        ([SSE + b"\r\n", b'data: {"error": {"message": "too long"}}\n\n'], "too long"),
        ([SSE + b"\r\n", b"data: {\n\n"], "JSONDecodeError"),
        ([SSE + b"\r\n", b"data: {}\n\n"], "KeyError"),
        ([], "IncompleteReadError"),
    ],
)
async def test_what_is_no_whole_answer_fails_its_request(pieces: list[bytes], error: str) -> None:
    record = await record_of(pieces)
    assert record.outcome is Outcome.FAILED
    assert error in record.error


async def test_a_server_that_is_not_there_fails_the_request() -> None:
    async with completions("127.0.0.1:1", completion, count_token_ids) as send:
        record = await send(REQUEST, time.monotonic())
    assert record.outcome is Outcome.FAILED
    assert "Connect" in record.error


async def test_a_request_out_of_time_is_cancelled() -> None:
    record = await record_of(chain([SSE + b"\r\n"], repeat(event())), timeout_seconds=0.1)
    assert record.outcome is Outcome.CANCELLED


async def test_each_peer_is_asked_for_greedy_tokens_past_the_end_in_its_own_words() -> None:
    asked: list[dict[str, Any]] = []

    def of_vllm(body: dict[str, Any]) -> list[bytes]:
        asked.append(body)
        return until_closed(*[event(each) for each in range(4)])

    def of_llamacpp(body: dict[str, Any]) -> list[bytes]:
        asked.append(body)
        return until_closed(
            *[
                b'data: {"choices": [{"text": "x"}], "timings": {"predicted_n": %d}}\n\n' % so_far
                for so_far in (1, 1, 3, 4)
            ],
            b'data: {"choices": [], "usage": {"completion_tokens": 4}}\n\n',
        )

    python, model = Path("python"), Path("model")
    peers = ((Vllm(python, model, "float32"), of_vllm), (LlamaCpp(python, model), of_llamacpp))
    for peer, pieces in peers:
        async with serve_completions(pieces) as address, peer.connected(address) as send:
            record = await send(REQUEST, time.monotonic())
        assert (record.outcome, record.error) == (Outcome.OK, "")
        assert record.num_output_tokens == 4
    common = {"prompt": [11, 12, 13], "max_tokens": 4, "temperature": 0.0, "ignore_eos": True, "stream": True}
    assert all(common.items() <= body.items() for body in asked)
    assert asked[0]["return_token_ids"]
    assert not asked[1]["cache_prompt"]


def test_a_server_has_room_for_the_demand() -> None:
    words = LlamaCpp(Path("llama-server"), Path("model")).command(80, Demand(64, 256)).words
    context = int(words[words.index("--ctx-size") + 1])
    assert words[words.index("--parallel") + 1] == "64"
    assert 64 * 256 <= context < 64 * 300
