"""What this process may use of the machine: memory and processors, within all control groups it is in.

Both versions of control groups are read, from the group of the process up to the highest that is visible: a
limit holds for all groups below it. All of it is read below `root`, so that tests hand over a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""From here on version 1 means that there is no limit: the largest number of whole pages."""


def machine_memory(root: Path = _ROOT) -> int:
    """Bytes this process may use: the machine's, or its container's where that is less."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(memory, memory_limit(root) or memory)


def memory_limit(root: Path = _ROOT) -> int | None:
    """Bytes that control groups leave this process, or None where they set no bound."""
    limits = [
        limit
        for folder in _groups(root, "memory")
        for name in ("memory.max", "memory.limit_in_bytes")
        if (limit := _number(folder / name)) is not None and 0 < limit < _UNLIMITED
    ]
    return min(limits, default=None)


def processor_limit(root: Path = _ROOT) -> float | None:
    """Processors' worth of time that quotas leave this process, or None where they set no bound."""
    return min((quota for folder in _groups(root, "cpu") for quota in _quotas(folder)), default=None)


def own_processors() -> int:
    """Processors that the system may run this process on: taskset, or a container's set of them."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def usable_processors(num_processors: int, limit: float | None) -> int:
    """Threads that run at once without being throttled: the whole processors of a quota, at least one."""
    return num_processors if limit is None else max(1, min(num_processors, int(limit)))


def anonymous_memory(root: Path = _ROOT) -> int:
    """Bytes of this process that no file backs: the system cannot take them back. 0 where it does not say."""
    try:
        _, resident, shared, *_ = map(int, (root / "proc/self/statm").read_text().split())
    except (OSError, ValueError):
        return 0
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def _quotas(folder: Path) -> Iterator[float]:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
        if quota != "max":
            yield int(quota) / int(period)
    except (OSError, ValueError):
        quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota_us is not None and period_us and quota_us > 0:
            yield quota_us / period_us


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of this process's groups that may bound the controller, each with all those above it."""
    paths = dict(_group_paths(root))
    for kind, mounted_root, mount in _mounts(root):
        # Version 2 has one hierarchy, whose line names no controller.
        path = paths.get("" if kind == "cgroup2" else controller)
        if path is None or (kind == "cgroup" and controller not in mount.name.split(",")):
            continue
        top = root / mount.relative_to("/")
        # A container sees its own group as the top, though the path may be that of the machine.
        inner = path.relative_to(mounted_root) if path.is_relative_to(mounted_root) else Path()
        folder = top / inner
        yield from (group for group in (folder, *folder.parents) if group.is_relative_to(top))


def _group_paths(root: Path) -> Iterator[tuple[str, Path]]:
    """Controller (empty for version 2) and path of each group that this process is in."""
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, Path(path)


def _mounts(root: Path) -> Iterator[tuple[str, Path, Path]]:
    """Kind, the group at its top, and the folder of each mounted hierarchy."""
    for line in _lines(root / "proc/self/mountinfo"):
        before, _, after = line.partition(" - ")
        kind = after.partition(" ")[0]
        if kind in ("cgroup", "cgroup2"):
            _, _, _, top, mount, *_ = (re.sub(r"\\([0-7]{3})", _octal, word) for word in before.split(" "))
            yield kind, Path(top), Path(mount)


def _octal(match: re.Match[str]) -> str:
    return chr(int(match[1], 8))


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []  # no such file on systems without control groups


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # "max"
        return None
