"""Look-alikes: the scheduling of other engines as policy sets, so that like is compared with like.

Each preset's docstring states the rule that it follows, and where the core's guards depart from it. The
guards hold under every preset: the guarded request is never a victim, victims are no more than needed, a
waiting request may claim blocks from strictly lower priorities.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pageturner.policies import admission, batch, eviction, queue, reclaim, registry, victim
from pageturner.policies.errors import UnknownPresetError
from pageturner.policies.interfaces import PolicySet

_NO_AGING_SECONDS = 1e6
"""A level of priority outweighs eleven days of waiting, and arrivals are still told apart to 1e-6 s."""


@dataclass(frozen=True, slots=True)
class Preset:
    """The policies of another engine, under its name."""

    name: str
    summary: str
    policies: PolicySet
    core_options: Mapping[str, object]
    """Options of the scheduler that belong to the rule, by name; others stay as configured."""


def pageturner() -> Preset:
    """The defaults: first come first served, whole prompts beside a watermark of 3 %, decodes first; the
    least computed of the lowest priority yields, the cheaper way; segmented lru."""
    return Preset(
        "pageturner",
        "this engine's defaults",
        registry.default_policies(),
        MappingProxyType({"watermark": 0.03}),
    )


def vllm_v1() -> Preset:
    """vLLM v1 (0.32) under `--scheduling-policy fcfs`, its default.

    Running requests get their tokens in the order in which they started, then waiting ones start in order
    of arrival until one does not fit: all its known tokens less the prefix hit must find a block
    (`scheduler_reserve_full_isl`), with no watermark. None starts in a step in which one is preempted. When
    a block is lacking, the last of the running yields and computes all again; it goes to the front of the
    queue. Cached blocks are evicted least recently used first, tails before heads.

    Departs from it: victims that turn out not to be needed are spared; a chunk is shortened to
    the blocks there are before any request is preempted; one whose next block another computes in this
    very step waits for it; unhashed blocks are reused before cached ones.
    """
    return Preset(
        "vllm-v1",
        "vLLM v1's default: first come first served, the last one yields and recomputes",
        PolicySet(
            queue=queue.Fcfs(),
            admission=admission.FullPrompt(),
            batch=batch.DecodeFirst(),
            victim=victim.LastArrived(),
            reclaim=reclaim.AlwaysRecompute(),
            eviction=eviction.Lru(),
        ),
        MappingProxyType({"watermark": 0.0, "max_skips": 0}),
    )


def vllm_v1_priority() -> Preset:
    """vLLM v1 under `--scheduling-policy priority`.

    As vllm-v1, but waiting requests start by (priority, arrival), and the running request of the lowest
    priority yields, of equals the last to arrive. There is no ageing. Here larger is more urgent; in vLLM
    it is less.

    Departs from it: a waiting request may claim blocks and slots from a lower priority; in vLLM it waits.
    """
    base = vllm_v1()
    return Preset(
        "vllm-v1-priority",
        "vLLM v1 with priorities: the least urgent yields and recomputes",
        PolicySet(
            queue=queue.PriorityWithAging(aging_seconds=_NO_AGING_SECONDS),
            admission=base.policies.admission,
            batch=base.policies.batch,
            victim=victim.LowestPriority(),
            reclaim=base.policies.reclaim,
            eviction=base.policies.eviction,
        ),
        base.core_options,
    )


def vllm_v0() -> Preset:
    """vLLM before v1: first come first served, a request starts if its whole prompt fits beside a watermark
    of 1 % of the blocks; prompts run before decodes; the last to arrive yields, by recomputing if it is one
    sequence and by swapping if it is a group.

    Departs from it: a step may mix prompts and decodes, and a group without host room recomputes.
    """
    return Preset(
        "vllm-v0",
        "vLLM before v1: prompts first, the last one yields, groups are swapped",
        PolicySet(
            queue=queue.Fcfs(),
            admission=admission.FullPrompt(),
            batch=batch.PrefillFirst(),
            victim=victim.LastArrived(),
            reclaim=reclaim.SwapGroups(),
            eviction=eviction.Lru(),
        ),
        MappingProxyType({"watermark": 0.01, "max_skips": 0}),
    )


def tensorrt_llm_max_utilization() -> Preset:
    """TensorRT-LLM's MAX_UTILIZATION: start as many requests as the blocks of this very step allow, "at the
    risk of having to pause requests if the KV cache size limit is reached"; generation goes before context
    chunks, which go first come first served; the last started pauses and computes again."""
    return Preset(
        "tensorrt-llm-max-utilization",
        "TensorRT-LLM's MAX_UTILIZATION: start all that fits now, pause the last one",
        PolicySet(
            queue=queue.Fcfs(),
            admission=admission.FirstChunk(),
            batch=batch.DecodeFirst(),
            victim=victim.LastArrived(),
            reclaim=reclaim.AlwaysRecompute(),
            eviction=eviction.Lru(),
        ),
        MappingProxyType({"watermark": 0.0, "max_skips": 0}),
    )


def tensorrt_llm_guaranteed_no_evict() -> Preset:
    """TensorRT-LLM's GUARANTEED_NO_EVICT, its default: a request starts only if it and all that run can
    reach their max_tokens, so that "a started request is never paused"; otherwise as MAX_UTILIZATION."""
    base = tensorrt_llm_max_utilization()
    return Preset(
        "tensorrt-llm-guaranteed-no-evict",
        "TensorRT-LLM's GUARANTEED_NO_EVICT: a request that has started is never paused",
        PolicySet(
            queue=base.policies.queue,
            admission=admission.GuaranteedNoEvict(),
            batch=base.policies.batch,
            victim=base.policies.victim,
            reclaim=base.policies.reclaim,
            eviction=base.policies.eviction,
        ),
        base.core_options,
    )


def sglang_lpm() -> Preset:
    """SGLang's `--schedule-policy lpm`: the longest cached prefix starts first, with no cap and no ageing; a
    request starts if it fits beside 0.7 of what the running may still generate (`new_token_ratio` at its
    initial value); prompts run before decodes; who has generated least is retracted, of equals the longest
    prompt, and computes again; least recently used blocks are evicted.

    Departs from it: the ratio does not decay while all goes well, the newcomer's own outputs count with the
    same ratio, and a queue of more than 128 requests is ordered all the same.
    """
    return Preset(
        "sglang-lpm",
        "SGLang's longest-prefix-match: cached prefixes first, fewest outputs yield",
        PolicySet(
            queue=queue.LongestPrefixMatch(cap_tokens=1 << 30, aging_tokens_per_second=1e-3),
            admission=admission.PeakEstimate(output_fraction=0.7),
            batch=batch.PrefillFirst(),
            victim=victim.FewestOutputs(),
            reclaim=reclaim.AlwaysRecompute(),
            eviction=eviction.Lru(),
        ),
        MappingProxyType({"watermark": 0.0, "max_skips": 0}),
    )


_MAKERS: tuple[Callable[[], Preset], ...] = (
    pageturner,
    vllm_v1,
    vllm_v1_priority,
    vllm_v0,
    tensorrt_llm_max_utilization,
    tensorrt_llm_guaranteed_no_evict,
    sglang_lpm,
)
PRESETS: Mapping[str, Preset] = MappingProxyType({make().name: make() for make in _MAKERS})
"""By the names that a configuration uses."""


def find_preset(name: str) -> Preset:
    """The preset of that name. Raises UnknownPresetError."""
    preset = PRESETS.get(name)
    if preset is None:
        raise UnknownPresetError(name, PRESETS)
    return preset
