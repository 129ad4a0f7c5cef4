"""Prompts as clients state them to token ids, checked; errors name the field as on the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from pageturner.service.engine.api import ChatMessage, ChatPrompt, ModelInfo, Prompt, TextPrompt
from pageturner.service.engine.conversation import num_characters
from pageturner.service.engine.prompt_limits import MAX_PROMPT_CHARACTERS, PromptLimits
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.engine.work_queue import WorkQueue
from pageturner.service.errors import InvalidArgument, PageturnerError

MAX_LONG_PROMPTS = 2
"""Long prompts read at once."""

PIECE_CHARACTERS = 1 << 14
"""A longer text is counted in pieces first, since reading one takes up to a thousand bytes a character."""

PIECE_MARGIN = 32
"""Tokens that a cut in the midst of a word may add to the count of a piece."""

_T = TypeVar("_T")


class PromptReader:
    """One model's way from prompt to ids. tokenizer: None for a model of token ids.

    inline_characters: longer prompts are read in threads beside the event loop, smaller ones first.
    """

    def __init__(self, tokenizer: Tokenizer | None, model: ModelInfo, inline_characters: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._inline_characters = inline_characters
        self._queue = WorkQueue(
            "pageturner-prompts", num_threads=MAX_LONG_PROMPTS, max_waiting=MAX_PROMPT_CHARACTERS
        )

    @property
    def has_text(self) -> bool:
        return self._tokenizer is not None

    def check_size(self, prompt: Prompt, limits: PromptLimits) -> int:
        """The fewest tokens that the prompt can become, by its counts alone. Raises InvalidArgument if they
        pass the limits, naming the field."""
        size, prompt = self.measure(prompt, limits), _with_choices(prompt)
        if isinstance(prompt, ChatPrompt):  # a template may leave out all but what is said
            size = sum(len(text) for turn in prompt.messages for text in turn.texts())
        return size if isinstance(prompt, tuple) else self._fewest_tokens(size)

    def measure(self, prompt: Prompt, limits: PromptLimits) -> int:
        """Its characters, or its ids. Raises InvalidArgument as `check_size` does."""
        prompt = _with_choices(prompt)
        if isinstance(prompt, TextPrompt):
            limits.check_characters(len(prompt.text), "prompt.text")
            return len(prompt.text)
        if isinstance(prompt, ChatPrompt):
            limits.check_messages(len(prompt.messages), "prompt.chat")
            limits.check_characters(prompt.num_characters, "prompt.chat")
            return prompt.num_characters
        limits.check_tokens(len(prompt), "prompt")
        return len(prompt)

    async def encode(
        self, prompt: Prompt, limits: PromptLimits, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[int, ...]:
        """The prompt's token ids. Raises as `read`."""
        token_ids, _ = await self.read(prompt, limits, add_special_tokens=add_special_tokens, tenant=tenant)
        return token_ids

    async def read(
        self, prompt: Prompt, limits: PromptLimits, *, add_special_tokens: bool = True, tenant: str = ""
    ) -> tuple[tuple[int, ...], str]:
        """(token ids, the text that became them: a chat's as its template writes it; of ids none).

        Raises InvalidArgument for a prompt that is empty or passes the limits, an id out of range, or text
        that the model cannot take; QueueFull if too much text waits to be read. tenant: who waits, and leaves
        room for others."""
        self.check_size(prompt, limits)
        prompt = _with_choices(prompt)
        if isinstance(prompt, TextPrompt):
            token_ids = await self._encode_text(prompt, limits, tenant, add_special_tokens=add_special_tokens)
            return self._known(token_ids, "prompt.text"), prompt.text
        if isinstance(prompt, ChatPrompt):
            token_ids, text = await self._encode_chat(prompt, limits, tenant)
            return self._known(token_ids, "prompt.chat"), text
        given = prompt
        return await self._run(len(given), lambda: self._checked(given, "prompt.token_ids"), tenant), ""

    async def decode(self, token_ids: Sequence[int], limits: PromptLimits, *, tenant: str = "") -> str:
        """Token ids to text, on a worker thread where there are many. Raises InvalidArgument."""
        tokenizer = self._require_tokenizer("token_ids")
        limits.check_tokens(len(token_ids), "token_ids")
        return await self._run(
            len(token_ids),
            lambda: tokenizer.decode(self._checked(token_ids, "token_ids", may_be_empty=True)),
            tenant,
        )

    def fail_waiting(self, error: PageturnerError) -> None:
        """End the wait of the prompts that are not being read yet."""
        self._queue.fail_waiting(error)

    async def _encode_text(
        self, prompt: TextPrompt, limits: PromptLimits, tenant: str, *, add_special_tokens: bool
    ) -> tuple[int, ...]:
        if not prompt.text:
            raise InvalidArgument("prompt.text", "empty")
        tokenizer = self._require_tokenizer("prompt.text")

        def encode() -> tuple[int, ...]:
            self._count_pieces(tokenizer, prompt.text, limits, "prompt.text")
            return tokenizer.encode(
                prompt.text, add_special_tokens=add_special_tokens, parse_special=prompt.parse_special
            )

        token_ids = await self._run(len(prompt.text), encode, tenant)
        if not token_ids:
            raise InvalidArgument("prompt.text", "no token comes of it")
        return token_ids

    async def _encode_chat(
        self, prompt: ChatPrompt, limits: PromptLimits, tenant: str
    ) -> tuple[tuple[int, ...], str]:
        tokenizer = self._require_tokenizer("prompt.chat")

        def encode() -> tuple[tuple[int, ...], str]:
            contents = "\n".join(text for turn in prompt.messages for text in turn.texts())
            self._count_pieces(tokenizer, contents, limits, "prompt.chat")
            rendered = tokenizer.render_chat(prompt)
            if len(rendered) > len(contents) + PIECE_CHARACTERS:  # of tools, or of the template's own
                self._count_pieces(tokenizer, tokenizer.shown(rendered), limits, "prompt.chat")
            return tokenizer.encode_rendered(rendered), tokenizer.shown(rendered)

        size = prompt.num_characters + len(prompt.messages) + num_characters(prompt.template_variables)
        return await self._run(size, encode, tenant)

    async def _run(self, size: int, work: Callable[[], _T], tenant: str) -> _T:
        return work() if size <= self._inline_characters else await self._queue.run(size, work, tenant)

    def _count_pieces(self, tokenizer: Tokenizer, text: str, limits: PromptLimits, field: str) -> None:
        """Refuse a long text that has too many tokens before it is read whole."""
        if len(text) <= PIECE_CHARACTERS:
            return
        count = 0
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            count += max(0, len(tokenizer.encode(piece, add_special_tokens=False)) - PIECE_MARGIN)
            if count > limits.max_tokens:
                end = start + len(piece)
                reason = f"more than {count} tokens in the first {end} of {len(text)} characters; at most "
                raise InvalidArgument(field, f"{reason}{limits.max_tokens} {limits.reason}")

    def _fewest_tokens(self, num_characters: int) -> int:
        longest = self._tokenizer.max_token_chars if self._tokenizer is not None else None
        return 1 if longest is None else max(1, num_characters // longest)

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


def _with_choices(prompt: Prompt) -> TextPrompt | ChatPrompt | tuple[int, ...]:
    """The prompt in the form that has a place for every choice."""
    if isinstance(prompt, str):
        return TextPrompt(prompt)
    if isinstance(prompt, TextPrompt | ChatPrompt):
        return prompt
    if prompt and isinstance(prompt[0], ChatMessage):
        return ChatPrompt(prompt)
    return cast(tuple[int, ...], prompt)
