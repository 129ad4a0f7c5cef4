"""Options of adapters; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pageturner.service.errors import ConfigError
from pageturner.service.sizes import Bytes

MAX_NAME_CHARACTERS = 256


@dataclass(frozen=True, slots=True)
class AdapterOptions:
    """LoRA adapters that requests may name, as PEFT saves them."""

    load: Mapping[str, str] = field(default_factory=dict)
    """By name, folders of adapters that are loaded at start, such as { sql = "adapters/sql" }."""
    folder: Path | None = None
    """Where LoadAdapter finds folders: it takes those below this one alone; absent, only callers of the admin
    listener's socket file may load any. Who may write there decides what is loaded."""
    memory: Bytes = Bytes(1 << 30)
    """Of all adapters together, as they lie on the model's device. Of more than fit those that were not used
    for longest make room, and are read again when they are asked for."""
    max_rank: int = 64
    """The largest rank of a module that is served."""
    max_adapters: int = 1024
    """Names that may be loaded at once."""

    def __post_init__(self) -> None:
        for name in ("memory", "max_rank", "max_adapters"):
            if getattr(self, name) < 1:
                raise ConfigError(f"adapters.{name}", f"{getattr(self, name)} is below 1")
        for name, folder in self.load.items():
            if reason := why_no_name(name):
                raise ConfigError("adapters.load", f"{name[:MAX_NAME_CHARACTERS]!r} {reason}")
            if not folder:
                raise ConfigError(f"adapters.load.{name}", "names no folder")
        if len(self.load) > self.max_adapters:
            raise ConfigError("adapters.load", f"{len(self.load)} adapters, more than adapters.max_adapters")


def why_no_name(name: str) -> str | None:
    """What is wrong with a name for an adapter; None if nothing."""
    if not name:
        return "is empty"
    if len(name) > MAX_NAME_CHARACTERS:
        return f"is longer than {MAX_NAME_CHARACTERS} characters"
    if not name.isprintable() or name != name.strip():
        return "has characters that do not print, or begins or ends with a space"
    return None
