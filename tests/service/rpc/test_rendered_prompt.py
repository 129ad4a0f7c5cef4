"""What was rendered of a prompt, told to whoever asks, over the real engine."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from support.real_service import RealService, real_service
from support.tiny_tokenizers import byte_level_bpe

from pageturner.service.client import AcceptedEvent
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import InvalidArgument

TEMPLATE = """{% if messages[0].content == "no" %}{{ raise_exception("I refuse") }}{% endif %}
{%- for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}
{%- if tools %}{{ tools | tojson }}{% endif %}assistant:"""
CHAT = [{"role": "user", "content": "hi <|end|>"}]


@pytest.fixture
async def service() -> AsyncIterator[RealService]:
    tokenizer = Tokenizer(byte_level_bpe(), chat_template=ChatTemplate(TEMPLATE))
    async with real_service(tokenizer=tokenizer, num_blocks=64) as service:
        yield service


async def test_the_rendered_prompt_is_told_where_it_is_asked_for(service: RealService) -> None:
    client, rendered = service.client, "user: hi <|end|>\n" + '[{"name": "f"}]assistant:'
    events = [
        event async for event in client.chat(CHAT, tools=[{"name": "f"}], return_prompt=True, max_tokens=1)
    ]
    assert isinstance(events[0], AcceptedEvent)
    assert events[0].rendered_prompt == rendered
    silent = [event async for event in client.chat(CHAT, tools=[{"name": "f"}], max_tokens=1)]
    assert isinstance(silent[0], AcceptedEvent)
    assert silent[0].rendered_prompt == ""
    assert silent[0].num_prompt_tokens == events[0].num_prompt_tokens
    whole = await client.generate(CHAT, return_prompt=True, max_tokens=1)
    assert whole.rendered_prompt == "user: hi <|end|>\nassistant:"


async def test_texts_are_rendered_as_themselves_and_ids_not_at_all(service: RealService) -> None:
    client = service.client
    assert await client.render("fox") == "fox"
    assert await client.render([1, 2]) == ""
    assert await client.render(CHAT) == "user: hi <|end|>\nassistant:"
    assert (await client.generate([1, 2], return_prompt=True, max_tokens=1)).rendered_prompt == ""


async def test_a_template_refuses_in_its_own_words(service: RealService) -> None:
    with pytest.raises(InvalidArgument, match="I refuse") as refused:
        await service.client.render([{"role": "user", "content": "no"}])
    assert refused.value.field == "prompt.chat.messages"
