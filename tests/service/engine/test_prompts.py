"""Prompts beside the event loop."""

from __future__ import annotations

import asyncio
import threading

import tokenizers
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.engine.api import ModelInfo
from pageturner.service.engine.prompts import MAX_LONG_PROMPTS, PromptReader
from pageturner.service.engine.tokenizer import Tokenizer

MODEL = ModelInfo("tiny", "", "", "", "float32", True, 500, 64, 1, 1, 1, 1, (), False)


class Counting(Tokenizer):
    """Holds every text until so many are being encoded as may be; counts the most there were."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__(backend)
        self.lock, self.full = threading.Lock(), threading.Event()
        self.num_now = self.most = 0

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        with self.lock:
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            if self.num_now >= MAX_LONG_PROMPTS:
                self.full.set()
        assert self.full.wait(10)
        token_ids = super().encode(text, add_special_tokens=add_special_tokens)
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
