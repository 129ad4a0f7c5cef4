"""Workloads by their statistics, the same for the same seed whatever the process."""

from __future__ import annotations

import dataclasses
import math
import random
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

from pageturner.service.simulator.errors import WorkloadError
from pageturner.service.simulator.workload import Segment, SimulatedWorkload, WorkloadRequest


@dataclass(frozen=True, slots=True)
class Synthetic:
    """A recipe.

    requests: how many conversations start. rate: how many a second on average. burstiness: squared
    coefficient of variation of the gaps, which are gamma distributed: 1 is a Poisson process, 0 a metronome.
    concurrency: above 0 a closed loop of so many, which needs no rate.
    prompt, output: median tokens; prompt_sigma, output_sigma: of the lognormal around it, 0 for fixed.
    long_share, long_prompt, long_output: a share of requests that has these medians instead.
    max_tokens_factor: how many times its output a request asks for; it stops earlier by itself.
    groups, shared: each prompt begins with the `shared` tokens of one of `groups` prefixes, the first the
    most popular as group_skew says (Zipf's exponent; 0 is even). group_share: the share of prompts that do.
    turns, think: each conversation has so many turns, each prompt holding all before it, sent `think`
    seconds (exponential) after the last answer.
    tenants: so many, t0, t1, ...; tenant_skew: Zipf's exponent of their shares of the requests.
    priorities: levels 0 .. priorities - 1, evenly. deadline: seconds after arrival, 0 for none;
    tight_share: a share of requests that has a quarter of it.
    choices: n of each request.
    """

    requests: int = 200
    rate: float = 4.0
    burstiness: float = 1.0
    concurrency: int = 0
    prompt: int = 512
    prompt_sigma: float = 0.6
    output: int = 128
    output_sigma: float = 0.6
    long_share: float = 0.0
    long_prompt: int = 4096
    long_output: int = 128
    max_tokens_factor: float = 1.0
    groups: int = 0
    shared: int = 0
    group_skew: float = 1.0
    group_share: float = 1.0
    turns: int = 1
    think: float = 5.0
    tenants: int = 1
    tenant_skew: float = 0.0
    priorities: int = 1
    deadline: float = 0.0
    tight_share: float = 0.0
    choices: int = 1
    longest: int = 16384

    def __post_init__(self) -> None:
        for name in ("requests", "prompt", "output", "turns", "tenants", "priorities", "choices", "longest"):
            if getattr(self, name) < 1:
                raise WorkloadError(f"{name} must be at least 1, not {getattr(self, name)}")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not 0 <= value < math.inf:
                raise WorkloadError(f"{field.name} must be finite and not negative, not {value}")
        if not self.concurrency and not self.rate:
            raise WorkloadError("rate must be above 0 in an open loop")

    def make(self, name: str, seed: int) -> SimulatedWorkload:
        """The workload of this recipe and this seed."""
        # Lengths and arrivals have generators of their own: changing one leaves the other as it was.
        arrivals, lengths, labels = (
            random.Random(f"{seed}/{part}") for part in ("arrivals", "lengths", "labels")
        )
        next_key = self.groups + 1
        made: list[WorkloadRequest] = []
        at_seconds = 0.0
        for _ in range(self.requests):
            at_seconds += self._gap(arrivals)
            prefix: tuple[Segment, ...] = ()
            if self.groups and self.shared and labels.random() < self.group_share:
                prefix = (Segment(1 + _zipf(labels, self.groups, self.group_skew), self.shared),)
            tenant = f"t{_zipf(labels, self.tenants, self.tenant_skew)}"
            priority = labels.randrange(self.priorities)
            is_tight = labels.random() < self.tight_share
            is_long = lengths.random() < self.long_share
            deadline = self.deadline * (0.25 if is_tight else 1.0) or None
            follows: int | None = None
            for _ in range(self.turns):
                asked = Segment(
                    next_key,
                    self._draw(lengths, self.long_prompt if is_long else self.prompt, self.prompt_sigma),
                )
                answer = Segment(
                    next_key + 1,
                    self._draw(lengths, self.long_output if is_long else self.output, self.output_sigma),
                )
                next_key += 2
                prompt = (*prefix, asked)
                think = arrivals.expovariate(1 / self.think) if self.turns > 1 and self.think else 0.0
                made.append(
                    WorkloadRequest(
                        at_seconds=at_seconds if follows is None else think,
                        prompt=prompt,
                        output=answer,
                        tenant=tenant,
                        priority=priority,
                        deadline_seconds=deadline,
                        num_choices=self.choices,
                        max_tokens=max(answer.num_tokens, round(self.max_tokens_factor * answer.num_tokens)),
                        follows=follows,
                    )
                )
                follows = len(made) - 1
                prefix = (*prompt, answer)
        return SimulatedWorkload(name, tuple(made), self.concurrency or None)

    def _gap(self, rng: random.Random) -> float:
        if self.concurrency:
            return 0.0
        if not self.burstiness:
            return 1 / self.rate
        return rng.gammavariate(1 / self.burstiness, self.burstiness / self.rate)

    def _draw(self, rng: random.Random, median: int, sigma: float) -> int:
        drawn = median if not sigma else round(rng.lognormvariate(math.log(median), sigma))
        return max(1, min(drawn, self.longest))


def _zipf(rng: random.Random, count: int, exponent: float) -> int:
    if count == 1:
        return 0
    return rng.choices(range(count), cum_weights=_zipf_sums(count, exponent))[0]


@lru_cache(maxsize=16)
def _zipf_sums(count: int, exponent: float) -> tuple[float, ...]:
    return tuple(accumulate((rank + 1) ** -exponent for rank in range(count)))


RECIPES: dict[str, Synthetic] = {
    "chat": Synthetic(rate=6, prompt=200, output=200, turns=3, think=10, groups=4, shared=512),
    "bursty": Synthetic(requests=400, rate=12, burstiness=8),
    "long-context": Synthetic(requests=100, rate=1.5, prompt=6000, prompt_sigma=0.3, output=256),
    "mixed": Synthetic(requests=400, rate=10, long_share=0.1, long_prompt=6000),
    "shared-prefix": Synthetic(requests=400, rate=12, prompt=64, groups=32, shared=2048, group_skew=0.8),
    "two-tenants": Synthetic(requests=400, rate=14, tenants=2, tenant_skew=3),
    "deadlines": Synthetic(requests=400, rate=14, deadline=20, tight_share=0.3),
}
"""Recipes by name, for an 8B model on an H100."""


def parse_recipe(text: str) -> tuple[str, Synthetic]:
    """`chat`, or `chat:rate=8,requests=50`: a recipe, some of its fields changed. Raises WorkloadError."""
    name, _, changes = text.partition(":")
    if name not in RECIPES:
        raise WorkloadError(f"no workload {name!r}; there are {', '.join(RECIPES)}, or the path of a trace")
    kinds: dict[str, type[int] | type[float]] = {
        field.name: type(getattr(RECIPES[name], field.name)) for field in dataclasses.fields(Synthetic)
    }
    values: dict[str, float] = {}
    for change in filter(None, changes.split(",")):
        field, _, value = change.partition("=")
        if field not in kinds:
            raise WorkloadError(f"a workload has no {field!r}; it has {', '.join(kinds)}")
        try:
            values[field] = kinds[field](value)
        except ValueError:
            raise WorkloadError(f"{field}: {value!r} is not {kinds[field].__name__}") from None
    return text, replace(RECIPES[name], **values)  # type: ignore[arg-type]  # int or float as the field's default
