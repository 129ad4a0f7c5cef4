"""One request from submission to its end, its errors in the words of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from pageturner.service.engine.api import EngineClient, GenerationRequest, StreamEvent
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc.from_wire import to_wire_path


async def events_of(engine: EngineClient, request: GenerationRequest) -> AsyncGenerator[StreamEvent, None]:
    """The engine's events. However this is left, what still runs is aborted before it is gone.

    The abort is shielded: a second cancellation (a stopping server's, after the client's) must not cut it
    short. Raises what `EngineClient.submit` and the stream raise; InvalidArgument names the field's path.
    """
    try:
        stream = await engine.submit(request)
        try:
            async for event in stream:
                yield event
        finally:
            await asyncio.shield(stream.aclose())
    except InvalidArgument as error:
        raise to_wire_path(error, request.prompt) from error
