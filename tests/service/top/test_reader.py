"""What is read of a real server, its restart, and the command that prints one look."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from support.fake_engine import FakeEngine
from support.ports import reserved_port
from support.real_service import real_service
from support.serving import serving

from pageturner.service.cli import main
from pageturner.service.client import Client, RequestState
from pageturner.service.client.server_process import PROGRAM
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.top.readings import Away, Reader, Reading


async def test_a_reading_of_a_real_server_is_of_one_moment() -> None:
    async with real_service(num_blocks=8, max_num_seqs=1) as service:
        service.hold_steps()
        calls = []
        for name in "ab":
            call = service.client.generate("x", request_id=name, max_tokens=20, tenant="t")
            calls.append(asyncio.create_task(call))
            await service.until(lambda: service.num_live == len(calls))
        reader = Reader(service.client, MonotonicClock())
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            await service.run_steps(1)
            await asyncio.sleep(0.01)
        told = await reading
        assert isinstance(told, Reading)
        assert {request.request_id for request in told.requests.requests} == {"a", "b"}
        assert told.requests.requests[0].state is RequestState.RUNNING
        assert [owner.request_id for owner in told.blocks.requests] == ["a", "b"]
        assert len(told.blocks.uses) == told.load.num_blocks == 8
        assert await reader.abort("b") == "ended"
        assert await reader.abort("nobody") == "no such request any more"
        assert (await reader.story("a"))[0].startswith("the flight recorder is off")
        service.release_steps()
        ended = await asyncio.gather(*calls, return_exceptions=True)
        assert "ended by an operator" in str(ended[1])


async def test_a_server_that_restarts_is_away_and_met_again() -> None:
    with reserved_port() as port:
        async with Client(f"127.0.0.1:{port}") as client:
            await _check_that_it_is_met_again(client, port)


async def _check_that_it_is_met_again(client: Client, port: int) -> None:
    reader = Reader(client, MonotonicClock())
    for _ in range(2):
        assert isinstance(await reader.read(), Away)
        async with serving(FakeEngine(), port=port):
            # gRPC may hold on to the connection that failed for a moment.
            told = [await reader.read()]
            while isinstance(told[-1], Away):
                told.append(await reader.read())
    away = await reader.read()
    assert isinstance(away, Away)
    assert away.reason


async def test_a_server_that_loads_is_a_state_and_no_end() -> None:
    async with serving(None) as served:
        told = await Reader(served.client, MonotonicClock()).read()
        assert isinstance(told, Away)
        assert "loading" in told.reason


async def _top(target: str, *words: str) -> str:
    command = [*PROGRAM, "top", f"--target={target}", "--interval=0.2", *words]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    printed, _ = await process.communicate()
    assert process.returncode == 0
    return printed.decode()


async def test_one_look_is_printed_as_text_or_json() -> None:
    async with real_service(num_blocks=8) as service:
        await service.client.generate("x", max_tokens=3)
        text = await _top(service.target, "--once")
        document = json.loads(await _top(service.target, "--json"))
    assert text.splitlines()[0].startswith("SERVING")
    assert "Requests: 0" in text
    assert document["server"]["num_blocks"] == 8
    assert document["activity"]["health"] == "serving"
    assert sum(document["blocks"].values()) == 8
    assert document["requests"]["requests"] == []
    assert {axis["axis"] for axis in document["policies"]["axes"]} >= {"queue", "victim"}


@pytest.mark.parametrize("words", [["--once"], ["--json"], ["--once", "--interval=0"]])
def test_what_cannot_be_looked_at_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--target=127.0.0.1:1", *words]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_textual_the_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "pageturner.service.top.app", None)
    monkeypatch.delitem(sys.modules, "pageturner.service.top.app")
    monkeypatch.setitem(sys.modules, "textual", None)
    for name in [name for name in sys.modules if name.startswith("textual.")]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "pageturner.service.top.screens", raising=False)
    assert main(["top"]) == 2
    assert "pip install 'pageturner[top]'" in capsys.readouterr().err


async def test_an_address_without_admin_service_is_told_from_a_server_that_is_gone() -> None:
    async with serving(FakeEngine(), enable_admin=False) as served:
        told = await Reader(served.client, MonotonicClock()).read()
    assert isinstance(told, Away)
    assert "server.admin_host" in told.reason


async def test_the_admin_listener_has_all_that_a_view_needs(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/admin.sock"
    async with serving(FakeEngine(), admin_host=address), Client(address) as client:
        told = await Reader(client, MonotonicClock()).read()
    assert isinstance(told, Reading), told
