"""Flags that are whole numbers from 1 on."""

from __future__ import annotations

import argparse

from pageturner.service.errors import ConfigError


def add_counts(parser: argparse.ArgumentParser, *counts: tuple[str, int, str]) -> None:
    """A flag for each (name without its dashes, default, what it counts)."""
    for name, default, doc in counts:
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="N", help=f"{doc} (default {default})"
        )


def check_counts(arguments: argparse.Namespace, *names: str) -> None:
    """names: of attributes. Raises ConfigError for the first that is below 1; None is a flag left out."""
    for name in names:
        value = getattr(arguments, name)
        if value is not None and value < 1:
            raise ConfigError(f"--{name.replace('_', '-')}", f"{value} is below 1")
