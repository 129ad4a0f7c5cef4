"""`pageturner adapters`: the LoRA adapters of a running server; list, load, unload."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table

from pageturner.service.client import AdapterInfo, Client
from pageturner.service.commands import signals
from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.flight import add_target
from pageturner.service.commands.output import show, write, write_json
from pageturner.service.errors import ConfigError
from pageturner.service.sizes import format_size

HELP = "the LoRA adapters of a running server: list, load NAME FOLDER, unload NAME"
EXAMPLE = "pageturner adapters load sql team/sql-v2 --target unix:admin.sock"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="ACTION",
        help="list (the default); load NAME FOLDER, the folder as the server knows it; unload NAME",
    )
    parser.add_argument(
        "--wait-seconds",
        type=float,
        default=0.0,
        metavar="X",
        help="of unload: how long to wait for the requests that have it (default 0)",
    )
    add_target(parser)
    add_credential_flags(parser)
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    return signals.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    async with Client(arguments.target, credentials=credentials_of(arguments)) as client:
        match arguments.words or ["list"]:
            case ["list"]:
                _show(await client.adapters(), as_json=arguments.json)
            case ["load", name, folder]:
                _show([await client.load_adapter(name, folder)], as_json=arguments.json)
            case ["unload", name]:
                num_requests = await client.unload_adapter(name, arguments.wait_seconds)
                if arguments.json:
                    write_json({"num_requests": num_requests})
                elif num_requests:
                    write(f"{name}: no request may name it any more; {num_requests} still have it, and go on")
                else:
                    write(f"{name}: unloaded")
            case words:
                told = " ".join(words)
                raise ConfigError(told, "write list, load NAME FOLDER, or unload NAME")
    return 0


def _show(adapters: Sequence[AdapterInfo], *, as_json: bool) -> None:
    if as_json:
        write_json([asdict(adapter) for adapter in adapters])
        return
    if not adapters:
        write("no adapter is loaded")
        return
    table = Table("name", "state", "rank", "modules", "memory", "requests", "of all", "folder")
    for adapter in adapters:
        table.add_row(
            adapter.name,
            _state(adapter),
            str(adapter.rank),
            " ".join(adapter.modules),
            format_size(adapter.num_bytes),
            str(adapter.num_requests),
            str(adapter.num_requests_total),
            adapter.path,
        )
    show(table)


def _state(adapter: AdapterInfo) -> str:
    if adapter.is_unloading:
        return "unloading"
    return "in memory" if adapter.is_loaded else "on disk"
