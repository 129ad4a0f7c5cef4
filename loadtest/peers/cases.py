"""What is asked of every engine."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

from pageturner.loadtest.errors import OptionError
from pageturner.loadtest.workload import Lengths, LoadtestWorkload


@dataclass(frozen=True, slots=True)
class Case:
    """A closed loop of `concurrency` requests, `num_requests` in all, each of one length."""

    name: str
    prompt_tokens: int
    output_tokens: int
    concurrency: int
    num_requests: int

    def workload(self, token_ids: tuple[int, ...], seed: int) -> LoadtestWorkload:
        """Its requests; their prompts are of no other seed or case, which a server may have cached."""
        return LoadtestWorkload(
            num_requests=self.num_requests,
            prompt_lengths=Lengths(self.prompt_tokens, self.prompt_tokens),
            output_lengths=Lengths(self.output_tokens, self.output_tokens),
            token_ids=token_ids,
            seed=zlib.crc32(f"{self.name}/{seed}".encode()),
        )


@dataclass(frozen=True, slots=True)
class Demand:
    """What a server must be able to hold at once."""

    num_sequences: int
    tokens_per_sequence: int


CASE_SETS: dict[str, tuple[Case, ...]] = {
    "throughput": (
        Case("1 at once", 128, 128, concurrency=1, num_requests=3),
        Case("16 at once", 128, 128, concurrency=16, num_requests=32),
        Case("64 at once", 128, 128, concurrency=64, num_requests=128),
    ),
    "first-token": (
        Case("prompt of 128", 128, 2, concurrency=1, num_requests=8),
        Case("prompt of 2,048", 2048, 2, concurrency=1, num_requests=3),
    ),
    "long-context": (
        Case("64 x 2,048", 2048, 64, concurrency=64, num_requests=64),
        Case("8 x 7,000", 7000, 64, concurrency=8, num_requests=8),
    ),
}


def cases_of(names: str) -> tuple[Case, ...]:
    """Of the sets named, in order: `throughput,first-token`. Raises OptionError."""
    chosen: list[Case] = []
    for name in names.split(","):
        if name not in CASE_SETS:
            raise OptionError("cases", f"{name!r} is none of {', '.join(CASE_SETS)}")
        chosen += CASE_SETS[name]
    return tuple(chosen)


def demand_of(cases: Sequence[Case]) -> Demand:
    """The most sequences at once, and the longest of them."""
    return Demand(
        max(case.concurrency for case in cases),
        max(case.prompt_tokens + case.output_tokens for case in cases),
    )
