"""What an inspection must say of the scheduler that it was made of."""

from __future__ import annotations

from collections import Counter

from pageturner.service.core.inspection import BlockUse, RequestState, SchedulerInspection
from pageturner.service.core.scheduler import Scheduler


def owners_of(owners: bytes) -> list[int]:
    """The two bytes of each block as a number."""
    return [low + 256 * high for low, high in zip(owners[::2], owners[1::2], strict=True)]


def check_inspection(scheduler: Scheduler, now: float) -> SchedulerInspection:
    """Every block's use is its pool's, every owner names it, every request is told once. The inspection."""
    seen, state = scheduler.inspect(now), scheduler.state
    device, manager = state.manager.device, state.manager
    blocks = seen.block_map()
    counts = Counter(map(BlockUse, blocks.uses))
    assert counts[BlockUse.FREE] == device.num_free, "inspection: free blocks"
    assert counts[BlockUse.EVICTABLE] == device.num_evictable, "inspection: evictable blocks"
    assert counts[BlockUse.PENDING] == device.num_pending, "inspection: pending blocks"
    assert counts[BlockUse.LIVE] + counts[BlockUse.SHARED] == device.num_live, "inspection: live blocks"
    for block_id, (use, owner) in enumerate(zip(blocks.uses, owners_of(blocks.owners), strict=True)):
        assert (use == BlockUse.SHARED) == (device.ref_count(block_id) > 1), f"inspection: block {block_id}"
        if not owner:
            assert not device.ref_count(block_id), f"inspection: block {block_id} has no owner"
            continue
        request = state.requests[seen.requests[owner - 1].request_id]
        assert block_id in manager.references(request), f"inspection: the owner of block {block_id}"
    assert seen.num_requests == len(state.requests), "inspection: how many"
    assert {r.request_id for r in seen.requests} == state.requests.keys(), "inspection: requests"
    running = [r for r in seen.requests if r.state is RequestState.RUNNING]
    assert len(running) == len(state.running)
    assert not any(r.queue_position for r in running)
    assert [r.queue_position for r in seen.requests[len(running) :]] == list(range(1, len(state.waiting) + 1))
    for info in seen.requests:
        request = state.requests[info.request_id]
        assert info.num_blocks == len(manager.references(request)), "inspection: blocks of a request"
        assert (info.num_host_blocks > 0) == (info.state is RequestState.SWAPPED), "inspection: host blocks"
        assert info.queue_seconds <= info.age_seconds, "inspection: time in the queue"
    return seen
