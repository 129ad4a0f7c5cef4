"""May the request whose turn it is start now?

Each policy answers from blocks alone. Slots, the guarded request and the bound on skips are the core's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from pageturner.policies.interfaces import Admission
from pageturner.policies.options import check_option
from pageturner.policies.views import AdmissionView, LoadView


@dataclass(frozen=True, slots=True)
class FirstChunk:
    """Admit as soon as the blocks of the first chunk are there; heeds no watermark.

    Source: vLLM, which allocates chunk by chunk and preempts when it has promised too much.
    """

    name: ClassVar[str] = "first-chunk"
    summary: ClassVar[str] = (
        "wins on TTFT while memory is plentiful; loses to thrashing when prompts outgrow the pool"
    )

    skip: bool = False
    """Whether requests behind it may try when this one does not fit; the core bounds how many."""

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        return _admit_if(candidate.num_blocks_first_chunk <= load.device.num_available, self.skip)


@dataclass(frozen=True, slots=True)
class FullPrompt:
    """Admit when every token known now fits, beside all that running prefills have yet to take, and the
    watermark stays free.

    Source: vLLM's watermark; measured: gating on the whole prompt ended a collapse from 100 to 1.5
    tokens/s.
    """

    name: ClassVar[str] = "full-prompt"
    summary: ClassVar[str] = (
        "wins as the safe middle: no prefill is thrown away; loses some TTFT to first-chunk"
    )

    skip: bool = False
    """Whether requests behind it may try when this one does not fit; the core bounds how many."""

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        return _admit_if(_fits_now(candidate, load), self.skip)


@dataclass(frozen=True, slots=True)
class Watermark:
    """Admit when the first chunk fits and `fraction` of the pool stays available; no mark if nothing runs.

    The larger of this mark and the core's own holds. Source: the watermark of vLLM's block manager
    (Kwon et al., SOSP 2023), here with chunked prefill.
    """

    name: ClassVar[str] = "watermark"
    summary: ClassVar[str] = (
        "wins by fewer preemptions than first-chunk; loses to full-prompt on long prompts"
    )

    fraction: float = 0.05
    """Share of the pool that stays available, 0 to 1."""
    skip: bool = False
    """Whether requests behind it may try when this one does not fit; the core bounds how many."""

    def __post_init__(self) -> None:
        check_option(self, "fraction", at_least=0, at_most=1)

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        mark = math.ceil(self.fraction * load.device.num_blocks) if load.num_running else 0
        needed = candidate.num_blocks_first_chunk + max(mark, candidate.watermark_blocks)
        return _admit_if(needed <= load.device.num_available, self.skip)


@dataclass(frozen=True, slots=True)
class GuaranteedNoEvict:
    """Admit only if everything running, and this one, may run to max_tokens without a preemption.

    Source: TensorRT-LLM's GUARANTEED_NO_EVICT.
    """

    name: ClassVar[str] = "guaranteed-no-evict"
    summary: ClassVar[str] = (
        "wins when a preemption is unaffordable; loses throughput if outputs end before max_tokens"
    )

    skip: bool = False
    """Whether requests behind it may try when this one does not fit; the core bounds how many."""

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        peak = max(load.num_blocks_at_peak, load.num_blocks_held) + candidate.num_blocks_peak
        return _admit_if(peak <= load.device.num_blocks and _fits_now(candidate, load), self.skip)


@dataclass(frozen=True, slots=True)
class PeakEstimate:
    """Admit if all fits when each request uses `output_fraction` of the growth it was promised.

    0 is full-prompt, 1 is guaranteed-no-evict. Source: the future-memory estimate of Gong et al.,
    "Past-Future Scheduler for LLM Serving" (ASPLOS 2025), with a stated fraction for its history.
    """

    name: ClassVar[str] = "peak-estimate"
    summary: ClassVar[str] = "wins when outputs use a known share of max_tokens; loses when that share drifts"

    output_fraction: float = 0.5
    """Share of the growth up to max_tokens that requests are expected to use, 0 to 1."""
    skip: bool = False
    """Whether requests behind it may try when this one does not fit; the core bounds how many."""

    def __post_init__(self) -> None:
        check_option(self, "output_fraction", at_least=0, at_most=1)

    def decide(self, candidate: AdmissionView, load: LoadView) -> Admission:
        promised = max(0, load.num_blocks_at_peak - load.num_blocks_held)
        own_growth = max(0, candidate.num_blocks_peak - candidate.num_blocks_known)
        growth = math.ceil(self.output_fraction * (promised + own_growth))
        peak = load.num_blocks_held + candidate.num_blocks_known + growth
        return _admit_if(peak <= load.device.num_blocks and _fits_now(candidate, load), self.skip)


def _fits_now(candidate: AdmissionView, load: LoadView) -> bool:
    needed = candidate.num_blocks_known + candidate.watermark_blocks + load.num_blocks_promised
    return needed <= load.device.num_available


def _admit_if(fits: bool, skip: bool) -> Admission:
    if fits:
        return Admission.ADMIT
    return Admission.SKIP if skip else Admission.WAIT
