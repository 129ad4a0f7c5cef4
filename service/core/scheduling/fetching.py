"""Has blocks read from disk for requests that are about to start, and keeps those waiting until they come.

A waiting request is looked at once before each of its starts. If its blocks that neither the device nor the
host holds are on disk, and reading them is sooner than computing them, it *fetches*: it may not run, it holds
up no other, and no policy is asked for it. Its blocks arrive in the host tier, from which it is then started
like any other. A disk that is slow or silent delays it by a bounded time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice

from pageturner.service.core.decisions import Fetches
from pageturner.service.core.memory.block import Release
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.memory.transfers import TransferEnd
from pageturner.service.core.request import Request, RequestStatus
from pageturner.service.core.scheduling.restoring import (
    disk_seconds,
    is_worth_loading,
    may_use_tiers,
    num_skippable_blocks,
)
from pageturner.service.core.scheduling.state import SchedulerState

LOOKED_AT = 32
"""Waiting requests, first ones first, whose blocks are looked for on disk: those that may start soon."""

PATIENCE = 8.0
"""How many times longer than the measured rate foretells a request waits for its blocks, and..."""

LEAST_PATIENCE = 0.5
"""...at least so many seconds."""


@dataclass(frozen=True, slots=True)
class FetchState:
    """Fetches as a value. looked: orders of waiting requests that were looked at, with the time until which
    they wait, and the blocks of the host that they wait for. fetching: those that do."""

    looked: tuple[tuple[int, float, tuple[int, ...]], ...]
    fetching: tuple[int, ...]


@dataclass(slots=True)
class _Look:
    """What came of a look: until when a request waits, for which blocks of the host."""

    request: Request
    until: float = 0.0
    host_blocks: set[int] = field(default_factory=set)


class Fetching:
    """tiers: with a disk. Changes them and `SchedulerState.fetching`, between two steps."""

    def __init__(self, state: SchedulerState, tiers: CacheTiers) -> None:
        self._state = state
        self._manager = state.manager
        self._tiers = tiers
        self._looks: dict[int, _Look] = {}

    def end(self, ended: tuple[TransferEnd, ...], now: float) -> None:
        """Transfers are over: who waited for the last of its blocks may start."""
        for transfer in ended:
            self._tiers.end(transfer, now)
            for order in tuple(self._state.fetching):
                look = self._looks[order]
                look.host_blocks.discard(transfer.host_block)
                if not look.host_blocks:
                    self._state.fetching.discard(order)

    def begin(self, now: float) -> None:
        """Before a step is planned: look for blocks of those that may start soon, and have others written."""
        state = self._state
        for order, look in tuple(self._looks.items()):
            if look.request.status in (RequestStatus.RUNNING, RequestStatus.FINISHED):
                del self._looks[order]  # if it comes back, it is looked at again
        for order in tuple(state.fetching):
            if self._looks[order].until <= now:
                state.fetching.discard(order)
        if state.suspects is None and len(state.waiting) > len(state.fetching):
            for request in islice(state.waiting, LOOKED_AT):
                if request.order not in self._looks and not request.is_paused:
                    self._look(request, now)
        self._tiers.start_saves()

    def _look(self, request: Request, now: float) -> None:
        if request.status is RequestStatus.SWAPPED or not may_use_tiers(request):
            return
        look = self._looks[request.order] = _Look(request)
        present, wanted, num_before = self._missing(request)
        rates, block_size = self._state.rates, self._manager.block_size
        if not wanted or not is_worth_loading(rates, len(wanted), block_size, num_before * block_size):
            return
        self._tiers.hold(present)  # so that what is read does not take the place of what it continues
        look.host_blocks = self._load(wanted)
        self._tiers.let_go(present, Release(now=now))
        if look.host_blocks:
            patience = PATIENCE * disk_seconds(rates, self._tiers.num_held)
            look.until = now + max(LEAST_PATIENCE, patience)
            self._state.fetching.add(request.order)
            if self._state.decisions is not None:
                self._state.decisions.append(Fetches(request.request_id, len(look.host_blocks)))

    def _load(self, wanted: list[bytes]) -> set[int]:
        """The blocks of the host into which the first of these are read, as many as there is room for."""
        tiers, host_blocks = self._tiers, set[int]()
        room = tiers.room_for_loads()
        for block_hash in wanted:
            host_block = tiers.loading(block_hash)
            if host_block is None:
                if not room:
                    break
                host_block = tiers.load(block_hash)
                room -= 1
            host_blocks.add(host_block)
        return host_blocks

    def _missing(self, request: Request) -> tuple[list[int], list[bytes], int]:
        """What continues the request's table: the blocks of the host that hold it, then hashes that the disk
        does; and how many blocks come before those."""
        (sequence,) = request.computing
        manager, tiers = self._manager, self._tiers
        index = len(manager.table(sequence))
        if sequence.num_kv_tokens != index * manager.block_size:
            return [], [], index
        index += len(manager.hits(sequence))
        present: list[int] = []
        wanted: list[bytes] = []
        num_before = index
        for index in range(num_before, num_skippable_blocks(sequence, manager.block_size)):
            block_hash = manager.block_hash(sequence, index)
            host_block = tiers.host.lookup(block_hash)
            if host_block is not None:
                present.append(host_block)
                num_before += not wanted
            elif tiers.loading(block_hash) is not None or tiers.is_on_disk(block_hash):
                wanted.append(block_hash)
            else:
                break
        return present, wanted, num_before

    # --- as a value ------------------------------------------------------------------------

    def snapshot(self) -> FetchState:
        """The state of this moment."""
        looked = ((order, look.until, tuple(sorted(look.host_blocks))) for order, look in self._looks.items())
        return FetchState(tuple(looked), tuple(sorted(self._state.fetching)))

    def restore(self, snapshot: FetchState, requests: Mapping[int, Request]) -> None:
        """Bring a part just made to a state. requests: those that live, by order."""
        self._looks = {
            order: _Look(requests[order], until, set(blocks))
            for order, until, blocks in snapshot.looked
            if order in requests
        }
        self._state.fetching = set(snapshot.fetching)

    def check_integrity(self) -> None:
        """Raise AssertionError, naming the invariant, unless each fetch waits for a transfer under way."""
        held = set(self._tiers.held())
        for order in self._state.fetching:
            assert self._looks[order].host_blocks, f"fetching: request {order} waits for nothing"
            assert self._looks[order].host_blocks <= held, f"fetching: request {order} waits for what ended"
