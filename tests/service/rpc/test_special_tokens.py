"""Special tokens over the wire: in prompts, in stop strings, and beyond the model's embeddings."""

from __future__ import annotations

import asyncio

import pytest
import support.real_service as real
from support.real_service import TOKENIZER, VOCAB_SIZE, real_service

from pageturner.service.engine.api import TextPrompt
from pageturner.service.errors import InvalidArgument

(END,) = TOKENIZER.encode("<|end|>")
FOX = TOKENIZER.encode("fox")


@pytest.mark.fault("7")
@pytest.mark.parametrize(("stop", "text"), [("<|end|>", "fox"), ("<|end|>fox", "fox")])
async def test_a_stop_that_spells_a_special_token_ends_the_choice_at_it(stop: str, text: str) -> None:
    async with real_service() as service:
        script = service.model.script = (*FOX, END, *FOX, *FOX, *FOX)
        answer = await service.client.generate((0,), stop=[stop], ignore_eos=True, max_tokens=len(script))
    (choice,) = answer.choices
    assert (choice.text, choice.matched) == (text, stop)
    assert len(choice.tokens) < len(script)


@pytest.mark.fault("1")
async def test_a_text_with_a_token_beyond_the_embeddings_is_refused_and_neighbours_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    beyond = TOKENIZER.encode("added token")
    assert max(beyond) == VOCAB_SIZE - 1
    monkeypatch.setattr(real, "VOCAB_SIZE", VOCAB_SIZE - 1)  # the model has no embedding for the last one
    async with real_service() as service:
        alone = await service.client.generate("fox", max_tokens=6, seed=1)
        neighbours = [
            asyncio.create_task(service.client.generate("fox", max_tokens=6, seed=1)) for _ in range(4)
        ]
        with pytest.raises(InvalidArgument) as caught:
            await service.client.generate("hi added token", max_tokens=2)
        answers = await asyncio.gather(*neighbours)
        load = await service.client.load()
    assert caught.value.field == "prompt.text"
    assert load.num_step_failures_total == 0
    assert all(answer.choices == alone.choices for answer in answers)


@pytest.mark.fault("E")
async def test_a_text_prompt_spells_special_tokens_unless_it_asks_not_to() -> None:
    async with real_service() as service:
        assert END in await service.client.tokenize("fox<|end|>")
        found = await service.client.tokenize(TextPrompt("fox<|end|>", parse_special=False))
        assert END not in found
        assert TOKENIZER.decode(found) == "fox<|end|>"
