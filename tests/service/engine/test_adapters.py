"""The adapters that requests may name: what lies in memory, who holds it, and what an unload waits for."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest
from support.fake_adapters import FakeFiles, fake_adapters

from pageturner.service.engine.adapter_reports import Lease, NoAdapters
from pageturner.service.engine.adapters import Adapters
from pageturner.service.errors import AdapterError, AdapterNotFound, AdaptersFull, InvalidArgument


async def loaded(*folders: str, memory: int = 100) -> tuple[Adapters, FakeFiles]:
    """Each under its own name."""
    adapters, files = fake_adapters(memory)
    for folder in folders:
        await adapters.load(folder, Path(folder))
    return adapters, files


async def test_a_request_holds_what_its_adapter_was_when_it_came() -> None:
    adapters, files = await loaded("one-10")
    lease = await adapters.acquire("one-10")
    again = await adapters.load("one-10", Path("two-20"))
    assert (again.digest, again.num_requests) == ("two-20", 0)
    assert lease.digest == "one-10"
    assert adapters.find("one-10") == "two-20"
    assert files.loaded == {"one-10", "two-20"}
    new, old = adapters.report()
    assert (old.digest, old.is_unloading, old.num_requests) == ("one-10", True, 1)
    assert not new.is_unloading
    lease.release()
    assert files.loaded == {"two-20"}
    assert len(adapters.report()) == 1


async def test_an_unload_refuses_new_requests_and_waits_for_the_others() -> None:
    adapters, files = await loaded("one-10")
    leases = [await adapters.acquire("one-10") for _ in range(2)]
    assert await adapters.unload("one-10", 0.0) == 2
    with pytest.raises(AdapterNotFound):
        adapters.find("one-10")
    with pytest.raises(AdapterNotFound):
        await adapters.acquire("one-10")
    with pytest.raises(AdapterNotFound):
        await adapters.unload("one-10", 0.0)
    leases.pop().release()
    assert files.loaded == {"one-10"}
    leases.pop().release()
    assert not files.loaded
    assert adapters.figures().num_adapters == adapters.figures().num_bytes == 0

    await adapters.load("again", Path("one-10"))
    lease = await adapters.acquire("again")
    waiting = asyncio.ensure_future(adapters.unload("again", 60.0))
    await asyncio.sleep(0)
    assert not waiting.done()
    lease.release()
    assert await waiting == 0


async def test_equal_content_lies_in_memory_once() -> None:
    adapters, files = fake_adapters()
    for name in ("a", "b"):
        await adapters.load(name, Path("one-10"))
    assert adapters.figures().num_loaded == 1
    assert await adapters.unload("a", 0.0) == 0
    assert files.loaded == {"one-10"}
    await adapters.unload("b", 0.0)
    assert not files.loaded


async def test_the_one_that_was_not_used_for_longest_makes_room() -> None:
    adapters, files = await loaded("a-40", "b-40")
    (await adapters.acquire("a-40")).release()
    await adapters.load("c-40", Path("c-40"))
    assert files.loaded == {"a-40", "c-40"}
    assert [each.is_loaded for each in adapters.report()] == [True, False, True]
    (await adapters.acquire("c-40")).release()
    back = await adapters.acquire("b-40")
    assert files.loaded == {"b-40", "c-40"}
    assert files.num_reads == 4
    assert (adapters.figures().num_evictions_total, adapters.figures().num_reads_total) == (2, 4)
    held = await adapters.acquire("c-40")
    with pytest.raises(AdaptersFull, match="a-40"):
        await adapters.acquire("a-40")
    assert files.loaded == {"b-40", "c-40"}, "a refusal takes none out"
    held.release()
    back.release()
    (await adapters.acquire("a-40")).release()
    assert files.loaded == {"a-40", "c-40"}


async def test_figures_tell_loads_and_requests_by_the_first_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pageturner.service.engine.adapters.NAMES_TOLD_APART", 2)
    adapters, _ = await loaded("a-10", "b-10", "c-10", "d-10", memory=30)
    leases = [await adapters.acquire(name) for name in ("a-10", "b-10", "b-10")]
    other = await adapters.acquire("c-10")
    with pytest.raises(AdaptersFull):
        await adapters.acquire("d-10")
    leases.pop().release()
    figures = adapters.figures()
    assert figures.requests_total == {"a-10": 1, "b-10": 2, "other": 1}
    assert figures.requests == {"a-10": 1, "b-10": 1, "other": 1}
    assert (figures.num_bytes, figures.memory_bytes) == (30, 30)
    other.release()
    assert await adapters.unload("c-10", 0.0) == 0
    await adapters.unload("b-10", 0.0)
    await adapters.load("a-10", Path("e-10"))
    figures = adapters.figures()
    assert (figures.num_loads_total, figures.num_unloads_total) == (5, 3)
    assert figures.requests == {"a-10": 1, "b-10": 1, "other": 0}, "those that leave are told until they end"
    assert figures.requests_total == {"a-10": 1, "b-10": 2, "other": 1}


async def test_a_load_that_finds_no_room_waits_for_its_first_request() -> None:
    adapters, files = await loaded("a-60")
    lease = await adapters.acquire("a-60")
    info = await adapters.load("b-60", Path("b-60"))
    assert not info.is_loaded
    with pytest.raises(AdaptersFull):
        await adapters.acquire("b-60")
    lease.release()
    assert (await adapters.acquire("b-60")).digest == "b-60"
    assert files.loaded == {"b-60"}


async def test_a_load_that_fails_changes_nothing() -> None:
    adapters, files = await loaded("a-10")
    before, held = adapters.report(), set(files.loaded)
    for name, folder, field in (("a-10", "bad", "path"), ("x", "bad", "path"), ("", "b-10", "name")):
        with pytest.raises(InvalidArgument, match=f"^{field}"):
            await adapters.load(name, Path(folder))
    assert adapters.report() == before
    assert files.loaded == held


async def test_a_folder_that_changed_is_not_taken_for_what_was_loaded() -> None:
    adapters, files = await loaded("a-60", "b-60")
    files.changed["a-60"] = "other-60"
    with pytest.raises(AdapterError, match=r"'a-60'.* another adapter"):
        await adapters.acquire("a-60")
    files.changed["a-60"] = "bad"
    with pytest.raises(AdapterError, match="can't be read again"):
        await adapters.acquire("a-60")
    assert all(each.num_requests == each.num_requests_total == 0 for each in adapters.report())
    files.changed.clear()
    (await adapters.acquire("a-60")).release()


async def test_requests_that_wait_for_one_read_share_it_and_may_leave() -> None:
    adapters, files = await loaded("a-60", "b-60")
    files.gate.clear()
    waiting = [asyncio.ensure_future(adapters.acquire("a-60")) for _ in range(3)]
    await asyncio.sleep(0.01)
    waiting[1].cancel()
    files.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    for each in (waiting[0], waiting[2]):
        (await each).release()
    assert files.num_reads == 3
    assert adapters.report()[0].num_requests == 0


async def test_names_and_their_number_are_bounded() -> None:
    adapters, _ = fake_adapters(max_adapters=1)
    for name in ("", "x" * 257, " a", "a\n"):
        with pytest.raises(InvalidArgument, match=r"^name"):
            await adapters.load(name, Path("a-1"))
    await adapters.load("a", Path("a-1"))
    with pytest.raises(InvalidArgument, match="no more may be"):
        await adapters.load("b", Path("b-1"))
    await adapters.load("a", Path("b-1"))
    with pytest.raises(AdapterNotFound):
        adapters.find("a", ("b",))
    none = Adapters(NoAdapters("not this model"), adapters._options, adapters._logger)
    with pytest.raises(AdapterError, match="not this model"):
        await none.load("a", Path("a-1"))


@pytest.mark.parametrize("seed", range(8))
async def test_memory_and_counts_hold_whatever_comes(seed: int) -> None:
    """The bound is kept, what is held stays, and when all has ended nothing lies in memory."""
    dice = random.Random(seed)
    adapters, files = fake_adapters(100)
    leases: list[Lease] = []
    for _ in range(400):
        name, folder = dice.choice("abc"), f"{dice.choice('uvw')}-{dice.choice((10, 30, 50, 90))}"
        move = dice.randrange(8)
        try:
            if move < 2:
                await adapters.load(name, Path(folder))
            elif move < 5:
                leases.append(await adapters.acquire(name))
            elif move < 7 and leases:
                leases.pop(dice.randrange(len(leases))).release()
            else:
                await adapters.unload(name, 0.0)
        except (AdapterNotFound, AdaptersFull):
            pass
        assert sum(int(digest.rpartition("-")[2]) for digest in files.loaded) <= 100
        assert {lease.digest for lease in leases} <= files.loaded
        assert sum(each.num_requests for each in adapters.report()) == len(leases)
        figures = adapters.figures()
        assert figures.num_loaded == len(files.loaded)
    for lease in leases:
        lease.release()
    for name in adapters.names():
        assert await adapters.unload(name, 0.0) == 0
    assert not files.loaded
    assert adapters.report() == ()
