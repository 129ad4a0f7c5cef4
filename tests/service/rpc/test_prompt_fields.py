"""Prompts with choices of their own, from the client's value to the engine's and what is refused between."""

from __future__ import annotations

import pytest
from support.fake_engine import UNLIMITED

from pageturner.service.client.prompts import to_prompt as to_wire
from pageturner.service.engine.api import ChatMessage, ChatPrompt, Prompt, TextPrompt
from pageturner.service.errors import InvalidArgument
from pageturner.service.rpc import from_wire
from pageturner.v1 import generation_pb2 as pb

TURNS = (ChatMessage("user", "hi"), ChatMessage("assistant", "According to"))


@pytest.mark.fault("43", "E")
@pytest.mark.parametrize(
    "prompt",
    [
        "hi",
        TextPrompt("hi", parse_special=False),
        TextPrompt("hi", parse_special=True),
        TURNS,
        ChatPrompt(TURNS, continue_final_message=True),
        ChatPrompt(TURNS, {"enable_thinking": False, "style": {"tone": ["dry", None, 1.5]}}),
    ],
)
def test_the_engine_is_given_the_prompt_that_the_client_stated(prompt: Prompt) -> None:
    assert from_wire.to_prompt(to_wire(prompt), UNLIMITED) == prompt


@pytest.mark.fault("43")
@pytest.mark.parametrize(
    ("variables", "field", "reason"),
    [
        ({"a": "no json"}, "prompt.chat.template_variables[a]", "is not JSON"),
        ({"a": "[" * 30_000}, "prompt.chat.template_variables[a]", "is not JSON"),
        ({str(i): "1" for i in range(65)}, "prompt.chat.template_variables", "65 entries; at most 64"),
        ({"a": "1" * 65_536}, "prompt.chat.template_variables", "at most 65536"),
    ],
)
def test_template_variables_that_are_too_many_or_no_json_are_refused(
    variables: dict[str, str], field: str, reason: str
) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], template_variables=variables)
    with pytest.raises(InvalidArgument, match=reason) as caught:
        from_wire.to_prompt(pb.Prompt(chat=chat), UNLIMITED)
    assert caught.value.field == field
