"""The view in a terminal of any size: what it shows, its keys, and a server that comes and goes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from support.patience import PATIENCE_SECONDS
from support.top_readings import ScriptedSource, reading
from textual.pilot import Pilot

from pageturner.service.engine.api import EngineHealth, RequestInfo
from pageturner.service.top.app import RequestTable, TopApp
from pageturner.service.top.readings import Away, Reading
from pageturner.service.top.text import ASCII, UNICODE, Glyphs

WIDE, NARROW, TINY = (130, 40), (60, 24), (32, 12)


def shown(app: TopApp) -> str:
    """The text on the screen, line by line."""
    strips = app.screen._compositor.render_strips()
    return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


@asynccontextmanager
async def viewing(
    source: ScriptedSource, size: tuple[int, int] = WIDE, glyphs: Glyphs = UNICODE
) -> AsyncIterator[Pilot[None]]:
    """The view after its first reading. It reads again only when a key asks for it."""
    app = TopApp(source, "somewhere:1", glyphs, interval_seconds=3600.0)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: bool(source.orders))
        await pilot.pause()
        yield pilot


async def until(pilot: Pilot[None], holds: Callable[[], bool]) -> None:
    """Let the view go round until it holds."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while not holds():
            await pilot.pause()


def _with(told: Reading, requests: tuple[RequestInfo, ...]) -> Reading:
    return replace(told, requests=replace(told.requests, requests=requests))


def of(pilot: Pilot[None]) -> TopApp:
    assert isinstance(pilot.app, TopApp)
    return pilot.app


@pytest.mark.parametrize("size", [WIDE, NARROW, TINY])
@pytest.mark.parametrize(("num_requests", "num_blocks"), [(0, 0), (5, 64), (500, 50_000)])
async def test_it_shows_any_load_in_any_terminal(
    size: tuple[int, int], num_requests: int, num_blocks: int
) -> None:
    num_running, num_waiting = min(num_requests, 40), max(0, num_requests - 40)
    told = reading(5.0, num_running=num_running, num_waiting=num_waiting, num_blocks=num_blocks)
    async with viewing(ScriptedSource(told), size) as pilot:
        text = shown(of(pilot))
        assert text.splitlines()[0].strip().startswith("SERVING · tiny at somew")
        assert f"running {num_running}" in text
        table = of(pilot).query_one(RequestTable)
        assert table.row_count == min(num_requests, 200), "as many as are listed"
        if size != TINY:
            assert f"Requests: {num_requests}" in text
            assert f"Blocks: {num_blocks:,}" in text
            assert "queue fcfs" in text
        assert max(map(len, text.splitlines())) <= size[0]


async def test_a_wide_terminal_shows_more_of_a_request() -> None:
    async with viewing(ScriptedSource(reading(num_running=1)), WIDE) as pilot:
        wide = shown(of(pilot))
        await pilot.resize_terminal(*NARROW)
        await pilot.pause()
        narrow = shown(of(pilot))
    assert "req-0000" in wide
    assert "team-0" in wide
    assert "req-0000" in narrow
    assert "team-0" not in narrow


async def test_rates_come_with_the_second_reading() -> None:
    source = ScriptedSource(reading(1.0), reading(2.0, num_tokens=612))
    async with viewing(source) as pilot:
        assert "output tokens/s -" in shown(of(pilot))
        await pilot.press("r")
        await until(pilot, lambda: "output tokens/s 612" in shown(of(pilot)))
        assert "first token 55 ms (p95 96 ms)" in shown(of(pilot))


async def test_a_server_that_is_away_leaves_its_last_picture_and_is_met_again() -> None:
    away = Away(3.0, "UNAVAILABLE: connection refused")
    source = ScriptedSource(reading(2.0), away, reading(9.0, uptime=0.5, num_running=1))
    async with viewing(source) as pilot:
        await pilot.press("r")
        await until(pilot, lambda: "AWAY" in shown(of(pilot)))
        assert "connection refused" in shown(of(pilot))
        assert "req-0001" in shown(of(pilot))
        await pilot.press("r")
        await until(pilot, lambda: "SERVING" in shown(of(pilot)))
        assert "req-0001" not in shown(of(pilot))


async def test_a_server_that_was_never_met_is_asked_on() -> None:
    source = ScriptedSource(Away(0.0, "UNAVAILABLE: nobody there"), reading(1.0))
    async with viewing(source) as pilot:
        assert "AWAY at somewhere:1" in shown(of(pilot))
        await pilot.press("r")
        await until(pilot, lambda: "SERVING" in shown(of(pilot)))


