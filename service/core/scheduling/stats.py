"""The scheduler's counters and gauges as one frozen value."""

from __future__ import annotations

from pageturner.service.core.outputs import SchedulerStats
from pageturner.service.core.request import RequestStatus
from pageturner.service.core.scheduling.state import SchedulerState


def scheduler_stats(state: SchedulerState) -> SchedulerStats:
    """Costs time in proportion to the requests that live and the blocks in use."""
    manager, counters = state.manager, state.counters
    device, host = manager.device, manager.host
    running = list(state.running.values())
    return SchedulerStats(
        num_waiting=len(state.waiting),
        num_running=len(running),
        num_swapped=sum(request.status is RequestStatus.SWAPPED for request in state.waiting),
        num_running_sequences=sum(request.num_slots for request in running),
        num_queued_prompt_tokens=state.waiting.num_prompt_tokens,
        num_blocks=device.num_blocks,
        num_blocks_free=device.num_free,
        num_blocks_evictable=device.num_evictable,
        num_blocks_used=device.num_live,
        num_host_blocks=host.num_blocks,
        num_host_blocks_used=host.num_live,
        num_wasted_slots=manager.num_wasted_slots(s for r in running for s in r.unfinished),
        num_steps_total=counters["steps"],
        num_scheduled_tokens_total=counters["scheduled_tokens"],
        num_prefix_query_tokens_total=counters["prefix_query_tokens"],
        num_prefix_hit_tokens_total=counters["prefix_hit_tokens"],
        num_resume_hit_tokens_total=counters["resume_hit_tokens"],
        num_swap_preemptions_total=counters["swap_preemptions"],
        num_recompute_preemptions_total=counters["recompute_preemptions"],
        num_tail_preemptions_total=counters["tail_preemptions"],
        num_bypasses_total=counters["bypasses"],
        num_policy_faults_total=sum(state.policy_host.faults.values()),
        num_step_failures_total=counters["step_failures"],
        num_evictions_total=device.num_evictions,
        num_swapped_out_blocks_total=counters["swapped_out_blocks"],
        num_swapped_in_blocks_total=counters["swapped_in_blocks"],
        num_copied_blocks_total=counters["copied_blocks"],
    )
