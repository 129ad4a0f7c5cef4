"""`pageturner score`: how likely given continuations of one prompt are."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys

from pageturner.service.client import Client, ScoreAnswer, ScoreOptions
from pageturner.service.commands import signals
from pageturner.service.commands.answer import CONNECT_SECONDS, add_target_flags, target_of
from pageturner.service.commands.credentials import credentials_of
from pageturner.service.commands.output import note, write, write_json
from pageturner.service.commands.text import input_text

HELP = "how likely given continuations of a prompt are"
EXAMPLE = 'pageturner score "The capital of France is" " Paris" " Rome"'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", help="the prompt, as it is; - reads it from standard input")
    parser.add_argument(
        "continuations",
        nargs="+",
        metavar="CONTINUATION",
        help="a text to score behind the prompt; a space that belongs to it stands at its beginning",
    )
    parser.add_argument("--logprobs", type=int, help="most likely tokens to tell at each place, with --json")
    parser.add_argument("--timeout-seconds", type=float, help="time limit, kept by the server")
    parser.add_argument("--priority", type=int, help="larger is more urgent")
    parser.add_argument("--json", action="store_true", help="scores, tokens and figures as JSON")
    add_target_flags(parser, " PROMPT CONTINUATION ...")


def run(arguments: argparse.Namespace) -> int:
    prompt = input_text(sys.stdin.read()) if arguments.prompt == "-" else arguments.prompt
    with target_of(arguments) as target:
        answer = signals.run(_score(target, prompt, arguments))
    if arguments.json:
        write_json(to_json(answer))
        return 0
    write(f"{'logprob':>9} {'a token':>8} {'tokens':>6} {'greedy':>6}  continuation")
    for text, score in zip(arguments.continuations, answer.scores, strict=True):
        count, greedy = len(score.tokens), "yes" if score.is_greedy else "no"
        write(f"{score.logprob:9.3f} {score.logprob / count:8.3f} {count:6} {greedy:>6}  {text}")
    if sys.stderr.isatty():
        usage = answer.usage
        note(f"prompt of {usage.num_prompt_tokens} tokens, {usage.num_cached_prompt_tokens} of them cached")
    return 0


async def _score(target: str, prompt: str, arguments: argparse.Namespace) -> ScoreAnswer:
    names = ScoreOptions.__optional_keys__
    given = {name: getattr(arguments, name, None) for name in names}
    options: ScoreOptions = {name: value for name, value in given.items() if value is not None}  # type: ignore[assignment] # names are its keys
    async with Client(target, credentials=credentials_of(arguments)) as client:
        await client.wait_until_serving(CONNECT_SECONDS)
        return await client.score(prompt, arguments.continuations, **options)


def to_json(answer: ScoreAnswer) -> dict[str, object]:
    """As it is, with the perplexity of each continuation."""
    shown = dataclasses.asdict(answer)
    for plain, score in zip(shown["scores"], answer.scores, strict=True):
        plain["perplexity"] = math.exp(min(-score.logprob / len(score.tokens), 700.0))
    return shown
