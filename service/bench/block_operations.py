"""`pageturner bench scheduler`: nanoseconds of the block operations, and of a long waiting queue."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.bench.scheduler import BLOCK_SIZE, NullText
from pageturner.service.core.memory.block import Release
from pageturner.service.core.memory.block_manager import BlockManager
from pageturner.service.core.memory.block_pool import BlockPool
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.request import NewRequest, Request, Sequence
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler
from pageturner.service.errors import RequestAborted

NUM_BLOCKS = 1024
NUM_ROUNDS = 15
QUEUE_LENGTH = 100_000
NOW = Release()


@dataclass(frozen=True, slots=True)
class OperationCost:
    """Median time of one operation; of block operations, for each block they touch."""

    name: str
    nanoseconds: float


def measure_block_operations() -> tuple[OperationCost, ...]:
    """Each on a table of NUM_BLOCKS blocks, NUM_ROUNDS times."""
    manager = BlockManager(
        BlockPool(NUM_BLOCKS, BLOCK_SIZE), BlockPool(0, BLOCK_SIZE), PrefixHasher(b"bench")
    )
    num_tokens = NUM_BLOCKS * BLOCK_SIZE
    new = NewRequest("bench", tuple(range(num_tokens)), SamplingParams(n=1), seed=0, arrival_time=0.0)
    request = Request(new, 0, 1, manager.root_hash(adapter="", salt=""))
    lead, child = request.sequences = [Sequence(index, request, index) for index in range(2)]
    costs: dict[str, list[float]] = {}

    def timed(name: str, operation: Callable[[], object]) -> None:
        started = time.perf_counter_ns()
        operation()
        costs.setdefault(name, []).append((time.perf_counter_ns() - started) / NUM_BLOCKS)

    for _ in range(NUM_ROUNDS):
        lead.block_hashes.clear()
        lead.num_cached_blocks = lead.num_kv_tokens = lead.num_accepted_tokens = 0
        timed("allocate", lambda: manager.grow(lead, num_tokens))
        timed("fork", lambda: manager.fork(lead, child, num_tokens))
        manager.free(child, NOW)
        timed("hash", lambda: manager.block_hash(lead, NUM_BLOCKS - 1))
        lead.num_kv_tokens = lead.num_accepted_tokens = num_tokens
        timed("publish", lambda: manager.cache_full_blocks(lead))
        timed("free cached", lambda: manager.free(lead, NOW))
        lead.reset(0, BLOCK_SIZE)
        timed("hit", lambda: manager.hits(lead))
        for block_id in range(NUM_BLOCKS):
            manager.device.uncache_block(block_id)
    return tuple(OperationCost(name, statistics.median(each)) for name, each in costs.items())


def measure_long_queue() -> tuple[OperationCost, ...]:
    """Requests entering and leaving behind QUEUE_LENGTH that wait, in the order of the default policy."""
    options = SchedulerOptions(max_waiting=2 * QUEUE_LENGTH, max_queued_tokens=1 << 40)
    scheduler = Scheduler(options, CacheOptions(64), registry.default_policies(), NullText(), Rates())
    params = SamplingParams(max_tokens=1)
    for number in range(QUEUE_LENGTH):
        scheduler.add_request(NewRequest(f"waiting-{number}", (number,), params, 0, float(number)))
    entering, leaving = [], []
    for number in range(200):
        new = NewRequest(f"late-{number}", (number,), params, 0, number + 0.5)  # among the first in line
        started = time.perf_counter_ns()
        scheduler.add_request(new)
        entered = time.perf_counter_ns()
        scheduler.abort_request(new.request_id, RequestAborted("bench"))
        entering.append(entered - started)
        leaving.append(time.perf_counter_ns() - entered)
    return (
        OperationCost(f"enter a queue of {QUEUE_LENGTH:,}", statistics.median(entering)),
        OperationCost(f"leave a queue of {QUEUE_LENGTH:,}", statistics.median(leaving)),
    )
