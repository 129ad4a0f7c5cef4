"""What stands behind the host tiers of simulated servers that hand blocks over.

They are `BlockSender` and `BlockReceiver` of the engine on a virtual clock, without the bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

from pageturner.service.core.memory.transfers import (
    BlockDisk,
    Discard,
    Load,
    Save,
    Transfer,
    TransferEnd,
    Withhold,
)


class PeerTier(BlockDisk, Protocol):
    """What a simulated server does between two steps, as the engine does with its `LowerTier`."""

    @property
    def bytes_per_second(self) -> float:
        """Of a load, as a start would measure it; 0 where there are none."""
        ...

    def start(self, transfers: Sequence[Transfer], now: float) -> None:
        """Begin transfers."""
        ...

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The saves and loads that are over and were not told of yet."""
        ...


class Reader(Protocol):
    """Who waits for blocks."""

    def settle(self, block_hash: bytes, *, is_there: bool) -> None:
        """The block may be sent, or will not come."""
        ...


class SimulatedSender:
    """Of a server that prefills. wake: a save is over, of which the server is to hear.

    A block stays in the host pool until all who want it have it; one that nobody wants is let go at once.
    """

    num_blocks = 0
    """It keeps none."""

    bytes_per_second = 0.0

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._wanted: dict[bytes, list[Reader]] = {}
        self._held: dict[bytes, tuple[int, list[Reader]]] = {}
        self._ended: list[TransferEnd] = []

    def holds(self, block_hash: bytes) -> bool:
        """Nothing comes back from here."""
        return False

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not (self._wanted or self._held or self._ended)

    def open(self, reader: Reader, hashes: Sequence[bytes]) -> None:
        """Blocks of these hashes are waited for, before a request is to hand them over."""
        there = [block_hash for block_hash in hashes if block_hash in self._held]
        for block_hash in hashes:
            readers = self._held[block_hash][1] if block_hash in self._held else None
            (self._wanted.setdefault(block_hash, []) if readers is None else readers).append(reader)
        for block_hash in there:
            reader.settle(block_hash, is_there=True)

    def give_up(self, reader: Reader, block_hash: bytes) -> None:
        """The reader wants the block no more, or has it."""
        waiting = self._wanted.get(block_hash)
        if waiting is not None and reader in waiting:
            waiting.remove(reader)
            if not waiting:
                del self._wanted[block_hash]
        if block_hash in self._held:
            host_block, readers = self._held[block_hash]
            if reader in readers:
                readers.remove(reader)
                if not readers:
                    del self._held[block_hash]
                    self._end(host_block, succeeded=True)

    def start(self, transfers: Sequence[Transfer], now: float) -> None:
        """Take what is handed over."""
        for transfer in transfers:
            match transfer:
                case Save(host_block, block_hash):
                    readers = self._wanted.pop(block_hash, [])
                    if not readers:
                        self._end(host_block, succeeded=True)
                        continue
                    self._held[block_hash] = host_block, readers
                    for reader in tuple(readers):
                        reader.settle(block_hash, is_there=True)
                case Withhold(block_hash) | Discard(block_hash):
                    for reader in self._wanted.pop(block_hash, []):
                        reader.settle(block_hash, is_there=False)
                case Load(host_block):
                    self._end(host_block, succeeded=False)

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The blocks that all have who wanted them, since the last call."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def _end(self, host_block: int, *, succeeded: bool) -> None:
        self._ended.append(TransferEnd(host_block, succeeded))
        self._wake()


class SimulatedReceiver:
    """Of a server that decodes. capacity: blocks that lie here at most; those that came longest ago give way.

    bytes_per_second: of copies into the host pool, one after the other. later: does something at a moment.
    """

    def __init__(
        self,
        capacity: int,
        block_bytes: int,
        bytes_per_second: float,
        later: Callable[[float, Callable[[], None]], None],
        wake: Callable[[], None],
    ) -> None:
        self.capacity = capacity
        self.bytes_per_second = bytes_per_second
        self._seconds = block_bytes / bytes_per_second
        self._later = later
        self._wake = wake
        self._blocks: OrderedDict[bytes, None] = OrderedDict()
        self._free_at = 0.0
        self._ended: list[TransferEnd] = []

    @property
    def num_blocks(self) -> int:
        """Blocks that lie here."""
        return len(self._blocks)

    def holds(self, block_hash: bytes) -> bool:
        """Whether a load of this hash may succeed."""
        return block_hash in self._blocks

    def put(self, block_hash: bytes) -> None:
        """A block came."""
        self._blocks[block_hash] = None
        self._blocks.move_to_end(block_hash)
        while len(self._blocks) > self.capacity:
            self._blocks.popitem(last=False)

    def start(self, transfers: Sequence[Transfer], now: float) -> None:
        """Begin loads."""
        for transfer in transfers:
            match transfer:
                case Load(host_block, block_hash) if block_hash in self._blocks:
                    del self._blocks[block_hash]
                    self._free_at = max(self._free_at, now) + self._seconds
                    self._later(self._free_at, _ending(self, host_block, succeeded=True))
                case Load(host_block) | Save(host_block):
                    self._later(now, _ending(self, host_block, succeeded=False))
                case Discard(block_hash):
                    self._blocks.pop(block_hash, None)

    def take_ended(self) -> tuple[TransferEnd, ...]:
        """The transfers that are over and were not told of yet."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def end(self, ended: TransferEnd) -> None:
        """A transfer is over."""
        self._ended.append(ended)
        self._wake()


def _ending(receiver: SimulatedReceiver, host_block: int, *, succeeded: bool) -> Callable[[], None]:
    ended = TransferEnd(host_block, succeeded)
    return lambda: receiver.end(ended)
