"""What the attempts of one step have settled so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageturner.service.core.decisions import Decision, Preempted
from pageturner.service.core.scheduling.plan import Preemption


@dataclass(slots=True)
class Constraints:
    """Keys are `Request.order`.

    preemptions: who gives up blocks. stalled: running requests for whom nobody else yields in this step; they
    do with what is there. blocked: waiting requests left out.
    claimants: waiting requests for whom others yield; no admission policy is asked for them.
    await_pending: a claimant is left out because what it needs falls free when the step in flight ends.
    notes, preemption_notes: what was decided, for whoever records.
    """

    preemptions: dict[int, Preemption] = field(default_factory=dict)
    stalled: set[int] = field(default_factory=set)
    blocked: set[int] = field(default_factory=set)
    claimants: set[int] = field(default_factory=set)
    await_pending: bool = False
    notes: list[Decision] = field(default_factory=list)
    preemption_notes: dict[int, Preempted] = field(default_factory=dict)
