"""What `generate`, `chat` and `demo` share: which server, which sampling, an answer with its figures."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, cast

from pageturner.service.client import (
    AcceptedEvent,
    ChoiceFinishedEvent,
    Client,
    FinishedEvent,
    Options,
    ScoredTokensEvent,
    TokenEvent,
)
from pageturner.service.client.server_process import running_server
from pageturner.service.client.targets import TARGET_FORMS
from pageturner.service.commands.credentials import add_credential_flags
from pageturner.service.commands.flags import add_config_flags, config_arguments
from pageturner.service.commands.output import note
from pageturner.service.commands.structured import add_form_flags, form_of
from pageturner.service.core.outputs import RequestTimings, SampledToken, Usage
from pageturner.service.engine.api import Prompt
from pageturner.service.errors import InvalidArgument, PageturnerError

CONNECT_SECONDS = 10.0
"""For a server that is there and loads its model."""

DEFAULT_MAX_TOKENS = 512
"""Of an answer whose length nobody stated, so that a model that finds no end does not fill its context."""


@dataclass(slots=True)
class ChoiceText:
    """One choice as it was streamed."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    finish_reason: str = ""
    matched: str | int | None = None
    score: float | None = None
    cumulative_logprob: float | None = None
    logprobs: tuple[SampledToken, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """A streamed answer and what the client saw of its pace, in seconds on its own clock.

    ttft_seconds: from sending the request to the first token. decode_seconds: from there to the last.
    """

    request_id: str
    seed: int
    choices: tuple[ChoiceText, ...]
    usage: Usage
    timings: RequestTimings
    ttft_seconds: float
    decode_seconds: float
    prompt_logprobs: tuple[SampledToken, ...] = ()
    rendered_prompt: str = ""

    @property
    def tokens_per_second(self) -> float:
        """After the first token; 0 where there is no second one."""
        later = self.usage.num_output_tokens - len(self.choices)
        return later / self.decode_seconds if later > 0 and self.decode_seconds > 0 else 0.0

    def figures(self) -> str:
        """Tokens, pace and cache hits, in words."""
        usage = self.usage
        drafted, accepted = usage.num_drafted_tokens, usage.num_accepted_drafts
        return (
            f"{usage.num_output_tokens} tokens, the first after {self.ttft_seconds:.3f} s, "
            f"then {self.tokens_per_second:.1f} tokens/s; prompt of {usage.num_prompt_tokens} tokens, "
            f"{usage.num_cached_prompt_tokens} of them cached"
            + (f"; {accepted} of {drafted} guesses came true" if drafted else "")
        )


async def ask(
    client: Client, prompt: Prompt, options: Options, on_text: Callable[[int, str], None]
) -> Answer:
    """Stream one answer; on_text(index, text) for every piece of it."""
    started = time.monotonic()
    first = last = 0.0
    request_id, seed, rendered = "", 0, ""
    choices = [ChoiceText() for _ in range(options.get("n", 1))]
    prompt_logprobs: tuple[SampledToken, ...] = ()
    finished: FinishedEvent | None = None
    async with aclosing(client.stream(prompt, **options)) as events:
        async for event in events:
            match event:
                case AcceptedEvent():
                    request_id, seed, rendered = event.request_id, event.seed, event.rendered_prompt
                case TokenEvent():
                    if event.tokens:
                        last = time.monotonic()
                        first = first or last
                    choice = choices[event.index]
                    choice.text += event.text
                    choice.token_ids += tuple(token.token_id for token in event.tokens)
                    choice.logprobs += tuple(token for token in event.tokens if token.logprob is not None)
                    on_text(event.index, event.text)
                case ChoiceFinishedEvent():
                    choices[event.index].finish_reason = event.reason.value
                    choices[event.index].matched = event.matched
                    choices[event.index].score = event.score
                    choices[event.index].cumulative_logprob = event.cumulative_logprob
                case ScoredTokensEvent():
                    prompt_logprobs += event.tokens
                case FinishedEvent():
                    finished = event
    assert finished is not None, "a stream that ends without an error ends with FinishedEvent"
    return Answer(
        request_id,
        seed,
        tuple(choice for choice in choices if choice.finish_reason),  # a form may have fewer texts than n
        finished.usage,
        finished.timings,
        ttft_seconds=max(first - started, 0.0),
        decode_seconds=last - first,
        prompt_logprobs=prompt_logprobs,
        rendered_prompt=rendered,
    )


async def ask_for_some(
    client: Client, prompt: Prompt, options: Options, on_text: Callable[[int, str], None]
) -> Answer:
    """As `ask`; without `max_tokens` DEFAULT_MAX_TOKENS at most, or what fits where those do not."""
    if "max_tokens" in options:
        return await ask(client, prompt, options, on_text)
    try:
        return await ask(client, prompt, {**options, "max_tokens": DEFAULT_MAX_TOKENS}, on_text)
    except InvalidArgument as error:
        if error.field.rpartition(".")[2] != "max_tokens":
            raise
    return await ask(client, prompt, options, on_text)


async def wait_while_it_loads(client: Client) -> None:
    """Return once the server is ready; one that loads its model is waited for, one that is not there is not.

    Raises the error of a server that can't be reached, at once, or DeadlineExceeded.
    """
    if not await client.is_serving(timeout_seconds=CONNECT_SECONDS):
        await client.wait_until_serving(CONNECT_SECONDS)


def add_target_flags(parser: argparse.ArgumentParser, positionals: str = "") -> None:
    """`--target`, and the flags of a server that is started where it is not given."""
    parser.add_argument(
        "--target",
        metavar=TARGET_FORMS,
        help="a running server; without it one is started, by the flags below",
    )
    add_credential_flags(parser)
    add_config_flags(parser, positionals)


@contextmanager
def target_of(arguments: argparse.Namespace) -> Iterator[str]:
    """The server named by --target, or one of our own for as long as it is needed."""
    given = config_arguments(arguments)
    if arguments.target is not None:
        if given:
            raise PageturnerError(f"{given[0]} is for a server that is started here, not for --target")
        yield arguments.target
        return
    if sys.stderr.isatty():
        note(f"starting a server; --target {TARGET_FORMS} uses a running one")
    with running_server(given) as server:
        yield server.target


def add_sampling_flags(parser: argparse.ArgumentParser, **defaults: Any) -> None:
    """Flags with the names of the wire; what is left out is the server's to choose."""
    group = parser.add_argument_group("sampling")
    for name, kind, doc in (
        ("max-tokens", int, "bound on the answer's tokens"),
        ("temperature", float, "0 takes the most likely token"),
        ("top-k", int, "only the k most likely tokens"),
        ("top-p", float, "only the most likely tokens that together reach this probability"),
        ("min-p", float, "only tokens this likely, relative to the most likely one"),
        ("repetition-penalty", float, "above 1 discourages tokens seen before"),
        ("seed", int, "the same seed gives the same answer"),
        ("max-draft-tokens", int, "guesses that a step verifies at most, 0 for none; no token changes"),
    ):
        default = defaults.get(name.replace("-", "_"))
        in_force = DEFAULT_MAX_TOKENS if name == "max-tokens" and default is None else default
        shown = doc if in_force is None else f"{doc} (default {in_force})"
        group.add_argument(f"--{name}", type=kind, default=default, metavar="X", help=shown)
    group.add_argument("--adapter", metavar="NAME", help="a LoRA adapter that the server has loaded")
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the answer; may be repeated")
    add_form_flags(parser)


def sampling_options(arguments: argparse.Namespace) -> Options:
    """The options of the client that these flags gave, by their names on the wire."""
    names = (*Options.__required_keys__, *Options.__optional_keys__)
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name, None) is not None}
    if (form := form_of(arguments)) is not None:
        given["structured_output"] = form
    return cast(Options, given)
