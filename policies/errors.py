"""What can be wrong with a policy that an operator asked for."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PolicyError(Exception):
    """Base of the errors below; str() is fit to be shown to an operator."""

    def __reduce__(self) -> tuple[object, ...]:
        """Copied and unpickled from its text and attributes: the constructor's arguments are others."""
        return type(self).__new__, (type(self), *self.args), self.__dict__


class UnknownAxisError(PolicyError):
    """There is no such policy axis."""

    def __init__(self, axis: str, known: Iterable[str]) -> None:
        self.axis = axis
        self.known = tuple(known)
        super().__init__(f"no policy axis {axis!r}{_did_you_mean(axis, self.known)}")


class UnknownPolicyError(PolicyError):
    """The axis has no policy of that name."""

    def __init__(self, axis: str, name: str, known: Iterable[str]) -> None:
        self.axis = axis
        self.name = name
        self.known = tuple(known)
        super().__init__(f"no {axis} policy {name!r}{_did_you_mean(name, self.known)}")


class UnknownPresetError(PolicyError):
    """There is no preset of that name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f"no preset {name!r}{_did_you_mean(name, self.known)}")


class PolicySpecError(PolicyError):
    """What was written for a policy cannot be read as a name with options."""

    def __init__(self, text: str, reason: str) -> None:
        self.text = text
        self.reason = reason
        super().__init__(f"{text!r} {reason}")


class PolicyOptionError(PolicyError):
    """An option of a policy is unknown, of the wrong type or out of range."""

    def __init__(self, policy: str, option: str, reason: str) -> None:
        self.policy = policy
        self.option = option
        self.reason = reason
        super().__init__(f"policy {policy!r}: option {option!r} {reason}")


class PolicyLoadError(PolicyError):
    """A policy from outside cannot be imported, or is no policy of its axis."""

    def __init__(self, axis: str, name: str, reason: str) -> None:
        self.axis = axis
        self.name = name
        self.reason = reason
        super().__init__(f"{axis} policy {name!r}: {reason}")


def _did_you_mean(name: str, known: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{hint} (there are: {', '.join(known)})"
