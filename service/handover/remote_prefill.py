"""Asks servers that prefill for the KV of long prompts, and leaves it where the scheduler finds it.

The decoding server decides, request by request (`core.missing_blocks`). On why to part the two see DistServe
(Zhong et al., 2024) and Splitwise (Patel et al., 2024).
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, fields
from itertools import dropwhile

from structlog.typing import FilteringBoundLogger

from pageturner.policies.views import Rates
from pageturner.service.client.async_connection import AsyncConnection
from pageturner.service.client.calls import StreamCall
from pageturner.service.client.credentials import Credentials
from pageturner.service.core.clock import Clock
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.missing_blocks import MissingBlocks, missing_blocks
from pageturner.service.core.prefix_summary import PrefixSummary
from pageturner.service.core.request import NewRequest
from pageturner.service.engine.block_receiver import BlockReceiver
from pageturner.service.engine.handover import HandoverOptions
from pageturner.service.errors import (
    DeadlineExceeded,
    DeadlineTooClose,
    DeadlineUnreachable,
    HandoverRefused,
    InvalidArgument,
    NonFiniteLogits,
    PageturnerError,
    RequestAborted,
    StepFailed,
    TenantLimitReached,
)
from pageturner.service.routing.peers import Peer, Peers, longest_seconds
from pageturner.v1 import transfer_pb2 as pb

_METHOD = pb.DESCRIPTOR.services_by_name["TransferService"].methods_by_name["Prefill"]
Prefiller = Peer[AsyncConnection]
PATH = f"/{_METHOD.containing_service.full_name}/{_METHOD.name}"


OF_ONE_REQUEST = (
    DeadlineTooClose,
    DeadlineUnreachable,
    InvalidArgument,
    NonFiniteLogits,
    RequestAborted,
    StepFailed,
    TenantLimitReached,
)
"""What a server says of one request, and of no other."""

FAIR_SECONDS = 1.0
"""A request whose deadline passes sooner tells nothing of the server that was to compute its prompt."""


class BadBlock(PageturnerError):
    """What came is not the block that was asked for."""


class Silent(PageturnerError):
    """No block came for too long."""


class Slow(PageturnerError):
    """Blocks came, and all of them would have taken too long."""


OF_OUR_FILES = frozenset(each.name for each in fields(Credentials))
"""Fields of what is wrong with this server's own token or certificate, before any request is sent."""


@dataclass(frozen=True, slots=True)
class OwnKv:
    """What KV of this server is: others' must be alike. fingerprint, layout: as of `PrefillOrder`. rates: how
    fast it is made here."""

    fingerprint: str
    layout: str
    block_size: int
    block_bytes: int
    rates: Rates = field(default_factory=Rates)


