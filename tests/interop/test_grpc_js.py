"""grpc-js, the client of Node, with the .proto files alone: it streams, cancels and reads rich errors."""

from __future__ import annotations

import asyncio
import json
import shutil
from asyncio.subprocess import PIPE
from pathlib import Path
from typing import Any

import google.rpc
import pytest
from support.fake_model import Stop, expected_tokens
from support.real_service import RealService, real_service

FOLDER = Path(__file__).parent
PROTOS = FOLDER.parents[1] / "protos"
GOOGLE = Path(next(iter(google.rpc.__path__))).parents[1]

pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node to run grpc-js with"),
    pytest.mark.skipif(
        not (FOLDER / "node_modules" / "@grpc" / "grpc-js").exists(),
        reason="grpc-js is not installed: `make test` does it, where there is npm",
    ),
]


async def seen_by_node(service: RealService, job: str) -> Any:
    """What client.js saw when it did this job."""
    process = await asyncio.create_subprocess_exec(
        *("node", str(FOLDER / "client.js"), service.target, job, str(PROTOS), str(GOOGLE)),
        stdout=PIPE,
        stderr=PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    return json.loads(output)


async def test_it_streams_what_a_whole_answer_holds() -> None:
    async with real_service(num_blocks=48) as service:
        seen = await seen_by_node(service, "ask")
    assert seen["error"] is None
    messages = seen["messages"]
    assert [message["sequence_number"] for message in messages] == list(range(len(messages)))
    assert {message["request_id"] for message in messages} == {"js"}
    accepted = messages[0]["accepted"]
    assert (accepted["seed"], accepted["prompt_tokens"], accepted["max_tokens"]) == (7, 3, 6)
    assert messages[-1]["event"] == "finished"
    assert messages[-1]["finished"]["usage"]["output_tokens"] == 12
    for index, choice in enumerate(seen["whole"]["choices"]):
        deltas = [m["delta"] for m in messages if m["event"] == "delta" and m["delta"]["index"] == index]
        streamed = [token for delta in deltas for token in delta["token_ids"]]
        assert streamed == choice["token_ids"] == expected_tokens((1, 2, 3), 7, index, Stop(6))
        assert "".join(delta["text"] for delta in deltas) == choice["text"]
        assert choice["finish_reason"] == "FINISH_REASON_LENGTH"
    assert seen["models"][0]["name"] == "tiny"
    assert seen["load"]["num_blocks"] == 48


async def test_its_cancel_frees_what_the_request_held() -> None:
    async with real_service() as service:
        seen = await seen_by_node(service, "cancel")
        await service.until_idle()
    assert seen["error"]["code"] == "CANCELLED"
    assert len(seen["messages"]) >= 3


async def test_it_reads_which_field_was_wrong() -> None:
    async with real_service() as service:
        seen = await seen_by_node(service, "errors")

    def violations(name: str) -> list[str]:
        assert seen[name]["code"] == "INVALID_ARGUMENT"
        assert seen[name]["details"]["google.rpc.ErrorInfo"]["domain"] == "pageturner"
        return [v["field"] for v in seen[name]["details"]["google.rpc.BadRequest"]["field_violations"]]

    assert violations("sampling") == ["sampling.top_p"]
    assert violations("prompt") == ["prompt.token_ids.ids[1]"]
    assert seen["model"]["code"] == "NOT_FOUND"
    assert seen["model"]["details"]["google.rpc.ErrorInfo"]["reason"] == "MODEL_NOT_FOUND"
    assert seen["deadline"]["code"] == "DEADLINE_EXCEEDED"
    assert seen["large"]["code"] == "RESOURCE_EXHAUSTED"
    assert str(2 << 20) in seen["large"]["text"], "the limit is named"


async def test_it_is_told_when_to_come_back() -> None:
    async with real_service(max_num_seqs=1, max_waiting=2) as service:
        seen = await seen_by_node(service, "flood")
        await service.until_idle()
    refused = [answer["error"] for answer in seen if answer["error"] is not None]
    assert 0 < len(refused) < 40
    for error in refused:
        assert error["code"] == "RESOURCE_EXHAUSTED"
        delay = error["details"]["google.rpc.RetryInfo"]["retry_delay"]
        assert delay["seconds"] + delay["nanos"] / 1e9 > 0
