"""The largest steps that the limits allow, run once so that the memory they need is known."""

from __future__ import annotations

from pageturner.kernels.interface import PagedOps
from pageturner.kernels.layout import KvLayout
from pageturner.service.core.options import SchedulerOptions
from pageturner.service.core.outputs import SampleRow, ScheduledSequence, SchedulerOutput, ScoreRun
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.model.causal_model import CausalModel
from pageturner.service.model.kv_cache import KvCache
from pageturner.service.model.runner import Runner
from pageturner.service.model.sampler import Sampler

_MOST_TEMPORARIES = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1)
"""The sampling that allocates the most."""


def run_largest_steps(
    model: CausalModel, layout: KvLayout, ops: PagedOps, limits: SchedulerOptions, sampler: Sampler
) -> None:
    """As many sequences as may run, then as few as take all tokens of a step; each as long as may be."""
    # All tables name one block: what is computed is nonsense, but finite, and the memory it takes is right.
    kv_cache = KvCache(layout, 1, 0, ops, model.device)
    kv_cache.pool.zero_()
    runner = Runner(model, kv_cache)
    most = min(limits.max_num_seqs, limits.max_num_batched_tokens)
    fewest = min(most, -(-limits.max_num_batched_tokens // limits.max_model_len))
    for num_sequences in (most, fewest):
        output = largest_step(limits, num_sequences, layout.block_size)
        sampler.sample(runner.step(output), output)


def largest_step(limits: SchedulerOptions, num_sequences: int, block_size: int) -> SchedulerOutput:
    """max_num_batched_tokens over so many sequences, each of max_model_len when it has computed its own; as
    many rows as may be are scored."""
    share, rest = divmod(limits.max_num_batched_tokens, num_sequences)
    scheduled = []
    scored_left = limits.max_scored_rows
    for number in range(num_sequences):
        count = min(share + (number < rest), limits.max_model_len)
        end = limits.max_model_len
        num_scored = min(count - 1, scored_left)
        scored_left -= num_scored
        scheduled.append(
            ScheduledSequence(
                seq_id=number,
                request_id="profile",
                epoch=0,
                token_ids=(0,) * count,
                start=end - count,
                write_start=end - count,
                block_table=(0,) * -(-end // block_size),
                samples=(SampleRow(number, 0, 0, 0, _MOST_TEMPORARIES),),
                scored=(ScoreRun(number, 0, end - count, (0,) * num_scored, 1),) if num_scored else (),
            )
        )
    return SchedulerOutput(0, tuple(scheduled))
