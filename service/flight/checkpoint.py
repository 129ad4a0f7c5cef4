"""The scheduler's whole state as plain values, taken between two steps, and a scheduler brought to it.

So that a record that has forgotten its beginning can still be replayed from the middle. Tokens are kept
as names of full blocks (`pseudonyms`), counters that only feed figures are not kept. This module is the
one friend of the core's classes: it reads and writes their private fields, and nobody else does.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, TypeAlias

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.memory.block_pool import Block, BlockPool, Release
from pageturner.service.core.request import QueueEntry, Request, RequestStatus, Sequence
from pageturner.service.core.scheduling.waiting_queue import WaitingQueue
from pageturner.service.flight.plain import Malformed
from pageturner.service.flight.policy_host_state import PolicyHostState, restore_policy_host, take_policy_host
from pageturner.service.flight.pseudonyms import digest_of, stand_ins
from pageturner.service.flight.recorded_request import RecordedRequest

if TYPE_CHECKING:
    from pageturner.service.core.scheduler import Scheduler

Scalar: TypeAlias = bool | int | float | str | None
Names: TypeAlias = Callable[[Sequence], tuple[int, ...]]
"""The names of all full blocks of an unfinished sequence."""

_SEQUENCE_FIELDS = tuple(
    name
    for name in Sequence.__slots__
    if name not in ("block_hashes", "index", "request", "seq_id", "tokens")
)
_RECORDED_NAMES = {"num_cached_blocks": "num_published_blocks"}
"""Fields that a record calls by their former name."""
_DERIVED = (
    "max_total_tokens",
    "needs_history",
    "new",
    "num_prompt_tokens",
    "root_hash",
    "sequences",
    "stop_ids",
)
_KEPT_APART = ("num_preemptions_by_kind", "queue_entry", "status")
_TOLD_ONLY = ("policies",)
_REQUEST_FIELDS = tuple(name for name in Request.__slots__ if name not in _DERIVED + _KEPT_APART + _TOLD_ONLY)


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block that is not free. name: of its content, 0 if it is not cached. parent: name of the block before
    it in its chain, 0 for none."""

    block_id: int
    ref_count: int
    name: int
    depth: int
    num_hits: int
    fence: int
    is_pending: bool
    last_release: Release
    parent: int = 0


