"""Options of structured output; `service/config.py` composes them with those of the other layers."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.errors import ConfigError


@dataclass(frozen=True, slots=True)
class GrammarOptions:
    """Structured output: what a request may ask the form of its answer to be."""

    enabled: bool = True
    """Whether requests may ask for structured output."""
    max_cached: int = 64
    """Compiled grammars that are kept for requests to come; those in use are kept in any case."""
    max_characters: int = 65536
    """Of a schema, a regular expression, a grammar or a list of choices."""
    max_json_whitespace: int = 20
    """Characters of white space that JSON may have between two of its words, 0 for none: a model that does
    not know how to go on would write them without end."""

    def __post_init__(self) -> None:
        for name, low, high in (
            ("max_cached", 0, 1 << 16),
            ("max_characters", 1, 1 << 20),
            ("max_json_whitespace", 0, 1024),
        ):
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"grammars.{name}", f"{getattr(self, name)} is not in [{low}, {high}]")
