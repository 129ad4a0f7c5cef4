"""Rates and latencies between two readings, and the map of blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.top_readings import blocks, reading, request

from pageturner.service.client import BlockOwner, BlockPoolMap, BlockUse
from pageturner.service.top import block_map
from pageturner.service.top.figures import WINDOW_SECONDS, History, quantile
from pageturner.service.top.panels import figures_panel
from pageturner.service.top.readings import Reading
from pageturner.service.top.text import ASCII, UNICODE, count, course_line, duration, glyphs_of, rate


def test_rates_are_of_the_last_seconds_by_the_servers_clock() -> None:
    history = History()
    assert history.add(reading(0.0)).output_tokens_per_second is None, "one reading is no rate"
    assert history.add(reading(1.0, num_tokens=50)).output_tokens_per_second == 50.0
    for second in range(2, 31):
        figures = history.add(reading(float(second), num_tokens=50 + 10 * (second - 1)))
    assert figures.output_tokens_per_second == 10.0, "what was a while ago is forgotten"
    assert figures.course[:2] == (50.0, 10.0)
    late = replace(reading(90.0, num_tokens=400), at=31.0)
    assert history.add(late).course[-1] == pytest.approx(60 / 60), "a view that was held up sees no burst"


def test_tiers_are_shown_of_a_server_that_has_some() -> None:
    seen = reading(0.0)
    figures = History().add(seen)
    assert "cache" not in figures_panel(seen, figures, 200, UNICODE).plain.replace("cached", "")
    load = replace(
        seen.load,
        num_host_blocks=8,
        num_host_blocks_cached=2,
        num_disk_blocks_cached=7,
        num_disk_reads_failed_total=1,
    )
    shown = figures_panel(replace(seen, load=load), figures, 200, UNICODE).plain
    assert "host cache 25" in shown
    assert "disk cache 7 blocks" in shown
    assert "disk faults 1" in shown


def test_guesses_are_shown_of_a_server_that_makes_some() -> None:
    def at(second: float, drafted: int, accepted: int) -> Reading:
        seen = reading(second)
        load = replace(seen.load, num_drafted_tokens_total=drafted, num_accepted_drafts_total=accepted)
        return replace(seen, load=load)

    history = History()
    history.add(at(0.0, 100, 100))
    figures = history.add(at(1.0, 120, 115))
    assert figures.accepted_draft_share == 0.75
    assert "guesses right 75" in figures_panel(at(1.0, 120, 115), figures, 200, UNICODE).plain
    idle = history.add(at(20.0, 120, 115))
    assert idle.accepted_draft_share is None
    assert "guesses" not in figures_panel(at(20.0, 120, 115), idle, 200, UNICODE).plain


def test_a_restart_begins_anew() -> None:
    history = History()
    history.add(reading(100.0, num_tokens=5000))
    history.add(reading(101.0, num_tokens=5100))
    assert history.add(reading(102.0, uptime=0.5, num_tokens=3)).output_tokens_per_second is None
    assert history.add(reading(103.0, uptime=1.5, num_tokens=13)).output_tokens_per_second == 10.0


def test_latencies_are_of_what_was_observed_between_two_readings() -> None:
    history = History()
    assert history.add(reading(0.0)).time_to_first_token.median is None
    first = history.add(reading(1.0, num_tokens=100)).time_to_first_token
    assert first.median == pytest.approx(0.055)
    assert first.p95 == pytest.approx(0.0955)
    idle = history.add(reading(1.0 + 2 * WINDOW_SECONDS, num_tokens=100)).time_to_first_token
    assert idle.median == first.median, "nothing new: what was before"


@pytest.mark.parametrize(
    ("cumulative", "share", "seconds"),
    [((0, 0), 0.5, None), ((10, 10), 0.5, 0.5), ((0, 10), 0.5, 1.0), ((5, 10), 0.25, 0.5), ((), 0.5, None)],
)
def test_a_quantile_lies_within_its_bucket(
    cumulative: tuple[int, ...], share: float, seconds: float | None
) -> None:
    assert quantile((1.0,), cumulative, share) == seconds


def test_every_block_has_a_cell_while_there_is_room() -> None:
    owner = request(7, num_blocks=5)
    size, found = block_map.cells(blocks(20, [owner]), 100)
    assert (size, len(found)) == (1, 20)
    assert [cell.owner for cell in found[:6]] == [7] * 5 + [None]
    assert found[5].use is BlockUse.EVICTABLE
    assert block_map.counts(blocks(20, [owner])) == {
        BlockUse.LIVE: 5,
        BlockUse.SHARED: 0,
        BlockUse.PENDING: 0,
        BlockUse.EVICTABLE: 1,
        BlockUse.FREE: 14,
    }


def test_a_cell_of_many_blocks_says_what_most_of_them_are() -> None:
    owners = [request(number, num_blocks=400) for number in range(100)]
    size, found = block_map.cells(blocks(50_000, owners), 1000)
    assert (size, len(found)) == (50, 1000)
    assert [cell.owner for cell in found[:800:8]] == list(range(100))
    assert {cell.use for cell in found[800:819]} == {BlockUse.EVICTABLE}
    mixed = BlockPoolMap(bytes([BlockUse.FREE, BlockUse.PENDING]), bytes(4))
    assert block_map.cells(mixed, 1)[1][0].use is BlockUse.PENDING, "of a tie, what is in use"


def test_a_pool_of_nothing_and_a_newer_servers_use_are_drawn() -> None:
    assert block_map.cells(BlockPoolMap(), 100) == (1, [])
    newer = BlockPoolMap(bytes([9]), b"\x02\x00", (BlockOwner("a", "", 0),))
    assert block_map.cells(newer, 10)[1] == [block_map.Cell(BlockUse.LIVE, None)]


def test_numbers_are_short() -> None:
    assert [count(n) for n in (0, 999, 9999, 12_345, 1_200_000)] == ["0", "999", "9,999", "12.3k", "1.2M"]
    assert [rate(n, UNICODE) for n in (None, 0.0, 0.25, 12.4)] == ["-", "0", "0.2", "12"]
    told = [duration(s) for s in (None, 0.0181, 0.9996, 1.25, 200, 7500, 187_000, -1.0)]
    assert told == ["-", "18 ms", "1.0 s", "1.2 s", "3 m 20 s", "2 h 5 m", "2 d 3 h", "0 ms"]
    assert course_line((9, 0, 2, 4), 3, ASCII) == "_+@"
    assert course_line((0, 0), 5, UNICODE) == "▁▁"


def test_a_terminal_without_unicode_gets_other_signs() -> None:
    assert glyphs_of("utf-8") is UNICODE
    assert glyphs_of("latin-1") is glyphs_of(None) is glyphs_of("nonsense") is ASCII
    for glyphs in (ASCII, UNICODE):
        assert len(set(glyphs.uses.values())) == len(block_map.USES), "uses differ without colours"
