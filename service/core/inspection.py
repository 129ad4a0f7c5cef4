"""What lives in a scheduler at one moment, as frozen values: its requests, and what each block is used for.

Taken between two steps, by `Scheduler.inspect`, which shares what is never changed (tables) and copies the
rest: its cost grows with the requests, and with the free blocks by a copy of their ids. `block_map` does what
costs time in proportion to the blocks, and may be called in any thread.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from enum import Enum, IntEnum

from pageturner.service.core.sample_row import record

MAX_OWNERS = 0xFFFF
"""Of a block map: requests behind the first so many are told as one."""


UNTOLD = -1
"""In place of a request's."""


class RequestState(Enum):
    """WAITING: for its turn, which may be for blocks again. SWAPPED: its KV is in host memory."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"


@record
class RequestInfo:
    """A live request.

    request_id: as the scheduler knows it (`identity.scoped_id`). number: of its acceptance, which no other
    request of this scheduler has. queue_position: from 1, in the order of the queue policy; 0 where it runs.
    max_tokens: of one choice. num_uncomputed_tokens: prompt and output tokens whose KV is not in device
    blocks. num_blocks: of the device, those that it shares with others included. is_paused: its reader lags.
    is_guarded: the one that no policy can hold back.
    """

    request_id: str
    tenant: str
    number: int
    state: RequestState
    queue_position: int
    priority: int
    num_choices: int
    num_prompt_tokens: int
    num_cached_prompt_tokens: int
    num_uncomputed_tokens: int
    num_output_tokens: int
    max_tokens: int
    num_blocks: int
    num_host_blocks: int
    num_preemptions: int
    age_seconds: float
    queue_seconds: float
    first_token_seconds: float | None = None
    """From arrival to its first token; None where it has none yet."""
    deadline_seconds: float | None = None
    """Left until its deadline; None where it has none."""
    is_paused: bool = False
    is_guarded: bool = False


class BlockUse(IntEnum):
    """Numbered as on the wire.

    FREE: holds nothing. LIVE: one table names it. SHARED: more than one does. PENDING: none does, but a step
    in flight may still touch it. EVICTABLE: none does, and the prefix cache still finds it.
    """

    FREE = 1
    LIVE = 2
    SHARED = 3
    PENDING = 4
    EVICTABLE = 5


@dataclass(frozen=True, slots=True)
class BlockMap:
    """uses: a byte for each block, a BlockUse. owners: for each block two bytes, the lower first: the place,
    counted from 1, in `requests` of the first request whose table names it; 0 where none does."""

    uses: bytes
    owners: bytes


@dataclass(frozen=True, slots=True)
class SchedulerInspection:
    """The requests: those that run in the order of their start, then those that wait in that of the queue.

    num_requests: all that live; of those that wait far behind nothing more is told. free, pending: ids of
    blocks. tables: of each sequence that has one, the place of its request in `requests`, UNTOLD for one
    that is not there, and its blocks. cached: hashes that find a block of the device or of the host tier, of
    each those cached first first.
    """

    requests: tuple[RequestInfo, ...] = ()
    num_requests: int = 0
    num_blocks: int = 0
    free: tuple[int, ...] = ()
    pending: tuple[int, ...] = ()
    tables: tuple[tuple[int, tuple[int, ...]], ...] = ()
    cached: tuple[bytes, ...] = ()

    def block_map(self) -> BlockMap:
        """What each block is used for. Takes some 50 ns a block."""
        # What no table names, and is neither free nor pending, is found by the cache alone.
        unknown = int(BlockUse.EVICTABLE)
        uses = bytearray((unknown,)) * self.num_blocks
        owners = array("H", bytes(2 * self.num_blocks))
        for ids, use in ((self.free, BlockUse.FREE), (self.pending, BlockUse.PENDING)):
            value = int(use)
            for block_id in ids:
                uses[block_id] = value
        live, shared = int(BlockUse.LIVE), int(BlockUse.SHARED)
        for place, table in self.tables:
            owner = min(place + 1, MAX_OWNERS)
            for block_id in table:
                if uses[block_id] == unknown:
                    uses[block_id] = live
                    owners[block_id] = owner
                else:
                    uses[block_id] = shared
        if sys.byteorder == "big":
            owners.byteswap()
        return BlockMap(bytes(uses), owners.tobytes())
