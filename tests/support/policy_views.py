"""Hypothesis strategies that draw any view or event the core could show to a policy, and plain makers."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from pageturner.policies.events import (
    PolicyEvent,
    RequestEnded,
    RequestQueued,
    RequestStarted,
    StepServed,
    TenantShare,
)
from pageturner.policies.views import (
    AdmissionView,
    BatchView,
    BlockView,
    LoadView,
    PoolView,
    Rates,
    RequestPhase,
    RequestView,
    VictimView,
)

POOL = PoolView(num_blocks=100, num_free=50, num_evictable=0, block_size=16)
LOAD = LoadView(
    now=100.0,
    num_running=4,
    num_running_sequences=4,
    max_num_seqs=64,
    num_waiting=2,
    device=POOL,
    host=POOL,
    num_blocks_held=50,
    num_blocks_at_peak=80,
)
REQUEST = RequestView(
    request_id="r",
    phase=RequestPhase.RUNNING,
    priority=0,
    tenant="",
    arrival_time=0.0,
    deadline=None,
    num_prompt_tokens=32,
    num_tokens=40,
    num_output_tokens=8,
    num_uncomputed_tokens=1,
    num_cached_tokens=0,
    max_output_tokens=64,
    num_sequences=1,
    num_preemptions=0,
    num_bypasses=0,
)
ADMISSION = AdmissionView(
    request=REQUEST,
    num_slots=1,
    num_blocks_first_chunk=2,
    num_blocks_known=4,
    num_blocks_peak=8,
    watermark_blocks=3,
)
VICTIM = VictimView(
    request=REQUEST,
    num_blocks=3,
    num_exclusive_blocks=3,
    num_recompute_tokens=39,
    num_remaining_tokens=56,
    num_tail_blocks=2,
    is_paused=False,
)
BLOCK = BlockView(block_id=0, depth=0, num_hits=0, released_at=100.0, tenant="", priority=0)
"""One unremarkable view of each kind; tests say what matters to them by `replace`."""


def request(request_id: str = "r", **changes: object) -> RequestView:
    return replace(REQUEST, request_id=request_id, **changes)  # type: ignore[arg-type]  # fields by name


def victim(request_id: str, *, priority: int = 0, arrival_time: float = 0.0, **changes: object) -> VictimView:
    """A victim whose num_computed, if given, sets the request's; other changes are VictimView's own."""
    num_computed = changes.pop("num_computed", None)
    view = request(request_id, priority=priority, arrival_time=arrival_time)
    if num_computed is not None:
        assert isinstance(num_computed, int)
        view = replace(view, num_uncomputed_tokens=view.num_tokens - num_computed)
    return replace(VICTIM, request=view, **changes)  # type: ignore[arg-type]  # fields by name


request_ids = st.sampled_from(list("abcdefgh"))
counts = st.integers(min_value=0, max_value=1 << 20)
small_counts = st.integers(min_value=0, max_value=64)
times = st.sampled_from([0.0, 1.0]) | st.floats(min_value=0, max_value=1e9)
priorities = st.integers(min_value=-(1 << 31), max_value=(1 << 31) - 1) | st.integers(-3, 3)


@st.composite
def pool_views(draw: st.DrawFn, block_size: int = 16) -> PoolView:
    num_blocks = draw(counts)
    num_free = draw(st.integers(0, num_blocks))
    return PoolView(num_blocks, num_free, draw(st.integers(0, num_blocks - num_free)), block_size)


@st.composite
def load_views(draw: st.DrawFn) -> LoadView:
    block_size = draw(st.sampled_from([1, 4, 16, 128]))
    device = draw(pool_views(block_size))
    num_running = draw(small_counts)
    num_running_sequences = draw(st.integers(num_running, num_running + 64))
    return LoadView(
        now=draw(times),
        num_running=num_running,
        num_running_sequences=num_running_sequences,
        max_num_seqs=draw(st.integers(max(1, num_running_sequences), 256)),
        num_waiting=draw(counts),
        device=device,
        host=draw(pool_views(block_size)),
        num_blocks_held=device.num_blocks - device.num_available,
        num_blocks_at_peak=draw(counts),
    )


@st.composite
def request_views(draw: st.DrawFn, ids: st.SearchStrategy[str] = request_ids) -> RequestView:
    num_prompt = draw(st.integers(1, 1 << 17))
    num_sequences = draw(st.integers(1, 16))
    max_output = draw(st.integers(1, 1 << 17))
    most_output = num_sequences * max_output
    num_output = draw(st.just(most_output) | st.integers(0, most_output))
    num_tokens = num_prompt + num_output
    num_uncomputed = draw(st.just(0) | st.integers(0, num_tokens))
    arrival = draw(times)
    return RequestView(
        request_id=draw(ids),
        phase=draw(st.sampled_from(RequestPhase)),
        priority=draw(priorities),
        tenant=draw(st.sampled_from(["", "a", "b"])),
        arrival_time=arrival,
        deadline=draw(st.none() | times.map(lambda wait: arrival + wait)),
        num_prompt_tokens=num_prompt,
        num_tokens=num_tokens,
        num_output_tokens=num_output,
        num_uncomputed_tokens=num_uncomputed,
        num_cached_tokens=draw(st.integers(0, num_uncomputed)),
        max_output_tokens=max_output,
        num_sequences=num_sequences,
        num_preemptions=draw(small_counts),
        num_bypasses=draw(small_counts),
    )


@st.composite
def admission_views(draw: st.DrawFn) -> AdmissionView:
    first, known, peak = sorted(draw(st.tuples(counts, counts, counts)))
    view = draw(request_views())
    return AdmissionView(view, view.num_sequences, first, known, peak, draw(small_counts))


@st.composite
def victim_views(draw: st.DrawFn, ids: st.SearchStrategy[str] = request_ids) -> VictimView:
    view = draw(request_views(ids))
    num_blocks = draw(counts)
    num_exclusive = draw(st.integers(0, num_blocks))
    return VictimView(
        request=view,
        num_blocks=num_blocks,
        num_exclusive_blocks=num_exclusive,
        num_recompute_tokens=draw(st.integers(0, view.num_tokens)),
        num_remaining_tokens=view.num_remaining_tokens,
        num_tail_blocks=draw(st.integers(0, num_exclusive)),
        is_paused=draw(st.booleans()),
    )


def victim_lists() -> st.SearchStrategy[list[VictimView]]:
    """Up to eight candidates, no id twice."""
    return st.lists(victim_views(), max_size=8, unique_by=lambda view: view.request.request_id)


positive_rates = st.floats(min_value=1e3, max_value=1e13)
costs = st.floats(min_value=0, max_value=1e3)
rates = st.builds(
    Rates,
    swap_out_bytes_per_second=positive_rates,
    swap_in_bytes_per_second=positive_rates,
    block_bytes=st.integers(1, 1 << 32),
    prefill_seconds_fixed=costs,
    prefill_seconds_per_token=costs,
    prefill_seconds_per_token_context=costs,
)
block_views = st.builds(
    BlockView,
    block_id=counts,
    depth=st.integers(0, 1 << 17),
    num_hits=counts,
    released_at=times,
    tenant=st.sampled_from(["", "a"]),
    priority=priorities,
    num_chain_blocks=st.integers(0, 1 << 17),
)
batch_views = st.builds(
    BatchView,
    token_budget=st.integers(0, 1 << 15),
    num_decode_tokens=st.integers(0, 4096),
    prefill_tokens=st.lists(st.integers(1, 1 << 17), max_size=12).map(tuple),
    num_waiting=counts,
)
tenants = st.sampled_from(["", "a", "b"])
shares = st.builds(
    TenantShare,
    tenant=tenants,
    num_prompt_tokens=counts,
    num_output_tokens=counts,
    num_recomputed_tokens=counts,
)
events: st.SearchStrategy[PolicyEvent] = st.one_of(
    st.builds(RequestQueued, times, request_ids, tenants, st.integers(1, 1 << 17), st.booleans()),
    st.builds(RequestStarted, times, request_ids, tenants, st.integers(1, 1 << 17), counts, st.booleans()),
    st.builds(RequestEnded, times, request_ids, tenants),
    st.builds(
        StepServed, times, st.lists(shares, max_size=3, unique_by=lambda share: share.tenant).map(tuple)
    ),
)
event_lists = st.lists(events, max_size=12)
"""In any order, likely or not: a policy told of what it has never heard of must not mind."""
