"""A request as a flight record keeps it: all that scheduling depends on, nothing of what it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.flight.pseudonyms import stand_ins

_HISTORY = 1.0
"""A presence penalty, any but 0: what the sampler needs the history for is not recorded."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """block_names: of the full blocks of its prompt. max_tokens: as asked for, None if left open."""

    request_id: str
    num_prompt_tokens: int
    block_names: tuple[int, ...]
    arrival_time: float
    max_tokens: int | None
    n: int = 1
    min_tokens: int = 0
    needs_history: bool = False
    priority: int = 0
    tenant: str = ""
    bypass_prefix_cache: bool = False
    deadline: float | None = None

    @classmethod
    def of(cls, new: NewRequest, block_names: tuple[int, ...]) -> Self:
        params = new.params
        return cls(
            new.request_id,
            len(new.prompt_token_ids),
            block_names,
            new.arrival_time,
            params.max_tokens,
            params.n,
            params.min_tokens,
            params.needs_history,
            new.priority,
            new.tenant,
            new.bypass_prefix_cache,
            new.deadline,
        )

    def stand_in(self, block_size: int) -> NewRequest:
        """The request for a replay: its blocks are equal where those of the original were."""
        return NewRequest(
            self.request_id,
            stand_ins(self.num_prompt_tokens, self.block_names, block_size),
            SamplingParams(
                n=self.n,
                max_tokens=self.max_tokens,
                min_tokens=self.min_tokens,
                presence_penalty=_HISTORY if self.needs_history else 0.0,
            ),
            seed=0,
            arrival_time=self.arrival_time,
            priority=self.priority,
            tenant=self.tenant,
            bypass_prefix_cache=self.bypass_prefix_cache,
            deadline=self.deadline,
        )
