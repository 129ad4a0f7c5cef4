"""What is told of adapters, and what they are read from: plain frozen values and one interface."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class ReadAdapter(Protocol):
    """An adapter that was read and checked whole, not yet where steps find it.

    digest: of its content. rank: the largest of a module. modules: those that it changes. num_bytes: as it
    lies on the model's device.
    """

    @property
    def digest(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def modules(self) -> tuple[str, ...]: ...
    @property
    def num_bytes(self) -> int: ...

    def put(self) -> None:
        """From now on steps find it, by its digest. From any thread."""
        ...


class AdapterFiles(Protocol):
    """Where adapters come from, and where steps find them."""

    @property
    def refusal(self) -> str | None:
        """Why this model takes no adapters; None if it does."""
        ...

    def read(self, folder: Path) -> ReadAdapter:
        """Takes its time; from any thread. Raises AdapterError."""
        ...

    def drop(self, digest: str) -> None:
        """Steps find it no more. From any thread."""
        ...


class NoAdapters:
    """`AdapterFiles` of a model that takes none."""

    def __init__(self, refusal: str) -> None:
        self.refusal: str | None = refusal

    def read(self, folder: Path) -> ReadAdapter:
        raise AssertionError(f"{folder} is not read: {self.refusal}")

    def drop(self, digest: str) -> None:
        raise AssertionError(f"{digest} was never put")


class Lease(Protocol):
    """One request's hold on its adapter: what it was when the request came stays in memory until
    `release`."""

    @property
    def digest(self) -> str:
        """Of the adapter's content."""
        ...

    def release(self) -> None:
        """The request has ended. Once."""
        ...


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """An adapter as operators see it.

    digest: of its content; requests share cached blocks, and answers go on, where it is equal. is_loaded: it
    lies in memory. is_unloading: no request may name it any more, and it goes with the last that does.
    num_requests: that have it and live. num_requests_total: since it was loaded.
    """

    name: str
    path: str
    digest: str
    rank: int
    modules: tuple[str, ...]
    num_bytes: int
    is_loaded: bool = True
    is_unloading: bool = False
    num_requests: int = 0
    num_requests_total: int = 0


@dataclass(frozen=True, slots=True)
class AdapterFigures:
    """num_adapters: names that requests may have. num_loaded, num_bytes: of those in memory; memory_bytes:
    what they may take. num_loads_total: times that a name was given an adapter, num_unloads_total: that one
    lost its name. num_reads_total: times that one was read from its folder, num_evictions_total: that one
    made room.

    requests: that live, requests_total: that ever had one, both by name; the first names, then `other`.
    """

    num_adapters: int = 0
    num_loaded: int = 0
    num_bytes: int = 0
    num_reads_total: int = 0
    num_evictions_total: int = 0
    memory_bytes: int = 0
    num_loads_total: int = 0
    num_unloads_total: int = 0
    requests: Mapping[str, int] = field(default_factory=dict)
    requests_total: Mapping[str, int] = field(default_factory=dict)
