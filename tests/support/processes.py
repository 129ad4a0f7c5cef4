"""Whether processes that a test did not start itself are still there."""

from __future__ import annotations

from pathlib import Path


def is_running(process_id: int) -> bool:
    """Whether it does anything still: nobody may collect what an orphan leaves."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
