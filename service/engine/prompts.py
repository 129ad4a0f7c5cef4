"""Prompts as clients state them to token ids, checked; errors name the field as on the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeGuard, TypeVar

from pageturner.service.engine.api import ChatMessage, ChatPrompt, ModelInfo, Prompt, TextPrompt
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import InvalidArgument

MAX_LONG_PROMPTS = 2
"""Long prompts read at once: each may be of megabytes, and takes a hundred times its size meanwhile."""

_T = TypeVar("_T")


class PromptReader:
    """One model's way from prompt to ids. tokenizer: None for a model of token ids.

    inline_characters: longer prompts are read in a worker thread, so that they hold up nobody, and wait
    for one another.
    """

    def __init__(self, tokenizer: Tokenizer | None, model: ModelInfo, inline_characters: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._inline_characters = inline_characters
        self._workers = ThreadPoolExecutor(MAX_LONG_PROMPTS, thread_name_prefix="pageturner-prompts")

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Raises InvalidArgument for an empty prompt, an id out of range, or text the model cannot take."""
        if isinstance(prompt, str):
            prompt = TextPrompt(prompt)
        if isinstance(prompt, TextPrompt):
            return self._known(await self._encode_text(prompt, add_special_tokens), "prompt.text")
        if _is_chat(prompt):
            prompt = ChatPrompt(prompt)
        if isinstance(prompt, ChatPrompt):
            return self._known(await self._encode_chat(prompt), "prompt.chat")
        if len(prompt) > self._inline_characters:
            return await self._beside(lambda: self._checked(prompt, "prompt.token_ids"))
        return self._checked(prompt, "prompt.token_ids")

    async def _encode_text(self, prompt: TextPrompt, add_special_tokens: bool) -> tuple[int, ...]:
        if not prompt.text:
            raise InvalidArgument("prompt.text", "empty")
        tokenizer = self._require_tokenizer("prompt.text")

        def encode() -> tuple[int, ...]:
            return tokenizer.encode(
                prompt.text, add_special_tokens=add_special_tokens, parse_special=prompt.parse_special
            )

        is_long = len(prompt.text) > self._inline_characters
        token_ids = await self._beside(encode) if is_long else encode()
        if not token_ids:
            raise InvalidArgument("prompt.text", "no token comes of it")
        return token_ids

    async def _encode_chat(self, prompt: ChatPrompt) -> tuple[int, ...]:
        tokenizer = self._require_tokenizer("prompt.chat")

        def encode() -> tuple[int, ...]:
            return tokenizer.encode_chat(
                prompt.messages, prompt.template_variables, continue_final=prompt.continue_final_message
            )

        size = sum(len(turn.role) + len(turn.content) + 1 for turn in prompt.messages)
        return await self._beside(encode) if size > self._inline_characters else encode()

    async def decode(self, token_ids: Sequence[int]) -> str:
        tokenizer = self._require_tokenizer("token_ids")

        def decode() -> str:
            return tokenizer.decode(self._checked(token_ids, "token_ids", may_be_empty=True))

        return await self._beside(decode) if len(token_ids) > self._inline_characters else decode()

    async def _beside(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._workers, work)

    def _known(self, token_ids: tuple[int, ...], field: str) -> tuple[int, ...]:
        """The ids of a text, if the model has an embedding for each: a tokenizer may know more tokens."""
        largest = max(token_ids, default=0)
        if largest >= self._model.vocab_size:
            bound = self._model.vocab_size - 1
            raise InvalidArgument(
                field, f"its text holds the token {largest}, beyond the model's last, {bound}"
            )
        return token_ids

    def _checked(
        self, token_ids: Sequence[object], field: str, *, may_be_empty: bool = False
    ) -> tuple[int, ...]:
        if not token_ids and not may_be_empty:
            raise InvalidArgument(field, "empty")
        checked: list[int] = []
        for position, token_id in enumerate(token_ids):
            if not isinstance(token_id, int) or not 0 <= token_id < self._model.vocab_size:
                bound = self._model.vocab_size - 1
                raise InvalidArgument(f"{field}[{position}]", f"{token_id} is not in [0, {bound}]")
            checked.append(token_id)
        return tuple(checked)

    def _require_tokenizer(self, field: str) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidArgument(field, f"{self._model.name!r} has no tokenizer; send token ids")
        return self._tokenizer


def _is_chat(prompt: Prompt) -> TypeGuard[tuple[ChatMessage, ...]]:
    return isinstance(prompt, tuple) and bool(prompt) and isinstance(prompt[0], ChatMessage)
