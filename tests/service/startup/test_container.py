"""The limits of a container, read from folders laid out as the kernel does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pageturner.service.startup.container import (
    anonymous_memory,
    machine_memory,
    memory_limit,
    own_processors,
    processor_limit,
    usable_processors,
)

V2_MOUNT = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "25 23 0:22 / /sys rw - sysfs sysfs rw\n"
    "32 31 0:29 {top} /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
)


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def process(root: Path, groups: str, mounts: str) -> None:
    write(root, {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts})


@pytest.mark.fault("28", "29")
def test_version_2_limits_of_a_nested_group_hold_together_with_those_above(tmp_path: Path) -> None:
    process(tmp_path, "0::/system.slice/pageturner.service\n", V2_MOUNT)
    group = "sys/fs/cgroup/system.slice"
    write(
        tmp_path,
        {
            f"{group}/memory.max": "max\n",
            f"{group}/cpu.max": "150000 100000\n",
            f"{group}/pageturner.service/memory.max": "1258291200\n",
            f"{group}/pageturner.service/cpu.max": "max 100000\n",
            "sys/fs/cgroup/other.slice/memory.max": "1\n",
        },
    )
    assert memory_limit(tmp_path) == 1200 << 20
    assert processor_limit(tmp_path) == 1.5
    assert machine_memory(tmp_path) == min(1200 << 20, machine_memory(tmp_path / "bare"))


@pytest.mark.fault("28", "29")
@pytest.mark.parametrize("top", ["/", "/docker/abc"])
def test_version_1_limits_are_read_from_each_controller(top: str, tmp_path: Path) -> None:
    """top: as the machine sees it, or as a container does whose hierarchies begin at its own group."""
    process(
        tmp_path,
        "9:name=systemd:/\n4:memory:/docker/abc\n1:cpu,cpuacct:/docker/abc\n",
        V1_MOUNTS.format(top=top),
    )
    inner = "docker/abc/" if top == "/" else ""
    write(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            f"sys/fs/cgroup/memory/{inner}memory.limit_in_bytes": "536870912\n",
            f"sys/fs/cgroup/cpu,cpuacct/{inner}cpu.cfs_quota_us": "250000\n",
            f"sys/fs/cgroup/cpu,cpuacct/{inner}cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(tmp_path) == 512 << 20
    assert processor_limit(tmp_path) == 2.5


@pytest.mark.fault("28", "29")
def test_a_group_outside_of_what_is_mounted_is_looked_up_at_the_top(tmp_path: Path) -> None:
    """As in a container that shares no group namespace, but sees only its own folder."""
    process(tmp_path, "0::/../../machine/abc\n", V2_MOUNT)
    write(tmp_path, {"sys/fs/cgroup/memory.max": "4194304\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"})
    assert memory_limit(tmp_path) == 4 << 20
    assert processor_limit(tmp_path) == 1.0


def test_no_control_group_limit_is_read_as_none(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None, "no control groups at all"
    process(tmp_path, "4:memory:/\n1:cpu,cpuacct:/\n", V1_MOUNTS.format(top="/"))
    write(
        tmp_path,
        {
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )
    assert memory_limit(tmp_path) is None
    assert processor_limit(tmp_path) is None


@pytest.mark.fault("28")
@pytest.mark.parametrize(
    ("processors", "limit", "threads"), [(8, None, 8), (8, 2.9, 2), (8, 0.5, 1), (2, 16.0, 2), (1, 1.0, 1)]
)
def test_threads_are_the_whole_processors_of_the_quota(
    processors: int, limit: float | None, threads: int
) -> None:
    assert usable_processors(processors, limit) == threads


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no sets of processors on this system")
def test_processors_that_the_process_may_not_run_on_are_not_counted() -> None:
    before = os.sched_getaffinity(0)
    assert own_processors() == len(before)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert own_processors() == 1
    finally:
        os.sched_setaffinity(0, before)


def test_memory_that_no_file_backs_is_counted(tmp_path: Path) -> None:
    assert anonymous_memory(tmp_path) == 0
    write(tmp_path, {"proc/self/statm": "900 500 100 5 0 123 0\n"})
    assert anonymous_memory(tmp_path) == 400 * os.sysconf("SC_PAGE_SIZE")
