"""Spans of calls and of the phases of their requests, as a collector would be sent them."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from support.fake_engine import FakeEngine
from support.real_service import RealService, real_service
from support.serving import serving

from pageturner.service.core.clock import ManualClock, MonotonicClock
from pageturner.service.engine.metrics import Method
from pageturner.service.errors import ConfigError, RequestAborted
from pageturner.service.monitoring.options import TracesOptions
from pageturner.service.monitoring.tracing import Tracing, open_tracing
from pageturner.v1 import generation_pb2, generation_pb2_grpc

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OPTIONS = TracesOptions("http://localhost:1")
GENERATE = "pageturner.v1.GenerationService/Generate"


class Traced:
    """Spans that were sent, by name in the order of their beginning."""

    def __init__(self, options: TracesOptions = OPTIONS) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing: Tracing = open_tracing(options, "1", MonotonicClock(), self.exporter)

    async def spans(self) -> list[ReadableSpan]:
        await asyncio.to_thread(self.tracing.flush)
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)


@pytest.fixture
def traced() -> Iterator[Traced]:
    made = Traced()
    yield made
    made.tracing.close()


async def _generate(service: RealService, *metadata: tuple[str, str], **options: Any) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(service.channel)
    request = generation_pb2.GenerateRequest(
        request_id="mine", prompt=generation_pb2.Prompt(text="a secret fox"), tenant="gold"
    )
    request.sampling.max_tokens = 4
    call = stub.Generate(request, metadata=metadata, **options)
    await call
    await service.until(lambda: not service.num_live)


def _parent_of(span: ReadableSpan) -> str:
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def _trace_of(span: ReadableSpan) -> str:
    return f"{span.context.trace_id:032x}"


async def test_a_call_is_a_server_span_of_the_callers_trace_with_its_phases_below(traced: Traced) -> None:
    async with real_service(tracing=traced.tracing) as service:
        await _generate(service, ("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "vendor=x"))
    spans = [span for span in await traced.spans() if _trace_of(span) == TRACE]
    assert [span.name for span in spans] == [GENERATE, "queue", "prefill", "decode"]
    server, *phases = spans
    assert server.kind is SpanKind.SERVER
    assert _parent_of(server) == SPAN
    assert server.context.trace_state.get("vendor") == "x"
    attributes = dict(server.attributes or {})
    assert attributes["rpc.response.status_code"] == "OK"
    assert attributes["pageturner.request_id"] == "mine"
    assert attributes["pageturner.tenant"] == "gold"
    for span in phases:
        assert _parent_of(span) == f"{server.context.span_id:016x}"
    ends = [(span.start_time, span.end_time) for span in phases]
    assert [begin for begin, _ in ends[1:]] == [end for _, end in ends[:-1]], "no gap, no overlap"
    assert server.start_time is not None
    assert server.end_time is not None
    assert ends[0][0] is not None
    assert server.start_time <= ends[0][0]
    assert dict(phases[0].attributes or {})["gen_ai.usage.input_tokens"] > 0  # type: ignore[operator]
    assert dict(phases[-1].attributes or {})["gen_ai.usage.output_tokens"] == 4


async def test_no_text_is_in_a_span(traced: Traced) -> None:
    async with real_service(tracing=traced.tracing) as service:
        await _generate(service)
    told = "".join(span.to_json() for span in await traced.spans())
    assert "mine" in told
    assert "secret" not in told
    assert "fox" not in told


async def test_a_preempted_request_tells_when_and_how(traced: Traced) -> None:
    async with real_service(num_blocks=4, max_num_seqs=4, tracing=traced.tracing) as service:
        service.hold_steps()
        calls = [
            asyncio.create_task(service.client.generate((1, 2, 3, 4), request_id=f"r{index}", max_tokens=10))
            for index in range(3)
        ]
        await service.until(lambda: service.num_live == 3)
        service.release_steps()
        await asyncio.gather(*calls)
        preemptions = service.metrics.snapshot(service.engine.load()).counters["num_preemptions_total"]
    spans = await traced.spans()
    preempted = [span for span in spans if span.name == "preempted"]
    assert 0 < len(preempted) <= preemptions
    assert {dict(span.attributes or {})["pageturner.preemption"] for span in preempted} <= {
        *("swap", "recompute", "tail")
    }
    for server in (span for span in spans if span.name == GENERATE):
        own = [span for span in spans if _parent_of(span) == f"{server.context.span_id:016x}"]
        own.sort(key=lambda span: span.start_time or 0)
        assert [span.start_time for span in own[1:]] == [span.end_time for span in own[:-1]]
        assert own[0].name == "queue"
        assert own[-1].name == "decode"


async def test_an_error_is_told_by_its_name(traced: Traced) -> None:
    async with real_service(tracing=traced.tracing) as service:
        service.hold_steps()
        call = asyncio.create_task(service.client.generate("x", request_id="r", max_tokens=9))
        await service.until(lambda: service.num_live == 1)
        abort = asyncio.create_task(service.client.abort("r"))
        await abort
        service.release_steps()
        with pytest.raises(RequestAborted):
            await call
        await service.until(lambda: service.num_handled("ABORTED") == 1)
    spans = await traced.spans()
    (last,) = [span for span in spans if "error.type" in (span.attributes or {})]
    assert dict(last.attributes or {})["error.type"] == "RequestAborted"
    assert last.status.status_code is StatusCode.ERROR


@pytest.mark.parametrize(
    ("flags", "ratio", "is_recorded"),
    [("01", 0.0, True), ("00", 1.0, False), (None, 1.0, True), (None, 0.0, False)],
)
async def test_the_caller_decides_what_is_recorded_and_without_one_the_ratio(
    flags: str | None, ratio: float, is_recorded: bool
) -> None:
    traced = Traced(TracesOptions("http://localhost:1", sample_ratio=ratio))
    metadata = [] if flags is None else [("traceparent", f"00-{TRACE}-{SPAN}-{flags}")]
    async with real_service(tracing=traced.tracing) as service:
        await _generate(service, *metadata)
    spans = await traced.spans()
    traced.tracing.close()
    names = {span.name for span in spans}
    assert names >= ({GENERATE, "queue", "decode"} if is_recorded else set())
    assert is_recorded or not names & {GENERATE, "queue", "decode"}


@pytest.mark.parametrize(
    "header", ["", "junk", f"00-{'0' * 32}-{SPAN}-01", "00-" + "a" * 9000, f"ff-{TRACE}"]
)
async def test_a_header_of_another_form_begins_a_trace_of_its_own(header: str, traced: Traced) -> None:
    async with real_service(tracing=traced.tracing) as service:
        try:
            await _generate(service, ("traceparent", header))
        except grpc.aio.AioRpcError as error:  # too large for gRPC itself
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED  # noqa: PT017
            return
    (server,) = [span for span in await traced.spans() if span.name == GENERATE]
    assert server.parent is None
    assert _trace_of(server) != "0" * 32


async def test_health_is_not_traced(traced: Traced) -> None:
    trace = traced.tracing.begin(Method("unary", "grpc.health.v1.Health", "Check"), ())
    assert trace.trace_parent == ""
    trace.end("OK", request_id="", tenant="")
    assert await traced.spans() == []


async def test_log_lines_name_the_trace_even_where_nothing_is_traced() -> None:
    async with serving(FakeEngine()) as served:
        stub = generation_pb2_grpc.GenerationServiceStub(served.channel)
        request = generation_pb2.GenerateRequest(
            request_id="r", prompt=generation_pb2.Prompt(text="x"), tenant="gold"
        )
        for metadata in ([("traceparent", f"00-{TRACE}-{SPAN}-01")], [("traceparent", "junk")], []):
            await stub.Generate(request, metadata=metadata)
        entries = [entry for entry in served.log.entries if entry["event"] == "rpc"]
    assert [entry.get("trace_id") for entry in entries] == [TRACE, None, None]
    assert {entry["request_id"] for entry in entries} == {"r"}
    assert {entry["tenant"] for entry in entries} == {"gold"}


def test_what_no_thread_takes_up_is_dropped_and_counted(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def put_nowait(self, item: object) -> None:
            raise __import__("queue").Full

    monkeypatch.setattr(traced.tracing, "_ended", Full())
    traced.tracing.note_request(None)  # type: ignore[arg-type]  # it is not looked at
    monkeypatch.undo()
    assert traced.tracing.num_dropped == 1


def test_a_collector_is_sent_spans_by_otlp() -> None:
    exported: list[str] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request: Any, context: object) -> Any:  # noqa: N802  # gRPC's name
            for resource in request.resource_spans:
                exported.extend(
                    attribute.value.string_value
                    for attribute in resource.resource.attributes
                    if attribute.key == "service.name"
                )
                exported.extend(span.name for scope in resource.scope_spans for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(  # type: ignore[no-untyped-call] # has no types
        Collector(), server
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    options = TracesOptions(f"http://127.0.0.1:{port}", service_name="mine")
    tracing = open_tracing(options, "1", ManualClock())
    trace = tracing.begin(Method("unary", "pageturner.v1.ModelService", "GetModel"), ())
    trace.end("OK", request_id="", tenant="")
    tracing.flush()
    tracing.close()
    server.stop(grace=None)
    assert exported == ["mine", "pageturner.v1.ModelService/GetModel"]


def test_a_collector_that_is_not_there_holds_up_nothing() -> None:
    tracing = open_tracing(TracesOptions("http://127.0.0.1:1"), "1", ManualClock())
    trace = tracing.begin(Method("unary", "pageturner.v1.ModelService", "GetModel"), ())
    trace.end("OK", request_id="", tenant="")
    tracing.close(0.0)


def test_without_the_extra_a_configured_endpoint_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from pageturner.service.commands.serve import _tracing

    monkeypatch.setitem(sys.modules, "opentelemetry.context", None)
    monkeypatch.delitem(sys.modules, "pageturner.service.monitoring.tracing")
    with pytest.raises(ConfigError, match=r"traces.endpoint: needs .*pip install 'pageturner\[traces\]'"):
        _tracing(OPTIONS, MonotonicClock())
    assert _tracing(TracesOptions(), MonotonicClock()) is None


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("endpoint", "localhost:4317"),
        ("endpoint", "http://user:secret@host"),
        ("endpoint", "ftp://x"),
        ("sample_ratio", 1.5),
        ("service_name", ""),
    ],
)
def test_a_wrong_option_is_told_by_its_key(key: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"traces\.{key}: "):
        TracesOptions(**{key: value})
