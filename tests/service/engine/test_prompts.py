"""Prompts beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import tokenizers
from support.patience import PATIENCE_SECONDS
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.engine.api import ChatMessage, ChatPrompt, ModelInfo, Prompt
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.prompt_limits import PromptLimits
from pageturner.service.engine.prompts import MAX_LONG_PROMPTS, PIECE_CHARACTERS, PromptReader
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import InvalidArgument

LIMITS = PromptLimits(max_tokens=1 << 16, max_characters=1 << 20, max_messages=64)
MODEL = ModelInfo("tiny", "", "", "", "float32", True, 500, 64, 1, 1, 1, 1, (), False)


class Counting(Tokenizer):
    """Holds every text until so many are being encoded as may be; counts the most there were."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self.lock, self.full = threading.Lock(), threading.Event()
        self.num_now = self.most = 0

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> tuple[int, ...]:
        with self.lock:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            if self.num_now >= MAX_LONG_PROMPTS:
                self.full.set()
        assert self.full.wait(PATIENCE_SECONDS)
        token_ids = super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
        with self.lock:
            self.num_now -= 1
        return token_ids


async def test_few_long_prompts_are_read_at_once() -> None:
    """Each takes a gigabyte for ten megabytes of text."""
    tokenizer = Counting(byte_level_bpe())
    reader = PromptReader(tokenizer, MODEL, inline_characters=10)
    texts = [f"The quick brown fox {i} " * 200 for i in range(12)]
    read = await asyncio.gather(*(reader.encode(text, LIMITS) for text in texts))
    assert [tokenizer.decode(token_ids) for token_ids in read] == texts
    assert tokenizer.most == MAX_LONG_PROMPTS


@pytest.mark.fault("1")
@pytest.mark.parametrize("inline_characters", [1, 1000])
@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("fox <tool>", "prompt.text"),
        ((ChatMessage("user", "fox"),), "prompt.chat"),
        ((3, 421, 3), "prompt.token_ids[1]"),
    ],
)
async def test_a_prompt_with_a_token_beyond_the_embeddings_is_refused(
    prompt: Prompt, field: str, inline_characters: int
) -> None:
    backend = tokenizers.Tokenizer.from_str(byte_level_bpe().to_str())
    backend.add_special_tokens(["<tool>"])
    rows = max(backend.get_vocab().values())
    model = ModelInfo("tiny", "", "", "", "float32", True, rows, 64, 1, 1, 1, 1, (), False)
    tokenizer = Tokenizer(backend, chat_template=ChatTemplate("<tool>{{ messages[0].content }}"))
    reader = PromptReader(tokenizer, model, inline_characters)
    with pytest.raises(InvalidArgument, match=str(rows)) as caught:
        await reader.encode(prompt, LIMITS)
    assert caught.value.field == field
    # What a message says is text, so that it cannot hold such a token.
    harmless = Tokenizer(backend, chat_template=ChatTemplate("{{ messages[0].content }}"))
    reading = PromptReader(harmless, model, inline_characters).encode(
        (ChatMessage("user", "<tool>"),), LIMITS
    )
    chat = await reading
    assert max(chat) < rows


class Noting(Tokenizer):
    """Notes the length of every text that is encoded."""

    def __init__(self) -> None:
        super().__init__(byte_level_bpe(), chat_template=ChatTemplate("{{ messages[0].content }}"))
        self.lengths: list[int] = []

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> tuple[int, ...]:
        self.lengths.append(len(text))
        return super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)


@pytest.mark.fault("F", "O")
@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ("1 " * 500_000, "prompt.text"),
        ((ChatMessage("user", "1 " * 500_000),), "prompt.chat"),
        ((ChatMessage("user", ""),) * 100, "prompt.chat"),
        (range(1_000_000), "prompt"),
    ],
    ids=["text", "chat", "turns", "ids"],
)
async def test_a_prompt_that_is_too_large_is_refused_before_it_is_read(prompt: Any, field: str) -> None:
    tokenizer = Noting()
    reader = PromptReader(tokenizer, MODEL, inline_characters=10)
    with pytest.raises(InvalidArgument) as caught:
        await reader.encode(prompt, PromptLimits.of_tokens(63, tokenizer.max_token_chars))
    assert caught.value.field == field
    assert tokenizer.lengths == []


@pytest.mark.fault("F", "O")
@pytest.mark.parametrize("is_chat", [False, True])
async def test_a_long_text_with_too_many_tokens_is_refused_after_its_first_piece(is_chat: bool) -> None:
    """Where tokens may be long, a bound in characters says little, and reading costs a kilobyte a token."""
    tokenizer = Noting()
    reader = PromptReader(tokenizer, MODEL, inline_characters=10)
    text = "1 " * 500_000
    prompt: Prompt = (ChatMessage("user", text),) if is_chat else text
    with pytest.raises(
        InvalidArgument, match=f"in the first {PIECE_CHARACTERS} of 1000000 characters"
    ) as caught:
        await reader.encode(prompt, PromptLimits(63, 1 << 20, 63))
    assert caught.value.field == ("prompt.chat" if is_chat else "prompt.text")
    assert tokenizer.lengths == [PIECE_CHARACTERS]


async def test_a_chat_with_long_template_variables_is_read_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Where(Tokenizer):
        def render_chat(self, chat: ChatPrompt) -> str:
            threads.append(threading.current_thread())
            return super().render_chat(chat)

    template = ChatTemplate("{{ tools | tojson }}{{ messages[0].content }}")
    reader = PromptReader(Where(byte_level_bpe(), chat_template=template), MODEL, inline_characters=64)
    for text in ("fox", "fox" * 64):
        variables = {"tools": [{"name": text}]}
        await reader.encode(ChatPrompt((ChatMessage("user", "the"),), variables), LIMITS)
    assert [thread is threading.current_thread() for thread in threads] == [True, False]


async def test_a_long_text_that_fits_is_read_as_a_whole() -> None:
    tokenizer = Tokenizer(byte_level_bpe())
    text = "The quick brown fox jumps over the lazy dog. " * 2000
    read = await PromptReader(tokenizer, MODEL, 10).encode(text, LIMITS)
    assert read == tokenizer.encode(text)


def test_limits_name_field_and_bound() -> None:
    limits = PromptLimits.of_tokens(63, 10)
    assert limits == PromptLimits(63, 630, 63)
    limits.check_characters(630, "prompt.text")
    with pytest.raises(InvalidArgument, match=r"prompt\.text: 631 characters are more than 63 tokens"):
        limits.check_characters(631, "prompt.text")
    with pytest.raises(InvalidArgument, match="64 messages; at most 63"):
        limits.check_messages(64, "prompt.chat")
    with pytest.raises(InvalidArgument, match="64 tokens; at most 63"):
        limits.check_tokens(64, "prompt")
    unbounded = PromptLimits.of_tokens(63, None)
    with pytest.raises(InvalidArgument, match=f"at most {unbounded.max_characters}"):
        unbounded.check_characters(unbounded.max_characters + 1, "prompt.text")
