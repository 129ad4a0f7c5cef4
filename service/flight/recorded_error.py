"""An error as a flight record keeps it: by the name of its type."""

from __future__ import annotations

from pageturner.service.errors import PageturnerError


class RecordedError(PageturnerError):
    """Stands, in a replay, for an error of which the record holds the name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


def error_name(error: BaseException | None) -> str:
    """Empty for none."""
    if error is None:
        return ""
    return error.name if isinstance(error, RecordedError) else type(error).__name__
