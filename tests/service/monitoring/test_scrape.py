"""A scrape of a real server tells what happened: each thing once, under the names that dashboards know."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any

import pytest
from support.fake_engine import FakeEngine
from support.http_pages import get
from support.real_service import RealService, real_service
from support.scrapes import Scrape, monitoring, parse
from support.serving import serving

from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import Condition, EngineHealth, GenerationRequest
from pageturner.service.engine.instruments import OTHER
from pageturner.service.engine.metrics import Metrics
from pageturner.service.errors import DeadlineExceeded, DuplicateRequest, InvalidArgument, QueueFull
from pageturner.service.monitoring.metrics_page import MetricsPage, Sources
from pageturner.service.monitoring.routes import HttpRequest

KNOWN = {
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "num_preemptions_total"),
    *("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total"),
    *("prefix_cache_hits_total", "cache_config_info", "request_success_total"),
    *(
        f"{name}_{part}"
        for name in (
            *("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds"),
            *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_prompt_tokens", "request_generation_tokens"),
        )
        for part in ("bucket", "sum", "count")
    ),
}
CALLS = {"grpc_server_started_total", "grpc_server_handled_total", "grpc_server_handling_seconds_bucket"}
ADAPTER_VALUES = {
    "num_adapters": 0,
    "num_adapters_loaded": 0,
    "adapter_bytes": 0,
    "adapter_memory_bytes": 1 << 20,
    "adapter_loads_total": 9,
    "adapter_unloads_total": 9,
    "adapter_reads_total": 7,
    "adapter_evictions_total": 1,
}
"""Of a FakeEngine."""
GENERATE = {
    "grpc_type": "unary",
    "grpc_service": "pageturner.v1.GenerationService",
    "grpc_method": "Generate",
}


def check_totals(scrape: Scrape, *, requests: int, prompt_tokens: int, output_tokens: int) -> None:
    """Every way in which requests and tokens are counted says the same."""
    assert scrape.value("pageturner:prompt_tokens_total") == prompt_tokens
    assert scrape.value("pageturner:generation_tokens_total") == output_tokens
    assert scrape.value("pageturner:requests_finished_total", outcome="ok") == requests
    assert scrape.value("pageturner:request_success_total", finished_reason="length") == requests
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert scrape.value(f"pageturner:{name}_count") == requests, name
    between = scrape.value("pageturner:inter_token_latency_seconds_count")
    assert between == output_tokens - requests
    assert scrape.value("pageturner:request_prompt_tokens_sum") == prompt_tokens
    assert scrape.value("pageturner:request_generation_tokens_sum") == output_tokens


async def _generate(service: RealService, num_requests: int, **options: Any) -> None:
    calls = [
        service.client.generate((1, 2, 3), request_id=f"r{index}", max_tokens=4, **options)
        for index in range(num_requests)
    ]
    await asyncio.gather(*calls)


async def test_counters_equal_what_happened() -> None:
    async with real_service() as service, monitoring(service.server, service.metrics) as monitored:
        await _generate(service, 3)
        scrape = await monitored.scrape()
    assert {f"pageturner:{name}" for name in KNOWN} | CALLS <= scrape.names
    check_totals(scrape, requests=3, prompt_tokens=9, output_tokens=12)
    assert scrape.value("grpc_server_started_total", **GENERATE) == 3
    assert scrape.value("grpc_server_handled_total", **GENERATE, grpc_code="OK") == 3
    assert scrape.value("grpc_server_handling_seconds_count", **GENERATE) == 3
    assert scrape.value("pageturner:num_requests_running") == 0
    assert scrape.value("pageturner:health", state="serving") == 1
    config = [labels for name, labels in scrape.samples if name == "pageturner:cache_config_info"]
    assert ("block_size", "4") in config[0]
    assert ("num_gpu_blocks", "16") in config[0]


async def test_every_figure_of_the_scheduler_is_shown() -> None:
    known_otherwise = {
        "num_running": "num_requests_running",
        "num_waiting": "num_requests_waiting",
        "num_swapped": "num_requests_swapped",
        "num_prefix_query_tokens_total": "prefix_cache_queries_total",
        "num_prefix_hit_tokens_total": "prefix_cache_hits_total",
        "num_drafted_tokens_total": "spec_decode_num_draft_tokens_total",
        "num_accepted_drafts_total": "spec_decode_num_accepted_tokens_total",
        **{f"num_{kind}_preemptions_total": "preemptions_total" for kind in ("swap", "recompute", "tail")},
    }
    async with serving(FakeEngine()) as served, monitoring(served.server, served.metrics) as monitored:
        names = (await monitored.scrape()).names
    figures = {field.name for field in fields(SchedulerStats)} - {"outlook"}
    assert {f"pageturner:{known_otherwise.get(name, name)}" for name in figures} <= names


async def test_work_that_is_done_again_is_counted_once() -> None:
    """Steps that fail and are retried, and requests that are preempted and computed anew."""
    async with (
        real_service(num_blocks=4, max_num_seqs=4) as service,
        monitoring(service.server, service.metrics) as monitored,
    ):
        service.hold_steps()
        calls = [
            asyncio.create_task(service.client.generate((1, 2, 3, 4), request_id=f"r{index}", max_tokens=10))
            for index in range(3)
        ]
        await service.until(lambda: service.num_live == 3)
        await service.run_steps(2)  # by then all of them are in it
        service.model.fail_apply = 1  # of a step of several: alone, a request would be found guilty
        service.release_steps()
        await asyncio.gather(*calls)
        scrape = await monitored.scrape()
    assert scrape.value("pageturner:num_preemptions_total") > 0
    assert scrape.value("pageturner:num_step_failures_total") == 1
    check_totals(scrape, requests=3, prompt_tokens=12, output_tokens=30)


@pytest.mark.parametrize("planted", ["prompt", "token", "end"])
async def test_what_is_counted_twice_is_caught(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above, with a bug in what it checks."""
    name = {"prompt": "accepted", "token": "_observe_tokens", "end": "_observe_finish"}[planted]
    counted = getattr(Metrics, name)

    def count_twice(*arguments: Any, **options: Any) -> Any:
        counted(*arguments, **options)
        return counted(*arguments, **options)

    async with real_service() as service, monitoring(service.server, service.metrics) as monitored:
        monkeypatch.setattr(Metrics, name, count_twice)
        await _generate(service, 2)
        scrape = await monitored.scrape()
    with pytest.raises(AssertionError):
        check_totals(scrape, requests=2, prompt_tokens=6, output_tokens=8)


