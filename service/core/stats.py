"""The scheduler's figures of one moment."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageturner.service.core.outlook import Outlook


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """Counters since start (num_..._total) and gauges of this moment; free to read."""

    num_waiting: int = 0
    num_running: int = 0
    num_swapped: int = 0
    num_running_sequences: int = 0
    num_queued_prompt_tokens: int = 0
    num_blocks: int = 0
    num_blocks_free: int = 0
    num_blocks_evictable: int = 0
    num_blocks_used: int = 0
    num_host_blocks: int = 0
    num_host_blocks_used: int = 0
    num_wasted_slots: int = 0
    num_steps_total: int = 0
    num_scheduled_tokens_total: int = 0
    num_prefix_query_tokens_total: int = 0
    num_prefix_hit_tokens_total: int = 0
    num_resume_hit_tokens_total: int = 0
    num_swap_preemptions_total: int = 0
    num_recompute_preemptions_total: int = 0
    num_tail_preemptions_total: int = 0
    num_bypasses_total: int = 0
    num_policy_faults_total: int = 0
    num_step_failures_total: int = 0
    num_evictions_total: int = 0
    num_swapped_out_blocks_total: int = 0
    num_swapped_in_blocks_total: int = 0
    num_copied_blocks_total: int = 0
    num_drafted_tokens_total: int = 0
    num_accepted_drafts_total: int = 0
    num_host_blocks_cached: int = 0
    num_disk_blocks_cached: int = 0
    num_requests_fetching: int = 0
    num_host_hit_tokens_total: int = 0
    num_disk_hit_tokens_total: int = 0
    num_spilled_blocks_total: int = 0
    num_disk_writes_dropped_total: int = 0
    num_disk_reads_failed_total: int = 0
    num_beam_selections_total: int = 0
    num_beam_table_entries_total: int = 0
    num_beam_blocks_total: int = 0
    num_window_blocks_total: int = 0
    queue_seconds: float = 0.0
    drain_tokens_per_second: float = 0.0
    num_cached_grammars: int = 0
    num_grammar_compilations_total: int = 0
    mask_wait_seconds_total: float = 0.0
    outlook: Outlook = field(default=Outlook(), compare=False)
    """What they are told from; stays in this process."""
