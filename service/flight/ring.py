"""Keeps the last of what the scheduler was told and what it decided.

A ring cannot be replayed from any place, so it is made of stretches that each begin with a checkpoint of the
whole state; a full ring loses its oldest stretch. Only if no checkpoint could be taken does it lose single
entries, and the record then says that its beginning is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pageturner.service.flight.records import Entry, FlightRecord, FlightStart, Setting

ENTRIES_A_STEP = 2
"""A step is two entries, decided and taken; what comes between counts as well."""

STRETCHES = 4
"""A ring is cut into so many parts, and forgets them one by one."""


@dataclass(slots=True)
class _Stretch:
    """num_before: entries that came before its first one."""

    start: FlightStart | None
    num_before: int = 0
    entries: list[Entry] = field(default_factory=list)


class EntryRing:
    """Keeps the entries of about `num_steps` steps: at most ENTRIES_A_STEP times as many, of any kind.

    A step of 64 sequences takes 1.3 kB, in all the rest hardly more than its decisions.

    One thread adds; `record` may be called from any other.
    """

    def __init__(self, setting: Setting, start: FlightStart | None, num_steps: int) -> None:
        self.setting = setting
        self._max_entries = max(STRETCHES, num_steps * ENTRIES_A_STEP)
        # Replaced, never changed: what another thread has read stays whole.
        self._stretches: tuple[_Stretch, ...] = (_Stretch(start),)
        self._num_entries = 0

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the present stretch is long enough, or has lost its beginning."""
        current = self._stretches[-1]
        return current.start is None or len(current.entries) >= self._max_entries // STRETCHES

    def begin(self, start: FlightStart) -> None:
        """A new stretch: a replay can begin here."""
        self._stretches = (*self._stretches, _Stretch(start, len(self)))

    def add(self, entry: Entry) -> None:
        """Keep an entry; a full ring forgets its oldest stretch."""
        self._stretches[-1].entries.append(entry)
        self._num_entries += 1
        if self._num_entries <= self._max_entries:
            return
        oldest = self._stretches[0]
        num_lost = len(oldest.entries)
        if len(self._stretches) > 1:
            self._stretches = self._stretches[1:]
        else:
            num_lost = num_lost // STRETCHES + 1
            self._stretches = (_Stretch(None, oldest.num_before + num_lost, oldest.entries[num_lost:]),)
        self._num_entries -= num_lost

    def __len__(self) -> int:
        """Entries so far, dropped ones included."""
        return self._stretches[0].num_before + self._num_entries

    def record(self, reason: str) -> FlightRecord:
        """What is kept at this moment."""
        stretches = self._stretches
        entries: list[Entry] = []
        for stretch in stretches:
            entries += stretch.entries[:]
        first = stretches[0]
        return FlightRecord(reason, self.setting, first.start, first.num_before, tuple(entries))
