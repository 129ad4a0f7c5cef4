"""In which order do waiting, preempted and swapped requests get their turn?

Ageing needs no clock where it is linear: if each second of waiting earns every request the same credit,
the order of two requests never changes, so their keys are *virtual arrival times* and stay put.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.interfaces import KeyChange, SortKey
from pageturner.policies.options import check_option
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

    def __post_init__(self) -> None:
        check_option(self, "aging_seconds", above=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        return (request.arrival_time - request.priority * self.aging_seconds,)


@dataclass(frozen=True, slots=True)
class ShortestJobFirst:
    """The least work left first: output tokens still allowed, and prompt tokens at `prefill_weight` each.

    Without ageing: what bounds starvation is the core's champion. Source: shortest remaining
    processing time (Schrage, 1968); for language models Fu et al., "Efficient LLM Scheduling by Learning
    to Rank" (NeurIPS 2024).
    """

    name: ClassVar[str] = "shortest-job-first"
    summary: ClassVar[str] = (
        "wins on mean latency when max_tokens is honest; loses the tail, starves long requests"
    )
    key_change: ClassVar[KeyChange] = KeyChange.WITH_REQUEST

    prefill_weight: float = 0.05

    def __post_init__(self) -> None:
        check_option(self, "prefill_weight", at_least=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        work = request.num_remaining_tokens + self.prefill_weight * request.num_uncomputed_tokens
        return (work, request.arrival_time)


@dataclass(frozen=True, slots=True)
class LongestPrefixMatch:
    """The longest cached prefix first, so that hits are taken before they are evicted.

    Up to `cap_tokens` cached tokens count, and a second of waiting outweighs `aging_tokens_per_second`
    of them: nobody is overtaken by a request that arrives cap_tokens / aging_tokens_per_second later.
    Source: SGLang's cache-aware scheduling (Zheng et al., 2024), which has neither bound.
    """

    name: ClassVar[str] = "longest-prefix-match"
    summary: ClassVar[str] = (
        "wins when many prompts share long prefixes; loses fairness to prompts that share none"
    )
    key_change: ClassVar[KeyChange] = KeyChange.WITH_REQUEST

    cap_tokens: int = 4096
    aging_tokens_per_second: float = 256.0

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
    seconds_per_prompt_token: float = 0.0005

    def __post_init__(self) -> None:
        check_option(self, "seconds_per_output_token", above=0)
        check_option(self, "seconds_per_prompt_token", at_least=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        # One output token at the least: who has nothing left to do would divide by zero.
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

    def __post_init__(self) -> None:
        check_option(self, "default_seconds", at_least=0)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        if request.deadline is not None:
            return (request.deadline, request.arrival_time)
        return (request.arrival_time + self.default_seconds, request.arrival_time)
