"""What requests have yet to do, and how long that takes beside others."""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.service.core.outlook import Concurrency
from pageturner.service.core.request import Request
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.pace import SHORT, TYPICAL, Pace


def concurrency(pace: Pace, running: Sequence[Request]) -> Concurrency:
    """How long answers take beside these."""
    num_prompt = num_outputs = num_rows = 0
    for request in running:
        num_rows += request.num_slots
        num_prompt += request.num_prompt_tokens - request.num_cached_prompt_tokens
        num_outputs += request.num_slots * pace.outputs_left(0, request.max_tokens, TYPICAL)
    ratio = num_prompt / num_outputs if num_outputs else 0.0
    return Concurrency(pace.step, pace.prompt_token, pace.output_token, num_rows, ratio)


def next_end(pace: Pace, company: Concurrency, running: Sequence[Request]) -> float:
    """Seconds until the first of these has likely ended; 0 where there are none."""
    left = (
        company.prompt_token * num_uncomputed(request)
        + likely_outputs(pace, request, SHORT) * pace.step_seconds(company.num_rows)
        for request in running
        if not request.is_paused
    )
    return min(left, default=0.0)


def likely_outputs(pace: Pace, request: Request, share: float) -> int:
    """Tokens that the longest of its answers has yet to come, as `Pace.outputs_left` has it."""
    num_outputs = max(sequence.num_output_tokens for sequence in request.unfinished)
    return pace.outputs_left(num_outputs, request.max_tokens, share)


def num_uncomputed(request: Request) -> int:
    """Tokens of its prompt, or of what it lost, that are to be computed before it decodes."""
    lacking = views.num_known_tokens(request) - views.num_computed_tokens(request)
    return lacking if lacking > request.num_slots else 0
