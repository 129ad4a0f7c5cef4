"""Summaries of a prefix cache: what they find, and that changes lead from one to the next."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.core_harness import CoreHarness

from pageturner.policies import registry
from pageturner.service.core import prefix_summary
from pageturner.service.core.memory.prefix_cache import PrefixHasher, prefix_key
from pageturner.service.core.prefix_summary import PrefixSummary

HASHES = st.lists(st.binary(min_size=16, max_size=16), max_size=12)


def of(hashes: list[bytes], revision: int = 1) -> PrefixSummary:
    return PrefixSummary.of(revision, 4, "key", hashes)


@settings(deadline=None)
@given(HASHES, HASHES)
def test_a_prompt_is_found_up_to_its_first_block_that_is_not_cached(
    cached: list[bytes], wanted: list[bytes]
) -> None:
    known = {block_hash[:4] for block_hash in cached}
    expected = next((n for n, each in enumerate(wanted) if each[:4] not in known), len(wanted))
    assert of(cached).num_leading(wanted) == expected
    assert of(cached).num_leading(cached) == len(cached)


@settings(deadline=None)
@given(HASHES, HASHES)
def test_changes_lead_from_one_summary_to_the_next(old: list[bytes], new: list[bytes]) -> None:
    before, after = of(old), of(new, 2)
    assert before.apply(before.change_to(after)) == after
    unchanged = before.change_to(of(old, 2))
    assert (unchanged.added, unchanged.removed) == (b"", b"")


def test_fingerprints_are_the_wires_whatever_order_they_came_in() -> None:
    hashes = [
        bytes([9, 0, 0, 1]) + bytes(12),
        bytes([1, 0, 0, 2]) + bytes(12),
        bytes([9, 0, 0, 1]) + b"x" * 12,
    ]
    assert of(hashes).fingerprints == bytes([9, 0, 0, 1, 1, 0, 0, 2])
    assert of(hashes).num_fingerprints == 2


def test_what_was_cached_last_is_left_out_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_summary, "MAX_FINGERPRINTS", 2)
    chain = [bytes([n]) * 16 for n in range(3)]
    summary = of(chain)
    assert summary.is_truncated
    assert summary.num_leading(chain) == 2
    assert not of(chain[:2]).is_truncated


def _one_too_few(hashes: list[bytes]) -> list[bytes]:
    return hashes[1:]


def _as_they_came(hashes: list[bytes]) -> list[bytes]:
    return hashes


@pytest.mark.parametrize(("spoil", "is_right"), [(_as_they_came, True), (_one_too_few, False)])
def test_what_the_scheduler_cached_is_found_by_who_hashes_alike(
    spoil: Callable[[list[bytes]], list[bytes]], is_right: bool
) -> None:
    policies = registry.default_policies()
    harness = CoreHarness(policies, num_blocks=12, block_size=2)
    prompt = (1, 2, 3, 4, 5, 6, 7)
    harness.submit(prompt, max_tokens=2)
    harness.run_to_end()
    cached = spoil(list(harness.scheduler.inspect(0.0).cached))
    hashes = PrefixHasher(b"test").chain(prompt, 2, adapter="", salt="")
    assert len(hashes) == 3
    assert (PrefixSummary.of(1, 2, "", cached).num_leading(hashes) == 3) is is_right
    assert (
        PrefixSummary.of(1, 2, "", cached).num_leading(
            PrefixHasher(b"other").chain(prompt, 2, adapter="", salt="")
        )
        == 0
    )
    other_salt = PrefixHasher(b"test").chain(prompt, 2, adapter="", salt="s")
    assert PrefixSummary.of(1, 2, "", cached).num_leading(other_salt) == 0


def test_keys_are_told_apart_and_not_told() -> None:
    one, other = PrefixHasher(prefix_key(b"a" * 16)), PrefixHasher(prefix_key(b"b" * 16))
    assert one.key_id == PrefixHasher(prefix_key(b"a" * 16)).key_id != other.key_id
    assert len(bytes.fromhex(one.key_id)) == 8
