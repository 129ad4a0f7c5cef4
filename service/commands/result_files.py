"""Whether results can be written, asked before long work that would be lost."""

from __future__ import annotations

from pathlib import Path

from pageturner.service.errors import ConfigError


def check_folder(flag: str, folder: Path) -> None:
    """Make it if it is not there. Raises ConfigError where no file can be written in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(flag, f"{folder}: {error.strerror}") from error
    check_file(flag, folder / ".pageturner")


def check_file(flag: str, path: Path) -> None:
    """Leaves everything as it was. Raises ConfigError where the file cannot be written."""
    is_there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not is_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(flag, f"{path}: {error.strerror}") from error
