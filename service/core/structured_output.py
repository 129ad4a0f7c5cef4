"""What form an answer must have, as the user asked for it; checked once, frozen ever after."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from typing import Self

from pageturner.service.errors import InvalidArgument

MAX_CHOICES = 1024
"""Texts that an answer may be one of."""

FIELD = "structured_output"


class OutputForm(Enum):
    """By what an answer is bound; the values are the names on the wire."""

    JSON_SCHEMA = "json_schema"
    JSON_OBJECT = "json_object"
    REGEX = "regex"
    CHOICE = "choice"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class StructuredOutput:
    """The text of an answer, from its first character to its last, is one that this admits.

    source: the schema as JSON, the regular expression or the grammar; empty for the other forms. choices: of
    OutputForm.CHOICE, the texts themselves.
    """

    form: OutputForm
    source: str = ""
    choices: tuple[str, ...] = ()

    @classmethod
    def one_of(cls, choices: Iterable[str]) -> Self:
        """One of these texts, whole."""
        return cls(OutputForm.CHOICE, choices=tuple(choices))

    @property
    def field(self) -> str:
        """Where it stands in the sampling parameters, for errors."""
        return f"{FIELD}.{self.form.value}"

    @property
    def num_characters(self) -> int:
        """What there is to read."""
        return len(self.source) + sum(map(len, self.choices))

    def check(self) -> None:
        """Raise InvalidArgument, naming the field, for what no compiler need look at."""
        if self.form is OutputForm.CHOICE:
            if not self.choices:
                raise InvalidArgument(self.field, "there is no text to choose")
            if len(self.choices) > MAX_CHOICES:
                raise InvalidArgument(self.field, f"{len(self.choices)} texts; at most {MAX_CHOICES}")
            for position, text in enumerate(self.choices):
                if not text:
                    raise InvalidArgument(f"{self.field}[{position}]", "is empty")
        elif self.form is not OutputForm.JSON_OBJECT and not self.source.strip():
            raise InvalidArgument(self.field, "is empty")
