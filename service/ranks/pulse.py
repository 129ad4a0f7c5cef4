"""Signs of life: each rank gives one every half second, and rank 0 looks whether they come.

A rank that was killed, or has crashed, has closed its socket: that is seen at once. One that is stopped, or
hangs with the interpreter's lock held, gives no sign. In the other direction the end of rank 0, whatever ends
it, closes the other end, and a rank whose rank 0 is gone ends itself, though its computing thread may wait in
a collective for ever. (PR_SET_PDEATHSIG would not do: it tells of the end of the thread that started a
process, and models are loaded by a thread that ends.)
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Callable, Iterable, Mapping

BEAT_SECONDS = 0.5
_BEAT = b"."
_READ_BYTES = 1 << 12


class Pulse:
    """A rank's side: beats until rank 0 is gone, then calls on_orphaned, in a thread of its own."""

    def __init__(
        self, connection: socket.socket, on_orphaned: Callable[[], object], seconds: float = BEAT_SECONDS
    ) -> None:
        self._socket = connection
        self._on_orphaned = on_orphaned
        self._seconds = seconds
        connection.settimeout(seconds)
        self._thread = threading.Thread(target=self._run, name="pageturner-pulse", daemon=True)

    def start(self) -> None:
        """Begin to beat. Once only."""
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                # Not waited for: where rank 0 stands still, room for beats ends some time.
                self._socket.send(_BEAT, socket.MSG_DONTWAIT)
            except BlockingIOError:
                pass
            except OSError:
                break
            try:
                if not self._socket.recv(1):  # rank 0 sends nothing: this is the pause between two beats
                    break
            except TimeoutError:
                pass
            except OSError:
                break
        self._on_orphaned()


class Silences:
    """For how many looks in a row each rank has given no sign.

    Looks are counted, not seconds: rank 0 may have stood still itself, and finds all signs at its next look.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._num_looks = dict.fromkeys(ranks, 0)

    def note(self, rank: int) -> None:
        """It gave a sign, before the next look."""
        self._num_looks[rank] = -1

    def look(self, most: int) -> int | None:
        """One more look has passed. A rank that gave no sign in more than `most` of them, if there is one."""
        for rank in self._num_looks:
            self._num_looks[rank] += 1
        return next((rank for rank, num_looks in self._num_looks.items() if num_looks > most), None)


class Lookout:
    """Rank 0's side: watches the pulses of all other ranks, in a thread of its own, until the first loss.

    pulses: sockets by rank, which it owns once it is started. on_lost: called in that thread with the rank,
    and what is known of why: empty where its socket was closed. silent_seconds: how long a rank may give no
    sign. now: seconds.
    Raises OSError where the system refuses what it watches with.
    """

    def __init__(
        self,
        pulses: Mapping[int, socket.socket],
        on_lost: Callable[[int, str], object],
        silent_seconds: float,
        now: Callable[[], float],
        look_seconds: float = BEAT_SECONDS,
    ) -> None:
        self._pulses = pulses
        self._on_lost = on_lost
        self._silent_seconds = silent_seconds
        self._now = now
        self._look_seconds = look_seconds
        self._silences = Silences(pulses)
        self._ended, self._end = socket.socketpair()
        try:
            self._selector = selectors.DefaultSelector()
        except BaseException:
            self._let_go()
            raise
        self._thread = threading.Thread(target=self._run, name="pageturner-lookout", daemon=True)

    def start(self) -> None:
        """Begin to watch. Once only. Raises RuntimeError where the system refuses a thread."""
        try:
            self._thread.start()
        except BaseException:
            self._selector.close()
            self._let_go()
            raise

    def bear(self, silent_seconds: float) -> None:
        """From now on a rank may be silent for so long. From any thread."""
        self._silent_seconds = silent_seconds

    def close(self) -> None:
        """Watch no more, and let go of the pulses. From any thread; closing twice is no error."""
        self._end.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _let_go(self) -> None:
        """Of what tells the thread to end, which there is none of."""
        self._ended.close()
        self._end.close()

    def _run(self) -> None:
        with self._selector as selector:
            selector.register(self._ended, selectors.EVENT_READ)
            for rank, pulse in self._pulses.items():
                pulse.setblocking(False)
                selector.register(pulse, selectors.EVENT_READ, rank)
            lost = None
            while lost is None and self._watch_once(selector):
                most = round(self._silent_seconds / self._look_seconds) - 1
                lost = self._silences.look(most)
        if lost is not None:
            self._on_lost(lost, f"it has given no sign of life for {self._silent_seconds:g} s")
        for pulse in (*self._pulses.values(), self._ended):
            pulse.close()

    def _watch_once(self, selector: selectors.BaseSelector) -> bool:
        """One look. Whether there is to be another."""
        ends = self._now() + self._look_seconds
        while (left := ends - self._now()) > 0:
            for key, _ in selector.select(left):
                if key.fileobj is self._ended:
                    return False
                if not _hears(self._pulses[key.data]):
                    self._on_lost(key.data, "")
                    return False
                self._silences.note(key.data)
        return True


def _hears(pulse: socket.socket) -> bool:
    """Take the signs that have come. Whether more may come."""
    try:
        return bool(pulse.recv(_READ_BYTES))
    except BlockingIOError:
        return True
    except OSError:
        return False
