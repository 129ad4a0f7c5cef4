"""Adapters on all ranks, without a model: all ranks hold what rank 0 lets requests have, whatever fails."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_adapters import FakeFiles
from support.planting import plant
from support.scripted import recording_logger

from pageturner.service.engine.adapter_options import AdapterOptions
from pageturner.service.engine.adapter_reports import Lease
from pageturner.service.engine.adapters import Adapters
from pageturner.service.errors import AdapterError, AdapterNotFound, AdaptersFull, InvalidArgument, RankLost
from pageturner.service.model.adapter_store import AdapterStore
from pageturner.service.model.adapters import AdapterWeights
from pageturner.service.ranks import adapters as real
from pageturner.service.ranks import messages
from pageturner.service.ranks.channel import Channel
from pageturner.service.ranks.messages import Done
from pageturner.service.sizes import Bytes

MEMORY = 100
NUM_OTHERS = 2


@dataclass
class Rank:
    """Another rank's side, in a thread of this process. changed: what its folders hold in place of what
    rank 0 finds there. stored: digests that its steps find."""

    number: int
    module: ModuleType
    changed: dict[str, str] = field(default_factory=dict)
    store: AdapterStore = field(default_factory=AdapterStore)

    def __post_init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        holder = self.module.AdapterHolder(Channel(theirs), self._read, self.store, recording_logger()[0])
        self.thread = threading.Thread(target=holder.run, daemon=True)
        self.thread.start()

    @property
    def stored(self) -> set[str]:
        return set(self.store._weights)

    def _read(self, folder: Path, max_rank: int, max_bytes: int) -> AdapterWeights:
        assert (max_rank, max_bytes) == (8, MEMORY)
        content = self.changed.get(folder.name, folder.name)
        if content.startswith("bad"):
            raise AdapterError(f"{content}: not served")
        if content.startswith("breaks"):
            raise ZeroDivisionError(content)
        return AdapterWeights(content, 8, ("q_proj",), int(content.rpartition("-")[2]), ())


class Ranked:
    """`Adapters` over all ranks: rank 0's files and the other ranks."""

    def __init__(self, module: ModuleType) -> None:
        self.files = FakeFiles()
        self.others = [Rank(number, module) for number in range(1, NUM_OTHERS + 1)]
        leader = SimpleNamespace(
            processes=[SimpleNamespace(rank=rank.number, adapters=rank.channel) for rank in self.others],
            lost=lambda rank, why="": RankLost(f"rank {rank} is lost: {why}"),
        )
        self.ranked = module.RankedAdapters(self.files, cast(Any, leader), 8, MEMORY)
        self.adapters = Adapters(self.ranked, AdapterOptions(memory=Bytes(MEMORY)), recording_logger()[0])

    def check(self) -> None:
        """What requests may have on rank 0 is there on all others."""
        for rank in self.others:
            assert self.files.loaded <= rank.stored, (rank.number, self.files.loaded, rank.stored)

    def check_at_rest(self) -> None:
        """And nothing else is, once the next one is read."""
        self.ranked.read(Path("probe-0"))
        for rank in self.others:
            assert rank.stored == self.files.loaded | {"probe-0"}, (rank.stored, self.files.loaded)


@contextmanager
def on_ranks(module: ModuleType = real) -> Iterator[Ranked]:
    ranked = Ranked(module)
    try:
        yield ranked
    finally:
        for rank in ranked.others:
            rank.channel.close()
        for rank in ranked.others:
            rank.thread.join()


CONTENTS = ("one-10", "two-10", "three-15", "bad-5", "wide-20", "wider-30")
"""The number is what each of three ranks holds of it."""
NAMES = ("a", "b", "c", "d")


async def any_history(ranked: Ranked, dice: random.Random, num_moves: int) -> None:
    """Loads, unloads, requests and their ends, and ranks that fail to read; checked after each."""
    leases: list[Lease] = []
    for _ in range(num_moves):
        rank = dice.choice(ranked.others)
        rank.changed = {dice.choice(CONTENTS): dice.choice(("bad-1", "breaks-1", "other-5")), **rank.changed}
        if dice.random() < 0.7:
            rank.changed = {}
        match dice.choice(("load", "load", "unload", "begin", "begin", "end")):
            case "load":
                before = ranked.adapters.report()
                try:
                    await ranked.adapters.load(dice.choice(NAMES), Path("/" + dice.choice(CONTENTS)))
                except InvalidArgument:
                    assert ranked.adapters.report() == before
            case "unload":
                with suppress(AdapterNotFound):
                    await ranked.adapters.unload(dice.choice(NAMES), 0.0)
            case "begin":
                try:
                    lease = await ranked.adapters.acquire(dice.choice(NAMES))
                except (AdapterNotFound, AdaptersFull, AdapterError):
                    pass
                else:
                    assert lease.digest in ranked.files.loaded
                    leases.append(lease)
            case "end" if leases:
                leases.pop(dice.randrange(len(leases))).release()
        ranked.check()
        assert all(lease.digest in ranked.files.loaded for lease in leases)
    ranked.check_at_rest()


