"""Traces of real traffic as workloads of the simulator. The formats and their reader are the load test's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pageturner.loadtest.traces import reader
from pageturner.loadtest.traces.errors import TraceError
from pageturner.loadtest.traces.lines import OnBytes, ignore_bytes
from pageturner.loadtest.traces.trace import Piece, Trace, TraceRequest
from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest


@dataclass(frozen=True, slots=True)
class SimulatedTrace:
    """A trace of which any run of requests becomes a workload."""

    source: Trace

    def workload(self) -> SimulatedWorkload:
        """All of it, from time 0 on."""
        return SimulatedWorkload(self.source.name, tuple(map(_to_request, self.source.requests())))

    def window(self, num_requests: int, seed: int) -> SimulatedWorkload:
        """`num_requests` consecutive requests, from a place that the seed chooses."""
        taken = self.source.window(num_requests, seed)
        return SimulatedWorkload(self.source.name, tuple(map(_to_request, taken)))


def read_trace(path: Path, on_bytes: OnBytes = ignore_bytes) -> SimulatedTrace:
    """`reader.read_trace`. Raises WorkloadError, which names the line and the column or field."""
    try:
        return SimulatedTrace(reader.read_trace(path, on_bytes))
    except TraceError as error:
        raise WorkloadError(str(error)) from error


def _to_request(request: TraceRequest) -> WorkloadRequest:
    labels = request.labels
    return WorkloadRequest(
        request.at_seconds,
        tuple(map(_to_segment, request.prompt)),
        _to_segment(request.answer),
        tenant=labels.tenant,
        priority=labels.priority,
        deadline_seconds=labels.deadline_seconds,
        num_choices=labels.num_choices,
        max_tokens=labels.max_tokens,
    )


def _to_segment(piece: Piece) -> Segment:
    return Segment(piece.key, piece.num_tokens)
