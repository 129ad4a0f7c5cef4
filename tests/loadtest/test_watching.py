"""What is seen beside the requests: the server's load, the client's cost, the figures so far."""

from __future__ import annotations

import asyncio
import io
import threading
from dataclasses import replace

import pytest
from rich.console import Console
from support.fake_server import serve
from support.real_service import real_service

from pageturner.loadtest.client import Arrival, Outcome, RequestRecord
from pageturner.loadtest.live import FiguresSoFar, live_display
from pageturner.loadtest.meter import ClientCost, CostMeter, warning
from pageturner.loadtest.monitor import LoadSample, Monitor
from pageturner.loadtest.report.series import MAX_POINTS, distributions, load_over_time, tokens_over_time

SAMPLE = LoadSample(10.0, 4, 16, 0, 100, 43, 7, 0, 0, 0, 0, 0, 1 << 20, 0.5)
RECORD = RequestRecord(0, Outcome.OK, "", 10.0, 10.0, 14.0, 9, arrivals=(Arrival(11.0, 1), Arrival(13.0, 2)))


async def test_the_monitor_sees_queue_pool_and_memory() -> None:
    seen = threading.Event()

    def on_sample(sample: LoadSample) -> None:
        if sample.num_running:
            seen.set()

    async with real_service(max_num_seqs=1) as service:
        monitor = Monitor(service.target, on_sample, interval_seconds=0.1)

        def watch() -> None:
            with monitor.watching():
                assert seen.wait(timeout=30)

        service.hold_steps()
        calls = [asyncio.create_task(service.client.generate("x", max_tokens=4)) for _ in range(3)]
        await asyncio.to_thread(watch)
        service.release_steps()
        await asyncio.gather(*calls)
    assert monitor.failure == ""
    last = monitor.samples[-1]
    assert (last.num_running, last.num_waiting, last.num_blocks) == (1, 2, 16)
    assert last.resident_bytes > 1 << 20
    assert last.cpu_seconds > 0
    assert [sample.at for sample in monitor.samples] == sorted(sample.at for sample in monitor.samples)


def test_a_server_that_tells_no_load_is_measured_without() -> None:
    with serve() as server:
        monitor = Monitor(server.address, lambda _: None)
        with monitor.watching():
            pass
    assert monitor.samples == []
    assert monitor.failure.startswith("UNIMPLEMENTED")


async def test_the_meter_counts_processor_time_and_how_late_the_loop_is() -> None:
    clock = [100.0]
    cpu = iter([5.0, 7.0])
    is_sampled = asyncio.Event()

    async def sleep(seconds: float) -> None:
        """The first one takes 0.9 s instead, the next one no end."""
        if is_sampled.is_set():
            await asyncio.Event().wait()
        clock[0] += 0.9
        is_sampled.set()

    meter = CostMeter(wall=lambda: clock[0], cpu=lambda: next(cpu), sleep=sleep)
    async with meter.running():
        await is_sampled.wait()
        clock[0] = 104.0
    assert meter.cost.wall_seconds == 4.0
    assert meter.cost.cpu_seconds == 2.0
    assert meter.cost.cpu_share == 0.5
    assert meter.cost.loop_lags == pytest.approx((0.85,))


def test_a_client_that_may_be_the_bottleneck_is_warned_of() -> None:
    calm = ClientCost(10.0, 2.0, (0.001, 0.002))
    assert warning([]) == warning([calm]) == warning([calm, calm]) == ""
    assert "took 90% of a core" in warning([calm, ClientCost(10.0, 9.0, ())])
    assert "--processes 3" in warning([calm, ClientCost(10.0, 9.0, ())])
    assert "50 ms late at p99 with 10% of a core; its machine" in warning([ClientCost(10.0, 1.0, (0.05,))])


def test_the_figures_so_far_are_those_of_the_last_seconds() -> None:
    now = [0.0]
    figures = FiguresSoFar(lambda: now[0])
    assert figures.text == ""
    now[0] = 2.0
    figures.add(RECORD)
    figures.observe(SAMPLE)
    assert figures.text == "1 ok · 2 tokens/s · TTFT p50 1,000 ms · 16 run, 4 wait · 43% of blocks"
    now[0] = 30.0
    figures.add(replace(RECORD, outcome=Outcome.SHED, arrivals=()))
    assert figures.text.startswith("1 ok · 1 shed · 0 tokens/s · 16 run")


def test_the_display_shows_them_on_a_terminal_and_nothing_elsewhere() -> None:
    for is_terminal in (True, False):
        out = io.StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=160)
        with live_display("requests", 4, console) as display:
            display.on_sample(SAMPLE)
            display.on_record(RECORD)
        assert ("16 run, 4 wait" in out.getvalue()) == is_terminal
        assert is_terminal or out.getvalue().strip() == ""


def test_series_are_columns_from_the_start_of_the_run() -> None:
    samples = [replace(SAMPLE, at=10.0 + index, num_waiting=index) for index in range(2 * MAX_POINTS + 1)]
    columns = load_over_time(samples, start=10.0)
    assert len(columns["seconds"]) <= MAX_POINTS + 1
    assert columns["seconds"][-1] == columns["num_waiting"][-1] == 2 * MAX_POINTS
    assert "at" not in columns
    assert load_over_time([], start=0.0)["seconds"] == []


def test_the_output_over_time_adds_up_to_the_tokens() -> None:
    columns = tokens_over_time([RECORD, RECORD], start=10.0)
    width = columns["seconds"][1] - columns["seconds"][0]
    assert sum(columns["output_tokens_per_second"]) * width == pytest.approx(6)
    assert tokens_over_time([], start=0.0)["seconds"] == []


def test_distributions_leave_out_what_was_not_measured() -> None:
    assert set(distributions([])) == {"shares"}
    found = distributions([RECORD])
    assert set(found) == {"shares", "ttft", "tpot", "itl", "e2el"}
    assert found["shares"][0] == 0
    assert found["shares"][-1] == 1
    assert set(found["e2el"]) == {3.0}
    slow = distributions([replace(RECORD, is_slow_reader=True)])
    assert set(slow) == {"shares"}
