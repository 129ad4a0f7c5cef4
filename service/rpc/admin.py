"""AdminService: what runs here and how busy it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping

import grpc

from pageturner.policies.spec import PolicySpec
from pageturner.service.errors import Draining, InvalidArgument
from pageturner.service.rpc import convert, from_wire
from pageturner.service.rpc.callers import current_caller
from pageturner.service.rpc.lifecycle import STOPPING_TEXT, Lifecycle
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.process_usage import process_usage
from pageturner.v1 import admin_pb2 as pb
from pageturner.v1.admin_pb2_grpc import AdminServiceServicer

Context = grpc.aio.ServicerContext

DEFAULT_WATCH_SECONDS = 1.0

CHUNK_BYTES = 1 << 18
"""Of a file that is sent in pieces: far below the size of a message that every client takes."""


class AdminServicer(AdminServiceServicer):
    """Raises PageturnerError; the interceptor makes statuses of them."""

    def __init__(self, options: ServerOptions, lifecycle: Lifecycle) -> None:
        self._options = options
        self._lifecycle = lifecycle

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: Context[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        return convert.from_server_info(self._lifecycle.engine.server_info())

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: Context[pb.GetLoadRequest, pb.GetLoadResponse]
    ) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(
            load=convert.from_stats(self._lifecycle.engine.load()), process=process_usage()
        )

    async def WatchLoad(
        self, request: pb.WatchLoadRequest, context: Context[pb.WatchLoadRequest, pb.WatchLoadResponse]
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        interval = request.interval_seconds if request.HasField("interval_seconds") else DEFAULT_WATCH_SECONDS
        low, high = self._options.min_watch_seconds, self._options.max_watch_seconds
        if not low <= interval <= high:  # also refuses NaN
            raise InvalidArgument("interval_seconds", f"{interval} is not in [{low:g}, {high:g}]")
        while True:
            yield pb.WatchLoadResponse(
                load=convert.from_stats(self._lifecycle.engine.load()), process=process_usage()
            )
            try:
                await asyncio.wait_for(self._lifecycle.stopping.wait(), interval)
            except TimeoutError:
                continue
            raise Draining(STOPPING_TEXT)

    async def GetPolicies(
        self, request: pb.GetPoliciesRequest, context: Context[pb.GetPoliciesRequest, pb.GetPoliciesResponse]
    ) -> pb.GetPoliciesResponse:
        return convert.from_policies(self._lifecycle.engine.policies())

    async def SetPolicies(
        self, request: pb.SetPoliciesRequest, context: Context[pb.SetPoliciesRequest, pb.SetPoliciesResponse]
    ) -> pb.SetPoliciesResponse:
        origin = ", ".join(filter(None, [f"peer {context.peer()}", current_caller().credential]))
        change = from_wire.to_policy_change(request, origin)
        if not self._options.allow_policy_imports:
            _refuse_imports("policies", change.policies)
            _refuse_imports("shadows", change.shadows)
        info = await self._lifecycle.engine.set_policies(change)
        return pb.SetPoliciesResponse(policies=map(convert.from_policy, info.axes), revision=info.revision)

    async def GetFlightRecord(
        self,
        request: pb.GetFlightRecordRequest,
        context: Context[pb.GetFlightRecordRequest, pb.GetFlightRecordResponse],
    ) -> AsyncIterator[pb.GetFlightRecordResponse]:
        content = await self._lifecycle.engine.flight_record()
        for start in range(0, len(content), CHUNK_BYTES):
            yield pb.GetFlightRecordResponse(chunk=content[start : start + CHUNK_BYTES])


def _refuse_imports(field: str, choices: Mapping[str, PolicySpec | None]) -> None:
    """A client that may name any module may run any installed code."""
    for axis, spec in choices.items():
        if spec is not None and ":" in spec.name:
            reason = "clients may not name classes here; server.allow_policy_imports would let them"
            raise InvalidArgument(f"{field}[{axis}].name", reason)
