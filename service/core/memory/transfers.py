"""Blocks on their way between host memory and disk, as values: what the core asks for, and what came of it.

A transfer is named by its block of the host, which holds a reference for as long as it is under way.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class Save:
    """Write a block of the host to disk, under its hash."""

    host_block: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Load:
    """Read the block of this hash from disk into a block of the host."""

    host_block: int
    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Discard:
    """Forget what is on disk under this hash; nothing answers."""

    block_hash: bytes


@dataclass(frozen=True, slots=True)
class Withhold:
    """The block of this hash was to be handed over, and left memory before; nothing answers."""

    block_hash: bytes


Transfer: TypeAlias = Save | Load | Discard | Withhold


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """A Save or a Load is over. succeeded: the disk, or the host block, holds the KV whole from now on."""

    host_block: int
    succeeded: bool


class BlockDisk(Protocol):
    """What the core asks of the disk. It may answer otherwise from one call to the next: an answer is an
    input of the scheduler, as the end of a transfer is."""

    def holds(self, block_hash: bytes) -> bool:
        """Whether a Load of this hash may succeed."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks that it holds."""
        ...
