"""A process that forks with a client in hand: parent and child each go on with connections of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.fake_server import serve

pytestmark = pytest.mark.fault("31")

PROGRAM = """
import asyncio, gc, grpc, os, sys
from pageturner.service.client import Client, ForkedProcess, SyncClient, TokenEvent

target, kind = sys.argv[1:]
sync_client, client = SyncClient(target), Client(target)

held = []
if kind in ("closed, in a circle", "closed, but kept"):
    gc.disable()
    make_channel = grpc.aio.insecure_channel

    def circling_channel(*arguments, **options):
        circle = [make_channel(*arguments, **options)]
        circle.append(circle)
        if kind == "closed, but kept":
            held.append(circle)
        return circle[0]

    grpc.aio.insecure_channel = circling_channel

def tokens(events):
    return [token.token_id for event in events if isinstance(event, TokenEvent) for token in event.tokens]

def ask():
    return tokens(sync_client.stream("x", max_tokens=5))

def ask_by_asyncio(client):
    async def read():
        try:
            return [event async for event in client.stream("x", max_tokens=5)]
        finally:
            if kind.startswith("closed"):
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
    if kind in ("closed", "closed, in a circle"):
        assert ask_by_asyncio(client) == expected
    elif kind in ("asyncio", "closed, but kept"):
        for forked in (client, Client(target)):
            try:
                ask_by_asyncio(forked)
            except ForkedProcess as error:
                assert "SyncClient" in str(error)
            else:
                os._exit(8)
    os._exit(7)
assert (ask() if kind in ("sync", "in a call") else ask_by_asyncio(client)) == expected
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    "kind", ["sync", "in a call", "asyncio", "closed", "closed, in a circle", "closed, but kept"]
)
def test_a_forked_child_is_served_or_told_why_not(kind: str) -> None:
    with serve() as server:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, server.address, kind], capture_output=True, text=True, timeout=120
        )
    assert done.stdout == "7\n", done.stderr
