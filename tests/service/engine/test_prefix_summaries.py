"""What the engine tells of its prefix cache is what the core's definition says, numbered as it changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.core.inspection import SchedulerInspection
from pageturner.service.core.memory.prefix_cache import PrefixHasher
from pageturner.service.core.prefix_summary import MAX_FINGERPRINTS, PrefixSummary
from pageturner.service.engine.prefix_summaries import PrefixSummaries, fingerprints_of

HASHER = PrefixHasher(b"key")


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=12))
def test_fingerprints_are_those_of_the_definition(hashes: list[bytes]) -> None:
    hashes += hashes[:2]  # device and host may hold the same block
    assert fingerprints_of(tuple(hashes)) == PrefixSummary.of(1, 16, "", hashes).fingerprints


def test_as_many_are_told_as_the_definition_tells() -> None:
    hashes = tuple(n.to_bytes(4, "big") * 4 for n in range(MAX_FINGERPRINTS + 3))
    summary = PrefixSummaries(HASHER, 16).of(look(*hashes))
    assert summary == PrefixSummary.of(1, 16, HASHER.key_id, hashes)
    assert summary.is_truncated


def test_the_number_rises_with_each_change_and_no_other_look() -> None:
    summaries = PrefixSummaries(HASHER, 16)
    first = look(b"a" * 16)
    told = [
        summaries.of(each)
        for each in (look(), first, first, look(b"a" * 16), look(b"a" * 16, b"b" * 16), look())
    ]
    assert [each.revision for each in told] == [0, 1, 1, 1, 2, 3]
    assert [each.num_fingerprints for each in told] == [0, 1, 1, 1, 2, 0]


def look(*cached: bytes) -> SchedulerInspection:
    return SchedulerInspection(cached=cached)
