"""Values that are frozen for the type checker and cheap at run time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """A slotted dataclass that mypy holds to be frozen, for the few kinds a step makes one of a sequence.

    `frozen=True` guards each field at run time by `object.__setattr__`: 2 us for eight fields where plain
    assignment takes 0.1, and so half of a whole step at 256 decodes.
    """
    return dataclass(slots=True, unsafe_hash=True)(cls)
