"""Files that a running service reads again: whether they have changed, and who else may read them."""

from __future__ import annotations

import stat
from pathlib import Path

from structlog.typing import FilteringBoundLogger

_Signature = tuple[int, int, int]


def unheard() -> None:
    """Where nobody counts the files that were refused."""


class WatchedFiles:
    """A glance at the time, size and inode of each file, links followed, as a mounted Secret swaps them.

    A file that is not there counts as unchanged: it is being replaced, and the next look finds the new one.
    """

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen: dict[Path, _Signature] = {}
        self.note()

    def note(self) -> None:
        """What is there now is known. To be called before the files are read, so that a write in between
        counts."""
        self._seen |= self._signatures()

    def have_changed(self) -> bool:
        """Whether any of them differs from what was noted."""
        return any(self._seen.get(path) != signature for path, signature in self._signatures().items())

    def _signatures(self) -> dict[Path, _Signature]:
        found: dict[Path, _Signature] = {}
        for path in self._paths:
            try:
                status = path.stat()
            except OSError:
                continue
            found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
        return found


def warn_of_readers(event: str, path: Path, logger: FilteringBoundLogger) -> None:
    """A warning where every user of the machine may read the file."""
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError:
        return  # it was read a moment ago; the next look will say what became of it
    if mode & stat.S_IROTH:
        reason = "every user may read it; chmod 600 lets only its owner"
        logger.warning(event, path=str(path), mode=f"{mode:04o}", reason=reason)
