"""Sums in one order, gathers in the order of ranks; by torch.distributed between real processes."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.ops import cpu_library
from support.planting import BuggyLibrary, ExpressionBug
from support.rank_processes import rank_processes
from support.rank_work import check_and_lose, check_collectives, summed
from support.thread_ranks import on_ranks
from torch.distributed import (  # type: ignore[attr-defined] # torch leaves them out
    FileStore,
    HashStore,
    distributed_c10d,
    is_initialized,
)

from pageturner.kernels.cpu.exchange import (
    ALIGNMENT,
    PLACE_BYTES,
    STRUCTURES,
    Exchange,
    Outcome,
    region_bytes,
)
from pageturner.kernels.errors import KernelArgumentError
from pageturner.service.errors import RankLost
from pageturner.service.model.tensor_parallel import meeting
from pageturner.service.model.tensor_parallel.collectives import ALONE, Collectives, add_in_order
from pageturner.service.model.tensor_parallel.meeting import exchange_library, meet
from pageturner.service.model.tensor_parallel.shared_collectives import (
    MOST_BYTES,
    SharedCollectives,
    SharedRegion,
)
from pageturner.service.model.tensor_parallel.torch_collectives import CONNECTING, open_collectives


def test_one_rank_alone() -> None:
    check_collectives(ALONE)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ranks_as_threads(size: int) -> None:
    on_ranks(size, check_collectives)


@given(
    st.lists(st.lists(st.floats(width=32, allow_nan=False), min_size=4, max_size=4), min_size=1, max_size=6)
)
def test_a_sum_has_one_order(rows: list[list[float]]) -> None:
    parts = [torch.tensor(row) for row in rows]
    total = torch.empty(4)
    add_in_order(parts, total)
    assert torch.equal(total.nan_to_num(), summed(parts).nan_to_num())


@pytest.mark.parametrize(
    ("size", "shares"),
    [(2, True), (2, False), *(pytest.param(4, each, marks=pytest.mark.slow) for each in (True, False))],
)
def test_ranks_as_processes_and_the_death_of_one(size: int, shares: bool, tmp_path: Path) -> None:
    with rank_processes(size, tmp_path, check_and_lose, shares=shares) as ranks:
        assert [rank.told() for rank in ranks] == ["checked"] * size
        ranks.pop().process.kill()
        for number, rank in enumerate(ranks):
            assert rank.told().startswith(f"rank {number} has lost another")
            assert rank.told() == "closed"


CPU = torch.device("cpu")


@pytest.mark.parametrize("shares", [True, False])
def test_ranks_that_do_not_come_are_missed_by_number(shares: bool) -> None:
    library = cpu_library() if shares else None
    store = HashStore()
    store.set("way 1", "shared memory" if shares else "torch")
    with pytest.raises(RankLost, match=r"rank 0 of 3 does not meet the others: rank 2 has not come within"):
        meet(CPU, store, 0, 3, timedelta(seconds=0.05), library)
    assert not is_initialized()


def test_a_rank_that_comes_but_does_not_connect_is_missed(tmp_path: Path) -> None:
    store = FileStore(str(tmp_path / "store"), 2)
    store.set("way 1", "torch")
    with pytest.raises(RankLost, match="rank 0 of 2 does not meet the others"):
        meet(CPU, store, 0, 2, timedelta(seconds=0.2))
    assert not is_initialized()


def test_a_loss_that_is_known_ends_a_meeting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fifteen minutes, else: other ranks may read their weights for so long."""
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)

    def check() -> None:
        if len(pauses) > 20:
            raise RankLost("rank 1 was killed")

    with pytest.raises(RankLost, match="rank 1 was killed"):
        meet(CPU, HashStore(), 0, 2, timedelta(seconds=900), cpu_library(), check)
    assert max(pauses) == meeting._LOOK_SECONDS, "however long it lasts"


def met_in_threads(
    size: int, libraries: Sequence[ctypes.CDLL | None]
) -> tuple[list[Collectives | None], list[str]]:
    """What ranks of one process meet by, the way of torch as nothing; and what they note."""
    store, notes = HashStore(), list[str]()

    def one(rank: int) -> Collectives | None:
        try:
            return meet(CPU, store, rank, size, timedelta(seconds=60), libraries[rank], note=notes.append)
        except RankLost:
            return None

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(one, range(size))), notes


def num_open_regions() -> int:
    """Descriptors that this process has of shared memory."""
    gc.collect()
    found = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # that of the listing itself
            found += "pageturner-ranks" in os.readlink(path)
    return found


