"""Adapters without weights: a folder's name is its content, and the number at its end its size in bytes."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path

from pageturner.service.engine.adapter_options import AdapterOptions
from pageturner.service.engine.adapters import Adapters
from pageturner.service.errors import AdapterError
from pageturner.service.sizes import Bytes
from support.scripted import recording_logger


@dataclass(frozen=True)
class FakeAdapter:
    digest: str
    num_bytes: int
    files: FakeFiles
    rank: int = 8
    modules: tuple[str, ...] = ("q_proj",)

    def put(self) -> None:
        assert self.digest not in self.files.loaded, "put twice"
        self.files.loaded.add(self.digest)


@dataclass
class FakeFiles:
    """changed: by folder, what it holds instead of what its name says. gate: reads wait for it."""

    loaded: set[str] = field(default_factory=set)
    changed: dict[str, str] = field(default_factory=dict)
    num_reads: int = 0
    gate: threading.Event = field(default_factory=threading.Event)
    refusal: str | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def read(self, folder: Path) -> FakeAdapter:
        assert self.gate.wait(60)
        self.num_reads += 1
        content = self.changed.get(folder.name, folder.name)
        if content.startswith("bad"):
            raise AdapterError(f"{content}: not served")
        return FakeAdapter(content, int(content.rpartition("-")[2]), self)

    def drop(self, digest: str) -> None:
        self.loaded.remove(digest)


def fake_adapters(memory: int = 100, **options: object) -> tuple[Adapters, FakeFiles]:
    files = FakeFiles()
    made = AdapterOptions(memory=Bytes(memory), **options)  # type: ignore[arg-type] # by name
    return Adapters(files, made, recording_logger()[0]), files
