"""What a policy sees: frozen values, built by the core, never a live object.

Times are seconds on the injected clock. Counts of blocks are device blocks unless a name says host.
A view is a snapshot of the moment it is asked for; a policy may keep one, it will not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class RequestPhase(Enum):
    """Where a request stands. The values are those of `service.core.request.RequestStatus`."""

    WAITING = "waiting"
    RUNNING = "running"
    SWAPPED = "swapped"


@dataclass(frozen=True, slots=True)
class PoolView:
    """One pool of blocks."""

    num_blocks: int
    num_free: int
    """Blocks that hold nothing of use."""
    num_evictable: int
    """Cached blocks without a reference: an allocation may take them as well."""
    block_size: int
    """Tokens of a block."""

    @property
    def num_available(self) -> int:
        """Blocks that an allocation may take now."""
        return self.num_free + self.num_evictable


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine was measured to do, for policies that weigh one cost against another.

    Measured once at start-up by the engine and frozen, so that a decision can be replayed.
    """

    swap_out_bytes_per_second: float = 8e9
    """Of copies from the device to the host pool."""
    swap_in_bytes_per_second: float = 8e9
    """Of copies from the host to the device pool."""
    block_bytes: int = 1 << 19
    """Size of one KV block over all layers."""
    prefill_seconds_fixed: float = 1e-2
    """Cost of a step that computes no token."""
    prefill_seconds_per_token: float = 5e-4
    """Cost of one more token in a step."""
    prefill_seconds_per_token_context: float = 1e-8
    """Cost of one token attending to one token of context."""
    disk_read_bytes_per_second: float = 0.0
    """Of blocks read from the disk tier of the prefix cache; 0 where there is none."""

    def prefill_seconds(self, num_tokens: int, num_context: int = 0) -> float:
        """Seconds to compute `num_tokens` on top of `num_context` tokens whose KV is held."""
        attended = num_tokens * num_context + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.prefill_seconds_per_token + attended * self.prefill_seconds_per_token_context


@dataclass(frozen=True, slots=True)
class LoadView:
    """The state of the whole engine that a decision may depend on."""

    now: float
    """Seconds on the scheduler's clock, as all times here."""
    num_running: int
    num_running_sequences: int
    max_num_seqs: int
    num_waiting: int
    device: PoolView
    host: PoolView
    num_blocks_held: int
    """Device blocks referenced by requests now."""
    num_blocks_at_peak: int
    """Blocks that all running requests would hold together if each ran to its max_tokens; an upper bound
    on what has been promised."""
    num_blocks_promised: int = 0
    """Blocks that running requests in the middle of a prefill have yet to take for tokens they know
    already; counted where an admission is asked about, else 0."""


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request, its sequences summed."""

    request_id: str
    phase: RequestPhase
    priority: int
    """Larger is more urgent."""
    tenant: str
    arrival_time: float
    deadline: float | None
    """Seconds on the scheduler's clock; None: no deadline."""
    num_prompt_tokens: int
    num_tokens: int
    """Known tokens, the shared prompt counted once."""
    num_output_tokens: int
    num_uncomputed_tokens: int
    """Known tokens whose KV is not on the device."""
    num_cached_tokens: int
    """How many of those the prefix cache held when last looked at; 0 if not looked at."""
    max_output_tokens: int
    """Bound on outputs of one sequence: max_tokens clamped to what fits."""
    num_sequences: int
    num_preemptions: int
    """Times this request yielded, by any means."""
    num_bypasses: int
    """Times a later request was admitted before it."""

    @property
    def num_computed_tokens(self) -> int:
        """Known tokens whose KV is on the device."""
        return self.num_tokens - self.num_uncomputed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Upper bound on the tokens that its sequences have yet to generate."""
        return max(0, self.num_sequences * self.max_output_tokens - self.num_output_tokens)


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """A waiting request whose turn it is, and what it would take."""

    request: RequestView
    num_slots: int
    """Sequences it would run."""
    num_blocks_first_chunk: int
    """New blocks for what the token budget of this step lets it compute."""
    num_blocks_known: int
    """New blocks for every token known now, prefix hits taken off."""
    num_blocks_peak: int
    """New blocks until every sequence reaches max_output_tokens."""
    watermark_blocks: int
    """Blocks to be left available, already 0 when nothing runs."""


@dataclass(frozen=True, slots=True)
class VictimView:
    """A request that may be asked to yield."""

    request: RequestView
    num_blocks: int
    """Distinct device blocks it holds."""
    num_exclusive_blocks: int
    """Those that no other request references, hence what its yielding frees."""
    num_recompute_tokens: int
    """Tokens that would have to be computed again."""
    num_remaining_tokens: int
    """Upper bound on tokens it has yet to generate."""
    num_tail_blocks: int
    """Exclusive blocks at its end that a tail reclaim could take."""
    is_paused: bool
    """Whether its reader lags: it is not scheduled meanwhile."""


@dataclass(frozen=True, slots=True)
class BlockView:
    """A cached block that no request references any more, as it enters the eviction order."""

    block_id: int
    depth: int
    """Its index in its chain, 0 at the head of a prompt."""
    num_hits: int
    """How often a prefix lookup took it since it was computed."""
    released_at: float
    """Seconds on the scheduler's clock: now."""
    tenant: str
    """Of the request that released it."""
    priority: int
    """Of the request that released it."""
    num_chain_blocks: int = 0
    """Cached blocks in the chain that was released with it, itself included; 0: unknown."""


@dataclass(frozen=True, slots=True)
class BatchView:
    """The step about to be filled."""

    token_budget: int
    """max_num_batched_tokens less what the guarded request took."""
    num_decode_tokens: int
    """Running sequences that lack exactly one token."""
    prefill_tokens: tuple[int, ...]
    """What each other running request lacks, oldest first."""
    num_waiting: int
    """Requests behind them."""
