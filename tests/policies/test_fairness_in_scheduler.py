"""Virtual token counters in the real scheduler: two tenants that always wait get alike, whatever they ask.

No request is preempted (each starts only if all can run to their end), and keys are computed anew before
each step, as the published bound supposes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_harness import NoText

from pageturner.policies import registry
from pageturner.policies.spec import PolicySpec
from pageturner.policies.views import Rates
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.outputs import FinishedEvent, SampledSequence, SampledToken
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.core.scheduler import Scheduler

Shape = tuple[int, int]
"""Prompt and output tokens of one request."""

INPUT, OUTPUT = 1.0, 2.0
BLOCK_SIZE, NUM_BLOCKS = 4, 12
LONGEST_PROMPT = 12


class Server:
    """Keeps both tenants backlogged, and counts what each was served: the scheduler's clients, in short."""

    def __init__(self, queue: PolicySpec | str, shapes: Mapping[str, Sequence[Shape]]) -> None:
        policies = registry.create_set({"queue": queue, "admission": "guaranteed-no-evict"})
        options = SchedulerOptions(
            max_model_len=64,
            max_num_seqs=64,
            max_num_batched_tokens=256,
            watermark=0.0,
            max_skips=0,
            resort_interval_seconds=0.0,
        )
        self.scheduler = Scheduler(
            options, CacheOptions(NUM_BLOCKS, BLOCK_SIZE, 0, False), policies, NoText(), Rates()
        )
        self.shapes = shapes
        self.tenant_of: dict[str, str] = {}
        self.prompt_of: dict[str, int] = {}
        self.service = dict.fromkeys(shapes, 0.0)
        self.num_submitted = dict.fromkeys(shapes, 0)
        self.now = 0.0

    def submit(self, tenant: str) -> None:
        shapes, number = self.shapes[tenant], self.num_submitted[tenant]
        num_prompt, num_output = shapes[number % len(shapes)]
        self.num_submitted[tenant] += 1
        name = f"{tenant}{number}"
        self.tenant_of[name], self.prompt_of[name] = tenant, num_prompt
        params = SamplingParams(max_tokens=num_output, ignore_eos=True)
        self.scheduler.add_request(NewRequest(name, (7,) * num_prompt, params, 0, self.now, tenant=tenant))

    def step(self) -> None:
        self.now += 0.01
        for tenant in self.shapes:
            waiting = sum(request.new.tenant == tenant for request in self.scheduler.state.waiting)
            for _ in range(NUM_BLOCKS + 1 - waiting):  # each that starts takes a block at the least
                self.submit(tenant)
        output = self.scheduler.schedule(self.now)
        sampled = []
        for part in output.scheduled:
            tenant = self.tenant_of[part.request_id]
            self.service[tenant] += INPUT * max(
                0, min(part.end, self.prompt_of[part.request_id]) - part.start
            )
            for row in part.samples:
                self.service[tenant] += OUTPUT
                sampled.append(SampledSequence(row.seq_id, row.epoch, (SampledToken(7),)))
        for event in self.scheduler.update(output, tuple(sampled), self.now):
            assert not isinstance(event, FinishedEvent) or event.error is None


def widest_gap(queue: PolicySpec | str, shapes: Mapping[str, Sequence[Shape]]) -> float:
    """The largest difference in service over any stretch of steps."""
    server = Server(queue, shapes)
    gaps = [0.0]
    for _ in range(60):
        server.step()
        one, other = server.service.values()
        gaps.append(one - other)
    assert server.scheduler.stats().num_recompute_preemptions_total == 0
    return max(gaps) - min(gaps)


FAIR = PolicySpec("virtual-token-counter", {"input_weight": INPUT, "output_weight": OUTPUT})
BOUND = 2 * max(INPUT * LONGEST_PROMPT, OUTPUT * NUM_BLOCKS * BLOCK_SIZE)
shape_lists = st.lists(st.tuples(st.integers(1, LONGEST_PROMPT), st.integers(1, 12)), min_size=1, max_size=4)


@settings(max_examples=15, deadline=None)
@given(one=shape_lists, other=shape_lists)
def test_the_service_gap_stays_within_the_published_bound(one: list[Shape], other: list[Shape]) -> None:
    assert widest_gap(FAIR, {"a": one, "b": other}) <= BOUND


@pytest.mark.parametrize(("queue", "is_fair"), [(FAIR, True), ("fcfs", False)])
def test_a_tenant_of_small_requests_is_not_starved_by_one_of_large(
    queue: PolicySpec | str, is_fair: bool
) -> None:
    shapes = {"a": [(1, 1)], "b": [(12, 12)]}
    assert (widest_gap(queue, shapes) <= BOUND) is is_fair
