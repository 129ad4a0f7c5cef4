"""What sets each admission policy apart. The pool has 100 blocks, 50 of them available."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from support.policy_views import ADMISSION, LOAD, admission_views, load_views

from pageturner.policies.admission import FirstChunk, FullPrompt, GuaranteedNoEvict, PeakEstimate, Watermark
from pageturner.policies.interfaces import Admission, AdmissionPolicy
from pageturner.policies.views import AdmissionView, LoadView


def candidate(first_chunk: int, known: int, peak: int, watermark: int = 3) -> AdmissionView:
    return replace(
        ADMISSION,
        num_blocks_first_chunk=first_chunk,
        num_blocks_known=known,
        num_blocks_peak=peak,
        watermark_blocks=watermark,
    )


def test_first_chunk_asks_for_no_more_than_the_chunk() -> None:
    assert FirstChunk().decide(candidate(50, 90, 99), LOAD) is Admission.ADMIT
    assert FirstChunk().decide(candidate(51, 90, 99), LOAD) is Admission.WAIT


def test_full_prompt_asks_for_all_that_is_known_beside_the_watermark() -> None:
    assert FullPrompt().decide(candidate(1, 47, 99), LOAD) is Admission.ADMIT
    assert FullPrompt().decide(candidate(1, 48, 99), LOAD) is Admission.WAIT
    assert FullPrompt().decide(candidate(1, 50, 99, watermark=0), LOAD) is Admission.ADMIT


def test_evictable_blocks_are_available() -> None:
    load = replace(LOAD, device=replace(LOAD.device, num_free=10, num_evictable=40))
    assert FullPrompt().decide(candidate(1, 47, 99), load) is Admission.ADMIT


def test_no_evict_adds_up_the_promises_to_all_running_requests() -> None:
    # 80 of 100 blocks are promised to those running.
    assert GuaranteedNoEvict().decide(candidate(1, 5, 20), LOAD) is Admission.ADMIT
    assert GuaranteedNoEvict().decide(candidate(1, 5, 21), LOAD) is Admission.WAIT


def test_no_evict_does_not_promise_what_is_held_beyond_the_promises() -> None:
    load = replace(LOAD, num_blocks_at_peak=10)  # 50 are held, some by requests that do not run
    assert GuaranteedNoEvict().decide(candidate(1, 5, 51), load) is Admission.WAIT
    assert GuaranteedNoEvict().decide(candidate(1, 47, 47), load) is Admission.ADMIT


def test_the_peak_estimate_counts_a_fraction_of_the_growth() -> None:
    # Held 50, promised growth 30; the candidate knows 10 and may grow by 20: half the growth is 25.
    assert PeakEstimate(output_fraction=0.5).decide(candidate(1, 10, 30), LOAD) is Admission.ADMIT
    assert PeakEstimate(output_fraction=0.8).decide(candidate(1, 10, 30), LOAD) is Admission.ADMIT  # 100
    assert PeakEstimate(output_fraction=0.81).decide(candidate(1, 10, 30), LOAD) is Admission.WAIT


@given(admission_views(), load_views())
def test_the_peak_estimate_lies_between_its_ends(view: AdmissionView, load: LoadView) -> None:
    none = PeakEstimate(output_fraction=0.0).decide(view, load)
    half = PeakEstimate(output_fraction=0.5).decide(view, load)
    full = PeakEstimate(output_fraction=1.0).decide(view, load)
    assert full is Admission.WAIT or half is Admission.ADMIT
    assert half is Admission.WAIT or none is Admission.ADMIT
    assert none is FullPrompt().decide(view, load)
    assert full is GuaranteedNoEvict().decide(view, load)


@pytest.mark.parametrize(
    "policy",
    [
        FirstChunk(skip=True),
        FullPrompt(skip=True),
        Watermark(skip=True),
        GuaranteedNoEvict(skip=True),
        PeakEstimate(skip=True),
    ],
)
def test_with_skip_those_behind_may_try(policy: AdmissionPolicy) -> None:
    assert policy.decide(candidate(99, 99, 99), LOAD) is Admission.SKIP
    assert policy.decide(candidate(1, 1, 1), LOAD) is Admission.ADMIT


def test_the_watermark_is_a_share_of_the_pool_while_something_runs() -> None:
    policy = Watermark(fraction=0.105)  # 11 of 100 blocks
    assert policy.decide(candidate(39, 90, 99), LOAD) is Admission.ADMIT
    assert policy.decide(candidate(40, 90, 99), LOAD) is Admission.WAIT
    assert policy.decide(candidate(50, 90, 99, watermark=0), replace(LOAD, num_running=0)) is Admission.ADMIT


def test_the_larger_of_both_watermarks_holds() -> None:
    assert Watermark(fraction=0.0).decide(candidate(48, 90, 99, watermark=3), LOAD) is Admission.WAIT
    assert Watermark(fraction=0.01).decide(candidate(47, 90, 99, watermark=3), LOAD) is Admission.ADMIT