async def test_a_step_that_hangs_is_told_with_the_age_of_what_is_shown() -> None:
    told = reading(50.0, health=EngineHealth.STALLED, age=42.0)
    async with viewing(ScriptedSource(told)) as pilot:
        text = shown(of(pilot))
    assert text.lstrip().startswith("STALLED")
    assert "the step under way does not end: requests and blocks are of 42.0 s ago" in text
    assert "the admission policy full-prompt is quarantined" in text


async def test_a_request_is_opened_told_of_and_left() -> None:
    async with viewing(ScriptedSource(reading(num_running=3))) as pilot:
        await pilot.press("down", "enter")
        await until(pilot, lambda: "req-0001 was admitted at once" in shown(of(pilot)))
        text = shown(of(pilot))
        assert "101 tokens, 16 from the cache" in text
        assert "2 of 200 tokens, 1 choice" in text
        await pilot.press("escape")
        await until(pilot, lambda: "Requests: 3" in shown(of(pilot)))


@pytest.mark.parametrize("is_sure", [True, False])
async def test_a_request_is_ended_by_a_key_and_a_yes(is_sure: bool) -> None:
    source = ScriptedSource(reading(num_running=3))
    async with viewing(source) as pilot:
        await pilot.press("down", "down", "k")
        await until(pilot, lambda: "End req-0002?" in shown(of(pilot)))
        await pilot.press("y" if is_sure else "n")
        if is_sure:
            await until(pilot, lambda: source.aborted == ["req-0002"])
        await pilot.pause()
        assert source.aborted == (["req-0002"] if is_sure else [])


async def test_a_request_is_ended_from_its_own_screen() -> None:
    source = ScriptedSource(reading(num_running=3))
    async with viewing(source) as pilot:
        await pilot.press("enter")
        await until(pilot, lambda: "admitted" in shown(of(pilot)))
        await pilot.press("k")
        await until(pilot, lambda: "End req-0000?" in shown(of(pilot)))
        await pilot.press("y")
        await until(pilot, lambda: source.aborted == ["req-0000"])


async def test_a_request_that_ends_while_it_is_looked_at_stays_with_a_word() -> None:
    source = ScriptedSource(reading(1.0, num_running=2), reading(2.0, num_running=0))
    async with viewing(source) as pilot:
        await pilot.press("down", "enter")
        await until(pilot, lambda: "req-0001 was admitted" in shown(of(pilot)))
        of(pilot).action_refresh_now()
        await until(pilot, lambda: "it has ended" in shown(of(pilot)))
        assert "req-0001" in shown(of(pilot))


async def test_the_cursor_stays_on_its_request_when_others_come_and_go() -> None:
    before, after = reading(1.0, num_running=4), reading(2.0, num_running=4)
    moved = after.requests.requests[2:] + after.requests.requests[:2]
    source = ScriptedSource(before, _with(after, moved))
    async with viewing(source) as pilot:
        await pilot.press("down", "down", "down", "r")
        await until(pilot, lambda: len(source.orders) == 2)
        await pilot.pause()
        await pilot.press("k")
        await until(pilot, lambda: "End req-0003?" in shown(of(pilot)))


async def test_order_colours_and_hold_are_keys() -> None:
    source = ScriptedSource(reading(num_running=2))
    async with viewing(source) as pilot:
        await pilot.press("o")
        await until(pilot, lambda: source.orders[-1] == "age")
        await until(pilot, lambda: "by age" in shown(of(pilot)))
        await pilot.press("m")
        await until(pilot, lambda: "coloured by owner" in shown(of(pilot)))
        await pilot.press("space")
        await until(pilot, lambda: "HELD" in shown(of(pilot)))
        asked = len(source.orders)
        await pilot.press("r", "r")
        await pilot.pause()
        assert len(source.orders) == asked, "it holds"


async def test_without_colours_and_without_unicode_uses_are_told_apart() -> None:
    async with viewing(ScriptedSource(reading(num_running=2)), WIDE, ASCII) as pilot:
        text = shown(of(pilot))
    assert "################oooo...." in text.replace(" ", "")
    frame = {line for line in text.splitlines() if "Blocks" in line or "held" in line or "#" in line}
    assert all(line.isascii() for line in frame)


async def test_markup_in_a_name_is_text() -> None:
    told = reading(num_running=1)
    (one,) = told.requests.requests
    source = ScriptedSource(_with(told, (replace(one, request_id="[red]x[/red]"),)))
    async with viewing(source) as pilot:
        assert "[red]x[/red]" in shown(of(pilot))
        await pilot.press("k", "y")
        await until(pilot, lambda: source.aborted == ["[red]x[/red]"])


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_a_key_leaves(key: str) -> None:
    async with viewing(ScriptedSource(reading())) as pilot:
        await pilot.press(key)
        await pilot.pause()
        assert of(pilot).return_code == 0
