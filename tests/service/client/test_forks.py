"""A process that forks with a client in hand: parent and child each go on with connections of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.fake_server import serve

pytestmark = pytest.mark.fault("31")

PROGRAM = """
import asyncio, os, sys
from pageturner.service.client import Client, ForkedProcess, SyncClient, TokenEvent

target, kind = sys.argv[1:]
sync_client, client = SyncClient(target), Client(target)

def tokens(events):
    return [token.token_id for event in events if isinstance(event, TokenEvent) for token in event.tokens]

def ask():
    return tokens(sync_client.stream("x", max_tokens=5))

def ask_by_asyncio(client):
    async def read():
        try:
            return [event async for event in client.stream("x", max_tokens=5)]
        finally:
            if kind == "closed":
                await client.close()

    return tokens(asyncio.run(read()))

expected = list(range(5))
if kind == "in a call":
    events = sync_client.stream("x", max_tokens=5)
    next(events)
elif kind == "sync":
    assert ask() == expected
else:
    assert ask_by_asyncio(client) == expected
child = os.fork()
if child == 0:
    if kind == "in a call":
        for forked in (sync_client, SyncClient(target)):
            try:
                tokens(forked.stream("x", max_tokens=5))
            except ForkedProcess as error:
                assert "between calls" in str(error)
            else:
                os._exit(9)
        os._exit(7)
    assert ask() == expected
    if kind == "closed":
        assert ask_by_asyncio(client) == expected
    elif kind == "asyncio":
        for forked in (client, Client(target)):
            try:
                ask_by_asyncio(forked)
            except ForkedProcess as error:
                assert "SyncClient" in str(error)
            else:
                os._exit(8)
    os._exit(7)
assert (ask_by_asyncio(client) if kind in ("asyncio", "closed") else ask()) == expected
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("kind", ["sync", "in a call", "asyncio", "closed"])
def test_a_forked_child_is_served_or_told_why_not(kind: str) -> None:
    with serve() as server:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.address, kind], capture_output=True, text=True, timeout=60
        )
    assert done.stdout == "7\n", done.stderr
