"""What counts as an answer of a policy: each function converts one, or raises BadAnswer (or anything)."""

from __future__ import annotations

import math
from typing import Any

from pageturner.policies.interfaces import Admission, BatchSplit, Reclaim, SortKey
from pageturner.policies.views import BatchView
from pageturner.service.policy_host.caller import BadAnswer


def sort_key(answer: Any) -> SortKey:
    if isinstance(answer, tuple) and all(map(_may_sort, answer)):
        return answer
    raise BadAnswer(answer)


def comparable(key: SortKey) -> tuple[tuple[int, float | str], ...]:
    """Numbers before texts, so that any two keys compare, whatever a policy returns."""
    return tuple((1, part) if isinstance(part, str) else (0, part) for part in key)


def admission(answer: Any) -> Admission:
    if isinstance(answer, Admission):
        return answer
    raise BadAnswer(answer)


def reclaim(answer: Any) -> Reclaim:
    if isinstance(answer, Reclaim):
        return answer
    raise BadAnswer(answer)


def score(answer: Any) -> float:
    number = float(answer)
    if math.isfinite(number):
        return number
    raise BadAnswer(answer)


def batch_split(answer: Any, batch: BatchView) -> BatchSplit:
    """A split that lets something advance if there is work and budget."""
    if isinstance(answer, BatchSplit) and _is_possible(answer, batch):
        return answer
    raise BadAnswer(answer)


def _may_sort(part: object) -> bool:
    """Whether a part of a key compares with any other: a text, or a number that is not NaN."""
    return isinstance(part, (str, int)) or (isinstance(part, float) and part == part)


def _is_possible(split: BatchSplit, batch: BatchView) -> bool:
    numbers = [split.decode_tokens, split.prefill_tokens]
    if split.chunk_tokens is not None:
        numbers.append(split.chunk_tokens)
    if any(not isinstance(number, int) or number < 0 for number in numbers):
        return False
    if split.decode_tokens + split.prefill_tokens > batch.token_budget:
        return False
    decodes = min(split.decode_tokens, batch.num_decode_tokens)
    prefills = split.prefill_tokens if split.chunk_tokens != 0 else 0
    may_prefill = bool(batch.prefill_tokens) or batch.num_waiting > 0
    return decodes > 0 or (may_prefill and prefills > 0) or not (batch.num_decode_tokens or may_prefill)
