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


@dataclass(frozen=True, slots=True)
class RequestStarted:
    """The request has left the queue and runs; told as the step that starts it is committed.

    num_cached_tokens: known tokens that it need not compute, because the prefix cache held them.
    is_first: it never ran before.
    """

    now: float
    request_id: str
    tenant: str
    num_prompt_tokens: int
    num_cached_tokens: int
    is_first: bool


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """The request is gone, with whatever outcome, wherever it stood; told once it has been taken out."""

    now: float
    request_id: str
    tenant: str


@dataclass(frozen=True, slots=True)
class TenantShare:
    """What one step did for one tenant, all its requests and their sequences together.

    num_prompt_tokens: prompt tokens computed that were never computed before for their request.
    num_output_tokens: tokens generated and accepted. num_recomputed_tokens: tokens computed once more,
    because their KV had been given up.
    """

    tenant: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_recomputed_tokens: int


@dataclass(frozen=True, slots=True)
class StepServed:
    """A step has succeeded: told once a step, at the end of `update`, after that step's RequestEnded.

    shares: one for each tenant that the step computed or generated a token for, in the order of their
    names. A step that failed served no request, and is not told.
    """

    now: float
    shares: tuple[TenantShare, ...]


PolicyEvent: TypeAlias = RequestQueued | RequestStarted | RequestEnded | StepServed
