"""The load in the trailers of calls, as balancers read it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import grpc
import pytest
from support.fake_engine import FakeEngine
from support.patience import PATIENCE_SECONDS
from support.serving import capturing_logger, serving

from pageturner.service.core.clock import ManualClock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import RecentLoad
from pageturner.service.engine.metrics import Metrics
from pageturner.service.errors import ModelNotFound
from pageturner.service.rpc.callers import Gatekeeper
from pageturner.service.rpc.interceptors import CallInterceptor
from pageturner.service.rpc.load_report import OWN_TRAILER, TRAILER, OrcaLoadReport, load_report
from pageturner.v1 import generation_pb2 as pb
from pageturner.v1.generation_pb2_grpc import GenerationServiceStub


def _engine(num_blocks_used: int = 16) -> FakeEngine:
    engine = FakeEngine()
    engine.stats = SchedulerStats(
        num_running=3,
        num_running_sequences=4,
        num_waiting=4,
        queue_seconds=1.5,
        num_blocks=64,
        num_blocks_used=num_blocks_used,
    )
    engine.recent = RecentLoad(requests_per_second=2.5, faults_per_second=0.5)
    return engine


def test_a_report_tells_how_much_is_taken_and_what_came_of_late() -> None:
    report = OrcaLoadReport.FromString(load_report(_engine()))
    assert report.application_utilization == 0.25, "8 of 32 sequences, 16 of 64 blocks"
    assert (report.rps_fractional, report.eps) == (2.5, 0.5)
    assert dict(report.named_metrics) == {
        "kv_cache_usage_perc": 0.25,
        "num_requests_waiting": 4.0,
        "num_requests_running": 3.0,
        "num_queued_prompt_tokens": 0.0,
        "queue_seconds": 1.5,
    }
    assert OrcaLoadReport.FromString(load_report(_engine(48))).application_utilization == 0.75


@pytest.mark.parametrize(
    ("name", "number"),
    [("application_utilization", 9), ("rps_fractional", 6), ("eps", 7), ("named_metrics", 8)],
)
def test_the_numbers_are_those_of_the_standard(name: str, number: int) -> None:
    """https://github.com/cncf/xds, xds/data/orca/v3/orca_load_report.proto"""
    assert OrcaLoadReport.DESCRIPTOR.fields_by_name[name].number == number


class _Context:
    """Keeps what a call ends with. gRPC's own clients take the report out of what they show."""

    def __init__(self) -> None:
        self.trailers: tuple[tuple[str, Any], ...] = ()

    def peer(self) -> str:
        return "nowhere"

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def set_trailing_metadata(self, trailers: Any) -> None:
        self.trailers = tuple(trailers)

    async def abort_with_status(self, status: Any) -> None:
        self.trailers = tuple(status.trailing_metadata)


async def _trailers(service: str, error: Exception | None = None, report: bytes | None = b"load") -> set[str]:
    async def behaviour(request: object, context: object) -> str:
        if error is not None:
            raise error
        return "answer"

    async def continuation(_: object) -> Any:
        return grpc.unary_unary_rpc_method_handler(behaviour)

    class Details:
        method = f"/{service}/Generate"
        invocation_metadata = ()

    interceptor = CallInterceptor(
        capturing_logger()[0],
        ManualClock(),
        Metrics(),
        Gatekeeper(None),
        write_timeout_seconds=60.0,
        load_report=None if report is None else lambda: report,
    )
    handler: Any = await interceptor.intercept_service(continuation, cast(Any, Details()))
    context = _Context()
    await handler.unary_unary(None, context)
    assert dict(context.trailers).get(TRAILER, b"load") == b"load"
    return {name for name, _ in context.trailers}


GENERATION = "pageturner.v1.GenerationService"


async def test_answers_and_errors_of_the_balanced_service_carry_it_and_no_others() -> None:
    assert await _trailers(GENERATION) == {TRAILER, OWN_TRAILER}
    error = ModelNotFound("x", "y")
    assert await _trailers(GENERATION, error) == {TRAILER, OWN_TRAILER, "grpc-status-details-bin"}
    assert await _trailers("pageturner.v1.ModelService") == set()
    assert await _trailers(GENERATION, report=None) == set()


async def test_grpcs_own_balancer_sends_calls_to_the_server_that_is_less_loaded() -> None:
    idle, busy = _engine(num_blocks_used=16), _engine(num_blocks_used=64)
    policy = {"blackoutPeriod": "0.1s", "weightUpdatePeriod": "0.1s"}
    config = json.dumps({"loadBalancingConfig": [{"weighted_round_robin": policy}]})
    request = pb.GenerateRequest(prompt=pb.Prompt(text="x"))
    async with serving(idle) as first, serving(busy) as second:
        target = f"ipv4:127.0.0.1:{first.port},127.0.0.1:{second.port}"
        options = (("grpc.service_config", config),)
        async with (
            grpc.aio.insecure_channel(target, options=options) as channel,
            asyncio.timeout(PATIENCE_SECONDS),
        ):
            while len(idle.requests) <= 2 * len(busy.requests):  # 8 to 3, by utilization and faults
                idle.requests.clear()
                busy.requests.clear()
                for _ in range(50):
                    await GenerationServiceStub(channel).Generate(request)
