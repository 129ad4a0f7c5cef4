"""What the core tells a policy that keeps a memory: frozen facts, in the order in which they came true.

Four events, so few that telling them costs next to nothing: three when a request changes its standing,
one a step for all the tokens in it. Times are seconds on the injected clock and never fall. Of one request
the order is

    RequestQueued RequestStarted (RequestQueued RequestStarted)* RequestEnded

cut off anywhere by its RequestEnded, which comes exactly once and last.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True)
class RequestQueued:
    """The request has taken its place among those that do not run.

    Told once `add_request` has accepted it (`is_first`), and again whenever it stops running without
    ending: it yielded by any means, or a step that it was part of failed. Not told of a request that waits
    already and only loses more of its blocks. Told before its queue key is asked for.
    """

    now: float
    request_id: str
    tenant: str
    num_prompt_tokens: int
    is_first: bool
    """Whether it has just been accepted, and was never queued before."""


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The request has left the queue and runs; told as the step that starts it is committed."""

    now: float
    request_id: str
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    """Known tokens that it need not compute, because the prefix cache held them."""
    is_first: bool
    """Whether it never ran before."""


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request is gone, with whatever outcome, wherever it stood; told once it has been taken out."""

    now: float
    request_id: str
    tenant: str


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What one step did for one tenant, all its requests and their sequences together."""

    tenant: str
    num_prompt_tokens: int
    """Prompt tokens computed for the first time for their request."""
    num_output_tokens: int
    """Tokens generated and accepted."""
    num_recomputed_tokens: int
    """Tokens computed once more, because their KV had been given up."""


@dataclass(frozen=True, slots=True)
class StepServed:
    """A step has succeeded: told once a step, at the end of `update`, after that step's RequestEnded.

    A step that failed served no request, and is not told.
    """

    now: float
    shares: tuple[TenantShare, ...]
    """One for each tenant that the step computed or generated a token for, by name."""


PolicyEvent: TypeAlias = RequestQueued | RequestStarted | RequestEnded | StepServed
