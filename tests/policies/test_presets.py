"""Each preset decides by the documented rule of the engine it looks like, shown on views made by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from itertools import pairwise

import pytest
from support.policy_views import ADMISSION, BLOCK, LOAD, REQUEST, VICTIM, request, victim

from pageturner.policies import registry
from pageturner.policies.errors import UnknownPresetError
from pageturner.policies.interfaces import AXES, Admission, BatchSplit, Reclaim
from pageturner.policies.presets import PRESETS, Preset, find_preset
from pageturner.policies.views import AdmissionView, BatchView, Rates, RequestView, VictimView
from pageturner.service.core.options import SchedulerOptions

BURST = BatchView(token_budget=100, num_decode_tokens=30, prefill_tokens=(500, 20), num_waiting=4)
DECODES_FIRST = BatchSplit(30, 70)
PROMPTS_FIRST = BatchSplit(0, 100)


def order(name: str, *requests: RequestView) -> list[str]:
    queue = find_preset(name).policies.queue
    return [view.request_id for view in sorted(requests, key=lambda view: queue.key(view, LOAD))]


def admits(name: str, *, first_chunk: int = 1, known: int = 1, peak: int = 1) -> bool:
    """With 50 of 100 blocks available, 50 held, 80 promised; the watermark is the preset's."""
    preset = find_preset(name)
    watermark = preset.core_options["watermark"]
    assert isinstance(watermark, float)
    view: AdmissionView = replace(
        ADMISSION,
        num_blocks_first_chunk=first_chunk,
        num_blocks_known=known,
        num_blocks_peak=peak,
        watermark_blocks=round(watermark * 100),
    )
    answer = preset.policies.admission.decide(view, LOAD)
    assert answer is not Admission.SKIP, "no request starts past one that does not fit"
    return answer is Admission.ADMIT


def first_to_yield(name: str, *victims: VictimView) -> str:
    return find_preset(name).policies.victim.rank(victims, REQUEST, LOAD)[0]


def how(name: str, view: VictimView = VICTIM) -> Reclaim:
    return find_preset(name).policies.reclaim.choose(view, 1, Rates(), LOAD)


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS.keys())
def test_a_preset_is_made_of_what_a_configuration_can_say(preset: Preset) -> None:
    assert PRESETS[preset.name] is preset
    for axis in AXES:
        policy = getattr(preset.policies, axis)
        assert registry.create(axis, registry.name_of(policy), registry.options_of(policy)) == policy
    options: Mapping[str, object] = preset.core_options
    assert options.keys() <= {field.name for field in fields(SchedulerOptions)}
    SchedulerOptions(**options)  # type: ignore[arg-type]  # checked by name above


def test_the_names() -> None:
    assert set(PRESETS) == {
        "pageturner",
        "vllm-v1",
        "vllm-v1-priority",
        "vllm-v0",
        "tensorrt-llm-max-utilization",
        "tensorrt-llm-guaranteed-no-evict",
        "sglang-lpm",
    }
    with pytest.raises(UnknownPresetError, match="did you mean 'vllm-v1'"):
        find_preset("vllm-1")


def test_pageturner_is_the_defaults() -> None:
    preset = find_preset("pageturner")
    assert preset.policies == registry.default_policies()
    assert preset.core_options == {"watermark": SchedulerOptions().watermark}


OLD = victim("old", arrival_time=1.0, priority=-1, num_computed=1)
YOUNG = victim("young", arrival_time=2.0, num_computed=39)


@pytest.mark.parametrize(
    "name", ["vllm-v1", "vllm-v0", "tensorrt-llm-max-utilization", "tensorrt-llm-guaranteed-no-evict"]
)
def test_first_come_first_served_and_last_come_first_to_yield(name: str) -> None:
    urgent = request("urgent", arrival_time=2.0, priority=9, num_cached_tokens=32)
    assert order(name, urgent, request("early", arrival_time=1.0)) == ["early", "urgent"]
    assert first_to_yield(name, OLD, YOUNG) == "young"


