"""grpc.channelz.v1: gRPC's own account of the server's connections and calls, for admins."""

from __future__ import annotations

import grpc
from grpc_channelz.v1 import channelz, channelz_pb2


def enable_channelz(server: grpc.aio.Server) -> str:
    """Serve it; the full name of the service."""
    channelz.add_channelz_servicer(server)  # type: ignore[no-untyped-call] # has no types
    name: str = channelz_pb2.DESCRIPTOR.services_by_name["Channelz"].full_name
    return name
