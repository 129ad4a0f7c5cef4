"""Views and events of every kind that the core could show to a policy, drawn from a seeded source.

Zeros, ones and largest values come often: policies fail at their edges.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from pageturner.policies.events import (
    PolicyEvent,
    RequestEnded,
    RequestQueued,
    RequestStarted,
    StepServed,
    TenantShare,
)
from pageturner.policies.fleet import Digest, ListedFleet, ReplicaView, RoutedRequest
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

_IDS, _TENANTS = "abcdefgh", ("", "a", "b")
_MANY, _TOKENS = 1 << 20, 1 << 17
_CHAIN: tuple[Digest, ...] = tuple(bytes([number]) for number in range(32))


def count(rng: Random, low: int = 0, high: int = _MANY) -> int:
    """A whole number of [low, high], often at an edge."""
    near = min(high, low + 8)
    return rng.choice((low, min(high, low + 1), rng.randint(low, near), rng.randint(low, high), high))


def moment(rng: Random) -> float:
    """Seconds on some clock."""
    return rng.choice((0.0, 1.0, rng.uniform(0, 100), rng.uniform(0, 1e9)))


def pool_view(rng: Random, block_size: int) -> PoolView:
    """A pool of blocks, sometimes a full one."""
    num_blocks = count(rng)
    num_free = count(rng, 0, num_blocks)
    return PoolView(num_blocks, num_free, count(rng, 0, num_blocks - num_free), block_size)


def load_view(rng: Random) -> LoadView:
    """An engine's load, its figures consistent with each other."""
    block_size = rng.choice((1, 4, 16, 128))
    device, num_running = pool_view(rng, block_size), count(rng, 0, 64)
    num_sequences = count(rng, num_running, num_running + 64)
    return LoadView(
        now=moment(rng),
        num_running=num_running,
        num_running_sequences=num_sequences,
        max_num_seqs=count(rng, max(1, num_sequences), 256),
        num_waiting=count(rng),
        device=device,
        host=pool_view(rng, block_size),
        num_blocks_held=device.num_blocks - device.num_available,
        num_blocks_at_peak=count(rng),
    )


def request_view(rng: Random, request_id: str = "") -> RequestView:
    """A request in any phase."""
    num_prompt, num_sequences, max_output = (
        count(rng, 1, _TOKENS),
        count(rng, 1, 16),
        count(rng, 1, _TOKENS),
    )
    num_output = count(rng, 0, num_sequences * max_output)
    num_tokens = num_prompt + num_output
    num_uncomputed, arrival = count(rng, 0, num_tokens), moment(rng)
    return RequestView(
        request_id=request_id or rng.choice(_IDS),
        phase=rng.choice(tuple(RequestPhase)),
        priority=rng.choice((0, rng.randint(-3, 3), -(1 << 31), (1 << 31) - 1)),
        tenant=rng.choice(_TENANTS),
        arrival_time=arrival,
        deadline=rng.choice((None, arrival + moment(rng))),
        num_prompt_tokens=num_prompt,
        num_tokens=num_tokens,
        num_output_tokens=num_output,
        num_uncomputed_tokens=num_uncomputed,
        num_cached_tokens=count(rng, 0, num_uncomputed),
        max_output_tokens=max_output,
        num_sequences=num_sequences,
        num_preemptions=count(rng, 0, 64),
        num_bypasses=count(rng, 0, 64),
    )


def admission_view(rng: Random) -> AdmissionView:
    """A waiting request with what it would take."""
    first, known, peak = sorted((count(rng), count(rng), count(rng)))
    view = request_view(rng)
    return AdmissionView(view, view.num_sequences, first, known, peak, count(rng, 0, 64))


def victim_view(rng: Random, request_id: str = "") -> VictimView:
    """A running request that may be asked to yield."""
    view, num_blocks = request_view(rng, request_id), count(rng)
    num_exclusive = count(rng, 0, num_blocks)
    return VictimView(
        request=view,
        num_blocks=num_blocks,
        num_exclusive_blocks=num_exclusive,
        num_recompute_tokens=count(rng, 0, view.num_tokens),
        num_remaining_tokens=view.num_remaining_tokens,
        num_tail_blocks=count(rng, 0, num_exclusive),
        is_paused=rng.random() < 0.5,
    )


def victim_views(rng: Random) -> tuple[VictimView, ...]:
    """Up to eight candidates, no id twice."""
    return tuple(victim_view(rng, name) for name in rng.sample(_IDS, rng.randint(0, len(_IDS))))


