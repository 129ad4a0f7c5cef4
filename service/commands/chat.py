"""`pageturner chat`: a conversation in the terminal. Ctrl-C ends an answer, Ctrl-D all."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator

from pageturner.service.client import Client, Credentials
from pageturner.service.commands import signals
from pageturner.service.commands.answer import (
    Answer,
    add_sampling_flags,
    add_target_flags,
    ask_for_some,
    sampling_options,
    target_of,
    wait_while_it_loads,
)
from pageturner.service.commands.credentials import credentials_of
from pageturner.service.commands.output import OutputLost, note, standard_output, write
from pageturner.service.commands.template_variables import add_template_flags, chat_prompt
from pageturner.service.commands.text import input_text
from pageturner.service.engine.api import ChatMessage
from pageturner.service.errors import PageturnerError

HELP = "talk to the model; streams every answer"
EXAMPLE = "pageturner chat --target localhost:50051 --system 'You answer in one sentence.'"
COMMANDS = "/reset forgets the conversation, /quit or Ctrl-D ends it, Ctrl-C ends an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", metavar="TEXT", help="a system message in front of the conversation")
    add_template_flags(parser)
    add_sampling_flags(parser, temperature=0.7)
    add_target_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    with target_of(arguments) as target, asyncio.Runner() as runner:
        client = signals.run(_connect(target, credentials_of(arguments)), runner)
        try:
            return _converse(runner, client, arguments)
        finally:
            runner.run(client.close())


async def _connect(target: str, credentials: Credentials) -> Client:
    client = Client(target, credentials=credentials)
    await wait_while_it_loads(client)
    return client


def _converse(runner: asyncio.Runner, client: Client, arguments: argparse.Namespace) -> int:
    opening = [ChatMessage("system", arguments.system)] if arguments.system else []
    history = list(opening)
    for line in _lines():
        if line == "/quit":
            break
        if line == "/reset":
            history = list(opening)
            continue
        turn = ChatMessage("user", line)
        try:
            answer = signals.run(_answer(client, [*history, turn], arguments), runner)
        except KeyboardInterrupt:
            write(" [stopped]")
            continue
        except OutputLost:
            raise
        except PageturnerError as error:
            # One refused turn (a conversation grown too long) must not end the others.
            note(f"pageturner chat: {error}")
            continue
        history += [turn, ChatMessage("assistant", answer.choices[0].text)]
        write()
        if sys.stderr.isatty():
            note(f"[{answer.figures()}]")
    return 0


async def _answer(client: Client, messages: list[ChatMessage], arguments: argparse.Namespace) -> Answer:
    prompt = chat_prompt(messages, arguments)
    return await ask_for_some(
        client, prompt, sampling_options(arguments), lambda _index, text: write(text, end="")
    )


def _lines() -> Iterator[str]:
    """What the user says, line by line; a prompt and line editing on a terminal."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  # importing it gives input() history and editing

        note(COMMANDS)
    while True:
        try:
            with standard_output():  # input() writes and flushes, even where there is no prompt
                line = input_text(input("> " if interactive else "")).strip()
        except EOFError:
            if interactive:
                write()
            return
        except KeyboardInterrupt:
            write()
            continue
        if line:
            yield line
