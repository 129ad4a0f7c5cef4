"""What a server says of itself at one moment, and how it is asked again after it was away."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from pageturner.service.client import (
    Activity,
    BlockPoolMap,
    Client,
    PageturnerError,
    RequestPage,
    UnknownStatus,
)
from pageturner.service.client.values import RequestOrder
from pageturner.service.core.clock import Clock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import AbortOutcome, ServerInfo
from pageturner.service.flight import flight_file
from pageturner.service.flight.explain import explain
from pageturner.service.policy_host.reports import PoliciesInfo

MAX_LISTED = 200
"""Requests that a view lists; the server says how many there are."""


@dataclass(frozen=True, slots=True)
class Reading:
    """at: on the view's own clock. The parts are of nearly the same moment."""

    at: float
    server: ServerInfo
    load: SchedulerStats
    activity: Activity
    policies: PoliciesInfo
    requests: RequestPage
    blocks: BlockPoolMap


@dataclass(frozen=True, slots=True)
class Away:
    """The server was not reached, or refused. reason: in its words or gRPC's."""

    at: float
    reason: str


_OUTCOMES = {
    AbortOutcome.ABORTED: "ended",
    AbortOutcome.ALREADY_FINISHED: "it had ended already",
    AbortOutcome.NOT_FOUND: "no such request any more",
}


def _story(content: bytes, request_id: str) -> list[str]:
    return [str(line) for line in explain(flight_file.load(content), request_id)]


def _why(error: PageturnerError) -> str:
    """The error's words, and where to ask where the address is not the admins'."""
    if isinstance(error, UnknownStatus) and error.code == "UNIMPLEMENTED":
        return "there is no AdminService at this address: server.admin_host and server.enable_admin say where"
    return str(error)


class Reader:
    """Asks one server. A server that was away is met on a connection of its own, without gRPC's pauses."""

    def __init__(self, client: Client, clock: Clock) -> None:
        self._client = client
        self._clock = clock

    async def abort(self, request_id: str) -> str:
        """End a request; what became of that, in words."""
        try:
            outcomes = await self._client.abort_requests(request_id)
        except PageturnerError as error:
            return str(error)
        return _OUTCOMES[outcomes.get(request_id, AbortOutcome.NOT_FOUND)]

    async def story(self, request_id: str) -> list[str]:
        """What happened to a request and which policy decided it, a line each, by the flight record."""
        try:
            content = await self._client.flight_record()
            # A record of thousands of steps takes a while to read.
            return await asyncio.to_thread(_story, content, request_id)
        except PageturnerError as error:
            return [str(error)]

    async def read(self, order: RequestOrder = "schedule") -> Reading | Away:
        """All of it now. Raises nothing that a later reading may do without."""
        client = self._client
        try:
            # Requests and blocks first: they may wait for a step, and both are of one look then.
            requests, blocks = await asyncio.gather(
                client.list_requests(page_size=MAX_LISTED, order=order), client.blocks()
            )
            server, load, activity, policies = await asyncio.gather(
                client.server_info(), client.load(), client.activity(), client.policies()
            )
        except PageturnerError as error:
            await client.close()
            return Away(self._clock.now(), _why(error))
        now = self._clock.now()
        return Reading(now, server, load, activity, policies, requests, blocks)
