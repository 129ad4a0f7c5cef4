"""The disk tier's threads: transfers end well or badly, and nothing but a figure and a line tells of it."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from time import sleep

import structlog
from structlog.testing import capture_logs
from structlog.typing import FilteringBoundLogger
from support.patience import wait_until

from pageturner.service.core.memory.transfers import Discard, Load, Save, Transfer, TransferEnd
from pageturner.service.engine.disk_tier import DiskTier
from pageturner.service.engine.lower_tier import CachedBlock
from pageturner.service.engine.tier_files import TierFiles

BLOCK = 256
LOGGER: FilteringBoundLogger = structlog.get_logger()


class Memory:
    """The host pool."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [bytearray([number]) * BLOCK for number in range(num_blocks)]

    def __call__(self, block: int) -> memoryview:
        return memoryview(self.blocks[block])


def tier(folder: Path, memory: Memory, capacity: int = 100) -> DiskTier:
    files = TierFiles(folder, "weights=a", BLOCK)
    return DiskTier(files, capacity, memory, files.found(1 << 30), LOGGER)


def done(disk: DiskTier, *transfers: Transfer) -> dict[int, bool]:
    """Carry them out; how each ended, by its block."""
    disk.start(transfers, lambda: None)
    return ended(disk)


def ended(disk: DiskTier) -> dict[int, bool]:
    found: list[TransferEnd] = []

    def is_idle() -> bool:
        found.extend(disk.take_ended())
        return not disk.is_busy

    wait_until(is_idle, 0.001)
    return {end.host_block: end.succeeded for end in found}


def name(number: int) -> bytes:
    return bytes([number]) * 16


def test_a_block_comes_back_as_it_was(tmp_path: Path) -> None:
    memory = Memory(4)
    disk = tier(tmp_path, memory)
    assert not disk.holds(name(1))
    assert done(disk, Save(1, name(1))) == {1: True}
    assert disk.holds(name(1))
    assert done(disk, Load(3, name(1))) == {3: True}
    assert memory.blocks[3] == memory.blocks[1]
    disk.close()


def test_nothing_is_touched_before_the_device_is_ready(tmp_path: Path) -> None:
    memory, gate = Memory(2), threading.Event()
    disk = tier(tmp_path, memory)
    disk.start([Save(1, name(1))], gate.wait)
    sleep(0.02)
    memory.blocks[1][:] = b"x" * BLOCK
    gate.set()
    assert ended(disk) == {1: True}
    done(disk, Load(0, name(1)))
    assert memory.blocks[0] == b"x" * BLOCK
    disk.close()


def test_a_damaged_block_is_no_longer_held(tmp_path: Path) -> None:
    memory = Memory(2)
    files = TierFiles(tmp_path, "weights=a", BLOCK)
    disk = DiskTier(files, 9, memory, [], LOGGER)
    done(disk, Save(1, name(1)))
    path = files.path(name(1))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with capture_logs() as logs:
        assert done(disk, Load(0, name(1))) == {0: False}
    assert not disk.holds(name(1))
    assert not path.exists()
    assert [entry["event"] for entry in logs] == ["disk_cache_read_failed"]
    assert done(disk, Save(1, name(1)), Load(0, name(7))) == {0: False, 1: True}
    disk.close()


def test_a_write_that_fails_costs_its_block_alone(tmp_path: Path) -> None:
    memory = Memory(3)
    files = TierFiles(tmp_path, "weights=a", BLOCK)
    disk = DiskTier(files, 9, memory, [], LOGGER)
    files.path(name(1)).mkdir()  # nothing can be renamed to it
    with capture_logs() as logs:
        assert done(disk, Save(1, name(1)), Save(2, name(2))) == {1: False, 2: True}
        assert done(disk, Save(1, name(1))) == {1: False}
    assert [entry["event"] for entry in logs] == ["disk_cache_write_failed"], "one line in a minute"
    assert not disk.holds(name(1))
    assert disk.holds(name(2))
    disk.close()


def test_the_one_used_longest_ago_gives_way(tmp_path: Path) -> None:
    memory = Memory(8)
    disk = tier(tmp_path, memory, capacity=3)
    for number in (1, 2, 3):
        done(disk, Save(number, name(number)))
    done(disk, Load(0, name(1)))
    done(disk, Save(4, name(4)))
    assert [number for number in (1, 2, 3, 4) if disk.holds(name(number))] == [1, 3, 4]
    disk.close()
    again = tier(tmp_path, memory)
    assert again.num_blocks == 3
    again.close()


def test_what_is_discarded_is_not_held_though_its_save_ends_later(tmp_path: Path) -> None:
    memory, gate = Memory(2), threading.Event()
    disk = tier(tmp_path, memory)
    disk.start([Save(1, name(1))], gate.wait)
    disk.start([Discard(name(1))], lambda: None)
    gate.set()
    assert ended(disk) == {1: True}
    assert not disk.holds(name(1))
    disk.close()
    again = tier(tmp_path, memory)
    assert again.num_blocks == 0
    again.close()


def test_the_end_of_a_server_writes_what_only_memory_holds(tmp_path: Path) -> None:
    memory = Memory(6)
    disk = tier(tmp_path, memory, capacity=4)
    done(disk, Save(1, name(1)))
    cached = [CachedBlock(name(number), partial(memory, number)) for number in (1, 2, 3)]
    assert disk.close(cached, 5.0) == 2
    again = tier(tmp_path, memory)
    assert [number for number in range(6) if again.holds(name(number))] == [1, 2, 3]
    done(again, Load(5, name(3)))
    assert memory.blocks[5] == memory.blocks[3]
    again.close()


def test_the_end_of_a_server_keeps_to_its_bounds(tmp_path: Path) -> None:
    memory = Memory(6)
    disk = tier(tmp_path, memory, capacity=2)
    cached = [CachedBlock(name(number), partial(memory, number)) for number in range(1, 6)]
    assert disk.close(cached, 5.0) == 2
    again = tier(tmp_path, memory)
    assert again.num_blocks == 2
    assert again.close(cached, 0.0) == 0, "there was no time left"
