"""How large a prompt may be, by counts that are known before it is copied, rendered or tokenized."""

from __future__ import annotations

from dataclasses import dataclass

from pageturner.service.errors import InvalidArgument

MAX_PROMPT_CHARACTERS = 1 << 22
"""Of one prompt, whatever the model: text that waits to be tokenized is held in memory."""

MIN_TOKENIZED = 1 << 16
"""Tokens of a text that may be tokenized or detokenized for its own sake, even if the context is shorter."""


@dataclass(frozen=True, slots=True)
class PromptLimits:
    """Bounds of one prompt; a chat's messages count together. Each check names the field and the bound.

    reason: what the bound on tokens is for, behind "at most N".
    """

    max_tokens: int
    max_characters: int
    max_messages: int
    reason: str = "are allowed here"

    @classmethod
    def of_tokens(
        cls, max_tokens: int, max_token_chars: int | None, reason: str = "are allowed here"
    ) -> PromptLimits:
        """Where a text may have so many tokens. max_token_chars: text that one token stands for at most, so
        that a longer text has too many tokens for certain; None where no such bound is known."""
        characters = MAX_PROMPT_CHARACTERS
        if max_token_chars is not None:
            characters = min(characters, max(1, max_tokens) * max_token_chars)
        # A turn becomes a token at least: its template marks where it begins.
        return cls(max_tokens, characters, max(1, max_tokens), reason)

    def check_characters(self, num_characters: int, field: str) -> None:
        """Raise InvalidArgument for a text that is too long to be tokenized."""
        if num_characters > self.max_characters:
            reason = f"{num_characters} characters are more than {self.max_tokens} tokens can stand for"
            if self.max_characters == MAX_PROMPT_CHARACTERS:
                reason = f"{num_characters} characters; at most {self.max_characters}"
            raise InvalidArgument(field, reason)

    def check_messages(self, num_messages: int, field: str) -> None:
        """Raise InvalidArgument for a conversation of too many turns."""
        if num_messages > self.max_messages:
            raise InvalidArgument(field, f"{num_messages} messages; at most {self.max_messages}")

    def check_tokens(self, num_tokens: int, field: str) -> None:
        """Raise InvalidArgument for too many token ids."""
        if num_tokens > self.max_tokens:
            raise InvalidArgument(field, f"{num_tokens} tokens; at most {self.max_tokens} {self.reason}")


@dataclass(frozen=True, slots=True)
class InputLimits:
    """generation: of a prompt that is to be answered. tokenization: of one to be turned into ids, or ids into
    text, for its own sake."""

    generation: PromptLimits
    tokenization: PromptLimits

    @classmethod
    def of_model(cls, max_model_len: int, max_token_chars: int | None) -> InputLimits:
        """The limits of a model of `max_model_len` tokens. max_token_chars: see `of_tokens`."""
        return cls(
            PromptLimits.of_tokens(max_model_len - 1, max_token_chars, "leave room for an answer"),
            PromptLimits.of_tokens(max(max_model_len, MIN_TOKENIZED), max_token_chars),
        )