def test_ranks_share_memory_or_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Collectives:
        raise RankLost("by torch")

    monkeypatch.setattr(meeting, "open_collectives", refuse)
    library = cpu_library()
    found, notes = met_in_threads(3, [library] * 3)
    assert all(isinstance(each, SharedCollectives) for each in found)
    assert not notes
    for each in found:
        assert each is not None
        each.close()
    for libraries in ([None, library, library], [library, None, library], [None] * 3):
        assert met_in_threads(3, libraries) == ([None] * 3, [])
    create, join = SharedRegion.create, SharedRegion.join
    del found, each

    def full(size: int) -> SharedRegion:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def barred(path: str, rank: int, size: int) -> SharedRegion:
        return join("/dev/null" if rank == 2 else path, rank, size)

    monkeypatch.setattr(SharedRegion, "create", full)
    assert met_in_threads(3, [library] * 3) == ([None] * 3, ["no memory to share: No space left on device"])
    monkeypatch.setattr(SharedRegion, "create", create)
    monkeypatch.setattr(SharedRegion, "join", barred)
    found, notes = met_in_threads(3, [library] * 3)
    assert found == [None] * 3
    assert len(notes) == 1
    assert num_open_regions() == 0


@pytest.mark.parametrize("unsaid", ["region 0", "way 0"])
def test_a_store_that_is_lost_while_ranks_meet_keeps_no_memory(unsaid: str) -> None:
    class Lost(HashStore):
        def set(self, key: str, value: str) -> None:
            if key == unsaid:
                raise RuntimeError("connection reset by peer")
            super().set(key, value)

    with pytest.raises(RankLost, match="rank 0 of 2 does not meet the others: connection reset"):
        meet(CPU, Lost(), 0, 2, timedelta(seconds=60), cpu_library())
    assert num_open_regions() == 0


def test_ranks_that_cannot_share_compile_nothing_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert exchange_library(torch.device("cuda:1"), tmp_path / "cache") is None
    monkeypatch.setattr(meeting, "can_share", lambda: False)
    assert exchange_library(CPU, tmp_path / "cache") is None
    assert not (tmp_path / "cache").exists()


def test_what_holds_while_ranks_connect_by_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    events = []

    @contextmanager
    def by_sockets() -> Iterator[None]:
        events.append("begins")
        yield
        events.append("ends")

    monkeypatch.setattr(meeting, "open_collectives", lambda *_: events.append("connects"))
    store = HashStore()
    meet(CPU, store, 0, 1, timedelta(seconds=60), by_sockets=by_sockets)
    patience: timedelta = store.timeout  # type: ignore[attr-defined]  # torch's stubs leave it out
    assert patience == timedelta(seconds=60), "by which NCCL waits for rank 0"
    assert events == ["begins", "connects", "ends"]
    meet(CPU, HashStore(), 0, 1, timedelta(seconds=60), cpu_library(), by_sockets=by_sockets).close()
    assert len(events) == 3, "of no use where memory is shared"


def test_ranks_wait_for_each_other_for_longer_than_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank may read its weights for minutes while another waits to add up."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    given: list[timedelta] = []
    form = torch.distributed.init_process_group

    def noted(backend: str, *, timeout: timedelta, **options: Any) -> None:
        given.append(timeout)
        form(backend, timeout=timeout, **options)

    monkeypatch.setattr(torch.distributed, "init_process_group", noted)
    for timeout in (CONNECTING / 2, 30 * CONNECTING):
        collectives = open_collectives(CPU, HashStore(), 0, 1, timeout)
        try:
            backend = distributed_c10d._get_default_group()._get_backend(CPU)
            assert backend.options._timeout == timeout
        finally:
            collectives.close()
    assert given == [CONNECTING / 2, CONNECTING]


def test_what_is_shared_has_no_name_and_one_size() -> None:
    region = SharedRegion.create(2)
    assert os.readlink(f"/proc/self/fd/{region.descriptor}").startswith("/memfd:")
    with pytest.raises(OSError, match="not permitted"):  # a rank that reads beyond the end would be killed
        os.ftruncate(region.descriptor, 4096)
    with pytest.raises(OSError, match="bytes, not"):
        SharedRegion.join(region.path, 1, 40)
    region.close()


def test_what_is_shared_is_there_bounded_and_of_no_other_program() -> None:
    for size in (2, 3, 7, 64):
        region = SharedRegion.create(size)
        places = size * PLACE_BYTES
        assert region.slot_bytes % ALIGNMENT == 0
        assert 2 * region.slot_bytes * size <= MOST_BYTES
        assert region.memory.numel() == places + 2 * region.slot_bytes * size
        # Pages that the system cannot find when they are first written end a process.
        assert os.fstat(region.descriptor).st_blocks * 512 >= region.memory.numel()
        assert not os.get_inheritable(region.descriptor)
        region.close()


