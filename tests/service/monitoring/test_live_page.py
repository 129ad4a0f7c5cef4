"""The live page in a real browser, its document without one, and a server that stalls, loads or goes."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from support.browser import Page, browsing, find_browser
from support.fake_engine import FakeEngine
from support.http_pages import get
from support.real_service import real_service
from support.scrapes import monitoring
from support.serving import capturing_logger
from support.top_readings import request, waiting

from pageturner.service.core.clock import ManualClock, MonotonicClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import (
    BlockUse,
    Condition,
    EngineHealth,
    Inspection,
    RequestInfo,
    RequestState,
    SchedulerInspection,
)
from pageturner.service.engine.metrics import Metrics
from pageturner.service.monitoring.live_page import FRESH_SECONDS, MAX_LISTED, LivePage
from pageturner.service.monitoring.metrics_page import Sources
from pageturner.service.monitoring.port import MonitoringPort
from pageturner.service.monitoring.routes import HttpRequest

PROGRAM = find_browser()
in_a_browser = pytest.mark.skipif(
    PROGRAM is None, reason="no Chromium here: apt-get install chromium-headless-shell"
)


def crowd(num_requests: int, num_blocks: int) -> SchedulerInspection:
    """Forty run and hold most of the pool, the rest waits; what is left is cached, pending and free."""
    each = max(1, num_blocks * 7 // 10 // 40)
    running = [request(number, num_blocks=each) for number in range(min(40, num_requests))]
    others = [waiting(40 + place, place + 1) for place in range(max(0, num_requests - 40))]
    if len(others) > 2:
        others[1] = replace(others[1], state=RequestState.SWAPPED, num_host_blocks=12, num_output_tokens=9)
    tables, start = [], 0
    for place in range(len(running)):
        end = min(num_blocks, start + each)
        # The first two share the blocks of a prompt.
        shared = tuple(range(min(each, 4))) if place == 1 else ()
        tables.append((place, (*shared, *range(start, end))))
        start = end
    rest = range(start, num_blocks)
    pending, cached = rest[:5], rest[5 : 5 + len(rest) // 2]
    return SchedulerInspection(
        (*running, *others),
        num_requests,
        num_blocks,
        tuple(rest[5 + len(cached) :]),
        tuple(pending),
        tuple(tables),
    )


def busy_engine(num_requests: int, num_blocks: int) -> FakeEngine:
    """Told as an engine in the middle of such a load."""
    engine, seen = FakeEngine(), crowd(num_requests, num_blocks)
    states = [one.state for one in seen.requests]
    uses = seen.block_map().uses
    engine.inspection = Inspection(seen)
    engine.stats = SchedulerStats(
        num_running=states.count(RequestState.RUNNING),
        num_waiting=len(states) - states.count(RequestState.RUNNING),
        num_swapped=states.count(RequestState.SWAPPED),
        num_blocks=num_blocks,
        num_blocks_used=uses.count(BlockUse.LIVE) + uses.count(BlockUse.SHARED),
    )
    return engine


@dataclass
class Shown:
    """A port whose engine a test may take away and give back."""

    port: int
    engine: FakeEngine | None
    condition: Condition

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


@asynccontextmanager
async def showing(engine: FakeEngine | None) -> AsyncIterator[Shown]:
    shown = Shown(0, engine, Condition(EngineHealth.SERVING))
    sources = Sources(Metrics(), lambda: shown.condition, lambda: shown.engine, lambda: 0)
    monitored = MonitoringPort(sources, MonotonicClock(), capturing_logger()[0])
    shown.port = await monitored.start("127.0.0.1", 0)
    try:
        yield shown
    finally:
        await monitored.aclose()


async def document_at(port: int) -> Any:
    page = await get(port, "/live.json")
    assert page.status == 200
    return json.loads(page.body)


# Without a browser


async def test_the_page_names_nothing_outside_its_port() -> None:
    async with showing(FakeEngine()) as shown:
        for path in ("/", "/live.js", "/live.css", "/icon.svg"):
            page = await get(shown.port, path)
            assert page.status == 200
            assert "default-src 'self'" in page.headers["content-security-policy"]
            named = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s\"']*", page.body))
            assert named <= {"http://www.w3.org/2000/svg"}, path


async def test_the_document_tells_what_lives_and_no_configuration() -> None:
    async with showing(busy_engine(500, 1000)) as shown:
        told = await document_at(shown.port)
    assert told["health"]["health"] == "serving"
    assert told["requests"]["total"] == 500
    assert len(told["requests"]["listed"]) == MAX_LISTED
    assert len(told["blocks"]["ids"]) == 500
    assert told["load"]["num_running"] == 40
    assert "config" not in told["server"]
    assert told["policies"]["axes"][1]["shadow"]["name"] == "first-chunk"


async def test_the_document_is_compressed_for_who_takes_it_so() -> None:
    page = LivePage(lambda: Condition(EngineHealth.SERVING), lambda: busy_engine(40, 50_000), ManualClock())
    answer = await page.document(HttpRequest("/live.json", headers={"accept-encoding": "gzip, br"}))
    plain = await page.document(HttpRequest("/live.json"))
    assert answer.headers == {"content-encoding": "gzip"}
    assert gzip.decompress(answer.body) == plain.body
    assert len(plain.body) > 200_000
    assert len(answer.body) < 40_000


async def test_however_many_look_one_document_is_made() -> None:
    engine, looks, clock = FakeEngine(), 0, ManualClock(100.0)
    inspect = engine.inspect

    async def counted() -> Inspection:
        nonlocal looks
        looks += 1
        return await inspect()

    engine.inspect = counted  # type: ignore[method-assign] # a counter around it
    page = LivePage(lambda: Condition(EngineHealth.SERVING), lambda: engine, clock)
    asked = HttpRequest("/live.json")
    await asyncio.gather(*(page.document(asked) for _ in range(20)))
    assert looks == 1
    clock.advance(FRESH_SECONDS)
    await page.document(asked)
    assert looks == 2


async def test_a_server_that_loads_says_so() -> None:
    async with showing(None) as shown:
        shown.condition = Condition(EngineHealth.STARTING, "the model is loading")
        told = await document_at(shown.port)
    assert told == {
        "health": {
            "health": "starting",
            "reason": "the model is loading",
            "num_live": 0,
            "seconds_without_progress": 0.0,
        },
        "server": None,
    }


async def test_a_step_that_hangs_does_not_hold_up_the_document() -> None:
    async with (
        real_service(num_blocks=8) as service,
        monitoring(service.server, service.metrics) as monitored,
    ):
        service.hold_steps()
        call = asyncio.create_task(service.client.generate("x", request_id="a", max_tokens=2))
        await service.until(lambda: service.num_live == 1)
        told = await document_at(monitored.port)
        assert told["load"]["num_running"] + told["load"]["num_waiting"] == 1
        assert told["requests"]["age_seconds"] > 0, "the look is of before the step"
        service.release_steps()
        await call


# In a browser


@asynccontextmanager
async def browser_page() -> AsyncIterator[Page]:
    assert PROGRAM is not None
    async with browsing(PROGRAM) as page:
        yield page


def text_of(selector: str) -> str:
    return f"document.querySelector({json.dumps(selector)}).innerText"


@in_a_browser
@pytest.mark.parametrize(
    ("num_requests", "num_blocks", "width", "scheme"),
    [(0, 0, 1280, "dark"), (5, 64, 1280, "light"), (500, 50_000, 1440, "dark"), (40, 3000, 420, "dark")],
)
async def test_the_page_shows_any_load(
    num_requests: int, num_blocks: int, width: int, scheme: str, tmp_path: Path
) -> None:
    async with showing(busy_engine(num_requests, num_blocks)) as shown, browser_page() as page:
        await page.open(shown.url, width, 900, scheme=scheme)
        await page.until(f"{text_of('#health')} === 'serving'")
        running = min(40, num_requests)
        assert await page.run(text_of("#running")) == str(running)
        listed = min(num_requests, MAX_LISTED)
        assert await page.run("document.querySelectorAll('#requests tr').length") == listed
        assert await page.run("document.getElementById('none').hidden") == (num_requests > 0)
        counts = await page.run("[...document.querySelectorAll('#legend b')].map((b) => b.innerText)")
        uses = crowd(num_requests, num_blocks).block_map().uses
        exact = [uses.count(use) for use in (BlockUse.LIVE, BlockUse.SHARED, BlockUse.PENDING)]
        assert counts[1:3] == [str(number) for number in exact[1:]]
        assert not await page.run("document.documentElement.scrollWidth > window.innerWidth"), "it fits"
        picture = await page.picture()
        (tmp_path / "live.png").write_bytes(picture)  # for people to look at
        assert picture.startswith(b"\x89PNG")
        assert page.complaints == []


@in_a_browser
async def test_blocks_are_drawn_pointed_at_and_coloured() -> None:
    pixel = "document.getElementById('map').getContext('2d').getImageData(2, 2, 1, 1).data"
    colour = f"[...{pixel}]"
    async with showing(busy_engine(5, 64)) as shown, browser_page() as page:
        await page.open(shown.url, 1280, 900)
        await page.until(f"{text_of('#health')} === 'serving'")
        by_use = await page.run(colour)
        assert by_use[3] == 255
        await page.run("document.querySelector('[data-colour=owner]').click()")
        by_owner = await page.run(colour)
        assert by_owner != by_use, "shared by use, the first request's by owner"
        box = await page.run("JSON.stringify(document.getElementById('map').getBoundingClientRect())")
        place = json.loads(box)
        await page.send(
            "Input.dispatchMouseEvent", type="mouseMoved", x=place["x"] + 3, y=place["y"] + 3, button="none"
        )
        await page.until(f"{text_of('#pointed')}.startsWith('block 0: shared by req-0000')")


@in_a_browser
async def test_the_page_goes_on_through_a_stall_and_an_end() -> None:
    async with browser_page() as page:
        async with showing(busy_engine(5, 64)) as shown:
            await page.open(shown.url, 1280, 900)
            await page.until(f"{text_of('#health')} === 'serving'")
            assert shown.engine is not None
            shown.condition = Condition(EngineHealth.STALLED, "no step has ended for 42 s")
            shown.engine.inspection = replace(shown.engine.inspection, age_seconds=42.0)
            await page.until(f"{text_of('#health')} === 'stalled'")
            notice = await page.run(text_of("#notice"))
            assert "no step has ended for 42 s" in notice
            assert "requests and blocks are of 42.0 s ago" in notice
            assert page.complaints == []
        await page.until(f"{text_of('#health')} === 'away'")
        assert "has not answered for" in await page.run(text_of("#notice"))
        assert await page.run("document.querySelectorAll('#requests tr').length") == 5, (
            "the last picture stays"
        )


@in_a_browser
async def test_markup_in_a_name_is_text() -> None:
    engine = busy_engine(3, 64)
    evil: RequestInfo = request(0, request_id="<img src=x onerror=alert(1)>", tenant="<script>1</script>")
    seen = replace(engine.inspection.scheduler, requests=(evil,), num_requests=1, tables=())
    engine.inspection = Inspection(seen)
    async with showing(engine) as shown, browser_page() as page:
        await page.open(shown.url, 1280, 900)
        await page.until("document.querySelectorAll('#requests tr').length === 1")
        assert await page.run("document.querySelectorAll('#requests img, #requests script').length") == 0
        assert await page.run(text_of("#requests td span")) == evil.request_id
        assert page.complaints == []
