"""The standing of the six policies as plain values: faults, quarantines, memories. See `checkpoint`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pageturner.service.flight.plain import Malformed, from_plain, to_plain
from pageturner.service.policy_host.decider import Decider
from pageturner.service.policy_host.policy_guard import PolicyGuard


@dataclass(frozen=True, slots=True)
class SeatState:
    """One axis. chosen_memory, default_memory: of stateful policies, else None."""

    num_faults: int
    num_offences: int
    is_quarantined: bool
    chosen_memory: object = None
    default_memory: object = None


@dataclass(frozen=True, slots=True)
class GuardState:
    """seats, faults: by axis. stale: axes where another policy came into force since the last step."""

    seats: Mapping[str, SeatState]
    faults: Mapping[str, int]
    stale: tuple[str, ...]


def take_guard(guard: PolicyGuard) -> GuardState:
    """Raises Malformed where a third party's memory is not made of plain values."""
    seats = {
        axis: SeatState(
            seat.num_faults,
            seat._num_offences,
            seat.is_quarantined,
            _memory(seat.chosen),
            _memory(seat.default),
        )
        for axis, seat in guard._seats.items()
    }
    return GuardState(seats, dict(guard.faults), tuple(sorted(guard._stale)))


def restore_guard(guard: PolicyGuard, recorded: GuardState) -> None:
    """guard: just made, of the same policies."""
    for axis, part in recorded.seats.items():
        seat = guard._seats[axis]
        seat.num_faults = part.num_faults
        seat._num_offences = part.num_offences
        seat.is_quarantined = part.is_quarantined
        _remember(seat.chosen, part.chosen_memory)
        _remember(seat.default, part.default_memory)
    guard.faults.clear()
    guard.faults.update(recorded.faults)
    guard._stale = set(recorded.stale)
    guard._refresh()


def _memory(decider: Decider) -> object:
    if not decider.has_memory:
        return None
    plain = to_plain(decider.state)
    if from_plain(type(decider.state), plain) != decider.state:
        raise Malformed(f"the state of {decider.policy!r} is not made of plain values")
    return plain


def _remember(decider: Decider, memory: object) -> None:
    if decider.has_memory:
        decider.state = from_plain(type(decider.state), memory)
