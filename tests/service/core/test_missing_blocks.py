"""Which blocks are asked for: those behind what is here, as many as have room, unless too few tokens lack."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from pageturner.service.core.missing_blocks import missing_blocks

BLOCK = 4


@dataclass(frozen=True)
class Arrived:
    blocks: frozenset[bytes]
    capacity: int

    def holds(self, block_hash: bytes) -> bool:
        return block_hash in self.blocks


@given(st.data())
def test_what_is_asked_for_continues_what_is_here(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 40), "tokens")
    hashes = [bytes([index]) for index in range((num_tokens - 1) // BLOCK)]
    num_held = data.draw(st.integers(0, len(hashes)), "held")
    arrived = Arrived(
        data.draw(st.frozensets(st.sampled_from(hashes)) if hashes else st.just(frozenset()), "arrived"),
        data.draw(st.integers(1, 12), "room"),
    )
    min_tokens = data.draw(st.integers(1, 30), "min_tokens")
    found = missing_blocks(
        hashes, num_held, arrived, num_tokens=num_tokens, block_size=BLOCK, min_tokens=min_tokens
    )
    here, behind = hashes[: found.num_here], hashes[found.num_here :]
    assert found.num_here >= num_held
    assert all(arrived.holds(each) for each in here[num_held:])
    assert not behind or not arrived.holds(behind[0])
    lacking = num_tokens - len(here) * BLOCK
    assert list(found.hashes) == (behind[: arrived.capacity] if lacking >= min_tokens else [])
