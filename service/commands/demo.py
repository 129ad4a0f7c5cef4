"""`pageturner demo`: the whole way once. A server of its own, one question, a streamed answer, the end."""

from __future__ import annotations

import argparse

from pageturner.service.client import Client
from pageturner.service.client.server_process import RunningServer, running_server
from pageturner.service.commands import signals
from pageturner.service.commands.answer import (
    CONNECT_SECONDS,
    Answer,
    add_sampling_flags,
    ask,
    sampling_options,
)
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.generate import to_json
from pageturner.service.commands.output import note, write, write_json
from pageturner.service.engine.api import ChatMessage

HELP = "start the service on a free port, stream one answer over gRPC, stop"
EXAMPLE = "pageturner demo --prompt 'Name three rivers.'"
PROMPT = "What is a page table in an operating system? Answer in three sentences."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", default=PROMPT, metavar="TEXT", help="what to ask")
    parser.add_argument("--json", action="store_true", help="the answer and its figures as JSON")
    add_sampling_flags(parser, temperature=0.0, max_tokens=160)
    add_config_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    say = note if arguments.json else write
    say("starting the service (the first start converts the embedded model, once) ...")
    with running_server(config_arguments(arguments)) as server:
        say(f"serving on {server.target} after {server.ready_seconds:.1f} s\n\n> {arguments.prompt}\n")
        answer = signals.run(_ask(server, arguments))
        say(f"\n\n{answer.figures()}")
    say("the service has stopped")
    if arguments.json:
        write_json({"ready_seconds": server.ready_seconds, **to_json(answer)}, indent=None)
    return 0


async def _ask(server: RunningServer, arguments: argparse.Namespace) -> Answer:
    def show(_index: int, text: str) -> None:
        if not arguments.json:
            write(text, end="")

    async with Client(server.target) as client:
        await client.wait_until_serving(CONNECT_SECONDS)
        return await ask(client, (ChatMessage("user", arguments.prompt),), sampling_options(arguments), show)
