"""Hands blocks over to other servers: what stands behind the host tier of a server that prefills.

A block that a request hands over arrives here as a save from the host pool. It stays there, held by that
save, until the readers that want it have copied it, so that no memory is taken beside the pool, and a reader
that is slow holds back its own blocks alone. One that nobody wants is let go at once.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from pageturner.service.core.memory.transfers import Discard, Load, Save, Transfer, TransferEnd, Withhold
from pageturner.service.engine.lower_tier import CachedBlock, Ready


@dataclass(slots=True, eq=False)
class _Held:
    """A block of the host on its way. readers: those that have yet to copy it."""

    save: Save
    ready: Ready
    readers: set[Delivery] = field(default_factory=set)


class BlockSender:
    """A `LowerTier`. host_block: the bytes of a block of the host pool.

    `open` is for the event loop, the rest for the engine's thread.
    """

    num_blocks = 0
    """It keeps none."""

    def __init__(self, host_block: Callable[[int], memoryview]) -> None:
        self._host_block = host_block
        self._lock = threading.Lock()
        self._wanted: dict[bytes, set[Delivery]] = {}
        self._held: dict[bytes, _Held] = {}
        self._ended: queue.SimpleQueue[TransferEnd] = queue.SimpleQueue()

    def open(self, hashes: Sequence[bytes]) -> Delivery:
        """Where blocks of these hashes are waited for, before a request is to hand them over."""
        delivery = Delivery(self, hashes)
        with self._lock:
            there = [self._held[block_hash] for block_hash in hashes if block_hash in self._held]
            for held in there:  # for another reader, and good for this one too
                held.readers.add(delivery)
            for block_hash in hashes:
                if block_hash not in self._held:
                    self._wanted.setdefault(block_hash, set()).add(delivery)
        for held in there:
            delivery.settle(held.save.block_hash, is_there=True)
        return delivery

    # --- as a lower tier -------------------------------------------------------------------

    def holds(self, block_hash: bytes) -> bool:
        """Nothing comes back from here."""
        return False

    @property
    def is_busy(self) -> bool:
        """Whether a reader has yet to copy a block, or the engine to hear that it has."""
        return bool(self._held) or not self._ended.empty()

    def start(self, transfers: Iterable[Transfer], ready: Ready) -> None:
        """Take blocks that are handed over."""
        for transfer in transfers:
            match transfer:
                case Save(_, block_hash):
                    self._offer(_Held(transfer, ready), block_hash)
                case Withhold(block_hash) | Discard(block_hash):
                    with self._lock:
                        readers = tuple(self._wanted.pop(block_hash, ()))
                    for reader in readers:
                        reader.settle(block_hash, is_there=False)
                case Load():
                    self._ended.put(TransferEnd(transfer.host_block, succeeded=False))

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The blocks that were copied, or that nobody wanted, since the last call."""
        ended = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return tuple(ended)

    def close(self, cached: Iterable[CachedBlock] = (), seconds: float = 0.0) -> int:
        """No block comes any more. None is kept."""
        with self._lock:
            wanted, self._wanted = self._wanted, {}
        for block_hash, readers in wanted.items():
            for reader in readers:
                reader.settle(block_hash, is_there=False)
        return 0

    def _offer(self, held: _Held, block_hash: bytes) -> None:
        with self._lock:
            held.readers |= self._wanted.pop(block_hash, set())
            if held.readers:
                self._held[block_hash] = held
            else:
                self._ended.put(TransferEnd(held.save.host_block, succeeded=True))
            readers = tuple(held.readers)
        for reader in readers:
            reader.settle(block_hash, is_there=True)

    # --- for deliveries --------------------------------------------------------------------

    def copy(self, block_hash: bytes, reader: Delivery) -> bytes:
        """The content of a block that `reader` was told is there; takes as long as the copy does."""
        with self._lock:
            held = self._held[block_hash]
        held.ready()
        content = bytes(self._host_block(held.save.host_block))
        self.give_up(block_hash, reader)
        return content

    def give_up(self, block_hash: bytes, reader: Delivery) -> None:
        """The reader wants the block no more, or has it."""
        with self._lock:
            others = self._wanted.get(block_hash)
            if others is not None:
                others.discard(reader)
                if not others:
                    del self._wanted[block_hash]
            held = self._held.get(block_hash)
            if held is not None:
                held.readers.discard(reader)
                if not held.readers:
                    del self._held[block_hash]
                    self._ended.put(TransferEnd(held.save.host_block, succeeded=True))


class Delivery:
    """One reader's blocks, in their order. Lives on the event loop that made it. Leaving it gives up the
    rest."""

    def __init__(self, sender: BlockSender, hashes: Sequence[bytes]) -> None:
        self._sender = sender
        self._hashes = tuple(hashes)
        self._loop = asyncio.get_running_loop()
        self._settled: dict[bytes, bool] = {}
        self._changed = asyncio.Event()
        self._error: BaseException | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for block_hash in self._hashes:
            self._sender.give_up(block_hash, self)

    def settle(self, block_hash: bytes, *, is_there: bool) -> None:
        """From any thread: the block may be copied, or will not come."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._note, block_hash, is_there)

    def fail(self, error: BaseException) -> None:
        """The request has ended with this: what has not come will not."""
        self._error = error
        self._changed.set()

    async def blocks(self) -> AsyncGenerator[bytes, None]:
        """The contents, in order, up to the first that does not come. Raises what the request failed with."""
        for block_hash in self._hashes:
            while block_hash not in self._settled:
                if self._error is not None:
                    raise self._error
                self._changed.clear()
                await self._changed.wait()
            if not self._settled[block_hash]:
                return
            # In a thread: the device's copy is waited for, and a block may be of many megabytes.
            yield await asyncio.to_thread(self._sender.copy, block_hash, self)

    def _note(self, block_hash: bytes, is_there: bool) -> None:
        self._settled.setdefault(block_hash, is_there)
        self._changed.set()
