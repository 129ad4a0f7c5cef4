"""Frames between two processes: whole ones in their order, and an end that is noticed wherever it comes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageturner.service.ranks import messages
from pageturner.service.ranks.channel import MOST_BYTES, Channel, ChannelClosed
from pageturner.service.ranks.messages import KINDS, STEP, BadMessage, Capacity


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the bare socket at its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def frame(kind: int, payload: bytes) -> bytes:
    return struct.pack("<BI", kind, len(payload)) + payload


def test_frames_that_come_in_pieces_and_together(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    content = frame(3, b"abc") + frame(0, b"") + frame(7, b"z" * 5000)
    other.sendall(content[:4])
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    other.sendall(content[4:])
    assert [channel.receive(1) for _ in range(3)] == [(3, b"abc"), (0, b""), (7, b"z" * 5000)]


@pytest.mark.parametrize("cut", [0, 3, 5, 7])
def test_an_end_in_the_middle_of_a_frame(cut: int, ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(frame(3, b"abc")[:cut])
    other.close()
    with pytest.raises(ChannelClosed, match="the other end is gone"):
        channel.receive(1)


def test_what_is_no_frame_is_not_waited_for(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(struct.pack("<BI", 1, MOST_BYTES + 1))
    with pytest.raises(ChannelClosed, match="no frame"):
        channel.receive(60)


JUNK = (b"", b"{}", b"[]", b"7", b'{"number": "x"}', b'{"reason": "", "more": 1}', b"[" * 5000)


@settings(max_examples=60)
@given(st.integers(0, len(KINDS) + 2), st.binary(max_size=60) | st.sampled_from(JUNK))
def test_no_bytes_are_more_than_a_bad_message(kind: int, payload: bytes) -> None:
    try:
        message = messages.read(kind, payload)
    except BadMessage:
        return
    assert type(message) is KINDS[kind - 1]


FIELDS = b'"num_blocks": 1, "num_swap_blocks": 2'


@pytest.mark.parametrize(
    "payload",
    [
        b"[" * 100_000,
        b"\xff",
        b"{",
        b"null",
        b"{%b}" % FIELDS,
        b'{%b, "num_host_cache_blocks": 3, "a": 4}' % FIELDS,
    ],
    ids=["deep", "no text", "cut", "no table", "a field less", "one more"],
)
def test_each_way_to_be_no_message_is_told_alike(payload: bytes) -> None:
    kind = KINDS.index(Capacity) + 1
    with pytest.raises(BadMessage, match="no Capacity"):
        messages.read(kind, payload)
    whole = b'{%b, "num_host_cache_blocks": 3}' % FIELDS
    assert messages.read(kind, whole) == Capacity(1, 2, 3)


@pytest.mark.parametrize("kind", [STEP, len(KINDS) + 1])
def test_a_frame_of_no_kind_of_message_is_a_bad_one(kind: int) -> None:
    with pytest.raises(BadMessage, match=f"a frame of kind {kind}"):
        messages.read(kind, b"{}")
    assert type(messages.read(len(KINDS), b'{"numbers": []}')) is KINDS[-1]