class RemotePrefill:
    """Implements `engine.handover.Handover`. hasher: the scheduler's. receiver: behind its host tier."""

    def __init__(
        self,
        peers: Peers[AsyncConnection],
        receiver: BlockReceiver,
        hasher: PrefixHasher,
        own: OwnKv,
        options: HandoverOptions,
        clock: Clock,
        logger: FilteringBoundLogger,
    ) -> None:
        self._peers = peers
        self._receiver = receiver
        self._hasher = hasher
        self._own = own
        self._options = options
        self._clock = clock
        self._logger = logger

    async def fetch(self, new: NewRequest, look: Callable[[], Awaitable[PrefixSummary]]) -> None:
        """What another server computes of its prompt, if it is asked for, is in the receiver then."""
        if not self._may_ask(new):
            return
        wanted = self._wanted(new, await look())
        first, missing = wanted.num_here, wanted.hashes
        # Each once: all of them silent cost their patience, and no more.
        asked: set[Peer[AsyncConnection]] = set()
        while missing and (peer := self._peers.choose(asked)) is not None:
            asked.add(peer)
            num_tokens = len(missing) * self._own.block_size
            peer.num_tokens += num_tokens
            asked_at = self._clock.now()
            try:
                await self._take_in(peer, new, first, missing)
            except PageturnerError as error:
                has_failed = self._note(peer, error, self._clock.now() - asked_at)
            except Exception as error:  # a fault of ours costs the hand-over, and no request
                has_failed = True
                self._peers.failed(peer, type(error).__name__, is_refusal=False)
                self._logger.error("handover_fault", server=peer.server.target.address, exc_info=error)
            else:
                self._peers.succeeded(peer)
                return
            finally:
                peer.num_tokens -= num_tokens
            if has_failed and not peer.num_tokens:  # no call is on it: the next one reads its files anew
                await peer.server.close()
            # What it gave is good: another server is asked for the rest, and has it cached or computes it.
            left = list(dropwhile(self._receiver.holds, missing))
            first, missing = first + len(missing) - len(left), left

    def _note(self, peer: Peer[AsyncConnection], error: PageturnerError, seconds: float) -> bool:
        """A server did not do what it was asked for, after so long. What others ask of it may be done all the
        same: it is left alone only where the reason is its own, which is returned."""
        has_little_time = isinstance(error, DeadlineExceeded) and seconds < FAIR_SECONDS
        is_about_us = isinstance(error, InvalidArgument) and error.field in OF_OUR_FILES
        if has_little_time or (isinstance(error, OF_ONE_REQUEST) and not is_about_us):
            self._logger.info("handover_declined", server=peer.server.target.address, reason=str(error))
            return False
        if self._peers.failed(peer, str(error), is_refusal=isinstance(error, HandoverRefused)):
            self._logger.warning("handover_failed", server=peer.server.target.address, reason=str(error))
        return True

    async def close(self) -> None:
        """Let go of the connections."""
        for peer in self._peers:
            await peer.server.close()

    def _may_ask(self, new: NewRequest) -> bool:
        """Not for one that is better, or can only be, computed here, whatever is cached."""
        is_own = new.adapter or new.bypass_prefix_cache or new.is_scored or new.resumed or new.hands_over
        return not is_own and len(new.prompt_token_ids) > self._options.min_tokens

    def _wanted(self, new: NewRequest, held: PrefixSummary) -> MissingBlocks:
        own, tokens = self._own, new.prompt_token_ids
        hashes = self._hasher.chain(
            tokens[:-1],
            own.block_size,
            adapter=new.adapter,
            salt=new.cache_salt,
            tenant=new.cache_tenant,
        )
        return missing_blocks(
            hashes,
            held.num_leading(hashes),
            self._receiver,
            num_tokens=len(tokens),
            block_size=own.block_size,
            min_tokens=self._options.min_tokens,
        )

    async def _take_in(self, peer: Prefiller, new: NewRequest, first: int, hashes: Sequence[bytes]) -> None:
        """Raises PageturnerError where the server fails, or gives something else than blocks in order."""
        last = first + len(hashes)
        request = pb.PrefillRequest(
            token_ids=new.prompt_token_ids[: last * self._own.block_size],
            fingerprint=self._own.fingerprint,
            layout=self._own.layout,
            first_block=first,
            tenant=new.tenant,
            cache_salt=new.cache_salt,
            priority=new.priority,
        )
        left = None if new.deadline is None else max(0.0, new.deadline - self._clock.now())
        call = StreamCall(PATH, request, pb.PrefillResponse, _as_it_is, left)
        async with aclosing(peer.server.follow(call)) as messages:
            index = first
            async for block in self._within_patience(messages, self._longest(first, len(hashes))):
                self._check(block, index, last)
                self._receiver.put(hashes[index - first], block.content)
                index += 1

    def _longest(self, first: int, num_blocks: int) -> float:
        """Seconds that these blocks may take."""
        own, patience = self._own, self._options.patience_seconds
        return longest_seconds(own.rates, patience, num_blocks * own.block_size, first * own.block_size)

    async def _within_patience(
        self, messages: AsyncIterator[pb.PrefillResponse], longest_seconds: float
    ) -> AsyncIterator[pb.KvBlock]:
        """Raises Silent where the next block does not come in time, whatever else does; Slow where all of
        them take too long."""
        patience = self._options.patience_seconds
        now = asyncio.get_running_loop().time
        ends_at = now() + longest_seconds
        while True:
            by = min(now() + patience, ends_at)
            try:
                async with asyncio.timeout_at(by):
                    message = await anext(messages)
                    while message.WhichOneof("news") != "block":
                        message = await anext(messages)
            except StopAsyncIteration:
                return
            except TimeoutError:
                if by == ends_at:
                    reason = f"it was not done in {longest_seconds:.1f} s, as this server is by itself"
                    raise Slow(reason) from None
                raise Silent(f"no block came for {patience:g} s (handover.patience_seconds)") from None
            yield message.block

    def _check(self, block: pb.KvBlock, index: int, last: int) -> None:
        if block.index != index or index >= last:
            raise BadBlock(f"block {block.index} came where block {index} of {last} was due")
        if len(block.content) != self._own.block_bytes:
            expected = self._own.block_bytes
            raise BadBlock(f"block {index} has {len(block.content)} bytes, not {expected}")
        if zlib.crc32(block.content) != block.checksum:
            raise BadBlock(f"block {index} was damaged on its way")


def _as_it_is(message: pb.PrefillResponse) -> pb.PrefillResponse:
    return message
