"""More sequences than a step has tokens: everything ends, in turns, with the tokens of a large budget."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from support.core_harness import CoreHarness

from pageturner.policies import registry
from pageturner.policies.interfaces import BatchSplit
from pageturner.policies.views import BatchView
from pageturner.service.core.options import SchedulerOptions

NUM_OUTPUTS = 16
MOST_TIMES_SLOWER = 3


def run(batch: str, budget: int, depth: int, load: tuple[int, ...]) -> CoreHarness:
    """A harness at whose end every request of `load` has ended; each is a number of choices."""
    options = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=budget, watermark=0.0)
    h = CoreHarness(
        registry.create_set({"batch": batch}), num_blocks=64, block_size=4, depth=depth, options=options
    )
    for seed, n in enumerate(load):
        h.submit((seed % 3,) * 10, max_tokens=NUM_OUTPUTS, n=n, seed=seed)
    h.run_to_end()
    h.check_finished()
    return h


@pytest.mark.fault("50")
@pytest.mark.parametrize(("budget", "depth"), [(1, 0), (2, 1)])
@pytest.mark.parametrize("load", [(4,), (1, 1), (1,) * 8, (3, 1, 2)], ids=str)
@pytest.mark.parametrize("batch", registry.names("batch"))
def test_more_sequences_than_the_token_budget_end_with_even_gaps_and_the_same_tokens(
    batch: str, load: tuple[int, ...], budget: int, depth: int
) -> None:
    h, ample = run(batch, budget, depth, load), run(batch, 512, depth, load)
    gaps = []
    for name, record in h.records.items():
        assert record.outputs == ample.records[name].outputs
        for moments in record.token_times.values():
            assert len(moments) == NUM_OUTPUTS
            gaps.append((moments[-1] - moments[0]) / (NUM_OUTPUTS - 1))
    assert max(gaps) <= MOST_TIMES_SLOWER * min(gaps)


@dataclass(frozen=True)
class TwoDecodes:
    """A batch policy: prompts first, then two tokens a step, whatever the budget."""

    def split(self, batch: BatchView) -> BatchSplit:
        is_prefill = bool(batch.prefill_tokens) or batch.num_waiting > 0
        return BatchSplit(0, batch.token_budget) if is_prefill else BatchSplit(2, 0)


def test_a_batch_policy_that_holds_decodes_back_is_obeyed_where_everything_decodes() -> None:
    options = SchedulerOptions(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, watermark=0.0)
    policies = replace(registry.default_policies(), batch=TwoDecodes())
    h = CoreHarness(policies, num_blocks=64, block_size=4, options=options)
    for seed in range(4):
        h.submit((seed,) * 5, max_tokens=NUM_OUTPUTS, seed=seed)
    h.step()
    # Two, and at times the one that the guarded request is owed.
    assert {len(h.step().scheduled) for _ in range(8)} == {2, 3}
