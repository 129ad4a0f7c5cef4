"""Policies that leave by SystemExit before they are asked anything."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from pageturner.policies.interfaces import KeyChange


@dataclass(frozen=True)
class Leaves:
    """Leaves as it is made."""

    key_change: ClassVar[KeyChange] = KeyChange.NEVER

    def __post_init__(self) -> None:
        raise SystemExit(2)

    def key(self, *_: object) -> Any:
        return ()


@dataclass(frozen=True)
class Interrupts(Leaves):
    """Raises what Ctrl-C would as it is made."""

    def __post_init__(self) -> None:
        raise KeyboardInterrupt


def __getattr__(name: str) -> Any:
    raise SystemExit(name)
