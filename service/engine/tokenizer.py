"""Text to token ids and back, over the `tokenizers` library alone: importing `transformers` takes seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType

import tokenizers
from tokenizers import decoders, models

from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.control_tokens import CONTINUE_HERE, ControlTokens
from pageturner.service.engine.conversation import ChatMessage, ChatPrompt
from pageturner.service.engine.incremental_decoder import (
    ByteLevelDecoder,
    IncrementalDecoder,
    WindowDecoder,
    token_bytes,
)
from pageturner.service.engine.token_texts import texts_of_tokens
from pageturner.service.errors import InvalidArgument
from pageturner.service.panics import panics_are_errors

ROLES = frozenset(
    ["system", "developer", "user", "assistant", "model", "tool", "function", "ipython", "observation"]
)
"""Words that chat templates compare roles with, and some of them build a control token around: <|user|>."""

DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
"""What models call the template of a plain conversation, and that of one with tools."""

RESERVED_VARIABLES = frozenset({"messages", "add_generation_prompt"})
"""Names in a chat template that a request cannot set."""


_panics_are_errors = panics_are_errors("the tokenizer")


class Tokenizer:
    """One model's tokenizer. Calls may come from several threads.

    backend: the tokenizer as `tokenizers` knows it; truncation and padding are switched off.
    chat_template: None where the model has none. named_templates: others that it has. bos_token: what texts
    start with if add_bos; the backend may put it there itself.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        chat_template: ChatTemplate | None = None,
        named_templates: Mapping[str, ChatTemplate] = MappingProxyType({}),
        bos_token: str | None = None,
        add_bos: bool = False,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._chat_template = chat_template
        self._named_templates = named_templates
        self._bos_id = backend.token_to_id(bos_token) if add_bos and bos_token else None
        self._opening_id = _opening_id(backend)
        self._controls = ControlTokens(backend)
        self._special_ids = frozenset(self._controls.ids.values())
        # A whole text of a byte-level tokenizer is the UTF-8 of its tokens' bytes, which is exact and
        # cheap to do token by token; any other decoder is asked through a sliding window.
        self._is_byte_level = isinstance(backend.decoder, decoders.ByteLevel)
        self._bytes_of: dict[int, bytes] = {}

    @property
    def has_chat_template(self) -> bool:
        """Whether conversations can be encoded."""
        return self._chat_template is not None or bool(self._named_templates)

    @property
    def controls(self) -> ControlTokens:
        """The special tokens."""
        return self._controls

    @property
    def vocab_size(self) -> int:
        """Tokens with a text; the model's logits may be padded to more."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def max_id(self) -> int:
        """The largest id that a text can become; -1 for an empty vocabulary."""
        return self._largest[0]

    @cached_property
    def _largest(self) -> tuple[int, int]:
        """The largest id, and the length of the longest token."""
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        return max(vocabulary.values(), default=-1), max(map(len, vocabulary), default=1)

    @property
    def max_token_chars(self) -> int | None:
        """Characters of text that one token can stand for, at most: a text of n characters becomes at least
        n / max_token_chars tokens, special tokens that swallow the white space beside them aside.

        None where no such bound holds: a run of unknown characters is one token, or is dropped.
        """
        model = self._backend.model
        if isinstance(model, models.WordPiece | models.WordLevel | models.Unigram):
            return None
        if isinstance(model, models.BPE) and not self._is_byte_level and not model.byte_fallback:
            return None
        # Composing characters (NFC) makes one of up to four.
        return self._largest[1] * (1 if self._backend.normalizer is None else 4)

    @_panics_are_errors
    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> tuple[int, ...]:
        """Token ids of a text.

        add_special_tokens: with what the model expects around a text, such as BOS, which a text that spells
        it has already. parse_special: special tokens that the text spells are those tokens, else they are
        text. Raises InvalidArgument where it is not Unicode (a lone surrogate).
        """
        _check_unicode("prompt", text)
        if parse_special:
            found = self._encode(text, add_special_tokens=add_special_tokens)
        else:
            found = self._encode(text, add_special_tokens=False)
            if any(self._controls.find(text)) or self._controls.escaped(found, text):
                found = self._controls.encode_text(text, add_special_tokens=add_special_tokens)
            elif add_special_tokens:
                found = self._encode(text, add_special_tokens=True)
        if add_special_tokens:
            return self._with_one_bos(found)
        return tuple(found)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        # Only the methods for batches let go of the GIL: a long text would hold up every other thread.
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids)

    def _with_one_bos(self, token_ids: list[int]) -> tuple[int, ...]:
        """As the post-processor left it, or with the BOS that is to be added; never a second one."""
        if self._opening_id is not None and token_ids[:2] == [self._opening_id] * 2:
            return tuple(token_ids[1:])
        if self._bos_id is not None and token_ids[:1] != [self._bos_id]:
            return (self._bos_id, *token_ids)
        return tuple(token_ids)

    @_panics_are_errors
    def encode_chat(
        self,
        messages: Sequence[ChatMessage] | ChatPrompt,
        variables: Mapping[str, object] | None = None,
        *,
        continue_final: bool = False,
    ) -> tuple[int, ...]:
        """Token ids of a conversation, opened for the assistant's answer; see `render_chat`."""
        chat = messages
        if not isinstance(chat, ChatPrompt):
            chat = ChatPrompt(tuple(chat), variables or {}, continue_final)
        return self.encode_rendered(self.render_chat(chat))

    def render_chat(self, chat: ChatPrompt) -> str:
        """What the template writes of a conversation, for `encode_rendered`, and for `shown` to be read.

        The template writes the special tokens; those spelled out in a message, a tool or a variable are
        text, and stand there behind stand-ins. Raises InvalidArgument where the model has no such template,
        or its template refuses this.
        """
        template = self._template_for(chat)
        if not chat.messages:
            raise InvalidArgument("prompt.chat", "no messages")
        turns = [self._hidden_turn(place, message) for place, message in enumerate(chat.messages)]
        if chat.continue_final_message:
            _mark_end(turns[-1])
        hidden = self._hidden_variables(chat.template_variables)
        tools = [self._hidden_nested(f"prompt.chat.tools[{i}]", tool) for i, tool in enumerate(chat.tools)]
        try:
            opens = not chat.continue_final_message
            text = template.render(turns, hidden, tools=tools, opens_answer=opens)
        except InvalidArgument as error:  # its words may quote a message
            raise InvalidArgument(error.field, self._controls.show(error.reason)) from error
        return text if opens else _cut_to_continue(text)

    def shown(self, rendered: str) -> str:
        """What `render_chat` gave, as it is read."""
        return self._controls.show(rendered)

    @_panics_are_errors
    def encode_rendered(self, text: str) -> tuple[int, ...]:
        """Token ids of what `render_chat` gave."""
        if not self._controls.has_hidden(text):
            found = self._encode(text, add_special_tokens=False)
            if not self._controls.escaped(found, text):
                return tuple(found)
        return tuple(self._controls.encode(text))

    def _template_for(self, chat: ChatPrompt) -> ChatTemplate:
        if not self.has_chat_template:
            raise InvalidArgument("prompt.chat", "this model has no chat template; send text or token ids")
        named, default = self._named_templates, self._chat_template
        if chat.template and chat.template != DEFAULT_TEMPLATE:
            if chat.template not in named:
                known = ", ".join(sorted([*named, *([DEFAULT_TEMPLATE] if default else [])]))
                reason = f"no template {chat.template[:64]!r}; this model has {known}"
                raise InvalidArgument("prompt.chat.template", reason)
            return named[chat.template]
        if not chat.template and chat.tools and TOOL_TEMPLATE in named:
            return named[TOOL_TEMPLATE]
        if default is None:
            reason = f"this model has no default; it has {', '.join(sorted(named))}"
            raise InvalidArgument("prompt.chat.template", reason)
        return default

    def _hidden_turn(self, place: int, message: ChatMessage) -> dict[str, object]:
        field = f"prompt.chat[{place}]"
        hidden: dict[str, object] = {}
        for name, value in message.values().items():
            if name == "role":
                _check_unicode(f"{field}.role", message.role)
                known = message.role in ROLES
                hidden[name] = message.role if known else self._controls.hide_within(message.role)
            elif name == "content" and isinstance(value, str):
                _check_unicode(f"{field}.content", value)
                hidden[name] = self._controls.hide(value)
            else:
                hidden[name] = self._hidden_nested(f"{field}.{name}", value)
        return hidden

    def _hidden_nested(self, field: str, value: object) -> object:
        try:
            return self._hidden_value(field, value)
        except RecursionError as error:
            raise InvalidArgument(field, "is nested too deeply") from error

    def _hidden_variables(self, variables: Mapping[str, object]) -> dict[str, object]:
        if reserved := RESERVED_VARIABLES & variables.keys():
            name = min(reserved)
            raise InvalidArgument(f"prompt.chat.template_variables[{name}]", "is set by the server")
        try:
            return {
                name: self._hidden_value(f"prompt.chat.template_variables[{name}]", value)
                for name, value in variables.items()
            }
        except RecursionError as error:
            raise InvalidArgument("prompt.chat.template_variables", "is nested too deeply") from error

    def _hidden_value(self, field: str, value: object) -> object:
        if isinstance(value, str):
            _check_unicode(field, value)
            # Templates compare words with their own, such as "high".
            return self._controls.hide(value, edges=not value.isidentifier())
        if isinstance(value, Mapping):
            # Keys too: a template that writes a mapping out, as JSON say, writes them.
            return {
                self._hidden_value(field, key): self._hidden_value(field, one) for key, one in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._hidden_value(field, one) for one in value]
        return value

    @_panics_are_errors
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of the ids as a whole. Ids the tokenizer does not know have none."""
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def incremental_decoder(
        self, prompt_token_ids: Sequence[int] = (), *, begins_anew: bool = False
    ) -> IncrementalDecoder:
        """A decoder of the tokens that continue a prompt; only the prompt's last few tokens matter.

        begins_anew: a character that the prompt left unfinished is not theirs to end.
        """
        if self._is_byte_level:
            return ByteLevelDecoder(self.token_bytes, prompt_token_ids, begins_anew=begins_anew)
        return WindowDecoder(self.decode, self._has_text, prompt_token_ids, begins_anew=begins_anew)

    def token_bytes(self, token_id: int) -> bytes:
        """What a token of a byte-level tokenizer adds to the text; special tokens add nothing."""
        found = self._bytes_of.get(token_id)
        if found is None:
            token = self._backend.id_to_token(token_id) if self._has_text(token_id) else None
            found = self._bytes_of[token_id] = token_bytes(token) if token else b""
        return found

    def texts_of_tokens(self, vocab_size: int) -> tuple[bytes, ...]:
        """What each id below vocab_size adds to a text. Raises NoTokenTexts."""
        return texts_of_tokens(self._backend, self._special_ids, vocab_size)

    def _has_text(self, token_id: int) -> bool:
        return token_id not in self._special_ids and self._backend.id_to_token(token_id) is not None


def _check_unicode(field: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(field, f"not Unicode at character {error.start}") from error


def _opening_id(backend: tokenizers.Tokenizer) -> int | None:
    """The token that the backend's post-processor puts in front of a text, if it does."""
    plain, processed = (backend.encode("a", add_special_tokens=add).ids[:2] for add in (False, True))
    return processed[0] if processed[:1] != plain[:1] and processed else None


def _mark_end(turn: dict[str, object]) -> None:
    """Mark the end of the final message's text, or of the last part of it that has one."""
    content = turn.get("content")
    if isinstance(content, str):
        turn["content"] = f"{content}{CONTINUE_HERE} "
    elif isinstance(content, list) and content:
        turn["content"] = [*content[:-1], {**content[-1], "text": f"{content[-1]['text']}{CONTINUE_HERE} "}]
    else:
        raise InvalidArgument("prompt.chat", "its final message has no content to continue")


def _cut_to_continue(text: str) -> str:
    """What the template wrote up to the end of the final message, as `transformers` cuts it: without white
    space at its end where the template trims messages. Raises InvalidArgument for a template that leaves
    the final message out."""
    before, mark, after = text.rpartition(CONTINUE_HERE)
    if not mark:
        reason = "the model's chat template does not show the final message, so it cannot be continued"
        raise InvalidArgument("prompt.chat", reason)
    before = before.replace(CONTINUE_HERE, "")
    return before if after.startswith(" ") else before.rstrip()
