"""What each token of a tokenizer adds to a text that goes on, as bytes.

Grammars are over texts, the model over tokens. A byte-level token is a run of bytes; a token of
sentencepiece's kind is text with a mark for a space, or one byte. Other kinds (WordPiece) write a token by
what stands beside it, and have no such bytes. What a decoder is said to do is tried on some tokens before it
is believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

import tokenizers

from pageturner.service.engine.incremental_decoder import token_bytes

NUM_TRIED = 256
"""Tokens that the backend is asked to decode."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_ToBytes = Callable[[str], bytes]


class NoTokenTexts(Exception):
    """The tokens of this tokenizer have no text of their own."""


def texts_of_tokens(
    backend: tokenizers.Tokenizer, without_text: Collection[int], vocab_size: int
) -> tuple[bytes, ...]:
    """The bytes of each id below vocab_size: none for those in `without_text` and for ids without a token.

    Raises NoTokenTexts.
    """
    read = _reader(backend)
    texts = [b""] * vocab_size
    for token, token_id in backend.get_vocab(with_added_tokens=True).items():
        if token_id < vocab_size and token_id not in without_text:
            texts[token_id] = read(token)
    _try(backend, texts)
    return tuple(texts)


def _reader(backend: tokenizers.Tokenizer) -> _ToBytes:
    """From a token as the vocabulary writes it to its bytes, by what the decoder says it does."""
    decoder: Any = backend.decoder
    if decoder is None:
        raise NoTokenTexts("the model's tokenizer has no decoder")
    told = json.loads(decoder.__getstate__())
    parts: list[Mapping[str, Any]] = told["decoders"] if told["type"] == "Sequence" else [told]
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return token_bytes
    if unknown := kinds - {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}:
        raise NoTokenTexts(f"a decoder of the kind {min(unknown)} writes a token by what stands beside it")
    replaced = [(part["replacement"], " ") for part in parts if part["type"] == "Metaspace"]
    replaced += [
        (part["pattern"]["String"], part["content"])
        for part in parts
        if part["type"] == "Replace" and "String" in part["pattern"]
    ]
    has_bytes = "ByteFallback" in kinds

    def read(token: str) -> bytes:
        if has_bytes and (byte := _BYTE.fullmatch(token)):
            return bytes([int(byte[1], 16)])
        for mark, text in replaced:
            token = token.replace(mark, text)
        return token.encode()

    return read


def _try(backend: tokenizers.Tokenizer, texts: list[bytes]) -> None:
    """Raise NoTokenTexts unless tokens decode, behind another, to what they are said to be."""
    whole = [(token_id, text) for token_id, text in enumerate(texts) if text and _is_whole(text)]
    before = next((token_id for token_id, text in whole if text.isalpha()), None)
    if before is None:
        raise NoTokenTexts("no token of the model's tokenizer is a word")
    start = backend.decode([before], skip_special_tokens=True)
    for token_id, text in whole[:: max(1, len(whole) // NUM_TRIED)]:
        decoded = backend.decode([before, token_id], skip_special_tokens=True)
        if decoded != start + text.decode():
            token = backend.id_to_token(token_id)
            raise NoTokenTexts(f"the tokenizer writes the token {token!r} by what stands beside it")


def _is_whole(text: bytes) -> bool:
    """Whether the bytes are characters, none of them in part."""
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True