def test_who_leaves_is_missed_at_once_and_who_is_silent_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    # A process's locks are in no way of its own: both ranks would seem to be gone.
    monkeypatch.setattr(SharedCollectives, "_ended", lambda collectives: None)
    ticks = count(0, 3)
    regions = [created := SharedRegion.create(2), SharedRegion.join(created.path, 1, 2)]
    one, other = (
        SharedCollectives(cpu_library(), region, rank, 2, 5.0, lambda: next(ticks))
        for rank, region in enumerate(regions)
    )
    with pytest.raises(RankLost, match="rank 0 has lost another: it is silent for 5 s"):
        one.all_gather(torch.ones(3))
    assert next(ticks) == 9, "after two looks, of which the second was too late"
    one.close()
    one.close()
    with pytest.raises(RankLost, match="rank 0 has left the others"):
        one.all_gather(torch.ones(3))
    with pytest.raises(RankLost, match="rank 1 has lost another, which left"):
        [other.all_gather(torch.ones(3)) for _ in range(2)]
    other.close()
    del one, other, regions, created
    assert num_open_regions() == 0


def test_what_may_shrink_or_is_a_file_is_not_shared(tmp_path: Path) -> None:
    """Whoever may run programs on the machine may tell a rank any path."""
    region, path = SharedRegion.create(2), tmp_path / "file"
    content = bytes(region.memory.numel())
    region.close()
    path.write_bytes(content)
    num_open = len(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match="Invalid argument"):
        SharedRegion.join(str(path), 1, 2)
    descriptor = os.memfd_create("pageturner-ranks", os.MFD_ALLOW_SEALING)
    os.truncate(descriptor, len(content))
    with pytest.raises(OSError, match="it may shrink"):
        SharedRegion.join(f"/proc/self/fd/{descriptor}", 1, 2)
    os.close(descriptor)
    assert len(os.listdir("/proc/self/fd")) == num_open


def two_ends(library: ctypes.CDLL) -> list[Exchange]:
    """Of one memory, in this process."""
    num_bytes = region_bytes(2, 64)
    memory = torch.zeros(num_bytes + ALIGNMENT, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % ALIGNMENT :][:num_bytes]
    return [Exchange(library, memory, 64, rank, 2) for rank in range(2)]


def one_ahead(library: ctypes.CDLL) -> list[list[int]]:
    """What a rank reads while the other, which has read already, has begun the next exchange."""
    first, second = two_ends(library)
    gathered = torch.zeros(2, 1, dtype=torch.uint8)
    first.publish(torch.tensor([1], dtype=torch.uint8))
    second.publish(torch.tensor([2], dtype=torch.uint8))
    assert second.collect(gathered, 1000) is Outcome.ALL_THERE
    second.publish(torch.tensor([3], dtype=torch.uint8))
    gathered.zero_()
    first.collect(gathered, 1000)
    found: list[list[int]] = gathered.tolist()
    return found


def test_a_rank_may_be_one_exchange_ahead() -> None:
    assert one_ahead(cpu_library()) == [[1], [2]]


def test_planted_bugs_of_exchanges_are_caught(tmp_path: Path) -> None:
    bugs = [
        ExpressionBug("exchange.h", "(number & 1)", "0"),
        ExpressionBug("exchange.h", "gathered + rank * stride", "gathered + (1 - rank) * stride"),
        ExpressionBug("exchange.h", "own.published.store(number)", "own.published.store(number - 1)"),
    ]
    planted = BuggyLibrary(bugs, tmp_path, tmp_path / "compiled", "exchange.cpp")
    for bug in bugs:
        planted.switch_on(bug)
        with pytest.raises(AssertionError):
            assert one_ahead(planted.library) == [[1], [2]]
    planted.switch_off()
    assert one_ahead(planted.library) == [[1], [2]]


def test_an_exchange_that_is_waited_for_in_vain() -> None:
    """Who is silent, and who leaves."""
    first, second = two_ends(cpu_library())
    gathered = torch.zeros(2, 8, dtype=torch.uint8)
    first.publish(torch.full((8,), 1, dtype=torch.uint8))
    assert first.collect(gathered, 1000) is Outcome.STILL_WAITING
    assert not gathered.any()
    second.publish(torch.full((8,), 2, dtype=torch.uint8))
    for end in (first, second):
        assert end.collect(gathered, 1000) is Outcome.ALL_THERE
        assert gathered.tolist() == [[1] * 8, [2] * 8]
    # Its last word counts before its leaving does.
    first.publish(torch.full((8,), 3, dtype=torch.uint8))
    first.leave()
    second.publish(torch.full((8,), 4, dtype=torch.uint8))
    assert second.collect(gathered, 1000) is Outcome.ALL_THERE
    second.publish(torch.full((8,), 5, dtype=torch.uint8))
    assert second.collect(gathered, 10**9) is Outcome.SOMEONE_LEFT
    with pytest.raises(KernelArgumentError, match="aligned to 64"):
        Exchange(cpu_library(), torch.zeros(region_bytes(2, 60), dtype=torch.uint8), 60, 0, 2)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_size_of_the_c_ones(name: str) -> None:
    assert getattr(cpu_library(), f"sizeof_{name}_args")() == ctypes.sizeof(STRUCTURES[name])
    assert cpu_library().sizeof_exchange_place_args() == PLACE_BYTES
