"""What an operation refuses, and why."""

from __future__ import annotations


class KernelArgumentError(ValueError):
    """An operation was given something it cannot read or write safely; nothing was written.

    `argument` names the culprit, the message says what it is and what is needed.
    """

    def __init__(self, argument: str, found: str, needed: str) -> None:
        super().__init__(f"{argument} is {found}; needed: {needed}")
        self.argument = argument

    def __reduce__(self) -> tuple[object, ...]:
        """Copied and unpickled from its text and attributes: the constructor's arguments are others."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class CompilerUnavailable(RuntimeError):
    """The C++ operations cannot be built or loaded on this machine; use the torch operations."""


class KernelsUnavailable(RuntimeError):
    """The CUDA kernels cannot be compiled or loaded here; the message names what is missing or too old."""


class KernelFault(RuntimeError):
    """A kernel stopped in the middle: a bounds check of the debug build, or a deadlock in the emulator."""
