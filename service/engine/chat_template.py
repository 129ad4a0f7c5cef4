"""Chat messages to one prompt text, through the template that the model's author wrote."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pageturner.service.errors import InvalidArgument, ModelError


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares the attribute as a plain set

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template in a sandbox, with what `transformers` lets templates use.

    source: the template. variables: the special tokens it may name: texts under `bos_token`, `eos_token`
    and so on, a tuple of them under `additional_special_tokens`.
    today: what `strftime_now` formats; an argument because a prompt must be reproducible.
    Raises ModelError if the template does not compile.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str | tuple[str, ...]] | None = None,
        *,
        today: Callable[[], datetime] = datetime.now,
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: today().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template does not compile: {error}") from error
        self._variables = dict(variables or {})

    def render(
        self,
        messages: Sequence[tuple[str, str]],
        variables: Mapping[str, object] | None = None,
        *,
        opens_answer: bool = True,
    ) -> str:
        """The prompt for (role, content) pairs. variables: the request's own, over those of the model.

        opens_answer: whether it ends with the template's cue for the assistant's turn. Raises
        InvalidArgument with the template's own words where it refuses them.
        """
        values = {
            "messages": [{"role": role, "content": content} for role, content in messages],
            "tools": None,
            "documents": None,
            **self._variables,
            **(variables or {}),
            "add_generation_prompt": opens_answer,
        }
        try:
            return self._template.render(values)
        # A template is foreign code: whatever it raises (a TypeError, say) is about these messages.
        except Exception as error:
            raise InvalidArgument("prompt.chat", f"the model's chat template refuses it: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """JSON as it is; jinja2's own filter would escape for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)
