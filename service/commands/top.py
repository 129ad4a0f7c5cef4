"""`pageturner top`: a live view of a server in the terminal, or one look as text or JSON."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from functools import partial
from typing import Any

from pageturner.service.client import Client, Credentials, PageturnerError
from pageturner.service.codec import plain
from pageturner.service.commands import signals
from pageturner.service.commands.credentials import add_credential_flags, credentials_of
from pageturner.service.commands.flight import add_target
from pageturner.service.commands.output import show, write_json
from pageturner.service.core.clock import MonotonicClock
from pageturner.service.errors import InvalidArgument
from pageturner.service.top.figures import Figures, History
from pageturner.service.top.readings import Away, Reader, Reading
from pageturner.service.top.text import Glyphs, glyphs_of

HELP = "watch a server in the terminal: requests, tokens, latencies, KV blocks and policies as they are now"
EXAMPLE = "pageturner top --target localhost:50051"

MIN_SECONDS, MAX_SECONDS = 0.2, 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target(parser)
    add_credential_flags(parser)
    parser.add_argument("--interval", type=float, metavar="SECONDS", default=1.0, help="between two looks")
    parser.add_argument("--once", action="store_true", help="look twice, an interval apart, and print that")
    parser.add_argument("--json", action="store_true", help="the same as JSON; implies --once")


def run(arguments: argparse.Namespace) -> int:
    interval = arguments.interval
    if not MIN_SECONDS <= interval <= MAX_SECONDS:
        raise InvalidArgument("--interval", f"{interval:g} is not in [{MIN_SECONDS:g}, {MAX_SECONDS:g}]")
    glyphs, credentials = glyphs_of(sys.stdout.encoding), credentials_of(arguments)
    if arguments.once or arguments.json:
        reading, figures = signals.run(_look(arguments.target, credentials, interval))
        if arguments.json:
            write_json(_document(reading, figures))
        else:
            _print(arguments.target, reading, figures, glyphs)
        return 0
    from pageturner.service.top.app import TopApp  # textual comes with it

    async def watch() -> int:
        async with Client(arguments.target, credentials=credentials) as client:
            app = TopApp(Reader(client, MonotonicClock()), arguments.target, glyphs, interval)
            leave = partial(app.exit, return_code=128 + signal.SIGINT)
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, leave)
            await app.run_async()
            return app.return_code or 0

    return signals.run(watch())


async def _look(target: str, credentials: Credentials, interval_seconds: float) -> tuple[Reading, Figures]:
    """Two readings, for rates. Raises PageturnerError where the server is not reached."""
    async with Client(target, credentials=credentials) as client:
        reader, history = Reader(client, MonotonicClock()), History()
        history.add(_met(await reader.read()))
        await asyncio.sleep(interval_seconds)
        reading = _met(await reader.read())
        return reading, history.add(reading)


def _met(told: Reading | Away) -> Reading:
    if isinstance(told, Away):
        raise PageturnerError(told.reason)
    return told


def _document(reading: Reading, figures: Figures) -> dict[str, Any]:
    """All of it but the map, of which the uses are counted."""
    from pageturner.service.top.block_map import counts
    from pageturner.service.top.styles import USE_NAMES

    return {
        "server": plain(reading.server),
        "load": plain(reading.load),
        "activity": plain(reading.activity),
        "figures": plain(figures),
        "policies": plain(reading.policies),
        "blocks": {USE_NAMES[use]: number for use, number in counts(reading.blocks).items()},
        "requests": plain(reading.requests),
    }


def _print(target: str, reading: Reading, figures: Figures, glyphs: Glyphs) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from pageturner.service.top import panels
    from pageturner.service.top.request_table import columns_that_fit, requests_title, room_of_first

    width = Console().width
    size, blocks = panels.blocks_panel(reading.blocks, width, 6, "use", glyphs)
    table = Table(box=None, pad_edge=False, header_style="dim")
    columns = columns_that_fit(width)
    for place, column in enumerate(columns):
        table.add_column(
            column.name,
            justify="right" if column.is_number else "left",
            no_wrap=True,
            min_width=column.width,
            max_width=room_of_first(columns, width) if not place else None,
        )
    for request in reading.requests.requests:
        table.add_row(*(column.value(request, glyphs) for column in columns))
    for part in (
        panels.headline(target, reading, None, False, glyphs),
        panels.notice(reading, glyphs),
        panels.figures_panel(reading, figures, width, glyphs),
        Text(panels.blocks_title(reading.blocks, "use", size), "bold"),
        blocks,
        panels.blocks_legend(reading.blocks, glyphs),
        Text(requests_title(reading, "schedule"), "bold"),
        table if reading.requests.requests else Text(),
        panels.policies_panel(reading.policies, glyphs),
    ):
        if part:
            show(part)
