"""A request as it enters: checked and tokenized, nothing left open, frozen."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ResumedChoice:
    """What a client has of one choice of an answer that broke off.

    num_characters: of its text; None for all that these tokens show. is_finished: it was told its end.
    """

    token_ids: tuple[int, ...] = ()
    num_characters: int | None = None
    is_finished: bool = False


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the engine accepts it: tokenized, its seed drawn, its deadline on our clock.

    priority: larger is more urgent. tenant: whose quota it is charged to. cache_salt, adapter, cache_tenant:
    part of the prefix cache's key; the last is the tenant within which alone blocks are shared, if within
    one. adapter: digest of the adapter's content, empty for none. bypass_prefix_cache: neither reads the
    cache nor waits for a producer. trace_parent: W3C trace context of the call that brought it, for those who
    listen; decides nothing. eos_token_ids: tokens that end a sequence unless params.ignore_eos. resumed: by
    choice, what is known of an answer that goes on here; empty for one that begins. fingerprint, is_exact:
    for its AcceptedEvent. is_scoring: `resumed` holds continuations of the prompt, at least a token each,
    that are to be scored; nothing is sampled. known: what the client has of a search that begins anew; for
    who tells it the rest. hands_over: each full block of its KV goes to the tier behind the host as soon as
    it is made, where another server takes it.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    arrival_time: float
    eos_token_ids: tuple[int, ...] = ()
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    cache_tenant: str = ""
    adapter: str = ""
    bypass_prefix_cache: bool = False
    deadline: float | None = None
    trace_parent: str = ""
    resumed: tuple[ResumedChoice, ...] = ()
    fingerprint: str = ""
    is_exact: bool = False
    is_scoring: bool = False
    known: tuple[ResumedChoice, ...] = ()
    hands_over: bool = False

    @property
    def num_score_top(self) -> int | None:
        """Alternatives wanted beside the log-probability of each scored token; None where none is scored.

        The prompt's are not told again to a client that has tokens of the answer: they came before these.
        """
        if self.is_scoring:
            return self.params.logprobs or 0
        return None if self.num_resumed_tokens else self.params.prompt_logprobs

    @property
    def num_resumed_tokens(self) -> int:
        """Outputs that are known already, of all choices."""
        return sum(len(choice.token_ids) for choice in self.resumed)

    @property
    def is_scored(self) -> bool:
        """Whether known tokens are scored, of its prompt or in place of an answer."""
        return self.is_scoring or self.num_score_top is not None

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a sequence of this request."""
        return self.params.stop_token_ids + (() if self.params.ignore_eos else self.eos_token_ids)

    @property
    def has_timely_ends(self) -> bool:
        """Whether the sampler gives an end token only where it ends the sequence, below min_tokens too: a
        text of a form that is complete may have nothing else to follow."""
        return self.params.structured_output is not None
