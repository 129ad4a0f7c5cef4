"""What a server's prefix cache holds, over the wire: all of it once, then what changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.service.client.live import PrefixNews
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc.inspection import from_prefix_summary
from pageturner.v1 import admin_pb2 as pb

FIRST = PrefixSummary.of(1, 16, "0123", [bytes([n]) * 16 for n in range(4)])
SECOND = PrefixSummary.of(2, 16, "0123", [bytes([n]) * 16 for n in (1, 3, 5)])


async def test_every_field_of_a_summary_crosses_the_wire() -> None:
    engine = FakeEngine()
    engine.summary = replace(FIRST, is_truncated=True)
    async with serving(engine) as served:
        assert await served.client.prefix_summary() == engine.summary


async def test_a_watch_tells_each_summary_once_and_sends_what_changed() -> None:
    engine = FakeEngine()
    engine.summary = FIRST
    async with serving(engine, min_watch_seconds=0.001) as served:
        watch = served.client.watch_prefix_summary(0.001)
        assert await anext(watch) == FIRST
        engine.summary = SECOND
        assert await anext(watch) == SECOND
        engine.summary = replace(SECOND, revision=3, is_truncated=True)
        assert await anext(watch) == engine.summary
        await watch.aclose()
        with pytest.raises(InvalidArgument, match="interval_seconds"):
            await anext(served.client.watch_prefix_summary(-1.0))


@pytest.mark.parametrize("spoil", [False, True])
def test_a_change_that_is_lost_shows(spoil: bool) -> None:
    news, change = PrefixNews(), FIRST.change_to(SECOND)
    news.read(pb.WatchPrefixSummaryResponse(whole=from_prefix_summary(FIRST)))
    removed = b"" if spoil else change.removed
    message = pb.WatchPrefixSummaryResponse(
        change=pb.PrefixChange(revision=change.revision, added=change.added, removed=removed)
    )
    assert (news.read(message) == SECOND) is not spoil
    assert news.read(pb.WatchPrefixSummaryResponse()) is None, "of a kind that this client does not know"
