"""What the ingresses of an application tell one another: where requests went, so that each finds the prompts
that another has sent. Knows nothing of Ray.

Replicas report what they hold only so often, by way of Ray's controller, and the second turn of a chat comes
sooner than that to an ingress that did not see the first. So an ingress tells the others of each prompt that
a replica has taken, and what it hears goes to the request router of its own process along with the next
request, which is the first that it may matter to.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import structlog

from pageturner.service.core.prefix_summary import FINGERPRINT_BYTES
from pageturner.service.scale.calls import RouteHint, Sent

NEWS_SECONDS = 0.05
"""How long news are gathered before they are told."""

MAX_NEWS = 4096
"""Of which no more are kept: the oldest are in the replicas' reports by then."""


class Peers(Protocol):
    """As much of `on_ray.RayReplicas` as is asked here: all ingresses, this one among them."""

    async def all(self, method_name: str, *arguments: object, seconds: float) -> list[Any]: ...


class News:
    """own_id: of this ingress. peers: asked for once there are news; None for an only ingress, which has
    nobody to tell. pause: awaited while news are gathered."""

    def __init__(
        self, own_id: str, peers: Callable[[], Peers] | None, pause: Callable[[float], Awaitable[object]]
    ) -> None:
        self._own_id = own_id
        self._peers = peers
        self._pause = pause
        self._heard: deque[Sent] = deque(maxlen=MAX_NEWS)
        self._to_tell: deque[Sent] = deque(maxlen=MAX_NEWS)
        self._telling: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger()

    def went(self, replica_id: str, hint: RouteHint) -> None:
        """A replica has taken the request of this hint."""
        if self._peers is None or not hint.digests:
            return
        fingerprints = b"".join(digest[:FINGERPRINT_BYTES] for digest in hint.digests)
        self._to_tell.append(Sent(replica_id, hint.block_size, fingerprints))
        if self._telling is None or self._telling.done():
            self._telling = asyncio.create_task(self._tell(self._peers))

    def hear(self, teller: str, news: Sequence[Sent]) -> None:
        """What an ingress tells all, which hears itself too."""
        if teller != self._own_id:
            self._heard.extend(news)

    def heard(self) -> tuple[Sent, ...]:
        """What was heard and is not taken yet."""
        news = tuple(self._heard)
        self._heard.clear()
        return news

    async def _tell(self, peers: Callable[[], Peers]) -> None:
        while self._to_tell:
            await self._pause(NEWS_SECONDS)
            news = tuple(self._to_tell)
            self._to_tell.clear()
            try:
                # Ray's controller may be asked for them, and waited for, which may not hold up streams.
                everyone = await asyncio.to_thread(peers)
                await everyone.all("hear", self._own_id, news, seconds=1.0)
            except Exception as error:  # those that do not hear it have the replicas' reports
                self._logger.warning("news_not_told", reason=str(error), requests=len(news))
