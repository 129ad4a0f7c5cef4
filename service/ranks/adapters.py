"""Adapters on all ranks: each reads the folder itself and holds its part, or none does.

Who may name an adapter and which requests have one is counted on rank 0 alone (`engine.adapters`). The other
ranks are told to read one before rank 0 lets requests have it, and to let go of it once rank 0 has: they know
it by the number of its reading, so that equal contents may come and go at the same time. All of this passes
through a socket beside that of steps, which wait for no file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pageturner.service.engine.adapter_reports import AdapterFiles, ReadAdapter
from pageturner.service.errors import AdapterError
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.adapters import AdapterWeights
from pageturner.service.ranks import messages
from pageturner.service.ranks.channel import Channel, ChannelClosed
from pageturner.service.ranks.follower import LONGEST_REASON
from pageturner.service.ranks.leader import Leader
from pageturner.service.ranks.messages import (
    AdapterLoaded,
    AdapterRefused,
    BadMessage,
    ForgetAdapters,
    LoadAdapter,
)
from pageturner.service.ranks.processes import RankProcess

Read = Callable[[Path, int, int], AdapterWeights]
"""This rank's part of what a folder holds, within a largest rank and bytes. Raises AdapterError."""


@dataclass(frozen=True, slots=True)
class _OnAllRanks:
    """`ReadAdapter` that every rank has read. own: rank 0's. num_bytes: of all ranks together."""

    own: ReadAdapter
    number: int
    num_bytes: int
    on_put: Callable[[str, int], object]

    @property
    def digest(self) -> str:
        return self.own.digest

    @property
    def rank(self) -> int:
        return self.own.rank

    @property
    def modules(self) -> tuple[str, ...]:
        return self.own.modules

    def put(self) -> None:
        self.on_put(self.digest, self.number)
        self.own.put()


class RankedAdapters:
    """`AdapterFiles` on all ranks. files: rank 0's own. max_rank, max_bytes: what may be read, of one.

    One is read at a time; what was read before and not put is let go of then.
    """

    refusal: str | None = None

    def __init__(self, files: AdapterFiles, leader: Leader, max_rank: int, max_bytes: int) -> None:
        self._files, self._leader = files, leader
        self._max_rank, self._max_bytes = max_rank, max_bytes
        self._number = 0
        self._held: dict[str, int] = {}
        self._not_put: set[int] = set()
        # Of the channels, which one thread uses: the event loop waits for no other rank.
        self._speaker = ThreadPoolExecutor(1, "pageturner-adapters")

    def read(self, folder: Path) -> ReadAdapter:
        """Raises AdapterError where a rank refuses it, after which none holds it; RankLost."""
        own = self._files.read(folder)
        return self._speaker.submit(self._read_on_all, folder.absolute(), own).result()

    def drop(self, digest: str) -> None:
        self._files.drop(digest)
        self._speaker.submit(self._forget, (self._held.pop(digest),))

    def _note_put(self, digest: str, number: int) -> None:
        self._not_put.discard(number)
        self._held[digest] = number

    def _read_on_all(self, folder: Path, own: ReadAdapter) -> _OnAllRanks:
        self._forget(self._not_put)
        self._not_put.clear()
        self._number += 1
        number = self._number
        told = LoadAdapter(number, str(folder), own.digest, self._max_rank, self._max_bytes)
        for process in self._leader.processes:
            try:
                messages.send(process.adapters, told)
            except ChannelClosed:
                raise self._leader.lost(process.rank) from None
        answers = [(process, self._answer(process, number)) for process in self._leader.processes]
        refusals = [
            f"rank {process.rank}: {answer.reason}"
            for process, answer in answers
            if isinstance(answer, AdapterRefused)
        ]
        num_bytes = own.num_bytes
        num_bytes += sum(answer.num_bytes for _, answer in answers if isinstance(answer, AdapterLoaded))
        if not refusals and num_bytes > self._max_bytes:
            refusals.append(f"takes {num_bytes} bytes of all ranks; all adapters may take {self._max_bytes}")
        if refusals:
            self._forget((number,))
            raise AdapterError("; ".join(refusals))
        self._not_put.add(number)
        return _OnAllRanks(own, number, num_bytes, self._note_put)

    def _answer(self, process: RankProcess, number: int) -> AdapterLoaded | AdapterRefused:
        """Waits for as long as the rank gives signs of life. Raises RankLost."""
        try:
            answer = messages.receive(process.adapters)
            if not isinstance(answer, AdapterLoaded | AdapterRefused) or answer.number != number:
                raise BadMessage(f"{answer} came where adapter {number} was due")
        except ChannelClosed:
            raise self._leader.lost(process.rank) from None
        except BadMessage as error:
            raise self._leader.lost(process.rank, f"it is not understood: {error}") from error
        return answer

    def _forget(self, numbers: Iterable[int]) -> None:
        if not (told := ForgetAdapters(tuple(numbers))).numbers:
            return
        for process in self._leader.processes:
            with suppress(ChannelClosed):  # of a rank that is lost, which its pulse tells
                messages.send(process.adapters, told)


class AdapterHolder:
    """Another rank's side: reads what rank 0 says, and lets steps find it in the store."""

    def __init__(
        self, channel: Channel, read: Read, store: AdapterStore, logger: FilteringBoundLogger
    ) -> None:
        self._channel, self._read, self._store, self._logger = channel, read, store, logger
        self._held: dict[int, AdapterWeights] = {}

    def run(self) -> None:
        """Until rank 0 is gone, or is not understood: then it sees that this rank hears no more."""
        try:
            while True:
                match messages.receive(self._channel):
                    case LoadAdapter() as told:
                        messages.send(self._channel, self._load(told))
                    case ForgetAdapters(numbers):
                        for number in numbers:
                            self._forget(number)
                    case other:
                        raise BadMessage(f"{type(other).__name__} came where an adapter was due")
        except ChannelClosed:
            pass
        except BadMessage as error:
            self._logger.error("adapters_not_understood", reason=str(error))
        finally:
            self._channel.close()

    def _load(self, told: LoadAdapter) -> AdapterLoaded | AdapterRefused:
        try:
            weights = self._read(Path(told.folder), told.max_rank, told.max_bytes)
        except AdapterError as error:
            return AdapterRefused(told.number, str(error)[:LONGEST_REASON])
        except Exception as error:  # whatever it is, rank 0 must not wait for ever
            self._logger.error("adapter_failed", path=told.folder, exc_info=error)
            return AdapterRefused(told.number, f"{type(error).__name__}: {error}"[:LONGEST_REASON])
        if weights.digest != told.digest:
            return AdapterRefused(told.number, "its folder holds another adapter than rank 0 has read there")
        self._held[told.number] = weights
        self._store.put(weights)
        return AdapterLoaded(told.number, weights.num_bytes)

    def _forget(self, number: int) -> None:
        gone = self._held.pop(number, None)
        if gone is not None and all(other.digest != gone.digest for other in self._held.values()):
            self._store.drop(gone.digest)
