"""In which order do waiting, preempted and swapped requests get their turn?

Ageing needs no clock where it is linear: if each second of waiting earns every request the same credit,
the order of two requests never changes, so their keys are *virtual arrival times* and stay put.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.events import PolicyEvent
from pageturner.policies.interfaces import KeyChange, SortKey
from pageturner.policies.options import check_option, check_tenant_weights
from pageturner.policies.service_counters import NOTHING_SERVED, Prices, ServiceCounters, fold
from pageturner.policies.views import LoadView, RequestView


@dataclass(frozen=True, slots=True)
class Fcfs:
    """First come, first served. A preempted request returns to the place its arrival gave it.

    Source: Orca (Yu et al., OSDI 2022); the default of vLLM.
    """

    name: ClassVar[str] = "fcfs"
    summary: ClassVar[str] = "wins on fairness and predictability; loses when long requests block short ones"
    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (request.arrival_time,)


@dataclass(frozen=True, slots=True)
class PriorityWithAging:
    """The most urgent first; a request gains one level of priority each `aging_seconds` it waits.

    A request is overtaken by one that is k levels more urgent only if that arrives within
    k x aging_seconds after it. Source: multilevel priorities with ageing (Silberschatz, Operating
    System Concepts); vLLM's `--scheduling-policy priority` is this without ageing.
    """

    name: ClassVar[str] = "priority"
    summary: ClassVar[str] = (
        "wins when interactive and batch traffic share a server; loses if all claim urgency"
    )
    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    aging_seconds: float = 60.0
    """Seconds of waiting that earn one level of priority."""

    def __post_init__(self) -> None:
        check_option(self, "aging_seconds", above=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (request.arrival_time - request.priority * self.aging_seconds,)


@dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """The least work left first: output tokens still allowed, and prompt tokens at `prefill_weight` each.

    Without ageing: what bounds starvation is the core's starvation guard. Source: shortest remaining
    processing time (Schrage, 1968); for language models Fu et al., "Efficient LLM Scheduling by Learning
    to Rank" (NeurIPS 2024).
    """

    name: ClassVar[str] = "shortest-job-first"
    summary: ClassVar[str] = (
        "wins on mean latency when max_tokens is honest; loses the tail, starves long requests"
    )
    key_change: ClassVar[KeyChange] = KeyChange.WITH_REQUEST

    prefill_weight: float = 0.05
    """Cost of a prompt token left, in output tokens."""

    def __post_init__(self) -> None:
        check_option(self, "prefill_weight", at_least=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        work = request.num_remaining_tokens + self.prefill_weight * request.num_uncomputed_tokens
        return (work, request.arrival_time)


@dataclass(frozen=True, slots=True)
class LongestPrefixMatch:
    """The longest cached prefix first, so that hits are taken before they are evicted.

    Up to `cap_tokens` cached tokens count, and a second of waiting outweighs `aging_tokens_per_second`
    of them: no request is overtaken by one that arrives cap_tokens / aging_tokens_per_second later.
    Source: SGLang's cache-aware scheduling (Zheng et al., 2024), which has neither bound.
    """

    name: ClassVar[str] = "longest-prefix-match"
    summary: ClassVar[str] = (
        "wins when many prompts share long prefixes; loses fairness to prompts that share none"
    )
    key_change: ClassVar[KeyChange] = KeyChange.WITH_REQUEST

    cap_tokens: int = 4096
    """Cached tokens beyond these do not count."""
    aging_tokens_per_second: float = 256.0
    """Cached tokens that a second of waiting outweighs."""

    def __post_init__(self) -> None:
        check_option(self, "cap_tokens", at_least=0)
        check_option(self, "aging_tokens_per_second", above=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        head_start = min(request.num_cached_tokens, self.cap_tokens) / self.aging_tokens_per_second
        return (request.arrival_time - head_start,)


@dataclass(frozen=True, slots=True)
class HighestResponseRatioNext:
    """The largest (waited + service) / service first: short requests go ahead, long ones age in.

    Service is estimated from the tokens left at the two rates given. Source: Brinch Hansen, 1971.
    """

    name: ClassVar[str] = "highest-response-ratio-next"
    summary: ClassVar[str] = (
        "wins on mean slowdown without starving the long; loses when outputs stop far early"
    )
    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

    seconds_per_output_token: float = 0.03
    """Estimate of service for each output token left."""
    seconds_per_prompt_token: float = 0.0005
    """Estimate of service for each prompt token left."""

    def __post_init__(self) -> None:
        check_option(self, "seconds_per_output_token", above=0)
        check_option(self, "seconds_per_prompt_token", at_least=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        # One output token at the least: a request with nothing left to do would divide by zero.
        service = (
            max(1, request.num_remaining_tokens) * self.seconds_per_output_token
            + request.num_uncomputed_tokens * self.seconds_per_prompt_token
        )
        waited = max(0.0, load.now - request.arrival_time)
        return (-waited / service, request.arrival_time)


@dataclass(frozen=True, slots=True)
class EarliestDeadlineFirst:
    """The nearest deadline first; a request without one counts as due `default_seconds` after arrival.

    Source: Liu and Layland, 1973 (optimal on one machine while the load can be met at all).
    """

    name: ClassVar[str] = "earliest-deadline-first"
    summary: ClassVar[str] = (
        "wins when clients set real deadlines and load is feasible; loses all at once in overload"
    )
    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    default_seconds: float = 60.0
    """Seconds after arrival at which a request without a deadline counts as due."""

    def __post_init__(self) -> None:
        check_option(self, "default_seconds", at_least=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        if request.deadline is not None:
            return (request.deadline, request.arrival_time)
        return (request.arrival_time + self.default_seconds, request.arrival_time)


@dataclass(frozen=True, slots=True)
class MultiLevelFeedback:
    """Levels by service had, first come first served within each; a level costs twice the one above it.

    A request leaves level 0 after `quantum_tokens`, level 1 after twice as many more, and so on. A prompt
    counts as service at `prompt_weight` a token from the start, so that a long one joins further down.
    Each `boost_seconds` since its arrival lift it by one level, so that no request starves. The service is in
    the view, hence no memory. Only the queue is ordered: who runs goes on until blocks or slots run short.
    Source: Corbato et al., 1962; for language models the skip-join queue of FastServe (Wu et al., 2023).
    """

    name: ClassVar[str] = "multi-level-feedback"
    summary: ClassVar[str] = "wins on mean latency when lengths are unknown; loses to fcfs when all are long"
    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

    quantum_tokens: int = 64
    """Tokens of service in level 0; each level has twice as many as the one above."""
    num_levels: int = 6
    """How many levels there are."""
    prompt_weight: float = 0.05
    """Service that a prompt token counts as, in output tokens."""
    boost_seconds: float = 30.0
    """Seconds since arrival that lift a request by one level."""

    def __post_init__(self) -> None:
        check_option(self, "quantum_tokens", at_least=1)
        check_option(self, "num_levels", at_least=1, at_most=64)
        check_option(self, "prompt_weight", at_least=0)
        check_option(self, "boost_seconds", above=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        served = request.num_output_tokens + self.prompt_weight * request.num_prompt_tokens
        # Levels 0 to i together hold quantum x (2^(i + 1) - 1) tokens.
        level = (int(served // self.quantum_tokens) + 1).bit_length() - 1
        num_boosts = max(0.0, load.now - request.arrival_time) // self.boost_seconds
        return (max(0, min(level, self.num_levels - 1) - num_boosts), request.arrival_time)


@dataclass(frozen=True, slots=True)
class VirtualTokenCounter:
    """The tenant with the least weighted service first; its own requests in order of arrival.

    A prompt token costs `input_weight`, a generated one `output_weight`, both over the tenant's weight
    ("gold=4, free=0.5"; 1 unless named). While two tenants both have requests waiting, none is preempted
    and keys are fresh, their service per weight differs by no more than 2 max(input_weight x longest
    prompt, output_weight x tokens that fit the pool). Other options keep the counters they find.
    Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024).
    """

    name: ClassVar[str] = "virtual-token-counter"
    summary: ClassVar[str] = (
        "wins when one tenant floods the server; loses cache hits by turning between tenants"
    )
    key_change: ClassVar[KeyChange] = KeyChange.WITH_TIME

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

    def key(
        self, request: RequestView, load: LoadView, *, state: ServiceCounters = NOTHING_SERVED
    ) -> SortKey:
        return (state.virtual_start(request.request_id, request.tenant), request.arrival_time)
