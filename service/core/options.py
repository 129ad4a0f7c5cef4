"""Options that the core owns; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pageturner.service.core.drafting.draft_counts import LEAST_ROW_COST, MAX_DRAFT_TOKENS
from pageturner.service.errors import ConfigError

MAX_SCORED_ROW_COST = 16.0
"""Beyond any model's: that many times its layers the head would be."""


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """Sizes of the two pools, in blocks; how bytes become blocks is the engine's business."""

    num_blocks: int
    block_size: int = 16
    num_host_blocks: int = 0
    enable_prefix_caching: bool = True
    reuse_partial_blocks: bool = False
    """Whether the last block of an ended answer is cached though it is not full. False, as in flight records
    and machine files that were written before there was the choice."""
    num_host_cache_blocks: int = 0
    """Of the host blocks, those that the host tier of the prefix cache adds to the swap space; 0 for no tier:
    a block that the device evicts is lost, as in records that were written before there was one."""
    num_disk_cache_blocks: int = 0
    """Blocks that the disk tier behind it may hold; 0 for none."""
    window: int | None = None
    """Keys that a position sees at most, its own included, where every layer of the model bounds them: blocks
    behind them are given back, where no tier would bring them back. None where some layer sees everything."""
    saves_evictions: bool = True
    """Whether what leaves the device goes to the tier behind the host. Not where that is another server: it
    is given what requests hand over, and gives what was handed over to this one."""


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Bounds of the scheduler."""

    max_model_len: int = 2048
    """Tokens of one sequence, prompt and output together."""
    max_num_seqs: int = 64
    """Sequences that run at once."""
    max_num_batched_tokens: int = 512
    """Tokens that one step computes."""
    max_scored_rows: int = 256
    """Rows of one step whose logits score known tokens (prompt_logprobs, Score) or verify guesses: what
    bounds the memory that these logits take, whatever the length of a prompt."""
    scored_row_cost: float | None = None
    """Tokens of max_num_batched_tokens that a row counts for whose logits score known tokens: the head's
    product comes on top, so that a step of such rows takes no longer than another. Unset: measured at the
    start; 1 in flight records that were written before there was the choice."""
    watermark: float = 0.03
    """Share of the pool that admissions leave available (rounded up in blocks)."""
    max_waiting: int = 1024
    """Requests that may wait; more are refused."""
    max_queued_tokens: int = 1 << 20
    """Prompt tokens that may wait."""
    deadline_shedding: bool = True
    """Whether deadlines decide who is served while requests queue: one that comes too late is refused or
    ended before it takes blocks, and no more run side by side than end in time."""
    max_n: int = 16
    """Parallel samples of one request."""
    max_bypasses: int = 64
    """How many admissions may overtake one waiting request before admissions hold for it."""
    max_preemptions: int = 16
    """After this many a request is no victim except for the guarded request."""
    share_between_tenants: bool = False
    """Whether tenants that have requests get equal shares: one with less than its share of slots and blocks
    has requests of one with more yield to its own, and a step does not take much longer for what others
    add to it. False, as in flight records that were written before there was the choice."""
    max_skips: int = 8
    """How many waiting requests one step may look past."""
    starvation_seconds: float = 30.0
    """A request that waited longer is the next guarded request. Until it has waited so long, or been
    preempted max_preemptions times, it gives way to a more urgent head of the queue."""
    resort_interval_seconds: float = 0.5
    """How often a queue key that changes with time is computed anew."""
    max_step_failures: int = 16
    """A request named in more failed steps than this fails."""
    max_policy_faults: int = 100
    """After so many bad answers a policy is quarantined: the axis's default decides."""
    max_policy_fault_share: float = 0.25
    """Likewise once so large a share of a policy's last 32 answers were bad, 8 of them at 0.25."""
    policy_budget_ms: float = 50.0
    """Likewise once it takes longer a step, in milliseconds on average over 64 steps; 0 for no limit."""

    def __post_init__(self) -> None:
        if self.scored_row_cost is not None and not 1 <= self.scored_row_cost <= MAX_SCORED_ROW_COST:
            reason = f"{self.scored_row_cost} is not in [1, {MAX_SCORED_ROW_COST}]"
            raise ConfigError("scheduler.scored_row_cost", reason)


@dataclass(frozen=True, slots=True)
class SpeculationOptions:
    """Guesses at what an answer says next, verified by the step that computes its last token. The tokens are
    those of an answer without them, only sooner where guesses come true."""

    method: Literal["none", "ngram"] = "none"
    """Where drafts come from: none makes none, ngram looks up what followed the last tokens where they stood
    before, in prompt or answer. Worth it where answers repeat their prompts: edits, quotes, code. A step
    verifies no more of them than its measured cost makes worth while. Not with engine.steps_ahead = 1."""
    num_tokens: int = 8
    """Drafts of one sequence that a step verifies at most."""
    max_ngram: int = 4
    """Equal tokens beyond which a match is no better."""
    min_ngram: int = 2
    """Equal tokens that are a match at least."""
    row_cost: float | None = None
    """What one more row adds to a step, as a share of a step of one row. Unset: measured at the start."""

    def __post_init__(self) -> None:
        bounds = (("num_tokens", MAX_DRAFT_TOKENS), ("max_ngram", 64), ("min_ngram", self.max_ngram))
        for name, most in bounds:
            value = getattr(self, name)
            if not 1 <= value <= most:
                raise ConfigError(f"speculation.{name}", f"{value} is not in [1, {most}]")
        if self.row_cost is not None and not LEAST_ROW_COST <= self.row_cost <= 1:
            reason = f"{self.row_cost} is not in [{LEAST_ROW_COST}, 1]"
            raise ConfigError("speculation.row_cost", reason)


NO_SPECULATION = SpeculationOptions()
