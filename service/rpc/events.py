"""One request from submission to its end, its errors in the words of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from pageturner.service.engine.api import EngineClient, GenerationRequest, RequestStream
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc.from_wire import to_wire_path


@asynccontextmanager
async def opened(engine: EngineClient, request: GenerationRequest) -> AsyncIterator[RequestStream]:
    """The engine's stream of a request. However this is left, what still runs is aborted before it is gone.

    The abort is shielded: a second cancellation (a stopping server's, after the client's) must not cut it
    short. Raises what `EngineClient.submit` and the stream raise; InvalidArgument names the field's path.
    """
    try:
        stream = await engine.submit(request)
        try:
            yield stream
        finally:
            await asyncio.shield(stream.aclose())
    except InvalidArgument as error:
        raise to_wire_path(error, request.prompt) from error