async def test_refusals_are_counted_by_cause_and_once() -> None:
    async with (
        real_service(max_num_seqs=1, max_waiting=1) as service,
        monitoring(service.server, service.metrics) as monitored,
    ):
        service.hold_steps()
        running = asyncio.create_task(service.client.generate("x", request_id="a", max_tokens=1))
        await service.until(lambda: service.engine.load().num_running == 1)
        waiting = asyncio.create_task(service.client.generate("x", request_id="b", max_tokens=1))
        await service.until(lambda: service.num_live == 2)
        for _ in range(2):
            with pytest.raises(QueueFull):
                await service.client.generate("x", request_id="c")
        with pytest.raises(DuplicateRequest):
            await service.client.generate("x", request_id="a")
        with pytest.raises(InvalidArgument):
            await service.client.generate("x", temperature=-1.0)
        service.release_steps()
        await asyncio.gather(running, waiting)
        scrape = await monitored.scrape()
    expected = {"queue_full": 2, "duplicate_request": 1, "invalid_argument": 1}
    assert scrape.by("pageturner:requests_refused_total", "cause") == expected
    assert scrape.by("pageturner:requests_finished_total", "outcome") == {"ok": 2}


async def test_a_refusal_of_the_scheduler_is_counted_once() -> None:
    """Two requests that pass the check before the engine's and meet the bound behind it."""
    async with (
        real_service(max_num_seqs=1, max_model_len=16, num_blocks=2) as service,
        monitoring(service.server, service.metrics) as monitored,
    ):
        with pytest.raises(InvalidArgument):  # it never fits the pool, which only the scheduler knows
            await service.client.generate((1,) * 12, max_tokens=4)
        scrape = await monitored.scrape()
    assert scrape.by("pageturner:requests_refused_total", "cause") == {"invalid_argument": 1}


async def test_a_request_that_outlives_its_deadline_unserved_is_shed() -> None:
    async with (
        real_service(max_num_seqs=1) as service,
        monitoring(service.server, service.metrics) as monitored,
    ):
        service.hold_steps()
        running = asyncio.create_task(service.client.generate("x", request_id="a", max_tokens=2))
        await service.until(lambda: service.num_live == 1)
        late = GenerationRequest("x", request_id="b", deadline_seconds=0.2)
        waiting = asyncio.create_task(service.engine.submit(late))
        await service.until(lambda: service.num_live == 2)
        await asyncio.sleep(0.25)  # its deadline passes
        service.release_steps()
        await running
        with pytest.raises(DeadlineExceeded):
            _ = [event async for event in await waiting]
        scrape = await monitored.scrape()
    assert scrape.by("pageturner:requests_shed_total", "cause") == {"deadline_exceeded": 1}
    assert scrape.by("pageturner:requests_refused_total", "cause") == {}


