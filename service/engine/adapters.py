"""The adapters that requests may name: the one owner of names, of what lies in memory, and of who uses it.

A name stands for a folder, and for what it held when it was loaded: its content, known by a digest. Contents
lie in memory, up to a bound; one that no live request has may make room for another, and is read again when
it is asked for. Lives on the event loop; files are read in threads, one at a time.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field
from pathlib import Path

from structlog.typing import FilteringBoundLogger

from pageturner.service.engine.adapter_options import AdapterOptions, why_no_name
from pageturner.service.engine.adapter_reports import (
    AdapterFigures,
    AdapterFiles,
    AdapterInfo,
    Lease,
    ReadAdapter,
)
from pageturner.service.engine.instruments import BoundedLabel
from pageturner.service.errors import AdapterError, AdapterNotFound, AdaptersFull, InvalidArgument
from pageturner.service.sizes import format_size

NAMES_TOLD_APART = 64
"""By figures of requests: the first so many that had one. The rest are counted together, since each is a
series for ever in the memory of whoever scrapes."""

RETRY_SECONDS = 1.0
"""What a request is told to wait whose adapter finds no room: until some other's requests have ended."""


@dataclass(slots=True, eq=False)
class _Content:
    """What names stand for. last_used: number of the last acquisition of all."""

    digest: str
    num_bytes: int
    is_loaded: bool = False
    last_used: int = 0
    num_requests: int = 0
    num_names: int = 0


@dataclass(slots=True, eq=False)
class _Named:
    """A name from its load to its unload, and on until its last request has ended."""

    name: str
    path: Path
    rank: int
    modules: tuple[str, ...]
    content: _Content
    is_unloading: bool = False
    num_requests: int = 0
    num_requests_total: int = 0
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)


class _Held:
    """`Lease` of a name."""

    __slots__ = ("_adapters", "_named")

    def __init__(self, adapters: Adapters, named: _Named) -> None:
        self._adapters, self._named = adapters, named

    @property
    def digest(self) -> str:
        return self._named.content.digest

    def release(self) -> None:
        self._adapters.release(self._named)


