"""What ranks say to each other beside steps, as frames of JSON.

    rank 0                                     every other rank
                                            <- Hello        as soon as its process runs
    Assignment   which rank it is           ->
                                            <- Identity     its model's files are read
    Join         all are alike              ->              meets the others, loads its part of the weights
                                            <- Capacity     what memory it has
    Sizes        of the smallest            ->
                                            <- Ready
    (steps)                                 ->
                                            <- Done or Failed, for each
    Renew        after a step that failed   ->              meets the others anew
                                            <- Ready
    End                                     ->              its process ends

In the place of any of its own a rank may say Refused, and ends.

Beside all this, through a socket of their own, so that no step waits for a file:

    LoadAdapter                             ->              reads it, and lets steps find its part
                                            <- AdapterLoaded or AdapterRefused
    ForgetAdapters                          ->              they go
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from cattrs.errors import CattrsError

from pageturner.service.codec import plain, strict_converter
from pageturner.service.ranks.channel import Channel

STEP: Final = 0
"""The kind of a frame that holds a step (`codec.py`). Messages have the others, in the order of `KINDS`."""


@dataclass(frozen=True, slots=True)
class Hello:
    """format: of steps. version: of Pageturner."""

    format: int
    version: str


@dataclass(frozen=True, slots=True)
class Assignment:
    """port: on the loopback address, where ranks meet. cache_dir: where converted weights and compiled
    kernels are kept. config: by dotted key, what this rank obeys. device: in place of the one there. stated:
    keys of the configuration that the operator stated."""

    rank: int
    size: int
    port: int
    cache_dir: str
    config: Mapping[str, object]
    device: str
    stated: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Identity:
    """parts: by name, all on which the bits of a forward depend; equal on all ranks."""

    parts: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Join:
    """Meet the others now."""


@dataclass(frozen=True, slots=True)
class Capacity:
    """Blocks that fit in this rank's memory: on its device; on its host, to swap to and to cache."""

    num_blocks: int
    num_swap_blocks: int
    num_host_cache_blocks: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """Blocks that every rank is to have."""

    num_blocks: int
    num_swap_blocks: int
    num_host_cache_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """Steps can come."""


@dataclass(frozen=True, slots=True)
class Done:
    """The step that was sent is carried out, as far as the host is concerned."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The step that was sent failed here, and the others have been left."""

    reason: str


@dataclass(frozen=True, slots=True)
class Renew:
    """Leave the others, if that was not done, and meet them anew. generation: how often they have met."""

    generation: int


@dataclass(frozen=True, slots=True)
class End:
    """No step follows."""


@dataclass(frozen=True, slots=True)
class Refused:
    """This rank can't serve. key: of the configuration, empty where the model's files are the cause, or a
    fault. detail: for the log."""

    reason: str
    key: str = ""
    detail: str = field(default="")


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """Read an adapter, and hold it as this number. folder: by its whole path. digest: what rank 0 has read
    there. max_rank, max_bytes: bounds, as rank 0's."""

    number: int
    folder: str
    digest: str
    max_rank: int
    max_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterLoaded:
    """num_bytes: of this rank's part."""

    number: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class AdapterRefused:
    """It is not held here."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class ForgetAdapters:
    """Hold these no more, as far as they are held. Not answered."""

    numbers: tuple[int, ...]


Message = (
    Hello
    | Assignment
    | Identity
    | Join
    | Capacity
    | Sizes
    | Ready
    | Done
    | Failed
    | Renew
    | End
    | Refused
    | LoadAdapter
    | AdapterLoaded
    | AdapterRefused
    | ForgetAdapters
)
KINDS: tuple[type[Message], ...] = (
    Hello,
    Assignment,
    Identity,
    Join,
    Capacity,
    Sizes,
    Ready,
    Done,
    Failed,
    Renew,
    End,
    Refused,
    LoadAdapter,
    AdapterLoaded,
    AdapterRefused,
    ForgetAdapters,
)
_NUMBERS: Mapping[type[Message], int] = {kind: number for number, kind in enumerate(KINDS, STEP + 1)}
END = _NUMBERS[End], b""
"""The frame of `End`, which a rank that can't go on waits for among whatever else comes."""
_CONVERTER = strict_converter()
_M = TypeVar("_M", bound=Message)


class BadMessage(ValueError):
    """A frame that is no message, or not the one that is due."""


def send(channel: Channel, message: Message, timeout: float | None = None) -> None:
    """Raises as `Channel.send`."""
    fields = plain(message)
    channel.send(_NUMBERS[type(message)], json.dumps(fields).encode() if fields else b"", timeout)


def receive(channel: Channel, timeout: float | None = None) -> Message:
    """Raises BadMessage for a step or what is none, else as `Channel.receive`."""
    return read(*channel.receive(timeout))


def read(kind: int, payload: bytes) -> Message:
    """A frame that holds no step. Raises BadMessage."""
    if not STEP < kind <= len(KINDS):
        raise BadMessage(f"a frame of kind {kind}")
    try:
        fields: Any = json.loads(payload) if payload else {}
        if not isinstance(fields, dict):
            raise TypeError(f"a {type(fields).__name__}, not a table")
        return _CONVERTER.structure(fields, KINDS[kind - 1])
    except (ValueError, TypeError, LookupError, RecursionError, CattrsError) as error:
        raise BadMessage(f"no {KINDS[kind - 1].__name__}: {error}") from error


def expect(message: Message, kind: type[_M]) -> _M:
    """The message, if it is of this kind. Raises BadMessage."""
    if not isinstance(message, kind):
        raise BadMessage(f"{type(message).__name__} came where {kind.__name__} was due")
    return message
