"""What requests have yet to do, and how long that takes beside others."""

from __future__ import annotations

from collections.abc import Sequence

from pageturner.service.core.outlook import NO_DRAFTING, Concurrency, Drafting
from pageturner.service.core.request import Request
from pageturner.service.core.request import Sequence as OneSequence
from pageturner.service.core.scheduling import views
from pageturner.service.core.scheduling.pace import SHORT, TYPICAL, Pace


def concurrency(pace: Pace, running: Sequence[Request]) -> Concurrency:
    """How long answers take beside these."""
    num_prompt = num_outputs = num_rows = 0
    drafting = NO_DRAFTING
    for request in running:
        num_rows += request.num_slots
        num_prompt += request.num_prompt_tokens - request.num_cached_prompt_tokens
        num_outputs += request.num_slots * pace.outputs_left(0, request.max_tokens, TYPICAL)
        if pace.has_drafts:
            drafting += sum((drafting_of(pace, s) for s in request.unfinished), NO_DRAFTING)
    ratio = pace.prompt_ratio
    if ratio is None:
        ratio = num_prompt / num_outputs if num_outputs else 0.0
    prices = pace.step, pace.prompt_token, pace.output_token
    return Concurrency(*prices, num_rows, ratio, drafting, pace.usual_drafting)


def next_end(pace: Pace, company: Concurrency, running: Sequence[Request]) -> float:
    """Seconds until the first of these has likely ended; 0 where there are none."""
    step = pace.step_seconds(company.num_rows + company.drafting.drafts)
    left = (
        company.prompt_token * num_uncomputed(request)
        + company.num_steps(likely_outputs(pace, request, SHORT), gain_of(pace, request)) * step
        for request in running
        if not request.is_paused
    )
    return min(left, default=0.0)


def drafting_of(pace: Pace, sequence: OneSequence) -> Drafting:
    """What guesses do to it: as measured, or as usual where nothing is."""
    request = sequence.request
    if request.beams is not None or request.new.params.max_draft_tokens == 0:
        return NO_DRAFTING
    return pace.usual_drafting if sequence.drafting is None else sequence.drafting


def gain_of(pace: Pace, request: Request) -> float:
    """Tokens beyond the one that each step yields of its slowest answer."""
    if not pace.has_drafts:
        return 0.0
    return min(drafting_of(pace, sequence).gain for sequence in request.unfinished)


def likely_outputs(pace: Pace, request: Request, share: float) -> int:
    """Tokens that the longest of its answers has yet to come, as `Pace.outputs_left` has it."""
    num_outputs = max(sequence.num_output_tokens for sequence in request.unfinished)
    return pace.outputs_left(num_outputs, request.max_tokens, share)


def num_uncomputed(request: Request) -> int:
    """Tokens of its prompt, or of what it lost, that are to be computed before it decodes."""
    lacking = views.num_known_tokens(request) - views.num_computed_tokens(request)
    return lacking if lacking > request.num_slots else 0