class Adapters:
    """files: where adapters are read from, and put for steps to find them."""

    def __init__(self, files: AdapterFiles, options: AdapterOptions, logger: FilteringBoundLogger) -> None:
        self._files, self._options, self._logger = files, options, logger
        self._names: dict[str, _Named] = {}
        self._leaving: list[_Named] = []
        self._contents: dict[str, _Content] = {}
        self._num_uses = 0
        self._num_reads = 0
        self._num_evictions = 0
        self._num_loads = 0
        self._num_unloads = 0
        self._labels = BoundedLabel(NAMES_TOLD_APART)
        self._requests_total: Counter[str] = Counter()
        self._reading = asyncio.Lock()

    @property
    def folder(self) -> Path | None:
        """Below which clients may name folders to load."""
        return self._options.folder

    # --- requests --------------------------------------------------------------------------

    def find(self, name: str, allowed: Container[str] | None = None) -> str:
        """The digest of an adapter. Raises AdapterNotFound, also for one that is not among those allowed: its
        name is none of the caller's business."""
        if name not in self._names or (allowed is not None and name not in allowed):
            raise AdapterNotFound(name)
        return self._names[name].content.digest

    async def acquire(self, name: str) -> Lease:
        """Hold an adapter for a request, in memory. Raises AdapterNotFound, AdaptersFull where others leave
        no room for it, or AdapterError where it can't be read again."""
        named = self._names.get(name)
        if named is None:
            raise AdapterNotFound(name)
        content = named.content
        self._hold(named)
        try:
            if not content.is_loaded:
                await self._read_again(named)
        except BaseException:
            named.num_requests_total -= 1
            self.release(named)
            raise
        self._num_uses += 1
        content.last_used = self._num_uses
        self._requests_total[self._labels.of(name)] += 1
        return _Held(self, named)

    def release(self, named: _Named) -> None:
        """One of its requests has ended; for `Lease`."""
        named.num_requests -= 1
        named.content.num_requests -= 1
        if not named.num_requests:
            named.is_idle.set()
            if named.is_unloading:
                self._forget(named)

    def _hold(self, named: _Named) -> None:
        named.num_requests += 1
        named.num_requests_total += 1
        named.content.num_requests += 1
        named.is_idle.clear()

    # --- operators -------------------------------------------------------------------------

    def preload(self, name: str, folder: Path) -> None:
        """At start, before any request. Raises AdapterError."""
        self._check_name(name)
        self._num_reads += 1
        self._register(name, folder, self._files.read(folder))

    async def load(self, name: str, folder: Path) -> AdapterInfo:
        """Let requests name what a folder holds now. What another load gave this name goes on for the
        requests that have it, and is unloaded with the last. Nothing is changed where this raises.

        Raises InvalidArgument for a name or a folder that is none, or holds what is not served.
        """
        async with self._reading:
            self._check_name(name)
            try:
                adapter = await self._read(folder)
            except AdapterError as error:
                raise InvalidArgument("path", str(error)) from error
            return _info_of(self._register(name, folder, adapter))

    def _check_name(self, name: str) -> None:
        """Raises InvalidArgument, or AdapterError where the model takes no adapters."""
        if reason := why_no_name(name):
            raise InvalidArgument("name", reason)
        if self._files.refusal is not None:
            raise AdapterError(self._files.refusal)
        if name not in self._names and len(self._names) >= (most := self._options.max_adapters):
            reason = f"{most} adapters are loaded, and no more may be (adapters.max_adapters)"
            raise InvalidArgument("name", reason)

    def _register(self, name: str, folder: Path, adapter: ReadAdapter) -> _Named:
        """The name stands for this adapter from now on; it is put where steps find it if there is room."""
        content = self._contents.get(adapter.digest)
        if content is None:
            content = _Content(adapter.digest, adapter.num_bytes)
            self._contents[adapter.digest] = content
        content.num_names += 1
        if not content.is_loaded and self._make_room(adapter.num_bytes):
            self._put(content, adapter)
        before = self._names.pop(name, None)
        named = _Named(name, folder, adapter.rank, adapter.modules, content)
        named.is_idle.set()
        self._names[name] = named
        self._num_loads += 1
        if before is not None:
            self._retire(before)
        self._logger.info("adapter_loaded", adapter=name, path=str(folder), digest=adapter.digest)
        return named

    async def unload(self, name: str, wait_seconds: float) -> int:
        """Let no request name it from now on, and wait so long for those that have it; how many still do, and
        end by themselves. Raises AdapterNotFound."""
        named = self._names.pop(name, None)
        if named is None:
            raise AdapterNotFound(name)
        self._retire(named)
        if named.num_requests and wait_seconds > 0:
            try:
                await asyncio.wait_for(named.is_idle.wait(), wait_seconds)
            except TimeoutError:
                self._logger.info("adapter_unloading", adapter=name, num_requests=named.num_requests)
        return named.num_requests

    def report(self) -> tuple[AdapterInfo, ...]:
        """Those that requests may name, in the order of their loads, then those that only wait for their
        requests."""
        return tuple(_info_of(named) for named in (*self._names.values(), *self._leaving))

    def names(self) -> tuple[str, ...]:
        """Those that requests may name."""
        return tuple(self._names)

    def figures(self) -> AdapterFigures:
        loaded = [content for content in self._contents.values() if content.is_loaded]
        requests = dict.fromkeys(self._requests_total, 0)
        for named in (*self._names.values(), *self._leaving):
            if named.num_requests and (label := self._labels.of(named.name)) in requests:
                requests[label] += named.num_requests
        return AdapterFigures(
            num_adapters=len(self._names),
            num_loaded=len(loaded),
            num_bytes=sum(content.num_bytes for content in loaded),
            num_reads_total=self._num_reads,
            num_evictions_total=self._num_evictions,
            memory_bytes=int(self._options.memory),
            num_loads_total=self._num_loads,
            num_unloads_total=self._num_unloads,
            requests=requests,
            requests_total=dict(self._requests_total),
        )

    def _retire(self, named: _Named) -> None:
        self._num_unloads += 1
        named.is_unloading = True
        if named.num_requests:
            self._leaving.append(named)
        else:
            self._forget(named)

    def _forget(self, named: _Named) -> None:
        """Nothing has the name any more: what it stood for goes, unless other names stand for it."""
        if named in self._leaving:
            self._leaving.remove(named)
        content = named.content
        content.num_names -= 1
        if not content.num_names:
            del self._contents[content.digest]
            if content.is_loaded:
                self._take_out(content)
        self._logger.info("adapter_unloaded", adapter=named.name, digest=content.digest)

    # --- memory ----------------------------------------------------------------------------

    async def _read_again(self, named: _Named) -> None:
        """Bring back what made room for another."""
        content = named.content
        async with self._reading:
            if content.is_loaded:
                return
            if not self._make_room(content.num_bytes):
                size = format_size(content.num_bytes)
                reason = (
                    f"adapter {named.name!r} of {size} finds no room: those in memory all have live requests"
                )
                raise AdaptersFull(reason, RETRY_SECONDS)
            try:
                adapter = await self._read(named.path)
            except AdapterError as error:
                raise AdapterError(f"adapter {named.name!r} can't be read again: {error}") from error
            if adapter.digest != content.digest:
                reason = "its folder holds another adapter than was loaded; load it anew"
                raise AdapterError(f"adapter {named.name!r}: {reason}")
            # Meanwhile others may have been read in vain, but none was put: reading is one at a time.
            self._put(content, adapter)

    async def _read(self, folder: Path) -> ReadAdapter:
        self._num_reads += 1
        return await asyncio.to_thread(self._files.read, folder)

    def _make_room(self, num_bytes: int) -> bool:
        """Take out those that were not used for longest and have no request, as many as it needs; none if
        that is not enough."""
        loaded = [content for content in self._contents.values() if content.is_loaded]
        over = sum(content.num_bytes for content in loaded) + num_bytes - self._options.memory
        leaving: list[_Content] = []
        for content in sorted(loaded, key=lambda content: content.last_used):
            if over <= 0:
                break
            if not content.num_requests:
                leaving.append(content)
                over -= content.num_bytes
        if over > 0:
            return False
        for content in leaving:
            self._num_evictions += 1
            self._take_out(content)
        return True

    def _put(self, content: _Content, adapter: ReadAdapter) -> None:
        adapter.put()
        content.is_loaded = True

    def _take_out(self, content: _Content) -> None:
        content.is_loaded = False
        self._files.drop(content.digest)


def _info_of(named: _Named) -> AdapterInfo:
    content = named.content
    return AdapterInfo(
        named.name,
        str(named.path),
        content.digest,
        named.rank,
        named.modules,
        content.num_bytes,
        content.is_loaded,
        named.is_unloading,
        named.num_requests,
        named.num_requests_total,
    )
