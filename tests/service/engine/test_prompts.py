"""Prompts beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import pytest
import tokenizers
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.engine.api import ChatMessage, ModelInfo, Prompt
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.prompts import MAX_LONG_PROMPTS, PromptReader
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import InvalidArgument

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
        assert self.full.wait(10)
        token_ids = super().encode(text, add_special_tokens=add_special_tokens, parse_special=parse_special)
        with self.lock:
            self.num_now -= 1
        return token_ids


async def test_few_long_prompts_are_read_at_once() -> None:
    """Each takes a gigabyte for ten megabytes of text."""
    tokenizer = Counting(byte_level_bpe())
    reader = PromptReader(tokenizer, MODEL, inline_characters=10)
    texts = [f"The quick brown fox {i} " * 200 for i in range(12)]
    read = await asyncio.gather(*map(reader.encode, texts))
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
        await reader.encode(prompt)
    assert caught.value.field == field
    # What a message says is text, so that it cannot hold such a token.
    harmless = Tokenizer(backend, chat_template=ChatTemplate("{{ messages[0].content }}"))
    chat = await PromptReader(harmless, model, inline_characters).encode((ChatMessage("user", "<tool>"),))
    assert max(chat) < rows
