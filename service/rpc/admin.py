"""AdminService: what runs here and how busy it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import grpc

from pageturner.policies.spec import PolicySpec
from pageturner.service.engine.api import DrainOutcome
from pageturner.service.errors import Draining, InvalidArgument, RequestAborted
from pageturner.service.rpc import adapters, convert, from_wire, inspection
from pageturner.service.rpc.callers import current_caller
from pageturner.service.rpc.lifecycle import STOPPING_TEXT, Lifecycle
from pageturner.service.rpc.load import load_of
from pageturner.service.rpc.options import ServerOptions
from pageturner.service.rpc.process_usage import process_usage
from pageturner.v1 import admin_pb2 as pb
from pageturner.v1.admin_pb2_grpc import AdminServiceServicer

Context = grpc.aio.ServicerContext

DEFAULT_WATCH_SECONDS = 1.0
MAX_GRACE_SECONDS = 86400.0

ABORTED_TEXT = "ended by an operator of the server"

DEFAULT_TENANTS, MAX_TENANTS = 100, 1000

CHUNK_BYTES = 1 << 18
"""Of a file that is sent in pieces: far below the size of a message that every client takes."""


class AdminServicer(AdminServiceServicer):
    """Raises PageturnerError; the interceptor makes statuses of them."""

    def __init__(
        self,
        options: ServerOptions,
        lifecycle: Lifecycle,
        begin_drain: Callable[[float | None], Awaitable[DrainOutcome]],
    ) -> None:
        self._options = options
        self._lifecycle = lifecycle
        self._begin_drain = begin_drain

    async def GetServerInfo(
        self,
        request: pb.GetServerInfoRequest,
        context: Context[pb.GetServerInfoRequest, pb.GetServerInfoResponse],
    ) -> pb.GetServerInfoResponse:
        return convert.from_server_info(self._lifecycle.engine.server_info())

    async def GetLoad(
        self, request: pb.GetLoadRequest, context: Context[pb.GetLoadRequest, pb.GetLoadResponse]
    ) -> pb.GetLoadResponse:
        return pb.GetLoadResponse(load=load_of(self._lifecycle.engine), process=process_usage())

    async def WatchLoad(
        self, request: pb.WatchLoadRequest, context: Context[pb.WatchLoadRequest, pb.WatchLoadResponse]
    ) -> AsyncIterator[pb.WatchLoadResponse]:
        interval = self._interval(request)
        while True:
            yield pb.WatchLoadResponse(load=load_of(self._lifecycle.engine), process=process_usage())
            await self._pause(interval)

    async def GetPrefixSummary(
        self,
        request: pb.GetPrefixSummaryRequest,
        context: Context[pb.GetPrefixSummaryRequest, pb.GetPrefixSummaryResponse],
    ) -> pb.GetPrefixSummaryResponse:
        summary = await self._lifecycle.engine.prefix_summary()
        return pb.GetPrefixSummaryResponse(summary=inspection.from_prefix_summary(summary))

    async def WatchPrefixSummary(
        self,
        request: pb.WatchPrefixSummaryRequest,
        context: Context[pb.WatchPrefixSummaryRequest, pb.WatchPrefixSummaryResponse],
    ) -> AsyncIterator[pb.WatchPrefixSummaryResponse]:
        interval = self._interval(request)
        told = await self._lifecycle.engine.prefix_summary()
        yield pb.WatchPrefixSummaryResponse(whole=inspection.from_prefix_summary(told))
        while True:
            await self._pause(interval)
            newest = await self._lifecycle.engine.prefix_summary()
            if newest.revision == told.revision:
                continue
            if newest.is_truncated == told.is_truncated:
                change = inspection.from_prefix_change(told.change_to(newest))
                yield pb.WatchPrefixSummaryResponse(change=change)
            else:
                yield pb.WatchPrefixSummaryResponse(whole=inspection.from_prefix_summary(newest))
            told = newest

    def _interval(self, request: pb.WatchLoadRequest | pb.WatchPrefixSummaryRequest) -> float:
        """Between two looks, as asked. Raises InvalidArgument."""
        interval = request.interval_seconds if request.HasField("interval_seconds") else DEFAULT_WATCH_SECONDS
        low, high = self._options.min_watch_seconds, self._options.max_watch_seconds
        if not low <= interval <= high:  # also refuses NaN
            raise InvalidArgument("interval_seconds", f"{interval} is not in [{low:g}, {high:g}]")
        return interval

    async def _pause(self, seconds: float) -> None:
        """Raises Draining as soon as the server ends what stands open by itself."""
        try:
            await asyncio.wait_for(self._lifecycle.stopping.wait(), seconds)
        except TimeoutError:
            return
        raise Draining(STOPPING_TEXT)

    async def Drain(
        self, request: pb.DrainRequest, context: Context[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        """Lasts until the requests have ended; a caller that leaves before does not end the drain."""
        grace = request.grace_seconds if request.HasField("grace_seconds") else None
        if grace is not None and not 0 <= grace < MAX_GRACE_SECONDS:  # also refuses NaN
            raise InvalidArgument("grace_seconds", f"{grace} is not in [0, {MAX_GRACE_SECONDS:g})")
        outcome = await asyncio.shield(self._begin_drain(grace))
        return pb.DrainResponse(num_finished=outcome.num_finished, num_aborted=outcome.num_aborted)

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

    async def ListTenants(
        self, request: pb.ListTenantsRequest, context: Context[pb.ListTenantsRequest, pb.ListTenantsResponse]
    ) -> pb.ListTenantsResponse:
        limit = request.limit if request.HasField("limit") else DEFAULT_TENANTS
        if not 1 <= limit <= MAX_TENANTS:
            raise InvalidArgument("limit", f"{limit} is not in [1, {MAX_TENANTS}]")
        return convert.from_tenants(self._lifecycle.engine.tenants(limit))

    async def GetFlightRecord(
        self,
        request: pb.GetFlightRecordRequest,
        context: Context[pb.GetFlightRecordRequest, pb.GetFlightRecordResponse],
    ) -> AsyncIterator[pb.GetFlightRecordResponse]:
        content = await self._lifecycle.engine.flight_record()
        for start in range(0, len(content), CHUNK_BYTES):
            yield pb.GetFlightRecordResponse(chunk=content[start : start + CHUNK_BYTES])

    async def ListRequests(
        self,
        request: pb.ListRequestsRequest,
        context: Context[pb.ListRequestsRequest, pb.ListRequestsResponse],
    ) -> pb.ListRequestsResponse:
        return inspection.list_requests(await self._lifecycle.engine.inspect(), request)

    async def AbortRequests(
        self,
        request: pb.AbortRequestsRequest,
        context: Context[pb.AbortRequestsRequest, pb.AbortRequestsResponse],
    ) -> pb.AbortRequestsResponse:
        if not 1 <= len(request.requests) <= self._options.max_abort_ids:
            bounds = f"[1, {self._options.max_abort_ids}]"
            raise InvalidArgument("requests", f"{len(request.requests)} names, not in {bounds}")
        response = pb.AbortRequestsResponse()
        for name in request.requests:
            outcome = await self._lifecycle.engine.abort(
                name.request_id, RequestAborted(ABORTED_TEXT), tenant=name.tenant
            )
            response.results.add(request=name, outcome=convert.ABORT_OUTCOMES[outcome])
        return response

    async def GetBlocks(
        self, request: pb.GetBlocksRequest, context: Context[pb.GetBlocksRequest, pb.GetBlocksResponse]
    ) -> pb.GetBlocksResponse:
        return inspection.from_blocks(await self._lifecycle.engine.inspect())

    async def GetActivity(
        self, request: pb.GetActivityRequest, context: Context[pb.GetActivityRequest, pb.GetActivityResponse]
    ) -> pb.GetActivityResponse:
        return inspection.from_activity(self._lifecycle.engine.activity())

    async def LoadAdapter(
        self, request: pb.LoadAdapterRequest, context: Context[pb.LoadAdapterRequest, pb.LoadAdapterResponse]
    ) -> pb.LoadAdapterResponse:
        engine = self._lifecycle.engine
        adapters.check_name(request.name)
        folder = adapters.folder_of(request.path, engine.adapter_folder, current_caller())
        adapter = await engine.load_adapter(request.name, folder)
        return pb.LoadAdapterResponse(adapter=adapters.from_adapter(adapter))

    async def UnloadAdapter(
        self,
        request: pb.UnloadAdapterRequest,
        context: Context[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        adapters.check_name(request.name)
        num_requests = await self._lifecycle.engine.unload_adapter(request.name, adapters.wait_of(request))
        return pb.UnloadAdapterResponse(num_requests=num_requests)

    async def ListAdapters(
        self,
        request: pb.ListAdaptersRequest,
        context: Context[pb.ListAdaptersRequest, pb.ListAdaptersResponse],
    ) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=map(adapters.from_adapter, self._lifecycle.engine.adapters()))


def _refuse_imports(field: str, choices: Mapping[str, PolicySpec | None]) -> None:
    """A client that may name any module may run any installed code."""
    for axis, spec in choices.items():
        if spec is not None and ":" in spec.name:
            reason = "clients may not name classes here; server.allow_policy_imports would let them"
            raise InvalidArgument(f"{field}[{axis}].name", reason)