def rates(rng: Random) -> Rates:
    """Rates of a slow or fast machine."""

    def cost() -> float:
        return rng.choice((0.0, rng.uniform(0, 1e-3), rng.uniform(0, 1e3)))

    return Rates(
        swap_out_bytes_per_second=10 ** rng.uniform(3, 13),
        swap_in_bytes_per_second=10 ** rng.uniform(3, 13),
        block_bytes=count(rng, 1, 1 << 32),
        prefill_seconds_fixed=cost(),
        prefill_seconds_per_token=cost(),
        prefill_seconds_per_token_context=cost(),
    )


def block_view(rng: Random) -> BlockView:
    """A cached block without a reference."""
    return BlockView(
        block_id=count(rng),
        depth=count(rng, 0, _TOKENS),
        num_hits=count(rng),
        released_at=moment(rng),
        tenant=rng.choice(_TENANTS),
        priority=rng.choice((0, rng.randint(-3, 3), -(1 << 31), (1 << 31) - 1)),
        num_chain_blocks=count(rng, 0, _TOKENS),
    )


def batch_view(rng: Random) -> BatchView:
    """A step about to be filled."""
    return BatchView(
        token_budget=count(rng, 0, 1 << 15),
        num_decode_tokens=count(rng, 0, 4096),
        prefill_tokens=tuple(count(rng, 1, _TOKENS) for _ in range(count(rng, 0, 12))),
        num_waiting=count(rng),
    )


def routed_request(rng: Random) -> RoutedRequest:
    """A request with a chain of digests, sometimes one that no replica could hold."""
    tokens_per_digest = rng.choice((1, 16, 512))
    num_prompt = count(rng, 1, _TOKENS)
    chains = ((), _CHAIN[: count(rng, 0, len(_CHAIN))], (b"other",))
    return RoutedRequest(
        number=count(rng),
        num_prompt_tokens=num_prompt,
        digests=rng.choice(chains)[: num_prompt // tokens_per_digest],
        tokens_per_digest=tokens_per_digest,
        session=rng.choice(("", "s", "a session of someone's")),
        priority=rng.choice((0, rng.randint(-3, 3), -(1 << 31), (1 << 31) - 1)),
        tenant=rng.choice(_TENANTS),
    )


def fleet_view(rng: Random) -> ListedFleet:
    """One replica to eight, idle or busy, of which some hold the beginnings of prompts."""
    names = rng.sample(_IDS, rng.randint(1, len(_IDS)))
    replicas = []
    for name in names:
        num_queued, num_requests = count(rng), count(rng, 0, 4096)
        capacity = rng.choice((1.0, 1.0, 0.25, 8.0))
        load = (num_queued + 512 * num_requests) / capacity
        replicas.append(ReplicaView(name, num_queued, num_requests, capacity, load))
    held = {name: frozenset(_CHAIN[: count(rng, 0, len(_CHAIN))]) for name in names if rng.random() < 0.7}
    return ListedFleet(tuple(replicas), held)


def events(rng: Random) -> tuple[PolicyEvent, ...]:
    """Up to twelve in any order, likely or not: a memory must not mind one that it never heard of."""
    return tuple(rng.choice(_EVENTS)(rng) for _ in range(rng.randint(0, 12)))


def _queued(rng: Random) -> RequestQueued:
    return RequestQueued(
        moment(rng), rng.choice(_IDS), rng.choice(_TENANTS), count(rng, 1, _TOKENS), rng.random() < 0.5
    )


def _started(rng: Random) -> RequestStarted:
    num_prompt = count(rng, 1, _TOKENS)
    return RequestStarted(
        moment(rng), rng.choice(_IDS), rng.choice(_TENANTS), num_prompt, count(rng), rng.random() < 0.5
    )


def _ended(rng: Random) -> RequestEnded:
    return RequestEnded(moment(rng), rng.choice(_IDS), rng.choice(_TENANTS))


def _served(rng: Random) -> StepServed:
    tenants = sorted(rng.sample(_TENANTS, rng.randint(0, len(_TENANTS))))
    return StepServed(
        moment(rng), tuple(TenantShare(name, count(rng), count(rng), count(rng)) for name in tenants)
    )


_EVENTS: tuple[Callable[[Random], PolicyEvent], ...] = (_queued, _started, _ended, _served)
