"""OpenTelemetry: a span for each call, and below it those of its request's phases. Comes with an extra.

Calls begin and end on the event loop; phases are told by the engine's thread at a request's end and made
spans of in a thread of this module, so that neither waits for a collector. What a collector does not take is
dropped. Spans carry ids, lengths and names of errors, never text.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from pageturner.service.core.clock import Clock
from pageturner.service.engine.metrics import Method
from pageturner.service.flight.phases import PhaseKind, RequestPhases
from pageturner.service.monitoring.options import TracesOptions

EXPORT_SECONDS = 5.0
"""How long one batch may take to be sent."""
CLOSE_SECONDS = 2.0
"""How long the end of the process waits for the last spans."""
MAX_QUEUED = 4096
"""Ended requests that wait to be made spans of; more are dropped."""

Metadata = Iterable[tuple[str, str | bytes]]

_TRACED = "pageturner.v1."
_HEADERS = ("traceparent", "tracestate")
_SERVER_FAULTS = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE"})
"""Codes that are errors of a server span by OpenTelemetry's conventions for gRPC."""


class _CallTrace:
    """Implements `rpc.tracing.CallTrace`."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def trace_parent(self) -> str:
        """Of this span, sampled or not; empty for one of no trace."""
        context = self._span.get_span_context()
        if not context.is_valid:
            return ""
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def end(self, code: str, *, request_id: str, tenant: str) -> None:
        """The call is over."""
        span = self._span
        if span.is_recording():
            span.set_attribute("rpc.response.status_code", code)
            if request_id:
                span.set_attribute("pageturner.request_id", request_id)
            if tenant:
                span.set_attribute("pageturner.tenant", tenant)
            if code in _SERVER_FAULTS:
                span.set_status(Status(StatusCode.ERROR))
        span.end()


class Tracing:
    """Implements `rpc.tracing.CallTracer`; `note_request` is for the engine's thread.

    wall: nanoseconds since 1970 at a moment of the engine's clock.
    """

    def __init__(self, provider: TracerProvider, wall: Callable[[float], int]) -> None:
        self._provider = provider
        self._wall = wall
        self._tracer = provider.get_tracer("pageturner")
        self._propagator = TraceContextTextMapPropagator()
        self._ended: queue.Queue[RequestPhases | None] = queue.Queue(MAX_QUEUED)
        self.num_dropped = 0
        self._thread = threading.Thread(target=self._make_spans, name="pageturner-traces", daemon=True)
        self._thread.start()

    def begin(self, method: Method, metadata: Metadata) -> _CallTrace:
        """A span of its own trace, or of the caller's. Other services than our own belong to none."""
        if not method.grpc_service.startswith(_TRACED):
            return _CallTrace(NonRecordingSpan(SpanContext(0, 0, is_remote=False)))
        name = f"{method.grpc_service}/{method.grpc_method}"
        span = self._tracer.start_span(
            name,
            self._propagator.extract(_carrier(metadata)),
            kind=SpanKind.SERVER,
            attributes={"rpc.system.name": "grpc", "rpc.method": name},
        )
        return _CallTrace(span)

    def note_request(self, request: RequestPhases) -> None:
        """A sampled request has ended. Neither waits nor raises."""
        try:
            self._ended.put_nowait(request)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Return when all that was noted before has been made spans of, and these were handed on."""
        self._ended.join()
        self._provider.force_flush()

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what waits, for so long at most."""
        closing = threading.Thread(target=self._close, daemon=True)
        closing.start()
        closing.join(seconds)

    def _close(self) -> None:
        self._ended.put(None)
        self._thread.join()
        self._provider.shutdown()

    def _make_spans(self) -> None:
        while (request := self._ended.get()) is not None:
            try:
                self._make_spans_of(request)
            finally:
                self._ended.task_done()

    def _make_spans_of(self, request: RequestPhases) -> None:
        parent = _parent(request.trace_parent)
        last = len(request.phases) - 1
        for position, phase in enumerate(request.phases):
            attributes: dict[str, str | int] = {}
            if phase.how:
                attributes["pageturner.preemption"] = phase.how
            if phase.kind is PhaseKind.QUEUE:
                attributes["gen_ai.usage.input_tokens"] = request.usage.num_prompt_tokens
                attributes["pageturner.cached_tokens"] = request.usage.num_cached_prompt_tokens
            if position == last:
                attributes["gen_ai.usage.output_tokens"] = request.usage.num_output_tokens
            span = self._tracer.start_span(
                phase.kind.value, parent, attributes=attributes, start_time=self._wall(phase.began)
            )
            if request.error and position == last:
                span.set_attribute("error.type", request.error)
                span.set_status(Status(StatusCode.ERROR))
            span.end(self._wall(phase.ended))


def open_tracing(
    options: TracesOptions, version: str, clock: Clock, exporter: SpanExporter | None = None
) -> Tracing:
    """exporter: where spans go; by default the configured collector, which need not be there yet."""
    resource = Resource.create(
        {
            "service.name": options.service_name,
            "service.version": version,
            "service.instance.id": str(uuid.uuid4()),
            "host.name": socket.gethostname(),
        }
    )
    sampler = ParentBased(TraceIdRatioBased(options.sample_ratio))
    provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter or _collector(options)))
    offset = time.time_ns() - round(clock.now() * 1e9)
    return Tracing(provider, lambda moment: round(moment * 1e9) + offset)


def _collector(options: TracesOptions) -> SpanExporter:
    endpoint = options.endpoint
    assert endpoint is not None, "traces go somewhere"
    return OTLPSpanExporter(endpoint, insecure=endpoint.startswith("http:"), timeout=EXPORT_SECONDS)


def _carrier(metadata: Metadata) -> Mapping[str, str]:
    return {key: value for key, value in metadata if key in _HEADERS and isinstance(value, str)}


def _parent(trace_parent: str) -> Context:
    _, trace_id, span_id, flags = trace_parent.split("-")
    context = SpanContext(
        int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=TraceFlags(int(flags, 16))
    )
    return set_span_in_context(NonRecordingSpan(context))
