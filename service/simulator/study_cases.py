"""For each built-in policy one setting in which it beats its axis's default, and the figure it wins by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pageturner.service.simulator.synthetic import Synthetic


@dataclass(frozen=True, slots=True)
class Case:
    """A policy against its axis's default, all else equal.

    policy: as after `axis=` in --policies. why: the setting, in words. metric: of METRICS. others: the other
    axes, as in --policies, for both. pool: of cache. bounds: of the scheduler. step_time: of the machine.
    has_drifted: policies believe the machine to be as it is without `step_time`.
    """

    axis: str
    policy: str
    why: str
    metric: str
    recipe: Synthetic
    others: str = ""
    num_blocks: int = 24700
    num_host_blocks: int = 0
    bounds: Mapping[str, Any] = field(default_factory=dict)
    step_time: Mapping[str, float] = field(default_factory=dict)
    has_drifted: bool = False


# Twice what the machine can serve, by many small requests and some large.
OVERLOAD = Synthetic(requests=150, rate=60, prompt=200, prompt_sigma=0.8, output=100, output_sigma=0.8)
FEW_SLOTS = {"max_num_seqs": 16}
SHORTAGE = Synthetic(requests=100, concurrency=24, prompt=150, output=150, output_sigma=0.8, longest=2000)
NO_MARK = {"watermark": 0.0, "max_preemptions": 1000}
RECOMPUTE = "reclaim=always-recompute"
LONG = Synthetic(requests=20, concurrency=8, prompt=1000, prompt_sigma=0.2, output=400, output_sigma=0.2)
SLOW_LINK = {"a_token": 5e-6, "an_attended_pair": 100e-9, "a_swap_out": 150e-6, "a_swap_in": 150e-6}
AMONG_LONG = Synthetic(
    requests=120,
    rate=8,
    prompt=64,
    prompt_sigma=0.3,
    output=32,
    long_share=0.2,
    long_prompt=10000,
    long_output=32,
)

CASES: tuple[Case, ...] = (
    Case(
        "queue",
        "priority",
        "overload, of which a third is urgent",
        "urgent_ttft_mean",
        Synthetic(requests=150, rate=60, prompt=200, output=100, priorities=3),
        bounds=FEW_SLOTS,
    ),
    Case(
        "queue",
        "shortest-job-first",
        "overload of very unequal requests with an honest max_tokens",
        "e2e_mean",
        OVERLOAD,
        bounds=FEW_SLOTS,
    ),
    Case(
        "queue",
        "longest-prefix-match",
        "many prefixes, of which the pool holds a few",
        "ttft_mean",
        Synthetic(
            requests=200,
            rate=40,
            prompt=32,
            output=16,
            groups=16,
            group_skew=0.0,
            shared=1024,
            prompt_sigma=0.2,
        ),
        num_blocks=400,
        bounds={"max_num_seqs": 4, "resort_interval_seconds": 0.05},
    ),
    Case(
        "queue",
        "highest-response-ratio-next",
        "overload of very unequal requests: seconds waited for each token of work",
        "slowdown_mean",
        OVERLOAD,
        bounds={**FEW_SLOTS, "resort_interval_seconds": 0.05},
    ),
    Case(
        "queue",
        "earliest-deadline-first",
        "a burst of which a third is in a hurry",
        "deadline_misses",
        Synthetic(
            requests=150, rate=60, prompt=200, output=60, output_sigma=0.4, deadline=12, tight_share=0.3
        ),
        bounds=FEW_SLOTS,
    ),
    Case(
        "queue",
        "multi-level-feedback",
        "overload with prompts of very unequal length, answers of unknown length",
        "e2e_mean",
        Synthetic(
            requests=150,
            rate=60,
            prompt=100,
            output=60,
            long_share=0.2,
            long_prompt=4000,
            max_tokens_factor=4,
        ),
        bounds={**FEW_SLOTS, "resort_interval_seconds": 0.05},
    ),
    Case(
        "queue",
        "virtual-token-counter",
        "one of three tenants sends most of an overload",
        "fairness_gap",
        Synthetic(requests=200, rate=60, prompt=200, output=60, tenants=3, tenant_skew=2.5),
        bounds={**FEW_SLOTS, "resort_interval_seconds": 0.05},
    ),
    Case(
        "admission",
        "first-chunk",
        "long prompts, answers of a few tokens: room comes back before a prompt is through",
        "ttft_mean",
        Synthetic(
            requests=80,
            concurrency=12,
            prompt=3000,
            prompt_sigma=0.5,
            output=4,
            output_sigma=0.2,
            longest=8000,
        ),
        num_blocks=550,
        bounds={"max_num_batched_tokens": 1024},
    ),
    Case(
        "admission",
        '{name="watermark",fraction=0.1}',
        "answers that grow: room is kept for them",
        "preemptions",
        SHORTAGE,
        others=RECOMPUTE,
        num_blocks=400,
        bounds={"max_preemptions": 1000},
    ),
    Case(
        "admission",
        "guaranteed-no-evict",
        "honest max_tokens and a pause in no stream",
        "itl_max",
        SHORTAGE,
        others=RECOMPUTE,
        num_blocks=400,
        bounds=NO_MARK,
    ),
    Case(
        "admission",
        '{name="peak-estimate",output_fraction=0.4}',
        "answers of about two fifths of max_tokens",
        "preemptions",
        Synthetic(
            requests=100,
            concurrency=24,
            prompt=150,
            output=150,
            output_sigma=0.3,
            max_tokens_factor=2.5,
            longest=2000,
        ),
        others=RECOMPUTE,
        num_blocks=400,
        bounds=NO_MARK,
    ),
    Case(
        "batch",
        "prefill-first",
        "prompts arrive at a machine that is decoding, with steps of few tokens",
        "ttft_mean",
        Synthetic(requests=200, rate=60, prompt=100, prompt_sigma=0.3, output=60),
        bounds={"max_num_batched_tokens": 64, "max_num_seqs": 128},
    ),
    Case(
        "batch",
        "equal-progress",
        "short prompts among a few huge ones",
        "ttft_p50",
        AMONG_LONG,
    ),
    Case(
        "batch",
        "long-prefill-cap",
        "short prompts among a few huge ones",
        "ttft_p50",
        AMONG_LONG,
    ),
    Case(
        "victim",
        "last-arrived",
        "prompts of very unequal length: one long newcomer yields in the place of many short ones",
        "preemptions",
        Synthetic(
            requests=100,
            concurrency=16,
            prompt=60,
            prompt_sigma=1.0,
            output=60,
            output_sigma=0.3,
            longest=800,
        ),
        others=RECOMPUTE,
        num_blocks=100,
        bounds=NO_MARK,
    ),
    Case(
        "victim",
        "lowest-priority",
        "urgent and other requests: of equals the youngest yields",
        "preemptions",
        Synthetic(
            requests=100, concurrency=24, prompt=100, prompt_sigma=1.0, output=150, priorities=2, longest=2000
        ),
        others=RECOMPUTE,
        num_blocks=300,
        bounds=NO_MARK,
    ),
    Case(
        "victim",
        "most-exclusive",
        "half of the requests share a long prefix, whose blocks free nothing",
        "preemptions",
        Synthetic(
            requests=100,
            concurrency=24,
            prompt=100,
            output=150,
            groups=1,
            shared=512,
            group_share=0.5,
            longest=1500,
        ),
        others=RECOMPUTE,
        num_blocks=300,
        bounds=NO_MARK,
    ),
    Case(
        "victim",
        "longest-remaining",
        "answers of very unequal length: the short ones leave and make room",
        "ttft_mean",
        Synthetic(requests=100, concurrency=24, prompt=100, output=100, output_sigma=1.2, longest=2000),
        others=RECOMPUTE,
        num_blocks=300,
        bounds=NO_MARK,
    ),
    Case(
        "victim",
        "most-over-served",
        "one of three tenants sends most of an overload, the queue is fair",
        "fairness_gap",
        Synthetic(
            requests=120,
            rate=60,
            prompt=100,
            output=100,
            output_sigma=0.3,
            tenants=3,
            tenant_skew=2.0,
            longest=1500,
        ),
        others=f"{RECOMPUTE};queue=virtual-token-counter",
        num_blocks=300,
        bounds={**NO_MARK, "resort_interval_seconds": 0.05},
    ),
    Case(
        "victim",
        "fewest-outputs",
        "long prompts among short ones: streams that clients watch go on",
        "tpot_p90",
        Synthetic(
            requests=100,
            concurrency=24,
            prompt=60,
            prompt_sigma=0.3,
            output=150,
            long_share=0.3,
            long_prompt=1000,
            long_output=150,
            longest=2000,
        ),
        others=RECOMPUTE,
        num_blocks=500,
        bounds=NO_MARK,
    ),
    Case(
        "reclaim",
        "always-recompute",
        "short contexts, a link ten times as slow as when it was measured",
        "e2e_mean",
        Synthetic(requests=150, concurrency=32, prompt=32, prompt_sigma=0.2, output=24, output_sigma=0.3),
        num_blocks=40,
        num_host_blocks=4000,
        bounds=NO_MARK,
        step_time={"a_swap_out": 5e-4, "a_swap_in": 5e-4},
        has_drifted=True,
    ),
    Case(
        "reclaim",
        "always-swap",
        "long contexts",
        "throughput",
        LONG,
        others="victim=last-arrived",
        num_blocks=400,
        num_host_blocks=4000,
        bounds=NO_MARK,
        step_time=SLOW_LINK,
    ),
    Case(
        "reclaim",
        "host-headroom",
        "long contexts, host memory to spare",
        "throughput",
        LONG,
        others="victim=last-arrived",
        num_blocks=400,
        num_host_blocks=4000,
        bounds=NO_MARK,
        step_time=SLOW_LINK,
    ),
    Case(
        "reclaim",
        "tail-first",
        "a link ten times as slow as when it was measured",
        "e2e_mean",
        Synthetic(requests=150, concurrency=32, prompt=32, prompt_sigma=0.2, output=24, output_sigma=0.3),
        num_blocks=40,
        num_host_blocks=4000,
        bounds=NO_MARK,
        step_time={"a_swap_out": 5e-4, "a_swap_in": 5e-4},
        has_drifted=True,
    ),
    Case(
        "reclaim",
        "swap-groups",
        "three answers of each long prompt",
        "throughput",
        Synthetic(
            requests=20, concurrency=8, prompt=1000, prompt_sigma=0.2, output=150, output_sigma=0.3, choices=3
        ),
        others="victim=last-arrived",
        num_blocks=400,
        num_host_blocks=4000,
        bounds=NO_MARK,
        step_time=SLOW_LINK,
    ),
    Case(
        "eviction",
        "lru",
        "conversations whose prefix comes back once, then another's",
        "prefix_hit_share",
        Synthetic(requests=80, rate=3, prompt=300, output=60, turns=3, think=2.0, prompt_sigma=0.3),
        num_blocks=800,
    ),
    Case(
        "eviction",
        "lfu",
        "popular prefixes, and now and then a huge prompt that sweeps the pool",
        "prefix_hit_share",
        Synthetic(
            requests=400,
            rate=15,
            prompt=16,
            prompt_sigma=0.0,
            output=4,
            output_sigma=0.0,
            groups=40,
            shared=256,
            long_share=0.05,
            long_prompt=5000,
            long_output=4,
        ),
        num_blocks=450,
    ),
    Case(
        "eviction",
        "cost-aware",
        "long shared prefixes come back among prompts that never do",
        "ttft_p90",
        Synthetic(
            requests=300,
            rate=12,
            prompt=200,
            prompt_sigma=0.4,
            output=16,
            groups=30,
            group_skew=0.7,
            shared=1024,
            group_share=0.7,
        ),
        num_blocks=900,
    ),
    Case(
        "eviction",
        "priority-ttl",
        "conversations of four priorities, more than the pool can hold",
        "urgent_ttft_mean",
        Synthetic(
            requests=80, rate=4, prompt=600, output=30, turns=3, think=4.0, priorities=4, prompt_sigma=0.3
        ),
        num_blocks=1500,
    ),
)