def check(seeds: Iterable[int], module: ModuleType = real, num_moves: int = 40) -> None:
    for seed in seeds:
        with on_ranks(module) as ranked:
            asyncio.run(any_history(ranked, random.Random(seed), num_moves))


@settings(max_examples=15)
@given(st.integers(0, 2**32))
def test_all_ranks_hold_what_requests_may_have(seed: int) -> None:
    check([seed])


PLANTED: Mapping[str, tuple[str, str]] = {
    "a changed folder is taken for what rank 0 has read": ("weights.digest != told.digest", "False"),
    "equal contents go with the first of them": (
        "all(other.digest != gone.digest for other in self._held.values())",
        "gone.digest in self._store._weights",
    ),
    "what one rank refuses stays on the others": (
        "            self._forget((number,))\n            raise AdapterError",
        "            raise AdapterError",
    ),
    "what finds no room stays": ("        self._forget(self._not_put)\n", ""),
    "what rank 0 lets go of stays": (
        "        self._speaker.submit(self._forget, (self._held.pop(digest),))\n",
        "",
    ),
    "what is put is let go of with what is not": ("        self._not_put.discard(number)\n", ""),
    "a rank that refuses is not heard": ("        if refusals:\n", "        if len(refusals) > 1:\n"),
    "only the first of the other ranks is told": (
        "        for process in self._leader.processes:\n"
        "            try:\n"
        "                messages.send(process.adapters, told)\n",
        "        for process in self._leader.processes:\n"
        "            try:\n"
        "                messages.send(process.adapters, told if process.rank == 1 else\n"
        "                    LoadAdapter(number, str(folder.parent / 'one-10'), 'one-10', 8, 100))\n",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_caught(name: str) -> None:
    planted = plant(real, *PLANTED[name])
    with pytest.raises((AssertionError, KeyError)):
        check(range(30), planted)


def test_what_a_rank_refuses_is_told_with_its_number() -> None:
    with on_ranks() as ranked:
        ranked.others[1].changed = {"one-10": "bad-10"}
        with pytest.raises(AdapterError, match=r"^rank 2: bad-10: not served$"):
            ranked.ranked.read(Path("one-10"))
        ranked.others[0].changed = {"one-10": "breaks-10"}
        with pytest.raises(AdapterError, match=r"^rank 1: ZeroDivisionError: breaks-10; rank 2: bad-10"):
            ranked.ranked.read(Path("one-10"))
        ranked.others[0].changed, ranked.others[1].changed = {}, {"one-10": "two-10"}
        with pytest.raises(AdapterError, match="rank 2: its folder holds another adapter than rank 0"):
            ranked.ranked.read(Path("one-10"))
        ranked.others[1].changed = {}
        assert ranked.ranked.read(Path("one-10")).num_bytes == 30
        with pytest.raises(AdapterError, match="takes 120 bytes of all ranks; all adapters may take 100"):
            ranked.ranked.read(Path("much-40"))
        ranked.check_at_rest()


def test_a_rank_that_is_gone_or_speaks_nonsense_is_lost() -> None:
    with on_ranks() as ranked:
        ours, theirs = socket.socketpair()
        nonsense = Channel(theirs)
        messages.send(nonsense, Done())
        ranked.ranked._leader.processes[1].adapters = Channel(ours)
        with pytest.raises(RankLost, match="rank 2 is lost: it is not understood: Done"):
            ranked.ranked.read(Path("one-10"))
        nonsense.close()
        with pytest.raises(RankLost, match="rank 2 is lost"):
            ranked.ranked.read(Path("one-10"))
        ours.close()


def test_what_comes_out_of_place_ends_the_hearing() -> None:
    rank = Rank(1, real)
    try:
        rank.thread.join(0)
        messages.send(rank.channel, Done())
        with pytest.raises(ConnectionError):
            messages.receive(rank.channel, 60)
    finally:
        rank.channel.close()
        rank.thread.join()
