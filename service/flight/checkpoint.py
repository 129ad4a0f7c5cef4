"""The scheduler's whole state for a record, taken between two steps, and a scheduler brought to it.

So that a record that has forgotten its beginning can still be replayed from the middle. Tokens are kept
as names of full blocks (`block_names`), counters that only feed statistics are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pageturner.policies.interfaces import Reclaim
from pageturner.service.core.request import Request, Sequence
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.flight import beams
from pageturner.service.flight.block_names import (
    hash_of,
    name_of,
    names_of,
    renamed,
    renamed_tiers,
    stand_ins,
)
from pageturner.service.flight.flight_file import Malformed, from_plain, to_plain
from pageturner.service.flight.records import (
    Checkpoint,
    RecordedRequest,
    RequestState,
    SequenceState,
)
from pageturner.service.policy_host.snapshot import ActivePolicyState, PolicyHostState

_SEQUENCE_FIELDS = tuple(
    name
    for name in Sequence.__slots__
    if name
    not in (
        "block_hashes",
        "index",
        "ngrams",
        "num_given_tokens",
        "request",
        "sample_rows",
        "seq_id",
        "token_log",
        "tokens",
    )
)
_DERIVED = (
    "beams",
    "has_timely_ends",
    "max_total_tokens",
    "min_total_tokens",
    "needs_history",
    "new",
    "num_prompt_tokens",
    "root_hash",
    "row_params",
    "sequences",
    "stop_ids",
    "stops",
)
_KEPT_APART = ("num_preemptions_by_kind", "queue_entry", "status")
_TOLD_ONLY = ("policies",)
_REQUEST_FIELDS = tuple(name for name in Request.__slots__ if name not in _DERIVED + _KEPT_APART + _TOLD_ONLY)


# --- taking --------------------------------------------------------------------------------


def take_checkpoint(scheduler: Scheduler) -> Checkpoint | None:
    """None while a step is in flight, or if a policy keeps a memory that cannot be written down."""
    snapshot = scheduler.snapshot()
    if snapshot is None:
        return None
    try:
        policies = _with_memories(snapshot.policies, _plain_memory)
    except Malformed:
        return None
    requests = tuple(_request_state(scheduler, request) for request in scheduler.state.requests.values())
    return Checkpoint(
        requests,
        replace(
            snapshot,
            policies=policies,
            producing=tuple((hash_of(name_of(made)), maker) for made, maker in snapshot.producing),
            device=renamed(snapshot.device),
            host=renamed(snapshot.host),
            tiers=None if snapshot.tiers is None else renamed_tiers(snapshot.tiers),
        ),
    )


def _request_state(scheduler: Scheduler, request: Request) -> RequestState:
    assert request.queue_entry is not None, f"{request.request_id} was never queued"
    manager = scheduler.manager
    sequences = []
    prompt_names: tuple[int, ...] = ()
    for sequence in request.sequences:
        names = () if sequence.is_finished else names_of(manager, sequence, len(sequence.tokens))
        prompt_names = names[: request.num_prompt_tokens // manager.block_size] or prompt_names
        sequences.append(
            SequenceState(
                sequence.seq_id,
                sequence.index,
                len(sequence.tokens),
                names,
                manager.table(sequence),
                manager.host_table(sequence),
                {name: getattr(sequence, name) for name in _SEQUENCE_FIELDS},
            )
        )
    return RequestState(
        RecordedRequest.of(request.new, prompt_names),
        request.status,
        request.queue_entry,
        {kind.value: count for kind, count in request.num_preemptions_by_kind.items()},
        tuple(sequences),
        {name: getattr(request, name) for name in _REQUEST_FIELDS},
        beams.state_of(request),
    )


# --- restoring -----------------------------------------------------------------------------


def restore_checkpoint(scheduler: Scheduler, checkpoint: Checkpoint) -> None:
    """Bring a scheduler just made, whose hasher is a `NameHasher`, to this state."""
    fresh = scheduler.policy_host.snapshot()

    def memory(plain: object, axis: str, field: str) -> object:
        return from_plain(type(getattr(fresh.axes[axis], field)), plain)

    policies = _with_memories(checkpoint.scheduler.policies, memory)
    requests = [_restored_request(scheduler, recorded) for recorded in checkpoint.requests]
    scheduler.restore(replace(checkpoint.scheduler, policies=policies), requests)


def _restored_request(scheduler: Scheduler, recorded: RequestState) -> Request:
    manager = scheduler.manager
    new = recorded.request.stand_in(manager.block_size)
    order, max_tokens = recorded.fields["order"], recorded.fields["max_tokens"]
    assert isinstance(order, int)
    assert isinstance(max_tokens, int)
    request = Request(new, order, max_tokens, manager.root_hash(adapter="", salt=""))
    # A field that is younger than the record has its default.
    for name in recorded.fields.keys() & _REQUEST_FIELDS:
        setattr(request, name, recorded.fields[name])
    request.status = recorded.status
    request.queue_entry = recorded.queue_entry
    request.num_preemptions_by_kind = {
        Reclaim(kind): count for kind, count in recorded.num_preemptions_by_kind.items()
    }
    for part in recorded.sequences:
        sequence = Sequence(part.seq_id, request, part.index)
        sequence.tokens = list(stand_ins(part.num_tokens, part.block_names, manager.block_size))
        for name in part.fields.keys() & _SEQUENCE_FIELDS:
            setattr(sequence, name, part.fields[name])
        request.sequences.append(sequence)
        manager.restore_tables(sequence, part.table, part.host_table)
    if recorded.beams is not None:
        request.beams = beams.restored(recorded.beams, request)
    return request


# --- memories of policies ------------------------------------------------------------------


def _with_memories(
    policies: PolicyHostState, change: Callable[[object, str, str], object]
) -> PolicyHostState:
    """Every memory changed; one that is None stays so. change: is given a memory, its axis and its field."""

    def changed(active: ActivePolicyState, axis: str, field: str) -> object:
        memory = getattr(active, field)
        return None if memory is None else change(memory, axis, field)

    axes = {
        axis: replace(
            active,
            chosen_memory=changed(active, axis, "chosen_memory"),
            default_memory=changed(active, axis, "default_memory"),
        )
        for axis, active in policies.axes.items()
    }
    return replace(policies, axes=axes)


def _plain_memory(memory: object, axis: str, field: str) -> object:
    try:
        plain = to_plain(memory)
        is_plain = bool(from_plain(type(memory), plain) == memory)
    except Malformed:
        raise
    except BaseException as error:  # a memory of another author's, whose __eq__ may raise anything
        raise Malformed(f"the {field} of the {axis} policy raised {type(error).__name__}") from error
    if not is_plain:
        raise Malformed(f"the {field} of the {axis} policy is not made of plain values")
    return plain
