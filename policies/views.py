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
    """One pool of blocks. free + evictable is what an allocation may take now."""

    num_blocks: int
    num_free: int
    num_evictable: int
    block_size: int

    @property
    def num_available(self) -> int:
        return self.num_free + self.num_evictable


@dataclass(frozen=True, slots=True)
class Rates:
    """What this machine was measured to do, for policies that weigh one cost against another.

    Measured once at start-up by the engine and frozen, so that a decision can be replayed.

    swap_out_bytes_per_second, swap_in_bytes_per_second: copies between device and host pool.
    block_bytes: size of one KV block over all layers.
    prefill_seconds_fixed: cost of a step that computes no token.
    prefill_seconds_per_token: cost of one more token in a step.
    prefill_seconds_per_token_context: cost of one token attending to one token of context.
    """

    swap_out_bytes_per_second: float = 8e9
    swap_in_bytes_per_second: float = 8e9
    block_bytes: int = 1 << 19
    prefill_seconds_fixed: float = 1e-2
    prefill_seconds_per_token: float = 5e-4
    prefill_seconds_per_token_context: float = 1e-8

    def prefill_seconds(self, num_tokens: int, num_context: int = 0) -> float:
        """Seconds to compute `num_tokens` on top of `num_context` tokens whose KV is held."""
        attended = num_tokens * num_context + num_tokens * (num_tokens + 1) // 2
        return num_tokens * self.prefill_seconds_per_token + attended * self.prefill_seconds_per_token_context


@dataclass(frozen=True, slots=True)
class LoadView:
    """The state of the whole engine that a decision may depend on.

    num_blocks_at_peak: blocks that all running requests would hold together if each ran to its
    max_tokens; an upper bound on what has been promised.
    num_blocks_held: device blocks referenced by requests now.
    num_blocks_promised: blocks that running requests in the middle of a prefill have yet to take for tokens
    they know already; counted where an admission is asked about, else 0.
    """

    now: float
    num_running: int
    num_running_sequences: int
    max_num_seqs: int
    num_waiting: int
    device: PoolView
    host: PoolView
    num_blocks_held: int
    num_blocks_at_peak: int
    num_blocks_promised: int = 0


@dataclass(frozen=True, slots=True)
class RequestView:
    """One request, its sequences summed. Larger priority is more urgent.

    num_tokens: known tokens, the shared prompt counted once.
    num_uncomputed_tokens: known tokens whose KV is not on the device.
    num_cached_tokens: how many of those the prefix cache held when last looked at (0 if not looked at).
    max_output_tokens: bound on outputs of one sequence (max_tokens clamped to what fits).
    num_preemptions: times this request yielded, by any means.
    """

    request_id: str
    phase: RequestPhase
    priority: int
    tenant: str
    arrival_time: float
    deadline: float | None
    num_prompt_tokens: int
    num_tokens: int
    num_output_tokens: int
    num_uncomputed_tokens: int
    num_cached_tokens: int
    max_output_tokens: int
    num_sequences: int
    num_preemptions: int
    num_bypasses: int

    @property
    def num_computed_tokens(self) -> int:
        return self.num_tokens - self.num_uncomputed_tokens

    @property
    def num_remaining_tokens(self) -> int:
        """Upper bound on the tokens that its sequences have yet to generate."""
        return max(0, self.num_sequences * self.max_output_tokens - self.num_output_tokens)


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """A waiting request whose turn it is, and what it would take.

    num_slots: sequences it would run. num_blocks_first_chunk: new blocks for what the token budget
    of this step lets it compute. num_blocks_known: new blocks for every token known now, prefix hits
    taken off. num_blocks_peak: new blocks until every sequence reaches max_output_tokens.
    watermark_blocks: blocks to be left available, already 0 when nothing runs.
    """

    request: RequestView
    num_slots: int
    num_blocks_first_chunk: int
    num_blocks_known: int
    num_blocks_peak: int
    watermark_blocks: int


@dataclass(frozen=True, slots=True)
class VictimView:
    """A request that may be asked to yield.

    num_blocks: distinct device blocks it holds. num_exclusive_blocks: those that no other request
    references, hence what its yielding frees. num_recompute_tokens: tokens that would have to be
    computed again. num_remaining_tokens: upper bound on tokens it has yet to generate.
    num_tail_blocks: exclusive blocks at its end that a tail reclaim could take.
    """

    request: RequestView
    num_blocks: int
    num_exclusive_blocks: int
    num_recompute_tokens: int
    num_remaining_tokens: int
    num_tail_blocks: int
    is_paused: bool


@dataclass(frozen=True, slots=True)
class BlockView:
    """A cached block that no request references any more, as it enters the eviction order.

    depth: its index in its chain, 0 at the head of a prompt. num_hits: how often a prefix lookup
    took it since it was computed. released_at: now. tenant, priority: of the request that released it.
    num_chain_blocks: cached blocks in the chain that was released with it, itself included (0: unknown).
    """

    block_id: int
    depth: int
    num_hits: int
    released_at: float
    tenant: str
    priority: int
    num_chain_blocks: int = 0


@dataclass(frozen=True, slots=True)
class BatchView:
    """The step about to be filled.

    token_budget: max_num_batched_tokens less what the guarded request took. num_decode_tokens: running
    sequences that lack exactly one token. prefill_tokens: what each other running request lacks,
    oldest first. num_waiting: requests behind them.
    """

    token_budget: int
    num_decode_tokens: int
    prefill_tokens: tuple[int, ...]
    num_waiting: int
