"""A request from acceptance to its terminal event, and its sequences.

`NewRequest` is what enters, frozen. `Request` and `Sequence` are the scheduler's own mutable record
of it; nobody else changes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from pageturner.service.core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the engine accepts it: tokenized, its seed drawn, its deadline on our clock.

    priority: larger is more urgent. tenant: whose quota it is charged to. cache_salt, adapter: part of
    the prefix cache's key. bypass_prefix_cache: neither reads the cache nor waits for a producer.
    eos_token_ids: tokens that end a sequence unless params.ignore_eos.
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
    adapter: str = ""
    bypass_prefix_cache: bool = False
    deadline: float | None = None


class RequestStatus(Enum):
    """WAITING holds no block, save one whose tail was reclaimed; SWAPPED holds host blocks only."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"
    FINISHED = "finished"
