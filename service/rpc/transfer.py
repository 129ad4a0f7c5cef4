"""TransferService: prompts computed for servers that decode."""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import aclosing

import grpc

from pageturner.service.engine.api import PrefillOrder
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc.lifecycle import Lifecycle
from pageturner.v1 import transfer_pb2 as pb
from pageturner.v1.transfer_pb2_grpc import TransferServiceServicer

Context = grpc.aio.ServicerContext


class TransferServicer(TransferServiceServicer):
    """Raises PageturnerError; the interceptor makes statuses of them."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle

    async def Prefill(
        self, request: pb.PrefillRequest, context: Context[pb.PrefillRequest, pb.PrefillResponse]
    ) -> AsyncIterator[pb.PrefillResponse]:
        engine = self._lifecycle.engine
        if not request.token_ids:
            raise InvalidArgument("token_ids", "has no tokens")
        engine.limits.generation.check_tokens(len(request.token_ids), "token_ids")
        info = engine.server_info()
        order = PrefillOrder(
            tuple(request.token_ids),
            request.fingerprint,
            request.layout,
            request.first_block,
            request.tenant,
            request.cache_salt,
            request.priority,
            request.request_id,
            context.time_remaining(),
        )
        has_begun = False
        async with aclosing(engine.prefill(order)) as blocks:
            async for block in blocks:
                if not has_begun:
                    has_begun = True
                    num_blocks = len(order.token_ids) // info.block_size - order.first_block
                    begun = pb.PrefillBegun(num_blocks=num_blocks, block_bytes=info.block_bytes)
                    yield pb.PrefillResponse(begun=begun)
                yield pb.PrefillResponse(
                    block=pb.KvBlock(
                        index=block.index, content=block.content, checksum=zlib.crc32(block.content)
                    )
                )
