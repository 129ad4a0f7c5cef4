"""What counts as an answer of a policy: each function makes a built-in value of one, or raises BadAnswer.

An answer's own methods are not trusted: a subclass of int may compare as it likes, and `__class__` may claim
anything. So types are asked of `type`, values are read through the built-in class, and the core is handed
copies of the built-in classes. What may be endless is read up to the length that can be right.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Mapping
from itertools import islice
from typing import Any

from pageturner.policies.interfaces import Admission, BatchSplit, Reclaim, SortKey
from pageturner.policies.views import BatchView
from pageturner.service.policy_host.calls import BadAnswer

WANTED: Mapping[str, str] = {
    "queue": "a tuple of at most 16 numbers (not NaN) and texts",
    "admission": "a member of Admission",
    "batch": "a BatchSplit within the budget that lets something advance",
    "victim": "the id of each candidate once",
    "reclaim": "a member of Reclaim that there is room for",
    "eviction": "a finite number",
    "routing": "ids of replicas that may take the request, the best first",
}
"""By axis, what a right answer is, for the log."""

MAX_KEY_PARTS = 16
MAX_TEXT_CHARACTERS = 1024
MAX_INT_BITS = 1024
MAX_REPLICAS_NAMED = 16

Comparable = tuple[tuple[int, float | str], ...]


def sort_key(answer: Any) -> SortKey:
    if not issubclass(type(answer), tuple) or tuple.__len__(answer) > MAX_KEY_PARTS:
        raise BadAnswer(answer)
    return tuple(_key_part(part, answer) for part in tuple.__iter__(answer))


def comparable(key: SortKey) -> Comparable:
    """Numbers before texts, so that any two keys compare, whatever a policy returns."""
    return tuple((1, part) if isinstance(part, str) else (0, part) for part in key)


def comparable_key(answer: Any) -> Comparable:
    return comparable(sort_key(answer))


def admission(answer: Any) -> Admission:
    if type(answer) is Admission:
        return answer
    raise BadAnswer(answer)


def reclaim(answer: Any) -> Reclaim:
    if type(answer) is Reclaim:
        return answer
    raise BadAnswer(answer)


def score(answer: Any) -> float:
    """Any finite number; a text that spells one is none."""
    if not hasattr(type(answer), "__float__") and not hasattr(type(answer), "__index__"):
        raise BadAnswer(answer)
    number = float(answer)
    if math.isfinite(number):
        return number
    raise BadAnswer(answer)


def batch_split(batch: BatchView) -> Callable[[Any], BatchSplit]:
    """Reads a split that lets something advance if there is work and budget."""

    def parse(answer: Any) -> BatchSplit:
        if not issubclass(type(answer), BatchSplit):
            raise BadAnswer(answer)
        chunk = answer.chunk_tokens
        split = BatchSplit(
            _count(answer.decode_tokens, answer),
            _count(answer.prefill_tokens, answer),
            None if chunk is None else _count(chunk, answer),
        )
        if not _is_possible(split, batch):
            raise BadAnswer(answer)
        return split

    return parse


class VictimReader:
    """Reads an order of candidates: as much of it as names any, once each, is kept if the rest is no good.

    known: the candidates' ids.
    """

    def __init__(self, known: Collection[str]) -> None:
        self._known = frozenset(known)
        self.understood: list[str] = []

    def parse(self, answer: Any) -> list[str]:
        """The whole order. Raises BadAnswer if an id is missing, unknown or named twice."""
        if issubclass(type(answer), (str, bytes, bytearray, Mapping, set, frozenset)):
            raise BadAnswer(answer)  # iterable, but not an order of requests
        told = [_id(item) for item in islice(iter(answer), len(self._known) + 1)]
        order = [rid for rid in dict.fromkeys(told) if rid in self._known]
        if not self.understood:
            self.understood = order
        if len(order) == len(self._known) == len(told):
            return order
        raise BadAnswer(answer)


def replica_order(known: Container[str]) -> Callable[[Any], list[str]]:
    """Reads replica ids, best first, each kept once; as many as MAX_REPLICAS_NAMED are read."""

    def parse(answer: Any) -> list[str]:
        if issubclass(type(answer), (str, bytes, bytearray, Mapping, set, frozenset)):
            raise BadAnswer(answer)
        named = [_id(item) for item in islice(iter(answer), MAX_REPLICAS_NAMED)]
        order = [name for name in dict.fromkeys(named) if name is not None and name in known]
        if not order or None in named:
            raise BadAnswer(answer)
        return order

    return parse


def _id(item: object) -> str | None:
    return str.__str__(item) if issubclass(type(item), str) else None


def _key_part(part: Any, answer: object) -> float | int | str:
    kind = type(part)
    if issubclass(kind, float) and not math.isnan(value := float.__float__(part)):
        return value
    if issubclass(kind, int) and int.bit_length(part) <= MAX_INT_BITS:
        return int.__int__(part)
    if issubclass(kind, str) and str.__len__(part) <= MAX_TEXT_CHARACTERS:
        return str.__str__(part)
    raise BadAnswer(answer)


def _count(number: Any, answer: object) -> int:
    if issubclass(type(number), int) and type(number) is not bool and int.__ge__(number, 0):
        return int.__int__(number)
    raise BadAnswer(answer)


def _is_possible(split: BatchSplit, batch: BatchView) -> bool:
    if split.decode_tokens + split.prefill_tokens > batch.token_budget:
        return False
    decodes = min(split.decode_tokens, batch.num_decode_tokens)
    prefills = split.prefill_tokens if split.chunk_tokens != 0 else 0
    may_prefill = bool(batch.prefill_tokens) or batch.num_waiting > 0
    return decodes > 0 or (may_prefill and prefills > 0) or not (batch.num_decode_tokens or may_prefill)
