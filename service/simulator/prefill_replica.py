"""A simulated server that computes prompts for others: requests of one token that hand their blocks over."""

from __future__ import annotations

from dataclasses import replace

from pageturner.policies.interfaces import PolicySet
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.simulator.machine import SimulatedMachine
from pageturner.service.simulator.peer_tiers import SimulatedSender
from pageturner.service.simulator.replica import SchedulerReplica
from pageturner.service.simulator.workload import SimulatedWorkload

_ONE_TOKEN = SamplingParams(max_tokens=1)


class PrefillReplica(SchedulerReplica):
    """sender: what stands behind its host tier."""

    def __init__(
        self,
        workload: SimulatedWorkload,
        machine: SimulatedMachine,
        policies: PolicySet,
        sender: SimulatedSender,
    ) -> None:
        super().__init__(workload, machine, policies, tier=sender)
        self.sender = sender
        self._lengths: dict[int, int] = {}

    def prefill(self, index: int, num_tokens: int, at: float, now: float) -> None:
        """The first tokens of a request's prompt are wanted. As of `submit`."""
        self._lengths[index] = num_tokens
        self.submit(index, at, now)

    def new_request(self, index: int, at: float) -> NewRequest:
        """What the engine makes of a call of Prefill."""
        whole = super().new_request(index, at)
        return replace(
            whole,
            prompt_token_ids=whole.prompt_token_ids[: self._lengths[index]],
            params=_ONE_TOKEN,
            eos_token_ids=(),
            hands_over=True,
        )
