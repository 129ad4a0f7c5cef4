"""Carries a plan out where evicted blocks live on: the committer's work, between two moves of the tiers.

Blocks of the host that will be copied back are held first, so that neither a swap of this step nor a block
that falls to the host takes their place. What the device evicts meanwhile is copied out before anything is
written to it: with the swap-outs, as what comes back is with the swap-ins.
"""

from __future__ import annotations

from dataclasses import replace

from pageturner.service.core.memory.block import Release
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.core.scheduling.committer import Committer
from pageturner.service.core.scheduling.state import SchedulerState
from pageturner.service.core.scheduling.step_plan import StepPlan
from pageturner.service.core.scheduling.transitions import Transitions


class TieredCommitter(Committer):
    """tiers: those of the state's manager."""

    def __init__(self, state: SchedulerState, transitions: Transitions, tiers: CacheTiers) -> None:
        super().__init__(state, transitions)
        self._tiers = tiers

    def commit(self, plan: StepPlan, step_id: int) -> SchedulerOutput:
        """As the committer's; the copies between tiers are among the step's."""
        tiers, now = self._tiers, self._state.now
        for admission in plan.admissions:
            tiers.hold(admission.restores)
        tiers.begin_step(step_id, now)
        output = super().commit(plan, step_id)
        spills, restores = tiers.end_step()
        for admission in plan.admissions:
            tiers.let_go(admission.restores, Release(step_id, now))
        if not spills and not restores:
            return output
        copies = output.block_copies
        copies = replace(copies, swap_outs=copies.swap_outs + spills, swap_ins=copies.swap_ins + restores)
        return replace(output, block_copies=copies)
