"""What is said of policies, as orderings that hold on paired seeds: the 95 % interval leaves zero out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pageturner.service.simulator.contenders import parse_policies
from pageturner.service.simulator.experiment import Contender, differences, run_experiment
from pageturner.service.simulator.figures import Interval
from pageturner.service.simulator.machine import SimulatedMachine, load_machine
from pageturner.service.simulator.synthetic import Synthetic

H100 = load_machine("h100-8b")
SEEDS = range(4)

# A small model on a slow link: 16 tokens are computed in 80 us and copied out and in again in 300 us, but
# behind 2,000 tokens of context computing them takes 3 ms.
SLOW_LINK = {"a_token": 5e-6, "an_attended_pair": 100e-9, "a_swap_out": 150e-6, "a_swap_in": 150e-6}


def machine(
    num_blocks: int, *, step_time: Mapping[str, float] | None = None, **bounds: Any
) -> SimulatedMachine:
    """An H100 with a pool small enough for shortage."""
    return replace(
        H100,
        cache=replace(H100.cache, num_blocks=num_blocks, num_host_blocks=4000),
        scheduler=replace(H100.scheduler, max_preemptions=1000, **bounds),
        step_time=replace(H100.step_time, **(step_time or {})),
    )


def compare(recipe: Synthetic, *contenders: Contender, seeds: range = SEEDS) -> list[Mapping[str, Interval]]:
    """Of each contender but the first: its paired difference from the first, by metric."""
    base, *others = run_experiment(contenders, {seed: recipe.make("claim", seed) for seed in seeds})
    return [differences(other, base) for other in others]


def more(found: Interval) -> bool:
    return found.low > 0


def less(found: Interval) -> bool:
    return found.high < 0


LONG = Synthetic(
    requests=20, concurrency=8, prompt=1000, prompt_sigma=0.2, output=400, output_sigma=0.2, longest=4000
)
SHORT = Synthetic(requests=100, concurrency=32, prompt=32, prompt_sigma=0.2, output=24, output_sigma=0.3)


def swap_against_recompute(recipe: Synthetic, setting: SimulatedMachine) -> Mapping[str, Interval]:
    sets = ("reclaim=always-recompute;victim=last-arrived", "reclaim=always-swap;victim=last-arrived")
    return compare(recipe, *(parse_policies(text).on(setting) for text in sets))[0]


def test_swap_beats_recompute_on_long_contexts_and_loses_on_short() -> None:
    long = swap_against_recompute(LONG, machine(400, step_time=SLOW_LINK, watermark=0.0))
    assert more(long["throughput"])
    assert less(long["e2e_mean"])
    short = swap_against_recompute(SHORT, machine(40, step_time=SLOW_LINK, watermark=0.0))
    assert more(short["e2e_mean"])


def test_swap_loses_where_a_block_is_many_fragments() -> None:
    """Not block-major: a block is two runs of bytes for each of its layers, an order of magnitude slower."""
    fragments = SLOW_LINK | {"a_swap_out": 2e-3, "a_swap_in": 2e-3}
    found = swap_against_recompute(LONG, machine(400, step_time=fragments, watermark=0.0))
    assert less(found["throughput"])
    assert more(found["e2e_mean"])


def test_full_prompt_admission_ends_the_thrash_of_first_chunk_admission() -> None:
    setting = machine(300, watermark=0.0, max_num_batched_tokens=256)
    recipe = Synthetic(
        requests=30, concurrency=16, prompt=1500, prompt_sigma=0.3, output=32, output_sigma=0.3
    )
    sets = (
        "reclaim=always-recompute;victim=last-arrived;admission=first-chunk",
        "reclaim=always-recompute;victim=last-arrived;admission=full-prompt",
    )
    outcomes = run_experiment(
        [parse_policies(text).on(setting) for text in sets],
        {seed: recipe.make("claim", seed) for seed in SEEDS},
    )
    thrashing, calm = (outcome.intervals for outcome in outcomes)
    assert thrashing["recompute_tax"].mean > 0.3  # of all that is computed, a third for the second time
    assert calm["recompute_tax"].mean < 0.05
    found = differences(outcomes[1], outcomes[0])
    assert more(found["throughput"])
    assert less(found["ttft_mean"])


def test_aging_ends_the_starvation_of_longest_prefix_match() -> None:
    """Overload, nearly all of it behind one cached prefix: a request that shares nothing waits to the end."""
    setting = machine(600, max_num_seqs=4, starvation_seconds=1e9, max_bypasses=10**9)
    recipe = Synthetic(
        requests=300, rate=150, prompt=32, prompt_sigma=0.2, output=16, output_sigma=0.2, groups=1, shared=512
    )
    policies = (
        'queue={name="longest-prefix-match",aging_tokens_per_second=1e-6,cap_tokens=1000000}',
        'queue={name="longest-prefix-match",aging_tokens_per_second=1024}',
    )
    (found,) = compare(
        replace(recipe, group_share=0.95), *(parse_policies(text).on(setting) for text in policies)
    )
    assert less(found["ttft_max"])
    assert less(found["ttft_p99"])


def test_least_computed_victims_waste_fewer_tokens_than_last_arrived() -> None:
    recipe = Synthetic(
        requests=100, concurrency=16, prompt=60, prompt_sigma=1.0, output=60, output_sigma=0.3, longest=800
    )
    setting = machine(100, watermark=0.0)
    sets = ("reclaim=always-recompute;victim=last-arrived", "reclaim=always-recompute;victim=least-computed")
    (found,) = compare(recipe, *(parse_policies(text).on(setting) for text in sets), seeds=range(10))
    assert less(found["recomputed_tokens"])
    assert less(found["recompute_tax"])


def test_a_watermark_trades_time_to_first_token_for_fewer_preemptions() -> None:
    recipe = Synthetic(
        requests=80, concurrency=24, prompt=200, prompt_sigma=0.5, output=150, output_sigma=0.8, longest=3000
    )
    policies = parse_policies("reclaim=always-recompute;victim=last-arrived")
    settings = [machine(400, watermark=watermark) for watermark in (0.0, 0.05)]
    (found,) = compare(recipe, *(policies.on(setting) for setting in settings))
    assert less(found["preemptions"])
    assert more(found["ttft_mean"])
