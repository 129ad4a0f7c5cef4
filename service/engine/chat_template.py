"""Chat messages to one prompt text, through the template that the model's author wrote."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

from pageturner.service.engine.template_budget import (
    Budget,
    BudgetedEnvironment,
    TemplateTooLong,
    with_budget,
)
from pageturner.service.errors import InvalidArgument, ModelError


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


MAX_RENDERED_CHARACTERS = 1 << 22
"""Of a prompt as a template writes it, which may repeat what it is given: as much as a text may have."""

_NOT_ASCII = re.compile("[^\x00-\x7f\ud800-\udfff]")
"""Stand-ins, which are surrogates, aside: they are shown as themselves at the end."""


class _Dict:
    """`dict` as templates know it, without the type behind it."""

    def __call__(self, *items: Any, **values: Any) -> dict[Any, Any]:
        return dict(*items, **values)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        """A mapping of these keys to one value."""
        return dict.fromkeys(keys, value)


class ChatTemplate:
    """A Jinja template in a sandbox, with what `transformers` lets templates use.

    source: the template. variables: the special tokens it may name: texts under `bos_token`, `eos_token`
    and so on, a tuple of them under `additional_special_tokens`.
    today: what `strftime_now` formats; an argument because a prompt must be reproducible. clock: seconds, of
    no date, by which a render is given up. Raises ModelError if the template does not compile.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str | tuple[str, ...]] | None = None,
        *,
        today: Callable[[], datetime] = datetime.now,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        environment = BudgetedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.add_filter("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: today().strftime(form)
        environment.globals["dict"] = _Dict()
        try:
            self._template = environment.compile_budgeted(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._variables = dict(variables or {})
        self._clock = clock

    def render(
        self,
        messages: Sequence[Mapping[str, object]],
        variables: Mapping[str, object] | None = None,
        *,
        tools: Sequence[object] = (),
        opens_answer: bool = True,
    ) -> str:
        """The prompt for turns as `transformers` has them. variables: the request's own, over the model's.

        opens_answer: whether it ends with the template's cue for the assistant's turn. Raises
        InvalidArgument with the template's own words where it refuses them, or where it writes too much, or
        would take too long.
        """
        values = {
            "messages": messages,
            "tools": None,
            "documents": None,
            **self._variables,
            **(variables or {}),
            **({"tools": tools} if tools else {}),
            "add_generation_prompt": opens_answer,
        }
        pieces: list[str] = []
        room = MAX_RENDERED_CHARACTERS
        try:
            for piece in self._template.generate(with_budget(values, Budget(self._clock))):
                pieces.append(piece)
                room -= len(piece)
                if room < 0:
                    reason = f"the model's chat template makes over {MAX_RENDERED_CHARACTERS} characters"
                    raise InvalidArgument("prompt.chat", reason)
            return "".join(pieces)
        except InvalidArgument:
            raise
        except TemplateTooLong as error:
            reason = f"the model's chat template does too much: {error}"
            raise InvalidArgument("prompt.chat", reason) from error
        # A template is foreign code: whatever it raises (a TypeError, say) is about these messages.
        except Exception as error:
            raise InvalidArgument("prompt.chat", f"the model's chat template refuses it: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter would escape for HTML. The arguments are those of `transformers`."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text
