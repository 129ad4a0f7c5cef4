"""The live page: what `pageturner top` shows, in a browser; it reads and changes nothing.

Three files and a picture that name nothing outside this port, and one document of figures that they ask for
every second.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

from pageturner.service.codec import plain
from pageturner.service.core.clock import Clock
from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.engine.api import (
    Activity,
    Condition,
    EngineClient,
    Inspection,
    SchedulerInspection,
    ServerInfo,
)
from pageturner.service.monitoring.routes import Handler, HttpRequest, HttpResponse, Router
from pageturner.service.policy_host.reports import PoliciesInfo

MAX_LISTED = 200
"""Requests that the page lists; it says how many there are."""

FRESH_SECONDS = 0.25
"""A document that is no older is handed out again: however many look, few are made."""

_FILES = {
    "/": ("live.html", "text/html; charset=utf-8"),
    "/live.css": ("live.css", "text/css; charset=utf-8"),
    "/live.js": ("live.js", "text/javascript; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
_SERVER_FACTS = (
    "model_name",
    "version",
    "device",
    "block_size",
    "num_blocks",
    "block_bytes",
    "kv_dtype",
    "max_num_seqs",
    "kernels",
)
"""The configuration is not among them: it is for admins."""


class LivePage:
    """condition, engine: read each time; no engine while it loads."""

    def __init__(
        self, condition: Callable[[], Condition], engine: Callable[[], EngineClient | None], clock: Clock
    ) -> None:
        self._condition = condition
        self._engine = engine
        self._clock = clock
        self._made_at = clock.now()
        self._document: asyncio.Task[bytes] | None = None

    def add_to(self, router: Router) -> None:
        """The page at / and what it asks for."""
        for path, (name, content_type) in _FILES.items():
            router.add(path, _file(name, content_type))
        router.add("/live.json", self.document)

    async def document(self, request: HttpRequest) -> HttpResponse:
        """The figures of this moment as JSON, compressed for who takes it so."""
        now = self._clock.now()
        if self._document is None or (self._document.done() and now - self._made_at >= FRESH_SECONDS):
            self._made_at = now
            self._document = asyncio.create_task(self._make())
        # Others may wait for it too: one that leaves must not take it from them.
        packed = await asyncio.shield(self._document)
        if "gzip" in request.headers.get("accept-encoding", ""):
            return HttpResponse(packed, "application/json", headers={"content-encoding": "gzip"})
        return HttpResponse(gzip.decompress(packed), "application/json")

    async def _make(self) -> bytes:
        condition, engine = self._condition(), self._engine()
        if engine is None:
            return _packed({"health": plain(condition), "server": None})
        inspection = await engine.inspect()
        seen = (engine.server_info(), engine.load(), engine.activity(), engine.policies())
        # Of frozen values, in a thread: a pool of 50,000 blocks takes some milliseconds.
        return await asyncio.to_thread(_make_document, self._condition(), inspection, *seen)


def _file(name: str, content_type: str) -> Handler:
    body = resources.files(__package__).joinpath("page", name).read_bytes()

    async def answer(_: HttpRequest) -> HttpResponse:
        return HttpResponse(body, content_type)

    return answer


def _make_document(
    condition: Condition,
    inspection: Inspection,
    server: ServerInfo,
    load: SchedulerStats,
    activity: Activity,
    policies: PoliciesInfo,
) -> bytes:
    seen = inspection.scheduler
    return _packed(
        {
            "health": plain(condition),
            "server": {name: getattr(server, name) for name in _SERVER_FACTS},
            "load": plain(load),
            "activity": plain(activity),
            "policies": plain(policies),
            "requests": {
                "total": seen.num_requests,
                "listed": plain(seen.requests[:MAX_LISTED]),
                "age_seconds": inspection.age_seconds,
            },
            "blocks": _blocks(seen),
        }
    )


def _blocks(seen: SchedulerInspection) -> dict[str, Any]:
    """uses, owners: bytes as `BlockMap` has them, in base64. numbers, ids: of the requests, by place."""
    blocks = seen.block_map()
    return {
        "uses": base64.b64encode(blocks.uses).decode(),
        "owners": base64.b64encode(blocks.owners).decode(),
        "numbers": [request.number for request in seen.requests],
        "ids": [request.request_id for request in seen.requests],
    }


def _packed(document: dict[str, Any]) -> bytes:
    text = json.dumps(document, separators=(",", ":"), allow_nan=False)  # browsers parse no NaN
    return gzip.compress(text.encode(), compresslevel=1)