@dataclass(frozen=True, slots=True)
class PoolState:
    """free: a stack, the last one is taken first. evictable: (score, order of release, block)."""

    free: tuple[int, ...]
    blocks: tuple[BlockState, ...]
    evictable: tuple[tuple[float, int, int], ...]
    release_order: int
    completed_step: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """block_names: of its full blocks, none once it is finished. Tables are empty where it holds none."""

    seq_id: int
    index: int
    num_tokens: int
    block_names: tuple[int, ...]
    table: tuple[int, ...]
    host_table: tuple[int, ...]
    fields: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class RequestState:
    """A live request. num_preemptions_by_kind: by Reclaim value."""

    request: RecordedRequest
    status: RequestStatus
    queue_entry: QueueEntry
    num_preemptions_by_kind: Mapping[str, int]
    sequences: tuple[SequenceState, ...]
    fields: Mapping[str, Scalar]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Requests are in order of acceptance, elsewhere they are named by `Request.order`.

    producing: names of blocks that the last step was to make, and the maker.
    """

    now: float
    requests: tuple[RequestState, ...]
    running: tuple[int, ...]
    holders: tuple[int, ...]
    waiting: tuple[int, ...]
    producing: tuple[tuple[int, int], ...]
    suspect_groups: tuple[tuple[int, ...], ...]
    champion: int | None
    pending_clears: tuple[int, ...]
    last_ended_step: int
    next_order: int
    next_seq_id: int
    next_step_id: int
    next_resort: float
    device: PoolState
    host: PoolState
    policies: PolicyHostState


# --- taking --------------------------------------------------------------------------------


def take_checkpoint(
    scheduler: Scheduler, names_of: Names, name_of: Callable[[bytes], int]
) -> Checkpoint | None:
    """None while a step is in flight, or if a policy keeps a memory that cannot be written down.

    name_of: a digest's name.
    """
    state = scheduler.state
    if scheduler._unfinished_steps:
        return None
    try:
        policies = take_policy_host(scheduler.policy_host)
    except Malformed:
        return None
    champion = scheduler._guarded
    is_live = champion is not None and champion.status is not RequestStatus.FINISHED
    return Checkpoint(
        now=state.now,
        requests=tuple(_request_state(scheduler, request, names_of) for request in state.requests.values()),
        running=tuple(state.running),
        holders=tuple(state.holders),
        waiting=tuple(request.order for request in state.waiting),
        producing=tuple(
            (name_of(digest), maker.order)
            for digest, maker in state.producing.items()
            if maker.status is not RequestStatus.FINISHED
        ),
        suspect_groups=tuple(tuple(sorted(group)) for group in scheduler._suspects._groups),
        champion=champion.order if champion is not None and is_live else None,
        pending_clears=tuple(state.pending_clears),
        last_ended_step=state.last_ended_step,
        next_order=scheduler._next_order,
        next_seq_id=scheduler._next_seq_id,
        next_step_id=scheduler._next_step_id,
        next_resort=scheduler._queue_order.next_resort,
        device=_pool_state(scheduler.manager.device, name_of),
        host=_pool_state(scheduler.manager.host, name_of),
        policies=policies,
    )


def _request_state(scheduler: Scheduler, request: Request, names_of: Names) -> RequestState:
    assert request.queue_entry is not None, f"{request.request_id} was never queued"
    block_size = scheduler.manager.block_size
    sequences = []
    prompt_names: tuple[int, ...] = ()
    for sequence in request.sequences:
        names = () if sequence.is_finished else names_of(sequence)
        prompt_names = names[: request.num_prompt_tokens // block_size] or prompt_names
        sequences.append(
            SequenceState(
                sequence.seq_id,
                sequence.index,
                len(sequence.tokens),
                names,
                scheduler.manager.table(sequence),
                scheduler.manager.host_table(sequence),
                {_RECORDED_NAMES.get(name, name): getattr(sequence, name) for name in _SEQUENCE_FIELDS},
            )
        )
    return RequestState(
        RecordedRequest.of(request.new, prompt_names),
        request.status,
        request.queue_entry,
        {kind.value: count for kind, count in request.num_preemptions_by_kind.items()},
        tuple(sequences),
        {name: getattr(request, name) for name in _REQUEST_FIELDS},
    )


def _pool_state(pool: BlockPool, name_of: Callable[[bytes], int]) -> PoolState:
    free = set(pool._free)
    return PoolState(
        tuple(pool._free),
        tuple(
            BlockState(
                block.block_id,
                block.ref_count,
                0 if block.block_hash is None else name_of(block.block_hash),
                block.depth,
                block.num_hits,
                block.fence,
                block.is_pending,
                block.last_release,
                0 if block.parent_hash is None else name_of(block.parent_hash),
            )
            for block in pool._blocks
            if block.block_id not in free
        ),
        tuple(entry[:3] for entry in sorted(pool._heap) if pool._is_current(entry)),
        pool._release_order,
        pool._completed_step,
    )


# --- restoring -----------------------------------------------------------------------------


def restore_checkpoint(scheduler: Scheduler, checkpoint: Checkpoint) -> None:
    """Bring a scheduler just made, whose digests are those of a `NameHasher`, to this state."""
    state = scheduler.state
    state.now = checkpoint.now
    by_order: dict[int, Request] = {}
    for recorded in checkpoint.requests:
        request = _restored_request(scheduler, recorded)
        by_order[request.order] = request
        state.requests[request.request_id] = request
        scheduler._deadlines.watch(request)
    state.running.update((order, by_order[order]) for order in checkpoint.running)
    state.holders.update((order, by_order[order]) for order in checkpoint.holders)
    for order in checkpoint.waiting:
        _enter_queue(state.waiting, by_order[order])
    state.producing = {digest_of(name): by_order[order] for name, order in checkpoint.producing}
    scheduler._suspects._groups.extend(set(group) for group in checkpoint.suspect_groups)
    scheduler._guarded = None if checkpoint.champion is None else by_order[checkpoint.champion]
    state.pending_clears = list(checkpoint.pending_clears)
    state.last_ended_step = checkpoint.last_ended_step
    scheduler._next_order = checkpoint.next_order
    scheduler._next_seq_id = checkpoint.next_seq_id
    scheduler._next_step_id = checkpoint.next_step_id
    scheduler._queue_order.next_resort = checkpoint.next_resort
    _restore_pool(scheduler.manager.device, checkpoint.device)
    _restore_pool(scheduler.manager.host, checkpoint.host)
    restore_policy_host(scheduler.policy_host, checkpoint.policies)


def _restored_request(scheduler: Scheduler, recorded: RequestState) -> Request:
    manager = scheduler.manager
    new = recorded.request.stand_in(manager.block_size)
    order, max_tokens = recorded.fields["order"], recorded.fields["max_tokens"]
    assert isinstance(order, int)
    assert isinstance(max_tokens, int)
    request = Request(new, order, max_tokens, manager.root_hash(adapter="", salt=""))
    for name, value in recorded.fields.items():
        setattr(request, name, value)
    request.status = recorded.status
    request.queue_entry = recorded.queue_entry
    request.num_preemptions_by_kind = {
        Reclaim(kind): count for kind, count in recorded.num_preemptions_by_kind.items()
    }
    for part in recorded.sequences:
        sequence = Sequence(part.seq_id, request, part.index)
        sequence.tokens = list(stand_ins(part.num_tokens, part.block_names, manager.block_size))
        for name, field in ((_RECORDED_NAMES.get(name, name), name) for name in _SEQUENCE_FIELDS):
            setattr(sequence, field, part.fields[name])
        request.sequences.append(sequence)
        if sequence.is_finished:
            continue
        scheduler.state.sequences[sequence.seq_id] = sequence
        scheduler._stop_condition.start(sequence.seq_id, new)
        if part.table:
            manager._tables[sequence.seq_id] = list(part.table)
        if part.host_table:
            manager._host_tables[sequence.seq_id] = list(part.host_table)
    return request


def _enter_queue(queue: WaitingQueue, request: Request) -> None:
    """As the last one, at the place it had: its policy may not be asked again."""
    assert request.queue_entry is not None
    queue._entries.append(request.queue_entry)
    queue._entry_of[request.order] = request.queue_entry
    queue._request_of[request.order] = request
    queue.num_prompt_tokens += request.num_prompt_tokens


def _restore_pool(pool: BlockPool, recorded: PoolState) -> None:
    pool._free = list(recorded.free)
    for part in recorded.blocks:
        block = pool._blocks[part.block_id]
        for field in fields(BlockState):
            if field.name not in ("name", "parent"):
                setattr(block, field.name, getattr(part, field.name))
        if part.name:
            block.block_hash = digest_of(part.name)
            pool._block_of_hash[block.block_hash] = block.block_id
            if part.parent:
                block.parent_hash = digest_of(part.parent)
                pool._children.setdefault(block.parent_hash, {})[block.block_hash] = None
        if block.is_pending:
            pool._pending.add(block.block_id)
    for score, order, block_id in recorded.evictable:
        block = pool._blocks[block_id]
        _enter_heap(pool, block, score, order)
    heapq.heapify(pool._heap)
    pool._release_order = recorded.release_order
    pool._completed_step = recorded.completed_step


def _enter_heap(pool: BlockPool, block: Block, score: float, order: int) -> None:
    block.in_heap = True
    pool._num_evictable += 1
    pool._heap.append((score, order, block.block_id, block.heap_version))
