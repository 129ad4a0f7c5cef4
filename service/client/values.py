"""What goes into and comes out of the Python client and of `LLM`: plain frozen values, no wire.

What a stream yields are the engine's own events (`engine/api.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

from pageturner.service.client.structured import StructuredOutputLike
from pageturner.service.core.outputs import (
    ChoiceFinishedEvent,
    FinishedEvent,
    FinishReason,
    RequestTimings,
    SampledToken,
    ScoredTokensEvent,
    TokenEvent,
    Usage,
)
from pageturner.service.core.sampling_params import BeamSearch, EarlyStopping
from pageturner.service.engine.api import (
    AcceptedEvent,
    ChatMessage,
    ChatPrompt,
    RequestInfo,
    StreamEvent,
    TextPrompt,
)


class BeamSearchOptions(TypedDict, total=False):
    """The fields of `BeamSearch`, where each is explained. early_stopping: also by its value."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping | Literal["heuristic", "first", "never"]


class Sampling(TypedDict, total=False):
    """How tokens are chosen: the fields of the wire's SamplingParams, where each is explained.

    stop: one text stands for a list of one. structured_output: as `structured.py` says.
    """

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
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    include_stop: bool
    logprobs: int
    max_draft_tokens: int
    beam_search: BeamSearch | BeamSearchOptions
    best_of: int
    prompt_logprobs: int
    structured_output: StructuredOutputLike


class RequestOptions(TypedDict, total=False):
    """What a request may state beside what it asks for.

    timeout_seconds: the time limit, which reaches the scheduler; none if infinite. adapter: the name of a
    loaded one. session: the conversation that it belongs to, for a client that balances; it is not sent.
    """

    request_id: str
    model: str
    priority: int
    tenant: str
    cache_salt: str
    bypass_prefix_cache: bool
    adapter: str
    session: str
    timeout_seconds: float | None


class Options(Sampling, RequestOptions, total=False):
    """All that a request for an answer may state. return_prompt: tell what was rendered of the prompt."""

    return_prompt: bool


class ScoreOptions(RequestOptions, total=False):
    """All that a request for scores may state. logprobs: likeliest tokens wanted beside each token's own."""

    logprobs: int


Turn = ChatMessage | Mapping[str, Any]
"""One turn of a conversation; a mapping has the fields of ChatMessage as keys. Parts and tool calls may be as
other APIs have them."""

PromptLike = str | TextPrompt | Iterable[int] | Iterable[Turn] | ChatPrompt
"""A text, token ids (a list, a range, a numpy array, a generator), or a conversation; the first and the last
also with choices."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole sample, or one of the best answers of a beam search, which has a score."""

    index: int
    text: str
    tokens: tuple[SampledToken, ...]
    reason: FinishReason
    matched: str | int | None
    score: float | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole answer. prompt_logprobs: of the prompt's tokens from the second on, where asked for.
    rendered_prompt: the text that was tokenized, likewise."""

    request_id: str
    seed: int
    choices: tuple[Choice, ...]
    usage: Usage
    timings: RequestTimings
    policies: Mapping[str, str]
    policies_changed: bool = False
    prompt_logprobs: tuple[SampledToken, ...] = ()
    rendered_prompt: str = ""

    @property
    def text(self) -> str:
        """The first choice's."""
        return self.choices[0].text


RequestOrder = Literal["schedule", "age", "blocks", "tokens", "preemptions"]
"""How live requests are listed. schedule: those that run, then those that wait, in the order of the queue;
age: the oldest first; the others: those with most first."""


@dataclass(frozen=True, slots=True)
class RequestPage:
    """Some of the requests that live. next_page_token: empty after the last page. total_size: of all pages.
    age_seconds: how long ago it was so."""

    requests: tuple[RequestInfo, ...]
    next_page_token: str = ""
    total_size: int = 0
    age_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class BlockOwner:
    """A request that may hold blocks. number: as `RequestInfo` has it."""

    request_id: str
    tenant: str
    number: int


@dataclass(frozen=True, slots=True)
class BlockPoolMap:
    """A block pool. uses: a byte for each block, a `BlockUse`. owners: for each block two bytes, the lower
    first: the place, counted from 1, in `requests` of the first that holds it; 0 where none does."""

    uses: bytes = b""
    owners: bytes = b""
    requests: tuple[BlockOwner, ...] = ()
    age_seconds: float = 0.0


class CompletionBuilder:
    """Puts the events of one stream together."""

    def __init__(self) -> None:
        self._accepted: AcceptedEvent | None = None
        self._texts: dict[int, list[str]] = {}
        self._tokens: dict[int, list[SampledToken]] = {}
        self._ends: dict[int, ChoiceFinishedEvent] = {}
        self._prompt: list[SampledToken] = []
        self._finished: FinishedEvent | None = None

    def add(self, event: StreamEvent) -> None:
        match event:
            case AcceptedEvent():
                self._accepted = event
            case TokenEvent():
                self._texts.setdefault(event.index, []).append(event.text)
                self._tokens.setdefault(event.index, []).extend(event.tokens)
            case ScoredTokensEvent():
                self._prompt += event.tokens
            case ChoiceFinishedEvent():
                self._ends[event.index] = event
            case FinishedEvent():
                self._finished = event

    def build(self) -> Completion:
        """The whole answer, once the FinishedEvent was added."""
        assert self._accepted is not None, "a stream begins with its AcceptedEvent"
        assert self._finished is not None, "a stream that ends without an error ends with its FinishedEvent"
        choices = tuple(
            Choice(
                index,
                "".join(self._texts.get(index, ())),
                tuple(self._tokens.get(index, ())),
                end.reason,
                end.matched,
                end.score,
                end.cumulative_logprob,
            )
            for index, end in sorted(self._ends.items())
        )
        finished = self._finished
        return Completion(
            finished.request_id,
            self._accepted.seed,
            choices,
            finished.usage,
            finished.timings,
            finished.policies,
            finished.policies_changed,
            tuple(self._prompt),
            self._accepted.rendered_prompt,
        )
