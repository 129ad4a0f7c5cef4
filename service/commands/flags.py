"""Every configuration key as a flag of the commands that start a server."""

from __future__ import annotations

import argparse
import json
import types
from collections import Counter, abc
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pageturner.policies.spec import PolicySpec
from pageturner.service.config import KEYS, LoadedConfig, load_config
from pageturner.service.schema import Key, to_plain
from pageturner.service.sizes import Bytes, format_size

_DESTINATION = "config:"
_RENAMED = {"model.source": "--model"}
_PREFIXED = {
    *("adapters", "auth", "grammars", "handover", "log"),
    *("metrics", "policies", "speculation", "tls", "traces"),
}
"""Sections whose flags all have the section's name before them."""
_METAVARS: dict[object, str] = {int: "N", float: "X", Bytes: "SIZE", Path: "FILE", PolicySpec: "POLICY"}


def flag_of(key: Key) -> str:
    """`--block-size` for cache.block_size: the bare name where one section has it, as in vLLM."""
    if str(key) in _RENAMED:
        return _RENAMED[str(key)]
    if key.annotation is PolicySpec:
        return f"--{key.name}-policy"
    shared = Counter(other.name for other in KEYS.values() if other.section not in _PREFIXED)[key.name] > 1
    prefix = f"{key.section}-" if shared or key.section in _PREFIXED else ""
    return f"--{prefix}{key.name}".replace("_", "-")


def add_config_flags(parser: argparse.ArgumentParser, positionals: str = "") -> None:
    """`--config FILE` and a flag for each key. positionals: what else the usage line shows."""
    parser.usage = f"%(prog)s [options]{positionals}"  # fifty flags in brackets are no help
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="the TOML file; else what PAGETURNER_CONFIG names"
    )
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, key in KEYS.items():
        if key.section not in groups:
            groups[key.section] = parser.add_argument_group(f"[{key.section}]")
        _add_flag(groups[key.section], name, key)


def _add_flag(group: argparse._ArgumentGroup, name: str, key: Key) -> None:
    flag, destination = flag_of(key), _DESTINATION + name
    doc = key.doc.rstrip(".")
    if doc[1:2].islower() or doc[1:2] == " ":  # a sentence in the code, a phrase of the help
        doc = doc[0].lower() + doc[1:]
    shown = f"{doc}{_default_of(key)}".replace("%", "%%")
    if _kind(key) is not bool:
        group.add_argument(
            flag, type=str, dest=destination, metavar=_metavar(key), default=None, help=shown
        )  # str: a path keeps its bytes
        return
    group.add_argument(
        flag, dest=destination, nargs="?", const="true", metavar="BOOL", default=None, help=shown
    )
    group.add_argument(
        f"--no-{flag[2:]}", dest=destination, action="store_const", const="false", help=argparse.SUPPRESS
    )


def _default_of(key: Key) -> str:
    """` (default 16)`, or nothing where there is none."""
    value = key.default
    if value is None or value == {} or value == ():
        return ""
    if _kind(key) is Bytes and isinstance(value, int):
        return f" (default {format_size(value)})"
    return f" (default {json.dumps(value) if isinstance(value, bool) else to_plain(value)})"


def _metavar(key: Key) -> str:
    """What a value looks like: `N`, `SIZE`, or the words to choose from."""
    kind = _kind(key)
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if isinstance(kind, type) and issubclass(kind, Enum):
        return "|".join(str(member.value) for member in kind)
    if get_origin(kind) in (tuple, list):
        return f"{key.name.upper()},..."
    if get_origin(kind) is abc.Mapping:
        return "{AXIS=POLICY,...}" if PolicySpec in get_args(kind) else "{NAME=FOLDER,...}"
    return _METAVARS.get(kind) or {"source": "MODEL"}.get(key.name, key.name.upper())


def _kind(key: Key) -> Any:
    """The annotation without None."""
    arguments = get_args(key.annotation)
    if types.NoneType not in arguments:
        return key.annotation
    return next(argument for argument in arguments if argument is not types.NoneType)


def config_flags(arguments: argparse.Namespace) -> dict[str, str]:
    """The configuration flags that were given: text by dotted key."""
    return {
        destination.removeprefix(_DESTINATION): value
        for destination, value in vars(arguments).items()
        if destination.startswith(_DESTINATION) and value is not None
    }


def config_arguments(arguments: argparse.Namespace) -> list[str]:
    """The same flags for the command line of a server that is started as a process of its own."""
    given = [f"{flag_of(KEYS[name])}={value}" for name, value in config_flags(arguments).items()]
    return [f"--config={arguments.config}", *given] if arguments.config else given


def load_from(arguments: argparse.Namespace) -> LoadedConfig:
    """The configuration that file, environment and these flags make. Raises ConfigError."""
    return load_config(arguments.config, flags=config_flags(arguments))
