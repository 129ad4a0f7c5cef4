"""Tokens to text as they come, such that the pieces joined are the text of the whole.

A token is not a piece of text: a character may be spread over several tokens, and some tokenizers
drop a space at the start or join pieces by rules of their own. So a decoder withholds what the next
token may still change, and nothing more.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"

MAX_WITHHELD_TOKENS = 8
"""A character has at most four bytes, hence tokens; a few without text of their own may stand before it."""

NUM_CONTEXT_TOKENS = 6
"""Prompt tokens looked at: more than one character can span, plus one that begins with a space."""


class IncrementalDecoder(Protocol):
    """Text of one sequence; each call costs O(1) amortised over the sequence."""

    def append(self, token_id: int) -> str:
        """Text that this token completes, which may be none."""
        ...

    def finish(self) -> str:
        """What was withheld; bytes that never became a character show as U+FFFD."""
        ...


class ByteLevelDecoder:
    """For byte-level tokenizers: a token is a run of bytes, the text their UTF-8.

    Bytes that can start no character come out as U+FFFD at once, by the same rule (Unicode's maximal
    subparts) as in `tokenizers`, so that equality holds for any token ids.

    begins_anew: what the prompt left unfinished stays the prompt's.
    """

    def __init__(
        self,
        bytes_of: Callable[[int], bytes],
        prompt_token_ids: Sequence[int] = (),
        *,
        begins_anew: bool = False,
    ) -> None:
        self._bytes_of = bytes_of
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # A prompt may end within a character (a stream resumed from tokens): its rest belongs to us.
        for token_id in () if begins_anew else prompt_token_ids[-NUM_CONTEXT_TOKENS:]:
            self._utf8.decode(bytes_of(token_id))

    def append(self, token_id: int) -> str:
        return self._utf8.decode(self._bytes_of(token_id))

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any tokenizer: decode a few tokens of context with the new ones, and show the difference.

    The window is the tokens shown last, as context, and those withheld since. It moves on when text
    appears, so it stays short. A text that ends in U+FFFD is withheld, but for no more tokens than a
    character can need. Byte-fallback tokenizers replace a whole run of byte tokens if one of
    them is wrong; characters of such a run that were shown already stay, and the rest is decoded alone.

    decode: ids to text, special tokens skipped. has_text: False for tokens that `decode` skips. begins_anew:
    what the prompt left unfinished stays the prompt's, so that it is no context.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        has_text: Callable[[int], bool],
        prompt_token_ids: Sequence[int] = (),
        *,
        begins_anew: bool = False,
    ) -> None:
        self._decode = decode
        self._has_text = has_text
        self._context = [
            token_id for token_id in prompt_token_ids[-NUM_CONTEXT_TOKENS:] if has_text(token_id)
        ]
        self._context_text = decode(self._context)
        while begins_anew and self._context_text.endswith(REPLACEMENT):
            self._context.pop()
            self._context_text = decode(self._context)
        self._withheld: list[int] = []

    def append(self, token_id: int) -> str:
        # A token without text must not become the context: the next would look like the first.
        if not self._has_text(token_id):
            return ""
        self._withheld.append(token_id)
        text = self._decode(self._context + self._withheld)
        if text.endswith(REPLACEMENT) and len(self._withheld) < MAX_WITHHELD_TOKENS:
            return ""
        return self._show(text)

    def finish(self) -> str:
        return self._show(self._decode(self._context + self._withheld)) if self._withheld else ""

    def _show(self, text: str) -> str:
        if text.startswith(self._context_text):
            shown = text[len(self._context_text) :]
        else:
            shown = self._decode(self._withheld)
        if shown:
            self._context, self._withheld = self._withheld, []
            self._context_text = self._decode(self._context)
        return shown


class NoText:
    """For models of token ids: no tokenizer, no text."""

    def append(self, token_id: int) -> str:
        return ""

    def finish(self) -> str:
        return ""


def _byte_alphabet() -> dict[str, int]:
    """The printable characters by which byte-level BPE writes bytes (GPT-2; Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def token_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for; a token not in that alphabet stands for itself."""
    try:
        return bytes(_BYTE_OF[character] for character in token)
    except KeyError:
        return token.encode()
