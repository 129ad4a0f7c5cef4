"""What the tiers of the prefix cache do in a step, before its plan is carried out and after.

Blocks of the host that will be copied back are held first, so that neither a swap of this step nor a block
that falls to the host takes their place. What the device evicts meanwhile is copied out before anything is
written to it: with the swap-outs, as what comes back is with the swap-ins.
"""

from __future__ import annotations

from dataclasses import replace

from pageturner.service.core.memory.block import Release
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.tiers import CacheTiers
from pageturner.service.core.outputs import SchedulerOutput
from pageturner.service.core.scheduling.step_plan import StepPlan


class TieredStep:
    """tiers: opened and closed here, once a step. device: the pool before them."""

    def __init__(self, tiers: CacheTiers, device: BlockPool) -> None:
        self._tiers = tiers
        self._device = device
        self._release = Release()
        self._held: list[int] = []

    def begin(self, plan: StepPlan, step_id: int, now: float) -> None:
        """The plan is about to be carried out."""
        self._release = Release(step_id, now)
        self._held = [block for admission in plan.admissions for block in admission.restores]
        self._tiers.hold(self._held)
        self._tiers.begin_step(self._release)

    def end(self, output: SchedulerOutput) -> SchedulerOutput:
        """It was: the step, with the copies between tiers among its own."""
        self._tiers.copy_offered(self._device)  # now: the plan's own swaps have had their room in the host
        spills, restores = self._tiers.end_step()
        self._tiers.let_go(self._held, self._release)
        if not spills and not restores:
            return output
        copies = output.block_copies
        copies = replace(copies, swap_outs=copies.swap_outs + spills, swap_ins=copies.swap_ins + restores)
        return replace(output, block_copies=copies)
