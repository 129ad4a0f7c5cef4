"""Digests of chunks tell what prompts share, as the hashes of blocks do."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.simulator.chunks import Chains, ChunkCache, digests_of
from pageturner.service.simulator.workload import Segment, WorkloadRequest

SEGMENTS = st.lists(st.builds(Segment, st.integers(1, 3), st.integers(1, 40)), min_size=1, max_size=5)


@given(SEGMENTS, SEGMENTS, st.integers(1, 17))
def test_two_prompts_share_as_many_digests_as_chunks_from_the_start(
    one: list[Segment], two: list[Segment], chunk_tokens: int
) -> None:
    """Where their segments are the same up to there, as those of turns of a conversation are."""
    shared = one[: len(one) // 2]
    left, right = digests_of([*shared, *one], chunk_tokens), digests_of([*shared, *two], chunk_tokens)
    assert len(left) == sum(s.num_tokens for s in (*shared, *one)) // chunk_tokens
    num_shared = sum(segment.num_tokens for segment in shared) // chunk_tokens
    assert left[:num_shared] == right[:num_shared]
    tokens = [[t for s in (*shared, *rest) for t in s.token_ids] for rest in (one, two)]
    for depth, (mine, other) in enumerate(zip(left, right, strict=False)):
        end = (depth + 1) * chunk_tokens
        assert mine != other or tokens[0][:end] == tokens[1][:end], "equal digests, different tokens"


def test_a_chain_is_of_the_prompt_and_then_of_the_answer() -> None:
    request = WorkloadRequest(0.0, (Segment(1, 30), Segment(2, 5)), Segment(3, 30))
    chain = Chains([request], 16).of(0)
    assert (chain.num_prompt, len(chain.digests)) == (2, 4)


def test_tails_go_before_heads_and_what_is_held_stays() -> None:
    cache = ChunkCache()
    cache.hold((1, 2, 3))
    cache.hold((1, 2))
    cache.release((1, 2, 3), num_computed=3)
    assert (cache.num_held, cache.num_hits((1, 2, 3))) == (2, 3)
    cache.release((1, 2), num_computed=2)
    cache.shrink(2)
    assert cache.num_hits((1, 2, 3)) == 2
    cache.shrink(0)
    assert cache.num_hits((1,)) == 0


def test_what_was_not_computed_is_not_found() -> None:
    cache = ChunkCache()
    cache.hold((1, 2, 3))
    cache.release((1, 2, 3), num_computed=1)
    assert cache.num_hits((1, 2, 3)) == 1
