"""`pageturner config`: what a server started now, with these flags, would run with."""

from __future__ import annotations

import argparse
import json

from pageturner.service.commands.flags import add_config_flags, load_from
from pageturner.service.commands.output import write

HELP = "print every configuration value in force"
EXAMPLE = "pageturner config --config my.toml --num-blocks 64 > effective.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="values, defaults, origins and meanings as JSON")
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    loaded = load_from(arguments)
    write(
        json.dumps(loaded.to_json(), indent=2, default=str) if arguments.json else loaded.to_toml().rstrip()
    )
    return 0
