"""Why a load test could not be run at all; a request that fails is a result, not an error."""

from __future__ import annotations


class LoadtestError(Exception):
    """str() is fit to be shown to the user."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copied and unpickled from its text and attributes: the constructor's arguments are others."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class OptionError(LoadtestError):
    """An option makes no sense; `option` is its flag without the dashes."""

    def __init__(self, option: str, reason: str) -> None:
        super().__init__(f"--{option}: {reason}")
        self.option = option
        self.reason = reason


class ServerError(LoadtestError):
    """The server cannot be reached, or cannot serve this workload."""


class OutputLost(LoadtestError):
    """Standard output takes no more, as on a full disk."""


class WorkerDied(LoadtestError):
    """A client process ended before its part of the work was done."""