async def test_tenants_are_told_apart_up_to_a_bound() -> None:
    async with (
        real_service(metrics=Metrics(max_tenants=2)) as service,
        monitoring(service.server, service.metrics) as monitored,
    ):
        for index in range(5):
            await service.client.generate("x", tenant=f"tenant-{index}", max_tokens=2)
        await service.client.generate("x", tenant="tenant-0", max_tokens=2)
        scrape = await monitored.scrape()
    tokens = scrape.by("pageturner:tenant_generation_tokens_total", "tenant")
    assert tokens == {"tenant-0": 4, "tenant-1": 2, OTHER: 6}
    assert scrape.value("pageturner:tenant_requests_total", tenant=OTHER, outcome="ok") == 3


async def test_adapters_are_told_with_their_memory_and_requests() -> None:
    async with serving(FakeEngine()) as served, monitoring(served.server, served.metrics) as monitored:
        scrape = await monitored.scrape()
    told = {name: scrape.value(f"pageturner:{name}") for name in ADAPTER_VALUES}
    assert told == ADAPTER_VALUES
    assert scrape.by("pageturner:adapter_requests_total", "adapter") == {"sql": 5, OTHER: 2}
    assert scrape.by("pageturner:num_adapter_requests", "adapter") == {"sql": 1, OTHER: 0}


async def test_a_name_of_a_tenant_is_no_syntax() -> None:
    name = 'a"} 1\npageturner:forged{x="\\'
    async with real_service() as service, monitoring(service.server, service.metrics) as monitored:
        await service.client.generate("x", tenant=name, max_tokens=2)
        scrape = await monitored.scrape()
    assert scrape.by("pageturner:tenant_generation_tokens_total", "tenant") == {name: 2}
    assert "pageturner:forged" not in scrape.names


async def test_no_text_leaves_by_a_scrape() -> None:
    async with real_service() as service, monitoring(service.server, service.metrics) as monitored:
        completion = await service.client.generate("my secret fox", request_id="id-of-mine", max_tokens=4)
        scrape = await monitored.scrape()
    for text in ("secret", "fox", "id-of-mine", completion.text):
        assert text not in scrape.text


async def test_those_who_ask_for_openmetrics_get_the_text_format() -> None:
    async with serving(FakeEngine()) as served, monitoring(served.server, served.metrics) as monitored:
        accept = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.3"
        page = await get(monitored.port, "/metrics", accept=accept)
    assert page.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "pageturner:num_requests_running" in parse(page).names


async def test_while_the_model_loads_calls_and_health_are_shown() -> None:
    async with serving(None) as served, monitoring(served.server, served.metrics) as monitored:
        scrape = await monitored.scrape()
        assert scrape.value("pageturner:health", state="starting") == 1
        assert "pageturner:num_requests_running" not in scrape.names
        assert (await get(monitored.port, "/healthz")).status == 200
        ready = await get(monitored.port, "/readyz")
        assert ready.status == 503
        assert ready.body == "starting: the model is loading: the server takes no requests yet\n"
        served.server.attach(FakeEngine())
        assert (await get(monitored.port, "/readyz")).body == "ready\n"


@pytest.mark.parametrize("health", list(EngineHealth))
async def test_probes_tell_health_and_why(health: EngineHealth) -> None:
    engine = FakeEngine()
    engine.set_health(health)
    async with serving(engine) as served, monitoring(served.server, served.metrics) as monitored:
        alive, ready = [await get(monitored.port, path) for path in ("/healthz", "/readyz")]
    assert alive.status == (503 if health is EngineHealth.DEAD else 200)
    assert ready.status == (200 if health is EngineHealth.SERVING else 503)
    if health is not EngineHealth.SERVING:
        assert ready.body == f"{health.value}: the fake was told so\n"


async def test_all_who_ask_within_a_moment_share_one_picture() -> None:
    clock, num_read = ManualClock(), 0

    def condition() -> Condition:
        nonlocal num_read
        num_read += 1
        return Condition(EngineHealth.STARTING)

    page = MetricsPage(Sources(Metrics(), condition, lambda: None, lambda: 0), clock, fresh_seconds=0.1)
    answers = await asyncio.gather(*(page.answer(HttpRequest("/metrics")) for _ in range(50)))
    assert num_read == 1
    assert len({answer.body for answer in answers}) == 1
    await page.answer(HttpRequest("/metrics"))
    assert num_read == 1
    clock.advance(0.1)
    await page.answer(HttpRequest("/metrics"))
    assert num_read == 2


async def test_a_scraper_that_leaves_takes_the_picture_from_nobody() -> None:
    sources = Sources(Metrics(), lambda: Condition(EngineHealth.STARTING), lambda: None, lambda: 0)
    page = MetricsPage(sources, ManualClock())
    asking = [asyncio.create_task(page.answer(HttpRequest("/metrics"))) for _ in range(2)]
    await asyncio.sleep(0)
    asking[0].cancel()
    assert (await asking[1]).status == 200


async def test_lost_lines_of_the_log_are_counted() -> None:
    async with serving(None) as served, monitoring(served.server, served.metrics, 7) as monitored:
        assert (await monitored.scrape()).value("pageturner:log_lines_lost_total") == 7
