"""No request waits for ever because of what others ask for.

Each test says which guard it leans on: without that guard it fails.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import ClassVar

import pytest
from support.real_service import real_service
from support.scenarios import policies, scenario

from pageturner.policies import registry
from pageturner.policies.interfaces import KeyChange, SortKey
from pageturner.policies.views import LoadView, RequestView
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import SamplingParams

WARM = (0, 1, 2, 1) * 4


@pytest.mark.parametrize("max_num_seqs", [1, 2])
def test_sglang_31954_cold_prompts_age_past_warm_ones(max_num_seqs: int) -> None:
    """A flood of prompts with a cached prefix of 16 tokens, and one cold prompt among them.

    The policy's own bound: none is overtaken by what arrives cap / aging seconds later. Leans on the aging
    of longest-prefix-match (the guarded request is switched off by a bound far away).
    """
    h = scenario(
        32, 4, queue=("longest-prefix-match", {"cap_tokens": 16, "aging_tokens_per_second": 2.0}),
        options={"max_num_seqs": max_num_seqs, "starvation_seconds": 10_000.0},
    )  # fmt: skip
    h.submit(WARM, max_tokens=1)
    h.run_to_end()
    for seed in range(3):
        h.submit((*WARM, seed % 3), max_tokens=3, seed=seed)
    cold = h.submit((2, 2, 2, 0) * 4, max_tokens=2, seed=50)
    arrived = h.now
    overtaken_by: list[float] = []
    for seed in range(60):
        if h.has_ended(cold) or cold in h.decisions[-1].started:
            break
        h.submit((*WARM, seed % 3), max_tokens=3, seed=100 + seed)
        h.step()
        started = [r for r in h.decisions[-1].started if r != cold]
        overtaken_by += [h.records[request_id].new.arrival_time - arrived for request_id in started]
    assert h.has_ended(cold) or cold in h.decisions[-1].started, "the cold prompt starves"
    assert max(overtaken_by, default=0.0) <= 16 / 2.0
    h.finish_all()


@pytest.mark.parametrize("queue", registry.names("queue"))
def test_sglang_31954_no_order_starves_anyone(queue: str) -> None:
    """Whatever the order prefers, an endless flood of it does not hold the one it does not prefer.

    Leans on the guarded request: who waited past starvation_seconds.
    """
    h = scenario(32, 4, queue=queue, options={"max_num_seqs": 2, "starvation_seconds": 20.0})
    h.submit(WARM, max_tokens=1)
    h.run_to_end()
    disliked = h.submit((2, 2, 2, 0) * 6, max_tokens=20, priority=-5, seed=50)
    for seed in range(120):
        if h.has_ended(disliked):
            break
        h.submit((*WARM, seed % 3), max_tokens=2, priority=5, deadline=h.now + 1000, seed=100 + seed)
        h.step()
    assert h.has_ended(disliked)
    h.run_to_end()
    h.check_finished()


@dataclass(frozen=True)
class TenantsTakeTurns:
    """Each tenant's requests stand behind one another, so a flood waits behind itself."""

    key_change: ClassVar[KeyChange] = KeyChange.NEVER
    seen: dict[str, int] = field(default_factory=dict, compare=False)

    def key(self, request: RequestView, load: LoadView) -> SortKey:
        self.seen[request.tenant] = self.seen.get(request.tenant, 0) + 1
        return (self.seen[request.tenant],)


def of_tenant(tenant: str, number: int) -> NewRequest:
    params = SamplingParams(max_tokens=3)
    return NewRequest(f"{tenant}{number}", (number % 3,) * 3, params, number, 0.0, tenant=tenant)


def test_vllm_7123_5605_the_scheduler_knows_the_tenant_of_each_request() -> None:
    """Forty requests of one tenant, then one of another: an order by tenant serves that one at once.

    Leans on RequestView.tenant.
    """
    policy = TenantsTakeTurns()
    h = scenario(32, 4, chosen=replace(policies(), queue=policy), options={"max_num_seqs": 2})
    for number in range(40):
        h.submit_new(of_tenant("flood", number))
    quiet = h.submit_new(of_tenant("quiet", 0))
    while not h.has_ended(quiet):
        h.step()
    assert sum(h.has_ended(f"flood{number}") for number in range(40)) <= 4
    assert set(policy.seen) == {"flood", "quiet"}
    h.finish_all()


@pytest.mark.parametrize("max_num_seqs", [1, 2, 4])
def test_vllm_7123_5605_a_flood_waits_behind_itself(max_num_seqs: int) -> None:
    """One tenant has forty requests at once, one has one now and then: that one never waits long.

    Leans on the virtual token counter being told what was served to whom.
    """
    h = scenario(
        64, 4, queue="virtual-token-counter",
        options={
            "max_num_seqs": max_num_seqs, "starvation_seconds": 10_000.0, "resort_interval_seconds": 0.0,
        },
    )  # fmt: skip
    for number in range(40):
        h.submit_new(of_tenant("flood", number))
    for number in range(4):
        for _ in range(5):
            h.step()
        quiet = h.submit_new(replace(of_tenant("quiet", number), arrival_time=h.now))
        num_ended = sum(h.has_ended(f"flood{other}") for other in range(40))
        while quiet not in h.decisions[-1].started:
            h.step()
        ahead = sum(h.has_ended(f"flood{other}") for other in range(40)) - num_ended
        assert ahead <= max_num_seqs, "only those that ran already go first"
    h.finish_all()


async def test_vllm_7123_5605_the_tenant_comes_with_the_request_on_the_wire() -> None:
    """Leans on the tenant being carried from the wire to the policy."""
    policy = TenantsTakeTurns()
    async with real_service(policies=replace(policies(), queue=policy)) as service:
        await service.client.generate((1, 2), max_tokens=1, tenant="alice")
        await service.client.generate((1, 2), max_tokens=1)
    assert set(policy.seen) == {"alice", ""}


@pytest.mark.parametrize(
    "batch", [("long-prefill-cap", {"cap_tokens": 4}), ("equal-progress", {"min_chunk_tokens": 2})]
)
def test_sglang_34623_a_huge_prompt_does_not_hold_up_the_others(batch: tuple[str, dict[str, object]]) -> None:
    """One prompt of 400 tokens at 8 a step, small ones behind it: they answer while it is in mid-prefill.

    Leans on chunk_tokens capping every prefill, the guarded request's too.
    """
    h = scenario(
        128, 4, batch=batch,
        options={"max_model_len": 500, "max_num_batched_tokens": 8, "starvation_seconds": 10_000.0},
    )  # fmt: skip
    huge = h.submit((0, 1) * 200, max_tokens=2)
    small = [h.submit((2, seed, 1, 2, 0), max_tokens=2, seed=seed) for seed in range(3)]
    most_in_prefill = 0
    while not all(map(h.has_ended, small)):
        output = h.step()
        assert h.num_steps < 20, "they wait for the huge one"
        most_in_prefill = max(most_in_prefill, sum(len(part.token_ids) > 1 for part in output.scheduled))
    assert h.num_tokens_of(huge) == 0
    assert most_in_prefill >= 2, "several requests in mid-prefill"
    h.finish_all()
