"""What goes into and comes out of the Python client: plain frozen values, no wire."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from pageturner.service.core.outputs import FinishReason, RequestTimings, SampledToken, Usage


class Sampling(TypedDict, total=False):
    """How tokens are chosen: the fields of the wire's SamplingParams, where each is explained."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    seed: int
    n: int
    max_tokens: int
    min_tokens: int
    stop: Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    logprobs: int


class Options(Sampling, total=False):
    """What else a request may state. timeout_seconds: the time limit, which reaches the scheduler."""

    request_id: str
    model: str
    priority: int
    tenant: str
    cache_salt: str
    bypass_prefix_cache: bool
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was queued under this id; the seed and the bound on tokens in force."""

    request_id: str
    seed: int
    num_prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """What a choice grew by."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """A choice ended. matched: the stop string or token that ended it."""

    index: int
    reason: FinishReason
    matched: str | int | None


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices ended. policies: axis to name, in force at the end; policies_changed: some came later
    than the request."""

    usage: Usage
    timings: RequestTimings
    policies: Mapping[str, str]
    policies_changed: bool = False


StreamItem = Accepted | Delta | ChoiceFinished | Finished


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole sample."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    reason: FinishReason
    matched: str | int | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer."""

    request_id: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    timings: RequestTimings
    policies: Mapping[str, str]
    policies_changed: bool = False

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text
