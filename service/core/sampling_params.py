"""How the next token is chosen, as the user asked for it; checked once, frozen ever after."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from pageturner.service.core.drafting.draft_counts import MAX_DRAFT_TOKENS
from pageturner.service.core.structured_output import FIELD, StructuredOutput
from pageturner.service.errors import InvalidArgument

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Of each stop string: the engine's thread builds an automaton as long for every choice."""

MAX_STOP_TOKEN_IDS = 1024

MAX_LOGIT_BIAS = 1024
MAX_LENGTH_PENALTY = 10.0


class EarlyStopping(Enum):
    """When a beam search ends that has as many ended answers as beams; `early_stopping` of `transformers`."""

    HEURISTIC = "heuristic"
    """Once the best beam, at its present length, scores no better than the worst of them (False there)."""
    FIRST = "first"
    """At once (True there)."""
    NEVER = "never"
    """Once no beam can score better at any length up to max_tokens."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Keep the `width` likeliest continuations at each token, in place of drawing one."""

    width: int
    """Beams; the answers are the n best of what they come to."""
    length_penalty: float = 1.0
    """An answer's score is its log-probability, divided by its number of tokens to this power: above 0 it
    favours long answers, below short ones."""
    early_stopping: EarlyStopping = EarlyStopping.HEURISTIC

    def check(self, params: SamplingParams, max_width: int) -> None:
        """Raise InvalidArgument, naming the field, for what it can't be, or stand beside."""
        _check_int("beam_search.width", self.width, 2, max_width)
        _check_float(
            "beam_search.length_penalty", self.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY
        )
        _check_int("n", params.n, 1, self.width)
        if params.temperature not in (0.0, 1.0):
            raise InvalidArgument("temperature", f"{params.temperature:g}: a beam search draws no token")
        for name in _DRAWING:
            if getattr(params, name) != getattr(_DEFAULTS, name):
                raise InvalidArgument(name, "is not taken beside beam_search, which ranks by the model alone")
        if params.stop:
            raise InvalidArgument("stop", "is not sought in a beam search; stop_token_ids end its answers")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one request; the defaults are those of the wire."""

    temperature: float = 1.0
    """0 is greedy."""
    top_k: int = 0
    """Tokens kept, by probability; 0 is off."""
    top_p: float = 1.0
    """Probability mass kept; 1 is off."""
    min_p: float = 0.0
    """Least probability kept, as a share of the largest; 0 is off."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; 1 is off."""
    presence_penalty: float = 0.0
    """Subtracted once for tokens seen in the output."""
    frequency_penalty: float = 0.0
    """Subtracted for each time a token was seen in the output."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, added logit)."""
    seed: int | None = None
    """None is drawn at acceptance."""
    n: int = 1
    """Parallel samples."""
    max_tokens: int | None = None
    """None is clamped to what fits."""
    min_tokens: int = 0
    """Stops are withheld below so many output tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a sequence; not part of its text unless include_stop."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a sequence."""
    ignore_eos: bool = False
    """Whether the model's own end tokens end nothing."""
    include_stop: bool = False
    """Whether text keeps the stop string that ended it."""
    logprobs: int | None = None
    """None for none, else how many alternatives beside the chosen token's own."""
    structured_output: StructuredOutput | None = None
    """The form that the text must have; None for any."""
    max_draft_tokens: int | None = None
    """Drafts that a step verifies for a sequence at most, of a server that makes any; None for its own bound.
    They change no token."""
    beam_search: BeamSearch | None = None
    """In place of sampling: the n best answers of a search, best first."""
    best_of: int | None = None
    """Samples of which the n with the highest cumulative log-probability are returned; None is n."""
    prompt_logprobs: int | None = None
    """As logprobs, of each prompt token but the first, given those before it."""

    @property
    def is_selective(self) -> bool:
        """Whether more are sampled than returned, so that nothing is told before all have ended."""
        return self.best_of is not None and self.best_of > self.n

    @property
    def needs_logprobs(self) -> bool:
        """Whether log-probabilities of the sampled tokens are asked for, or tell which choices are best."""
        return self.logprobs is not None or self.best_of is not None

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen so far are discouraged, or the opposite."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def needs_history(self) -> bool:
        """Whether sampling depends on the tokens seen so far."""
        return self.structured_output is not None or self.has_penalties

    @property
    def num_sequences(self) -> int:
        """Sequences that run for it: more than are returned, where they compete."""
        return (self.best_of or self.n) if self.beam_search is None else self.beam_search.width

    def check(self, vocab_size: int, max_n: int) -> None:
        """Raise InvalidArgument, naming the field, unless every value is in range."""
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("top_k", self.top_k, 0, None)
        _check_int("n", self.n, 1, max_n)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, self.n, max_n)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.max_draft_tokens is not None:
            _check_int("max_draft_tokens", self.max_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidArgument("stop", f"{len(self.stop)} strings; at most {MAX_STOP_STRINGS}")
        for position, text in enumerate(self.stop):
            if not text:
                raise InvalidArgument(f"stop[{position}]", "an empty string would stop at once")
            if len(text) > MAX_STOP_CHARACTERS:
                raise InvalidArgument(
                    f"stop[{position}]", f"{len(text)} characters; at most {MAX_STOP_CHARACTERS}"
                )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise InvalidArgument(
                "stop_token_ids", f"{len(self.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS}"
            )
        for position, token_id in enumerate(self.stop_token_ids):
            _check_int(f"stop_token_ids[{position}]", token_id, 0, vocab_size - 1)
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidArgument("logit_bias", f"{len(self.logit_bias)} entries; at most {MAX_LOGIT_BIAS}")
        for token_id, bias in self.logit_bias:
            _check_int(f"logit_bias[{token_id}]", token_id, 0, vocab_size - 1)
            _check_float(f"logit_bias[{token_id}]", bias, -100.0, 100.0)
        if self.structured_output is not None:
            self.structured_output.check()
            if self.ignore_eos and not self.stop_token_ids:
                reason = "its text ends with an end token, and ignore_eos leaves none"
                raise InvalidArgument(FIELD, reason)
        if self.beam_search is not None:
            self.beam_search.check(self, max_n)


_DEFAULTS = SamplingParams()
_DRAWING = (
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "best_of",
)
"""What bends the model's distribution before a token is drawn from it, or ranks what was drawn."""


def _check_float(field: str, value: float, low: float, high: float) -> None:
    if not math.isfinite(value) or not low <= value <= high:
        raise InvalidArgument(field, f"{value} is not in [{low:g}, {high:g}]")


def _check_int(field: str, value: int, low: int, high: int | None) -> None:
    if value < low or (high is not None and value > high):
        bound = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise InvalidArgument(field, f"{value} is not {bound}")
