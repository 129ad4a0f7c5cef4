"""What beams save by sharing blocks: searches on short instructions, on a model and its block tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pageturner.policies import registry
from pageturner.policies.views import Rates
from pageturner.service.bench.memory_study import StepModel
from pageturner.service.bench.scheduler import NullText
from pageturner.service.core.options import CacheOptions, SchedulerOptions
from pageturner.service.core.request import NewRequest
from pageturner.service.core.sampling_params import BeamSearch, SamplingParams
from pageturner.service.core.scheduler import Scheduler

WIDTHS = (2, 4, 6)
INSTRUCTIONS = (
    ("Give three tips for staying healthy.", 80),
    ("What are the three primary colors?", 24),
    ("Describe the structure of an atom in simple words.", 72),
    ("How can we reduce air pollution in large cities?", 88),
    ("Rewrite the following sentence in the past tense: she walks to school every day.", 36),
    ("Identify the odd one out: Twitter, Instagram, Telegram. Explain why.", 48),
    ("Write a short story in which the main character has to make a difficult decision.", 64),
    ("Explain why four quarters are the same as one whole, and give an example.", 56),
)
"""Texts and the tokens of their answers, about as long as Alpaca's are on average: 19 and 58 tokens."""


@dataclass(frozen=True, slots=True)
class BeamSharing:
    """saved: the share of the blocks of unshared tables that shared ones do without, over all tokens."""

    width: int
    saved: float
    num_copies: int


def measure_sharing(
    steps: StepModel,
    prompts: Sequence[tuple[tuple[int, ...], int]],
    limits: SchedulerOptions,
    cache: CacheOptions,
    width: int,
) -> BeamSharing:
    """All searches at once, each to its full length.

    prompts: with the tokens of their answers. limits, cache: of the model; every search must fit the pool.
    """
    limits = replace(limits, max_num_seqs=width * len(prompts), max_n=max(width, limits.max_n))
    scheduler = Scheduler(limits, cache, registry.default_policies(), NullText(), Rates())
    for index, (prompt, num_outputs) in enumerate(prompts):
        params = SamplingParams(max_tokens=num_outputs, ignore_eos=True, beam_search=BeamSearch(width))
        scheduler.add_request(NewRequest(f"{index}", prompt, params, seed=0, arrival_time=0.0))
    while output := scheduler.schedule(0.0):
        sampled, _ = steps.run(output)
        scheduler.update(output, sampled, 0.0)
    stats = scheduler.stats()
    saved = 1 - stats.num_beam_blocks_total / stats.num_beam_table_entries_total
    return BeamSharing(width, saved, stats.num_copied_blocks_total)
