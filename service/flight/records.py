"""What a flight record holds: where it starts, then every call of the scheduler and what came of it.

No prompt, no output, no token id: see `pseudonyms`. Request ids and tenants stand as they are.
Every entry says when (`now`: the scheduler's clock, which moves with its steps), what was decided, and
in `raised` the type of what the scheduler raised instead of an answer, if it did.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.core.decisions import Decision
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import BlockCopies, SchedulerOutput
from pageturner.service.flight.checkpoint import Checkpoint
from pageturner.service.flight.recorded_request import RecordedRequest

ROW_FIELDS = ("seq_id", "start", "num_tokens", "num_blocks", "last_block")
_LOW = 0xFFFFFFFF
"""Enough of a sequence's number to tell it from any other in the record."""


PolicySpecs: TypeAlias = Mapping[str, PolicySpec]
"""By axis."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What a scheduler is made of, save for its policies and secrets. version: of the program."""

    version: str
    options: SchedulerOptions
    cache: CacheOptions
    rates: Rates
    depth: int


@dataclass(frozen=True, slots=True)
class FlightStart:
    """Where a replay can begin. checkpoint: None for a scheduler just made."""

    policies: PolicySpecs
    checkpoint: Checkpoint | None = None


@dataclass(frozen=True, slots=True)
class Added:
    """A request was submitted. max_tokens: in force, 0 if it was refused. refusal: the error's type."""

    now: float
    request: RecordedRequest
    max_tokens: int = 0
    refusal: str = ""
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Aborted:
    """A request was ended from outside. error: the type of the reason."""

    now: float
    request_id: str
    error: str
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Expired:
    """The clock moved, and ended those whose deadline passed. Noted only where either made a difference."""

    now: float
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Paused:
    """A reader lags behind, or (is_paused False) reads on."""

    now: float
    request_id: str
    is_paused: bool
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class PoliciesSet:
    """Policies were swapped while running. policies: those that came, the others stay."""

    now: float
    policies: PolicySpecs
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A step was decided. step_id: 0 if there was nothing to do.

    rows: for each sequence ROW_FIELDS as 32-bit numbers. raised: what came instead, or empty.
    """

    now: float
    step_id: int
    rows: bytes = b""
    copies: BlockCopies = BlockCopies()
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class RowResult:
    """What the row-th sample of a step yielded, where that was not one token that went on.

    block_names: for each token accepted, the name of the block that it completed, or 0. is_stopped: the
    last one ended its choice by a stop string or token.
    """

    row: int
    block_names: tuple[int, ...]
    is_stopped: bool = False
    error: str = ""


@dataclass(frozen=True, slots=True)
class Updated:
    """A step's results were taken. results: those unlike the most common one."""

    now: float
    step_id: int
    results: tuple[RowResult, ...] = ()
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


@dataclass(frozen=True, slots=True)
class Failed:
    """A step failed. error: the type of the failure."""

    now: float
    step_id: int
    error: str
    decisions: tuple[Decision, ...] = ()
    raised: str = ""


Entry = Added | Aborted | Expired | Paused | PoliciesSet | Scheduled | Updated | Failed


@dataclass(frozen=True, slots=True)
class FlightRecord:
    """reason: why it was written. start: None if the entries reach back to no moment that a replay could
    begin at. num_dropped: entries that came before and are gone."""

    reason: str
    setting: Setting
    start: FlightStart | None
    num_dropped: int
    entries: tuple[Entry, ...]


def pack_rows(output: SchedulerOutput) -> bytes:
    """`Scheduled.rows` of a step."""
    flat = [
        number
        for part in output.scheduled
        for number in (
            part.seq_id & _LOW,
            part.start,
            len(part.token_ids),
            len(part.block_table),
            part.block_table[-1],
        )
    ]
    return struct.pack(f"<{len(flat)}I", *flat)


def unpack_rows(rows: bytes) -> list[tuple[int, ...]]:
    """One tuple of ROW_FIELDS for each sequence."""
    return list(struct.iter_unpack(f"<{len(ROW_FIELDS)}I", rows))
