"""`pageturner generate`: one prompt, one streamed answer."""

from __future__ import annotations

import argparse
import dataclasses
import sys

from pageturner.service.client import BeamSearch, Client, EarlyStopping, Options
from pageturner.service.commands import signals
from pageturner.service.commands.answer import (
    DEFAULT_MAX_TOKENS,
    Answer,
    add_sampling_flags,
    add_target_flags,
    ask_for_some,
    sampling_options,
    target_of,
    wait_while_it_loads,
)
from pageturner.service.commands.credentials import credentials_of
from pageturner.service.commands.output import note, write, write_json
from pageturner.service.commands.template_variables import add_template_flags, chat_prompt
from pageturner.service.commands.text import input_text
from pageturner.service.core.outputs import FinishReason
from pageturner.service.engine.api import ChatMessage, Prompt
from pageturner.service.errors import ConfigError

HELP = "stream the answer to one prompt"
EXAMPLE = 'pageturner generate "Why is the sky blue?" --max-tokens 100'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt; - reads it from standard input")
    parser.add_argument(
        "--raw", action="store_true", help="continue the text as it is, without chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message in front of the prompt")
    parser.add_argument("--n", type=int, default=1, help="answers to sample in parallel (default 1)")
    parser.add_argument(
        "--beam-width", type=int, metavar="X", help="search with so many beams; --n answers are the best ones"
    )
    parser.add_argument(
        "--length-penalty",
        type=float,
        metavar="X",
        help="above 0 favours long answers of a search (default 1)",
    )
    parser.add_argument(
        "--early-stopping",
        choices=[each.value for each in EarlyStopping],
        help="when the search ends that has as many answers as beams (default heuristic)",
    )
    parser.add_argument("--best-of", type=int, help="answers to sample, of which the n likeliest are shown")
    for name, whose in (("--logprobs", "answer"), ("--prompt-logprobs", "prompt")):
        words = f"with --json: log-probabilities of the {whose}'s tokens, and of so many alternatives"
        parser.add_argument(name, type=int, help=words)
    parser.add_argument(
        "--return-prompt",
        action="store_true",
        default=None,
        help="with --json: the prompt as rendered",
    )
    parser.add_argument("--timeout-seconds", type=float, metavar="X", help="time limit, kept by the server")
    parser.add_argument("--priority", type=int, metavar="X", help="larger is more urgent")
    parser.add_argument("--json", action="store_true", help="no stream; the answer and its figures as JSON")
    add_template_flags(parser)
    add_sampling_flags(parser)
    add_target_flags(parser, " PROMPT")


def run(arguments: argparse.Namespace) -> int:
    text = input_text(sys.stdin.read()) if arguments.prompt == "-" else arguments.prompt
    options = _options(arguments)
    with target_of(arguments) as target:
        answer = signals.run(_generate(target, _prompt(text, arguments), options, arguments))
    if arguments.json:
        write_json(to_json(answer))
    elif options.get("n", 1) > 1:
        for index, choice in enumerate(answer.choices):
            score = "" if choice.score is None else f", score {choice.score:.4f}"
            write(f"--- {index} ({choice.finish_reason}{score})\n{choice.text}")
    else:
        write()
    if not arguments.json and sys.stderr.isatty():
        note(answer.figures())
        ended = [choice.finish_reason for choice in answer.choices]
        if arguments.max_tokens is None and FinishReason.LENGTH.value in ended:
            note(f"it was cut; without --max-tokens there are at most {DEFAULT_MAX_TOKENS} tokens")
    return 0


def _prompt(text: str, arguments: argparse.Namespace) -> Prompt:
    if arguments.raw:
        for name in ("template_variables", "tools", "template"):
            if getattr(arguments, name):
                flag = {"template_variables": "--template-variable"}.get(name, f"--{name}")
                raise ConfigError(flag, "is for the chat template, which --raw leaves out")
        return f"{arguments.system}\n{text}" if arguments.system else text
    system = (ChatMessage("system", arguments.system),) if arguments.system else ()
    return chat_prompt((*system, ChatMessage("user", text)), arguments)


def _options(arguments: argparse.Namespace) -> Options:
    options = sampling_options(arguments)
    search = {
        "length_penalty": arguments.length_penalty,
        "early_stopping": arguments.early_stopping and EarlyStopping(arguments.early_stopping),
    }
    given = {name: value for name, value in search.items() if value is not None}
    if arguments.beam_width is not None:
        options["beam_search"] = BeamSearch(arguments.beam_width, **given)
    elif given:
        raise ConfigError(f"--{next(iter(given)).replace('_', '-')}", "is for a search; give --beam-width")
    return options


async def _generate(target: str, prompt: Prompt, options: Options, arguments: argparse.Namespace) -> Answer:
    shows = not arguments.json and arguments.n == 1

    def show(_index: int, text: str) -> None:
        if shows:
            write(text, end="")

    async with Client(target, credentials=credentials_of(arguments)) as client:
        await wait_while_it_loads(client)
        return await ask_for_some(client, prompt, options, show)


def to_json(answer: Answer) -> dict[str, object]:
    return {**dataclasses.asdict(answer), "tokens_per_second": answer.tokens_per_second}
