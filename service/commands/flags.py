"""Every configuration key as a flag of the commands that start a server."""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path
from typing import get_args

from pageturner.policies.spec import PolicySpec
from pageturner.service.config import KEYS, LoadedConfig, load_config
from pageturner.service.schema import Key

_DESTINATION = "config:"
_RENAMED = {"model.source": "--model"}
_PREFIXED = {"log", "policies"}


def flag_of(key: Key) -> str:
    """`--block-size` for cache.block_size: the bare name where one section has it, as in vLLM."""
    if str(key) in _RENAMED:
        return _RENAMED[str(key)]
    if key.annotation is PolicySpec:
        return f"--{key.name}-policy"
    shared = Counter(other.name for other in KEYS.values())[key.name] > 1
    prefix = f"{key.section}-" if shared or key.section in _PREFIXED else ""
    return f"--{prefix}{key.name}".replace("_", "-")


def add_config_flags(parser: argparse.ArgumentParser, positionals: str = "") -> None:
    """`--config FILE` and a flag for each key. positionals: what else the usage line shows."""
    parser.usage = f"%(prog)s [options]{positionals}"  # fifty flags in brackets help nobody
    parser.add_argument("--config", type=Path, metavar="FILE", help="the TOML file; PAGETURNER_CONFIG else")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name, key in KEYS.items():
        if key.section not in groups:
            groups[key.section] = parser.add_argument_group(f"[{key.section}]")
        _add_flag(groups[key.section], name, key)


def _add_flag(group: argparse._ArgumentGroup, name: str, key: Key) -> None:
    doc = key.doc.replace("%", "%%")
    flag, destination = flag_of(key), _DESTINATION + name
    if key.annotation is not bool:
        metavar = "|".join(map(str, get_args(key.annotation))) if _is_literal(key) else "VALUE"
        group.add_argument(flag, dest=destination, metavar=metavar, default=None, help=doc)
        return
    group.add_argument(
        flag, dest=destination, nargs="?", const="true", metavar="BOOL", default=None, help=doc
    )
    group.add_argument(
        f"--no-{flag[2:]}", dest=destination, action="store_const", const="false", help=argparse.SUPPRESS
    )


def _is_literal(key: Key) -> bool:
    arguments = get_args(key.annotation)
    return bool(arguments) and all(isinstance(argument, str) for argument in arguments)


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