@pytest.mark.parametrize("name", ["vllm-v1", "vllm-v1-priority"])
def test_vllm_v1_starts_whole_prompts_without_a_watermark(name: str) -> None:
    assert admits(name, known=50, peak=99)
    assert not admits(name, known=51, peak=99)
    assert find_preset(name).policies.batch.split(BURST) == DECODES_FIRST
    assert how(name) is how(name, replace(VICTIM, num_tail_blocks=9)) is Reclaim.RECOMPUTE


def test_vllm_v1_priority_orders_by_priority_then_arrival_without_aging() -> None:
    day = 86_400.0
    patient, urgent = request("patient", arrival_time=0.0), request("urgent", arrival_time=day, priority=1)
    assert order("vllm-v1-priority", patient, urgent) == ["urgent", "patient"]
    levels = [request(f"p{p}", priority=p, arrival_time=day - 1e-5 * p) for p in range(-1000, 1001, 500)]
    ordered = order("vllm-v1-priority", *levels)
    assert ordered == [view.request_id for view in reversed(levels)]
    close = [request(f"at{n}", priority=1000, arrival_time=day + n * 1e-5) for n in range(4)]
    assert order("vllm-v1-priority", *reversed(close)) == [view.request_id for view in close]
    assert first_to_yield("vllm-v1-priority", OLD, YOUNG) == "old"
    assert first_to_yield("vllm-v1-priority", replace(OLD, request=YOUNG.request), YOUNG) == "young"


def test_vllm_v0_keeps_a_watermark_runs_prompts_first_and_swaps_groups() -> None:
    assert admits("vllm-v0", known=49)
    assert not admits("vllm-v0", known=50)
    assert find_preset("vllm-v0").policies.batch.split(BURST) == PROMPTS_FIRST
    group = replace(VICTIM, request=replace(REQUEST, num_sequences=4))
    assert how("vllm-v0") is Reclaim.RECOMPUTE
    assert how("vllm-v0", group) is Reclaim.SWAP


def test_tensorrt_max_utilization_starts_every_request_that_fits_this_step() -> None:
    name = "tensorrt-llm-max-utilization"
    assert admits(name, first_chunk=50, known=90, peak=99)
    assert not admits(name, first_chunk=51, known=90, peak=99)
    assert find_preset(name).policies.batch.split(BURST) == DECODES_FIRST
    assert how(name) is Reclaim.RECOMPUTE


def test_tensorrt_guaranteed_no_evict_starts_only_what_can_run_to_its_end() -> None:
    name = "tensorrt-llm-guaranteed-no-evict"
    assert admits(name, peak=20)
    assert not admits(name, peak=21), "80 of 100 blocks are promised to those who run"
    assert find_preset(name).policies.batch.split(BURST) == DECODES_FIRST


def test_sglang_takes_the_longest_cached_prefix_without_cap_or_ageing() -> None:
    day = 86_400.0
    none = request("none", arrival_time=0.0)
    hits = [request(f"hit{n}", arrival_time=day * 0.9, num_cached_tokens=n) for n in (100, 5000, 100_000)]
    assert order("sglang-lpm", none, *hits) == ["hit100000", "hit5000", "hit100", "none"]


def test_sglang_holds_back_a_share_of_what_may_still_be_generated() -> None:
    # 50 held and 30 promised: 0.7 of the 30 leaves 29 blocks.
    assert admits("sglang-lpm", known=29, peak=29)
    assert not admits("sglang-lpm", known=30, peak=30)


def test_sglang_retracts_the_request_with_the_fewest_output_tokens() -> None:
    few = replace(OLD, request=replace(OLD.request, num_output_tokens=1, priority=9))
    assert first_to_yield("sglang-lpm", few, YOUNG) == "old"
    assert find_preset("sglang-lpm").policies.batch.split(BURST) == PROMPTS_FIRST
    assert how("sglang-lpm") is Reclaim.RECOMPUTE


@pytest.mark.parametrize("name", sorted(PRESETS.keys() - {"pageturner"}))
def test_the_least_recently_used_block_is_evicted(name: str) -> None:
    eviction = find_preset(name).policies.eviction
    blocks = [replace(BLOCK, released_at=float(at), num_hits=9 - at, depth=at) for at in range(4)]
    assert all(eviction.score(one) < eviction.score(other) for one, other in pairwise(blocks))
