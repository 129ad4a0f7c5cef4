"""Text to token ids and back, over the `tokenizers` library alone: importing `transformers` takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import tokenizers
from tokenizers import decoders

from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.incremental_decoder import (
    ByteLevelDecoder,
    IncrementalDecoder,
    WindowDecoder,
    token_bytes,
)
from pageturner.service.errors import InvalidArgument, ModelError


class Message(Protocol):
    """One turn: who speaks, and what."""

    @property
    def role(self) -> str: ...
    @property
    def content(self) -> str: ...


class Tokenizer:
    """One model's tokenizer. Calls may come from several threads.

    backend: the tokenizer as `tokenizers` knows it; truncation and padding are switched off.
    chat_template: None where the model has none. bos_token: what texts start with if add_bos; the
    backend may put it there itself.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        bos_token: str | None = None,
        add_bos: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._bos_id = backend.token_to_id(bos_token) if add_bos and bos_token else None
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        # A whole text of a byte-level tokenizer is the UTF-8 of its tokens' bytes, which is exact and
        # cheap to do token by token; any other decoder is asked through a sliding window.
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}

    @classmethod
    def from_file(
        cls,
        path: Path,
        *,
        chat_template: str | None = None,
        bos_token: str | None = None,
        eos_token: str | None = None,
        add_bos: bool = False,
    ) -> Tokenizer:
        """Read a tokenizer.json. chat_template: Jinja source, which may name bos_token and eos_token.

        Raises ModelError if the file cannot be read or the template does not compile.
        """
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault
            raise ModelError(f"cannot read the tokenizer {path}: {error}") from error
        variables = {"bos_token": bos_token or "", "eos_token": eos_token or ""}
        template = ChatTemplate(chat_template, variables) if chat_template else None
        return cls(backend, chat_template=template, bos_token=bos_token, add_bos=add_bos)

    @property
    def has_chat_template(self) -> bool:
        return self._chat_template is not None

    @property
    def vocab_size(self) -> int:
        """Tokens with a text; the model's logits may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a text. Raises InvalidArgument where it is not Unicode (a lone surrogate)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgument("prompt", f"not Unicode at character {error.start}") from error
        # Only the methods for batches let go of the GIL: a long text would hold up every other thread.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        token_ids = tuple(encoding.ids)
        if add_special_tokens and self._bos_id is not None and token_ids[:1] != (self._bos_id,):
            return (self._bos_id, *token_ids)
        return token_ids

    def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of a conversation, opened for the assistant's answer.

        The template writes the special tokens itself; those spelled out in a message count as well, as
        in `transformers`. Raises InvalidArgument where the model has no template, or its template
        refuses these messages.
        """
        if self._chat_template is None:
            raise InvalidArgument("prompt.chat", "this model has no chat template; send text or token ids")
        if not messages:
            raise InvalidArgument("prompt.chat", "no messages")
        text = self._chat_template.render([(message.role, message.content) for message in messages])
        return self.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids as a whole. Ids the tokenizer does not know have none."""
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def incremental_decoder(self, prompt_token_ids: Sequence[int] = ()) -> IncrementalDecoder:
        """A decoder of the tokens that continue a prompt; only the prompt's last few tokens matter."""
        if self._is_byte_level:
            return ByteLevelDecoder(self.token_bytes, prompt_token_ids)
        return WindowDecoder(self.decode, self._has_text, prompt_token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token of a byte-level tokenizer adds to the text; special tokens add nothing."""
        found = self._bytes_of.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if self._has_text(token_id) else None
            found = self._bytes_of[token_id] = token_bytes(token) if token else b""
        return found

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None
