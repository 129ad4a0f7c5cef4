"""What a simulated server is asked: arrivals, lengths and what prompts share. Never text.

A prompt is a run of segments. Two prompts share exactly the segments they have in common from the start,
so a whole workload of long prompts is written down in a few numbers, and still becomes token ids that
the real prefix cache hashes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import chain

from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.simulator.acceptance import Acceptance
from pageturner.service.simulator.errors import WorkloadError

SEGMENT_BITS = 20
"""A segment has fewer than 2**20 tokens, so that segments of different keys share no token id."""

MAX_SEGMENT_TOKENS = (1 << SEGMENT_BITS) - 1
"""The most tokens of one segment."""


@dataclass(frozen=True, slots=True)
class Segment:
    """`num_tokens` token ids that only `key` (at least 1) has; the same in every prompt that names it."""

    key: int
    num_tokens: int

    @property
    def token_ids(self) -> range:
        """In order of the prompt."""
        return range(self.key << SEGMENT_BITS, (self.key << SEGMENT_BITS) + self.num_tokens)


@dataclass(frozen=True, slots=True)
class WorkloadRequest:
    """One request to come.

    at_seconds: after the start of the run; of a follow-up, after the end of the request that it follows.
    follows: index of that request in the workload. output: what it will generate, of each choice.
    max_tokens: what it asks for, if not exactly that. deadline_seconds: after its arrival.
    """

    at_seconds: float
    prompt: tuple[Segment, ...]
    output: Segment
    tenant: str = ""
    priority: int = 0
    deadline_seconds: float | None = None
    num_choices: int = 1
    max_tokens: int | None = None
    follows: int | None = None

    @property
    def num_prompt_tokens(self) -> int:
        """Over all segments."""
        return sum(segment.num_tokens for segment in self.prompt)

    def to_request(self, request_id: str, arrival_time: float) -> NewRequest:
        """As the scheduler takes it.

        The seed is where output ids start, less the prompt's length: the null sampler says seed + position,
        so that the next turn of a conversation can name its answer before it exists. It stops at the last
        id of `output`, or at max_tokens.
        """
        num_prompt = self.num_prompt_tokens
        seed = (self.output.key << SEGMENT_BITS) - num_prompt
        asked = self.output.num_tokens if self.max_tokens is None else self.max_tokens
        stops = () if asked <= self.output.num_tokens else (self.output.token_ids[-1],)
        return NewRequest(
            request_id,
            tuple(chain.from_iterable(segment.token_ids for segment in self.prompt)),
            SamplingParams(max_tokens=asked, n=self.num_choices),
            seed,
            arrival_time,
            eos_token_ids=stops,
            priority=self.priority,
            tenant=self.tenant,
            deadline=None if self.deadline_seconds is None else arrival_time + self.deadline_seconds,
        )


@dataclass(frozen=True, slots=True)
class SimulatedWorkload:
    """Requests by arrival. concurrency: of a closed loop, where a request is sent when another ended
    and `at_seconds` counts only for the first; None for an open one. acceptance: of drafts, on a machine that
    speculates."""

    name: str
    requests: tuple[WorkloadRequest, ...]
    concurrency: int | None = None
    acceptance: Acceptance = Acceptance()

    def __post_init__(self) -> None:
        if not self.requests:
            raise WorkloadError(f"workload {self.name!r} has no requests")
        if self.concurrency is not None and self.concurrency < 1:
            raise WorkloadError(f"workload {self.name!r}: a concurrency of {self.concurrency}")
        for number, request in enumerate(self.requests):
            segments = (*request.prompt, request.output)
            if not all(0 < segment.num_tokens <= MAX_SEGMENT_TOKENS for segment in segments):
                raise WorkloadError(f"workload {self.name!r}: request {number} has a length out of range")
            if request.follows is not None and not 0 <= request.follows < number:
                raise WorkloadError(f"workload {self.name!r}: request {number} follows none before it")

    def at_rate(self, factor: float) -> SimulatedWorkload:
        """The same requests, arriving `factor` times as fast."""
        return replace(
            self,
            requests=tuple(
                replace(request, at_seconds=request.at_seconds / factor) for request in self.requests
            ),
        )
