"""The calls of AdminService: where they go, what they send, how their answers read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pageturner.policies.spec import PolicySpec
from pageturner.service.client.admin_wire import (
    from_adapter,
    from_policies,
    from_server_info,
    from_stats,
    from_tenants,
    to_choices,
)
from pageturner.service.client.calls import Call, StreamCall, path_of
from pageturner.service.client.from_wire import ABORT_OUTCOMES
from pageturner.service.client.live import (
    REQUEST_ORDERS,
    REQUEST_STATES,
    PrefixNews,
    from_activity,
    from_blocks,
    from_prefix_summary,
    from_request_page,
)
from pageturner.service.client.messages import build, check_number
from pageturner.service.client.values import BlockPoolMap, RequestOrder, RequestPage
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.engine.api import (
    AbortOutcome,
    Activity,
    AdapterInfo,
    DrainOutcome,
    RequestState,
    ServerInfo,
)
from pageturner.service.engine.tenants import TenantsReport
from pageturner.service.errors import InvalidArgument
from pageturner.service.policy_host.reports import PoliciesInfo
from pageturner.v1 import admin_pb2

NO_POLICIES: Mapping[str, PolicySpec] = MappingProxyType({})


def server_info() -> Call[admin_pb2.GetServerInfoResponse, ServerInfo]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "GetServerInfo"),
        admin_pb2.GetServerInfoRequest(),
        admin_pb2.GetServerInfoResponse,
        from_server_info,
    )


def policies() -> Call[admin_pb2.GetPoliciesResponse, PoliciesInfo]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "GetPolicies"),
        admin_pb2.GetPoliciesRequest(),
        admin_pb2.GetPoliciesResponse,
        from_policies,
    )


def set_policies(
    policies: Mapping[str, PolicySpec],
    shadows: Mapping[str, PolicySpec | None],
    preset: str,
    expected_revision: int | None,
) -> Call[admin_pb2.SetPoliciesResponse, PoliciesInfo]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "SetPolicies"),
        build(
            admin_pb2.SetPoliciesRequest,
            policies=to_choices("policies", policies),
            shadows=to_choices("shadows", shadows),
            preset=preset,
            expected_revision=expected_revision,
        ),
        admin_pb2.SetPoliciesResponse,
        from_policies,
    )


def load() -> Call[admin_pb2.GetLoadResponse, SchedulerStats]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "GetLoad"),
        admin_pb2.GetLoadRequest(),
        admin_pb2.GetLoadResponse,
        lambda response: from_stats(response.load),
    )


def tenants(limit: int) -> Call[admin_pb2.ListTenantsResponse, TenantsReport]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "ListTenants"),
        build(admin_pb2.ListTenantsRequest, limit=limit),
        admin_pb2.ListTenantsResponse,
        from_tenants,
    )


def watch_load(interval_seconds: float) -> StreamCall[admin_pb2.WatchLoadResponse, SchedulerStats]:
    interval = check_number(interval_seconds, "interval_seconds")
    return StreamCall(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "WatchLoad"),
        admin_pb2.WatchLoadRequest(interval_seconds=interval),
        admin_pb2.WatchLoadResponse,
        lambda response: from_stats(response.load),
    )


def drain(grace_seconds: float | None) -> Call[admin_pb2.DrainResponse, DrainOutcome]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "Drain"),
        build(admin_pb2.DrainRequest, grace_seconds=grace_seconds),
        admin_pb2.DrainResponse,
        lambda response: DrainOutcome(response.num_finished, response.num_aborted),
    )


def flight_record() -> StreamCall[admin_pb2.GetFlightRecordResponse, bytes]:
    """A stream of pieces of one file."""
    return StreamCall(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "GetFlightRecord"),
        admin_pb2.GetFlightRecordRequest(),
        admin_pb2.GetFlightRecordResponse,
        lambda response: response.chunk,
    )


def list_requests(
    page_size: int | None,
    page_token: str,
    order: RequestOrder,
    states: Iterable[RequestState],
    tenant: str | None,
) -> Call[admin_pb2.ListRequestsResponse, RequestPage]:
    if order not in REQUEST_ORDERS:
        raise InvalidArgument("order", f"no order {order!r}; there are {', '.join(REQUEST_ORDERS)}")
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "ListRequests"),
        build(
            admin_pb2.ListRequestsRequest,
            page_size=page_size,
            page_token=page_token,
            order=REQUEST_ORDERS[order],
            states=[REQUEST_STATES[state] for state in states],
            tenant=tenant,
        ),
        admin_pb2.ListRequestsResponse,
        from_request_page,
    )


def abort_requests(
    request_ids: Iterable[str], tenant: str | None
) -> Call[admin_pb2.AbortRequestsResponse, Mapping[str, AbortOutcome]]:
    names = [build(admin_pb2.RequestName, request_id=name, tenant=tenant) for name in request_ids]
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "AbortRequests"),
        admin_pb2.AbortRequestsRequest(requests=names),
        admin_pb2.AbortRequestsResponse,
        lambda response: {one.request.request_id: ABORT_OUTCOMES[one.outcome] for one in response.results},
    )


def blocks() -> Call[admin_pb2.GetBlocksResponse, BlockPoolMap]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "GetBlocks"),
        admin_pb2.GetBlocksRequest(),
        admin_pb2.GetBlocksResponse,
        from_blocks,
    )


def prefix_summary() -> Call[admin_pb2.GetPrefixSummaryResponse, PrefixSummary]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "GetPrefixSummary"),
        admin_pb2.GetPrefixSummaryRequest(),
        admin_pb2.GetPrefixSummaryResponse,
        lambda response: from_prefix_summary(response.summary),
    )


def watch_prefix_summary(
    interval_seconds: float,
) -> StreamCall[admin_pb2.WatchPrefixSummaryResponse, PrefixSummary]:
    """A stream of whole summaries, put together of what changes."""
    interval = check_number(interval_seconds, "interval_seconds")
    return StreamCall(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "WatchPrefixSummary"),
        admin_pb2.WatchPrefixSummaryRequest(interval_seconds=interval),
        admin_pb2.WatchPrefixSummaryResponse,
        PrefixNews().read,
    )


def activity() -> Call[admin_pb2.GetActivityResponse, Activity]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "GetActivity"),
        admin_pb2.GetActivityRequest(),
        admin_pb2.GetActivityResponse,
        from_activity,
    )


def load_adapter(name: str, path: str) -> Call[admin_pb2.LoadAdapterResponse, AdapterInfo]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "LoadAdapter"),
        build(admin_pb2.LoadAdapterRequest, name=name, path=path),
        admin_pb2.LoadAdapterResponse,
        lambda response: from_adapter(response.adapter),
    )


def unload_adapter(name: str, wait_seconds: float) -> Call[admin_pb2.UnloadAdapterResponse, int]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "UnloadAdapter"),
        build(admin_pb2.UnloadAdapterRequest, name=name, wait_seconds=wait_seconds),
        admin_pb2.UnloadAdapterResponse,
        lambda response: response.num_requests,
    )


def adapters() -> Call[admin_pb2.ListAdaptersResponse, tuple[AdapterInfo, ...]]:
    return Call(
        path_of(admin_pb2.DESCRIPTOR, "AdminService", "ListAdapters"),
        admin_pb2.ListAdaptersRequest(),
        admin_pb2.ListAdaptersResponse,
        lambda response: tuple(map(from_adapter, response.adapters)),
    )
