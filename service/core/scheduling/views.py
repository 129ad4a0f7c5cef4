"""Builds the frozen views that policies see from the scheduler's own records."""

from __future__ import annotations

from dataclasses import replace

from pageturner.policies.views import AdmissionView, LoadView, RequestPhase, RequestView, VictimView
from pageturner.service.core.memory.block_manager import BlockManager, blocks_for
from pageturner.service.core.memory.window import SlidingWindow
from pageturner.service.core.request import Request, RequestStatus

_PHASES = {
    RequestStatus.WAITING: RequestPhase.WAITING,
    RequestStatus.RUNNING: RequestPhase.RUNNING,
    RequestStatus.SWAPPED: RequestPhase.SWAPPED,
}


def num_known_tokens(request: Request) -> int:
    """Prompt and outputs of the unfinished sequences, what all of them share once."""
    shared = request.num_shared_tokens
    return shared + sum(len(sequence.tokens) - shared for sequence in request.unfinished)


def num_computed_tokens(request: Request) -> int:
    """Known tokens whose KV is in device blocks, what all sequences share once."""
    if request.status is RequestStatus.SWAPPED:
        return 0
    common, unfinished = request.num_shared_tokens, request.unfinished
    shared = max((min(sequence.num_kv_tokens, common) for sequence in unfinished), default=0)
    own = sum(min(len(s.tokens), s.num_kv_tokens) - common for s in unfinished if s.num_kv_tokens > common)
    return shared + own


def request_view(request: Request) -> RequestView:
    """What every policy sees of a request."""
    known = num_known_tokens(request)
    return RequestView(
        request_id=request.request_id,
        phase=_PHASES[request.status],
        priority=request.priority,
        tenant=request.new.tenant,
        arrival_time=request.new.arrival_time,
        deadline=request.new.deadline,
        num_prompt_tokens=request.num_prompt_tokens,
        num_tokens=known,
        num_output_tokens=known - request.num_prompt_tokens,
        num_uncomputed_tokens=known - num_computed_tokens(request),
        num_cached_tokens=request.num_cached_tokens,
        max_output_tokens=request.max_tokens,
        num_sequences=request.num_slots,
        num_preemptions=request.num_preemptions,
        num_bypasses=request.num_bypasses,
    )


def num_known_blocks(request: Request, block_size: int) -> int:
    """Blocks that hold every known token, those that all sequences share once.

    Never more than at the peak: choices of one token each share even a partial block to their end, and what a
    sliding window has passed is given back.
    """
    unfinished = request.unfinished
    if len(unfinished) == 1:
        return min(blocks_for(len(unfinished[0].tokens), block_size), request.num_blocks_peak)
    shared = request.num_shared_tokens // block_size
    known = shared + sum(blocks_for(len(s.tokens), block_size) - shared for s in unfinished)
    return min(known, request.num_blocks_peak)


def num_peak_blocks(
    num_prompt_tokens: int,
    max_tokens: int,
    n: int,
    block_size: int,
    window: SlidingWindow | None = None,
    num_step_tokens: int = 1,
) -> int:
    """Blocks held when all n sequences have their last token; that token's own KV is never needed.

    So with one token each, no choice writes behind the prompt, and all share even a partial block. Under a
    sliding window none holds more than it leaves, where a step computes num_step_tokens of it at most.
    """
    total = blocks_for(num_prompt_tokens + max_tokens - 1, block_size)
    shared = num_prompt_tokens // block_size
    peak = total if n == 1 or max_tokens == 1 else shared + n * (total - shared)
    return peak if window is None else min(peak, n * window.most_blocks(num_step_tokens))


def victim_view(request: Request, manager: BlockManager) -> VictimView:
    """What a victim or reclaim policy sees of a request that may yield; blocks are those of the device."""
    references = manager.references(request)
    exclusive = sum(manager.device.ref_count(block) == held for block, held in references.items())
    return VictimView(
        request=request_view(request),
        num_blocks=len(references),
        num_exclusive_blocks=exclusive,
        num_recompute_tokens=num_computed_tokens(request),
        num_remaining_tokens=sum(request.max_tokens - s.num_output_tokens for s in request.unfinished),
        num_tail_blocks=sum(manager.num_tail_blocks(sequence) for sequence in request.unfinished),
        is_paused=request.is_paused,
    )


def load_view(
    now: float,
    running: list[Request],
    num_waiting: int,
    max_num_seqs: int,
    manager: BlockManager,
    num_available: int,
) -> LoadView:
    """The engine's load, with `num_available` device blocks left to the asking request."""
    device = manager.device.view()
    num_free = max(0, min(device.num_free, num_available))
    device = replace(device, num_free=num_free, num_evictable=max(0, num_available - num_free))
    return LoadView(
        now=now,
        num_running=len(running),
        num_running_sequences=sum(request.num_slots for request in running),
        max_num_seqs=max_num_seqs,
        num_waiting=num_waiting,
        device=device,
        host=manager.host.view(),
        num_blocks_held=device.num_blocks - device.num_available,
        num_blocks_at_peak=sum(request.num_blocks_peak for request in running),
    )


def admission_view(
    request: Request,
    *,
    num_blocks_first_chunk: int,
    num_blocks_known: int,
    num_blocks_held: int,
    watermark_blocks: int,
) -> AdmissionView:
    """What an admission policy sees of a waiting request.

    num_blocks_first_chunk, num_blocks_known: that it would take now, for its first chunk and for all of its
    known tokens. num_blocks_held: that it holds already. watermark_blocks: to be left available.
    """
    return AdmissionView(
        request=request_view(request),
        num_slots=request.num_slots,
        num_blocks_first_chunk=num_blocks_first_chunk,
        num_blocks_known=num_blocks_known,
        num_blocks_peak=max(num_blocks_known, request.num_blocks_peak - num_blocks_held),
        watermark_blocks=watermark_blocks,
    )
