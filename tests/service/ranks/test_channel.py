"""Frames between ranks arrive whole and in order, and nothing waits longer than it was told to."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from pageturner.service.ranks.channel import Channel, ChannelClosed


@pytest.fixture
def ends() -> Iterator[tuple[Channel, socket.socket]]:
    """A channel, and the socket that is its other end."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Channel(ours), theirs


def test_frames_come_out_as_they_went_in(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    far = Channel(other)
    frames = [(3, b"abc"), (0, b""), (255, bytes(20_000)), (1, b"x")]
    for kind, payload in frames[:2]:
        channel.send(kind, payload)
    assert [far.receive(), far.receive()] == frames[:2]
    for kind, payload in frames[2:]:
        channel.send(kind, payload, timeout=30.0)
    assert [far.receive(30.0), far.receive(30.0)] == frames[2:]


def test_a_frame_may_come_in_pieces(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    sent = b"\x07\x03\x00\x00\x00abc\x08\x00\x00\x00\x00"
    for start in range(len(sent) - 1):
        other.sendall(sent[start : start + 1])
    assert channel.receive(30.0) == (7, b"abc")
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    other.sendall(sent[-1:])
    assert channel.receive(30.0) == (8, b"")


@pytest.mark.parametrize("is_used", [False, True])
def test_an_end_that_takes_nothing_is_not_waited_for(
    ends: tuple[Channel, socket.socket], is_used: bool
) -> None:
    channel, other = ends
    if is_used:  # what was waited for once says nothing of the next time
        other.sendall(b"\x01\x00\x00\x00\x00")
        channel.receive()
    with pytest.raises(TimeoutError):
        channel.send(0, bytes(64 << 20), timeout=0.05)


def test_an_end_that_is_gone_is_told(ends: tuple[Channel, socket.socket]) -> None:
    channel, other = ends
    other.sendall(b"\x01\xff\x00\x00\x00half a frame")
    other.close()
    with pytest.raises(ChannelClosed, match="gone"):
        channel.receive(30.0)
    with pytest.raises(ChannelClosed, match="nothing can be sent"):
        channel.send(0)
