"""Who yields when blocks or slots run out?

A paused request (its reader does not keep up) always yields first, and of equals the youngest: it has
waited least and is likely to have least to lose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.events import PolicyEvent
from pageturner.policies.options import check_option, check_tenant_weights
from pageturner.policies.service_counters import NOTHING_SERVED, Prices, ServiceCounters, fold
from pageturner.policies.views import LoadView, RequestView, VictimView


@dataclass(frozen=True, slots=True)
class LastArrived:
    """The youngest yields, whatever its priority. Source: vLLM's recompute of the last in its queue."""

    name: ClassVar[str] = "last-arrived"
    summary: ClassVar[str] = (
        "wins on fairness to the oldest; loses when the youngest holds a long, nearly done prefill"
    )

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return _rank(candidates, lambda _: ())


@dataclass(frozen=True, slots=True)
class LowestPriority:
    """The least urgent yields. Source: vLLM's priority scheduling."""

    name: ClassVar[str] = "lowest-priority"
    summary: ClassVar[str] = "wins when priorities mean something; loses work, blind to what is computed"

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return _rank(candidates, lambda victim: (victim.request.priority,))


@dataclass(frozen=True, slots=True)
class LeastComputed:
    """Within the lowest priority, who has least computed yields: it has least to lose.

    Source: the recompute tax of vLLM's preemptions, of which the choice of the victim is about half.
    """

    name: ClassVar[str] = "least-computed"
    summary: ClassVar[str] = (
        "wins by wasting least work; loses when many small victims must yield for one shortage"
    )

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return _rank(candidates, lambda victim: (victim.request.priority, victim.request.num_computed_tokens))


@dataclass(frozen=True, slots=True)
class MostExclusiveBlocks:
    """Within the lowest priority, who frees most blocks for each token to be computed again yields.

    Blocks shared with others free nothing, and tokens that the cache keeps cost nothing. Source: the
    ratio rule for covering a need at least cost (Dantzig, 1957).
    """

    name: ClassVar[str] = "most-exclusive"
    summary: ClassVar[str] = (
        "wins when prefixes are shared, shared blocks free nothing; loses by taking many small"
    )

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return _rank(
            candidates,
            lambda victim: (
                victim.request.priority,
                -victim.num_exclusive_blocks / max(1, victim.num_recompute_tokens),
            ),
        )


@dataclass(frozen=True, slots=True)
class LongestRemaining:
    """Within the lowest priority, who has most left to generate yields, so that others finish and free.

    Source: shortest remaining processing time, read from its other end (Schrage, 1968).
    """

    name: ClassVar[str] = "longest-remaining"
    summary: ClassVar[str] = (
        "wins on requests finished a second; loses the long ones' latency, and trusts max_tokens"
    )

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return _rank(candidates, lambda victim: (victim.request.priority, -victim.num_remaining_tokens))


@dataclass(frozen=True, slots=True)
class FewestOutputs:
    """Who has generated least yields, whatever its priority; of equals the one with the longest prompt.

    Source: SGLang's retraction of decoding requests (Zheng et al., 2024).
    """

    name: ClassVar[str] = "fewest-outputs"
    summary: ClassVar[str] = (
        "wins by keeping streams that clients watch; loses long prompts' prefill again and again"
    )

    def rank(self, candidates: Sequence[VictimView], claimant: RequestView, load: LoadView) -> Sequence[str]:
        return _rank(
            candidates,
            lambda victim: (victim.request.num_output_tokens, -victim.request.num_prompt_tokens),
        )


@dataclass(frozen=True, slots=True)
class MostOverServed:
    """Within the lowest priority, whose tenant has had most service for its weight yields.

    Service is counted as by the queue policy virtual-token-counter, whose options these are.
    Source: Sheng et al. (OSDI 2024), whose counters say who owes; the paper itself never preempts.
    """

    name: ClassVar[str] = "most-over-served"
    summary: ClassVar[str] = (
        "wins when one tenant's burst squeezes the others; loses work, blind to what is computed"
    )

    input_weight: float = 1.0
    """Cost of a prompt token."""
    output_weight: float = 2.0
    """Cost of a generated token."""
    tenant_weights: str = ""
    """Weights by tenant, as "gold=4, free=0.5"; 1 unless named."""

    def __post_init__(self) -> None:
        check_option(self, "input_weight", at_least=0)
        check_option(self, "output_weight", at_least=0)
        check_tenant_weights(self, "tenant_weights")

    def initial_state(self) -> ServiceCounters:
        return NOTHING_SERVED

    def fold(self, state: ServiceCounters, event: PolicyEvent) -> ServiceCounters:
        return fold(state, event, Prices(self.input_weight, self.output_weight, self.tenant_weights))

    def migrate(self, predecessor: object) -> ServiceCounters | None:
        return predecessor if isinstance(predecessor, ServiceCounters) else None

    def rank(
        self,
        candidates: Sequence[VictimView],
        claimant: RequestView,
        load: LoadView,
        *,
        state: ServiceCounters = NOTHING_SERVED,
    ) -> Sequence[str]:
        return _rank(
            candidates,
            lambda victim: (victim.request.priority, -state.counter(victim.request.tenant)),
        )


def _rank(
    candidates: Sequence[VictimView], key: Callable[[VictimView], tuple[float, ...]]
) -> tuple[str, ...]:
    """Ids by (paused first, key, youngest first, id): one order whatever the order of the candidates."""

    def full_key(victim: VictimView) -> tuple[bool, tuple[float, ...], float, str]:
        return not victim.is_paused, key(victim), -victim.request.arrival_time, victim.request.request_id

    return tuple(victim.request.request_id for victim in sorted(candidates, key=full_key))
