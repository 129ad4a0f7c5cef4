"""What is asked of an engine, and what comes of it: values that cross between it and its clients, all frozen.

`engine/api.py` gathers them with the interface that takes them.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from pageturner.policies.spec import PolicySpec
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    RequestTimings,
    SampledToken,
    ScoredTokensEvent,
    TokenEvent,
    Usage,
)
from pageturner.service.core.request import ResumedChoice
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.engine.conversation import ChatMessage, ChatPrompt
from pageturner.service.errors import InvalidArgument
from pageturner.service.identity import ANONYMOUS, Identity

MAX_NAME_CHARACTERS = 256
"""Of an id, a model's name, a tenant or a salt: they travel in logs and metadata."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text with a choice. parse_special: special tokens that it spells are those tokens, else text."""

    text: str
    parse_special: bool = True


Prompt = str | TextPrompt | tuple[int, ...] | tuple[ChatMessage, ...] | ChatPrompt


@dataclass(frozen=True, slots=True)
class Resumption:
    """What a client has of an answer that broke off; fields as those of `Resume` in `generation.proto`."""

    seed: int
    fingerprint: str
    choices: tuple[ResumedChoice, ...]
    max_tokens: int | None = None
    allow_inexact: bool = False


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A request as a client states it, before tokenizing."""

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    request_id: str = ""
    """Chosen by the server if empty."""
    model: str = ""
    """Empty: whichever is served."""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    deadline_seconds: float | None = None
    """Time left from now, None for no limit."""
    trace_parent: str = ""
    """The W3C trace context of the call that brings it; empty where it is not traced."""
    resume: Resumption | None = None
    """What is known of the answer already; None for one that begins."""
    continuations: tuple[tuple[int, ...], ...] = ()
    """Token ids that are to be scored behind the prompt, `params.n` of them, in place of an answer."""
    adapter: str = ""
    """Name of a loaded adapter; empty for the model as it is."""
    hands_over: bool = False
    """Whether the prompt's KV goes to another server as it is made (see `engine.handover`)."""
    return_prompt: bool = False
    """Whether the AcceptedEvent says what was rendered of the prompt."""
    identity: Identity = ANONYMOUS
    """Who asks, as proved. Its tenant takes the place of `tenant` where authentication is on."""

    def check_names(self) -> None:
        """Raises InvalidArgument for an id, a model's or adapter's name, a tenant or a salt that is too
        long."""
        for name in ("request_id", "model", "tenant", "cache_salt", "adapter"):
            if len(getattr(self, name)) > MAX_NAME_CHARACTERS:
                raise InvalidArgument(name, f"longer than {MAX_NAME_CHARACTERS} characters")


@dataclass(frozen=True, slots=True)
class AcceptedEvent:
    """First message of every stream: the id and seed in force, and the size of the prompt.

    fingerprint: of what determines the tokens, for resuming the answer elsewhere; empty where it can't be.
    is_exact: a server of equal fingerprint would go on with exactly the tokens that come here.
    rendered_prompt: the text that was tokenized, if the request asked for it; empty for one of token ids.
    """

    request_id: str
    seed: int
    num_prompt_tokens: int
    max_tokens: int
    fingerprint: str = ""
    is_exact: bool = False
    rendered_prompt: str = ""


StreamEvent = AcceptedEvent | TokenEvent | ScoredTokensEvent | ChoiceFinishedEvent | FinishedEvent


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """Continuations of one prompt, of which it is asked how likely they are; fields as of GenerationRequest.

    num_top: most likely tokens wanted beside each token's own.
    """

    prompt: Prompt
    continuations: tuple[str | tuple[int, ...], ...]
    num_top: int = 0
    request_id: str = ""
    model: str = ""
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    bypass_prefix_cache: bool = False
    deadline_seconds: float | None = None
    trace_parent: str = ""
    identity: Identity = ANONYMOUS
    adapter: str = ""


@dataclass(frozen=True, slots=True)
class ContinuationScore:
    """How likely a continuation is. logprob: the sum of its tokens'. is_greedy: greedy decoding gives it."""

    logprob: float
    is_greedy: bool
    tokens: tuple[SampledToken, ...]


@dataclass(frozen=True, slots=True)
class ScoreAnswer:
    """scores: of the continuations, in order. usage: the prompt counts once, continuations as output."""

    request_id: str
    scores: tuple[ContinuationScore, ...]
    usage: Usage
    timings: RequestTimings


class RequestStream(Protocol):
    """The events of one request, in order: Accepted, scores of the prompt, tokens and ends, Finished last.

    Iteration raises the request's PageturnerError in place of a Finished that carries one. Adjacent
    token events of one choice that already wait are delivered as one. Leaving early must be followed
    by `aclose`, which aborts what still runs.
    """

    @property
    def request_id(self) -> str: ...

    def __aiter__(self) -> AsyncIterator[StreamEvent]: ...

    async def aclose(self) -> None: ...


class AbortOutcome(Enum):
    """What an abort met. Aborting twice is no error."""

    ABORTED = "aborted"
    ALREADY_FINISHED = "already_finished"
    NOT_FOUND = "not_found"


@dataclass(frozen=True, slots=True)
class PolicyChange:
    """The policies that are wanted, by axis; what is left out stays as it is."""

    policies: Mapping[str, PolicySpec] = field(default_factory=dict)
    shadows: Mapping[str, PolicySpec | None] = field(default_factory=dict)
    """None ends a shadow."""
    preset: str = ""
    """A named set for all axes, which `policies` go over."""
    expected_revision: int | None = None
    """Refuse unless it is the one in force."""
    origin: str = ""
    """The caller, for the log."""
