"""Frames over a socket between rank 0 and one other rank: a kind, a length, so many bytes."""

from __future__ import annotations

import socket
import struct

_HEADER = struct.Struct("<BI")
_READ_BYTES = 1 << 16
MOST_BYTES = 1 << 28
"""Of a frame. A step of 65,536 new tokens in as many blocks takes two million."""


class ChannelClosed(ConnectionError):
    """The other end is gone."""


class Channel:
    """One end. Used by one thread at a time. Owns the socket."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._read = bytearray()

    def send(self, kind: int, payload: bytes = b"", timeout: float | None = None) -> None:
        """Raises ChannelClosed, or TimeoutError where the other end takes nothing for so many seconds."""
        try:
            self._socket.settimeout(timeout)
            self._socket.sendall(_HEADER.pack(kind, len(payload)) + payload)
        except TimeoutError:
            raise
        except OSError as error:
            raise ChannelClosed(f"nothing can be sent: {error.strerror}") from error

    def receive(self, timeout: float | None = None) -> tuple[int, bytes]:
        """The next frame. Raises ChannelClosed, or TimeoutError after so many seconds without a byte."""
        self._fill(_HEADER.size, timeout)
        kind, length = _HEADER.unpack_from(self._read)
        if length > MOST_BYTES:
            raise ChannelClosed(f"what is read is no frame: it would have {length} bytes")
        end = _HEADER.size + length
        self._fill(end, timeout)
        payload = bytes(self._read[_HEADER.size : end])
        del self._read[:end]
        return kind, payload

    def close(self) -> None:
        """The other end sees it at once. Closing twice is no error."""
        self._socket.close()

    def _fill(self, num_bytes: int, timeout: float | None) -> None:
        """Have so many bytes been read."""
        while len(self._read) < num_bytes:
            try:
                self._socket.settimeout(timeout)
                received = self._socket.recv(_READ_BYTES)
            except TimeoutError:
                raise
            except OSError as error:
                raise ChannelClosed(f"nothing can be read: {error.strerror}") from error
            if not received:
                raise ChannelClosed("the other end is gone")
            self._read += received
