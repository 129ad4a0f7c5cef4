"""What a caller gives is sent as it was meant, or refused by its name before anything is sent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.policies.spec import PolicySpec
from pageturner.service.client import (
    ChatMessage,
    ChatPrompt,
    Client,
    SyncClient,
    TextPrompt,
    admin_calls,
    calls,
)
from pageturner.service.client.prompts import to_chat, to_prompt
from pageturner.service.client.to_wire import LONGEST_TIMEOUT_SECONDS, to_timeout
from pageturner.service.core.sampling_params import SamplingParams
from pageturner.service.errors import DeadlineExceeded, InvalidArgument
from pageturner.v1 import generation_pb2 as pb

SYSTEM = ChatMessage("system", "Answer in French.")
USER = {"role": "user", "content": "hi"}


def turns(prompt: pb.Prompt) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in prompt.chat.messages]


@pytest.mark.fault("3")
@pytest.mark.parametrize("to_message", [to_prompt, to_chat])
def test_turns_given_as_objects_and_as_mappings_are_all_kept(to_message: Any) -> None:
    system, user = ("system", "Answer in French."), ("user", "hi")
    assert turns(to_message([SYSTEM, USER])) == [system, user]
    assert turns(to_message((USER, SYSTEM))) == [user, system]
    assert turns(to_message(iter([USER, USER]))) == [user, user]


@pytest.mark.fault("3")
@pytest.mark.parametrize(
    "ids",
    [[1, 2, 3], (1, 2, 3), range(1, 4), {1: "", 2: "", 3: ""}.keys(), np.array([1, 2, 3], np.uint8)],
    ids=lambda ids: type(ids).__name__,
)
def test_token_ids_may_be_any_iterable_of_whole_numbers(ids: Iterable[int]) -> None:
    assert list(to_prompt(ids).token_ids.ids) == [1, 2, 3]
    assert list(to_prompt(token_id for token_id in ids).token_ids.ids) == [1, 2, 3]


@pytest.mark.fault("3")
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        (b"hi", "the prompt is of type bytes, not a text"),
        (bytearray(b"hi"), "the prompt is of type bytearray"),
        (memoryview(b"hi"), "the prompt is of type memoryview"),
        (None, "the prompt is of type NoneType"),
        (7, "the prompt is of type int"),
        (USER, "the prompt is of type dict"),
        (SYSTEM, "the prompt is of type ChatMessage"),
        (["hi"], r"prompt\[0\] is of type str"),
        ([1, "hi"], r"prompt\[1\] is of type str"),
        ([1, 2.0], r"prompt\[1\] is of type float"),
        ([1, True], r"prompt\[1\] is of type bool"),
        ([1, USER], r"prompt\[1\] is of type dict"),
        ([SYSTEM, 5], r"prompt\[1\] is of type int"),
        ([SYSTEM, "hi"], r"prompt\[1\] is of type str"),
        ([USER, {"role": "user"}], r"prompt\[1\] has the keys \['role'\]"),
        ([USER, {**USER, "nome": "x"}], r"prompt\[1\] has the keys \['content', 'nome', 'role'\]"),
        ([USER, {**USER, "name": 7}], r"prompt\[1\]: its name is of type int"),
        ([USER, {"role": "user", "tool_calls": [{"id": "x"}]}], r"prompt\[1\].tool_calls\[0\] has the keys"),
        ([USER, {"role": "user", "tool_calls": ["x"]}], r"prompt\[1\].tool_calls\[0\] is of type str"),
        (
            [USER, {"role": "user", "content": [{"type": "text"}]}],
            r"prompt\[1\].content\[0\] is of type dict, not a text",
        ),
        (np.array([0.5]), r"prompt\[0\] is of type float64"),
    ],
)
def test_what_is_no_prompt_is_a_type_error_that_names_the_position(prompt: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        to_prompt(prompt)


@pytest.mark.fault("3")
@pytest.mark.parametrize(
    ("messages", "text"), [("hi", "type str"), (USER, "type dict"), ([1], r"messages\[0\]")]
)
def test_a_chat_takes_turns_only(messages: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        to_chat(messages)


def test_an_empty_conversation_is_the_servers_to_refuse_as_one() -> None:
    assert to_chat([]).WhichOneof("input") == "chat"


LONE = "a\ud800"
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": -1}, "sampling.max_tokens: -1 is not in [0, 4294967295]"),
    ({"max_tokens": 1 << 32}, "sampling.max_tokens: 4294967296 is not in [0, 4294967295]"),
    ({"max_tokens": 2.0}, "sampling.max_tokens: 2.0 is not a whole number"),
    ({"max_tokens": "3"}, "sampling.max_tokens: '3' is not a whole number"),
    ({"n": True}, "sampling.n: True is not a whole number"),
    ({"top_k": -1}, "sampling.top_k: -1 is not in [0, 4294967295]"),
    ({"seed": -1}, "sampling.seed: -1 is not in [0, 18446744073709551615]"),
    ({"seed": 1 << 64}, "sampling.seed: 18446744073709551616 is not in [0, 18446744073709551615]"),
    ({"seed": 10**5000}, "sampling.seed: a number of 16610 bits is not in [0, 18446744073709551615]"),
    ({"stop_token_ids": [1, -1]}, "sampling.stop_token_ids[1]: -1 is not in [0, 4294967295]"),
    ({"stop_token_ids": 5}, "sampling.stop_token_ids: 5 is not a list"),
    ({"logit_bias": {5: 1.0, -1: 1.0}}, "sampling.logit_bias[-1]: -1 is not in [0, 4294967295]"),
    ({"logit_bias": {5: "x"}}, "sampling.logit_bias[5]: 'x' is not a number"),
    ({"logit_bias": {"x": 1.0}}, "sampling.logit_bias['x']: 'x' is not a whole number"),
    ({"logit_bias": [5]}, "sampling.logit_bias: [5] is not a mapping"),
    ({"temperature": "hot"}, "sampling.temperature: 'hot' is not a number"),
    ({"temperature": 10**400}, "sampling.temperature: a double's range"),
    ({"ignore_eos": "no"}, "sampling.ignore_eos: 'no' is not true or false"),
    ({"stop": ["ok", LONE]}, "sampling.stop[1]: character 1 is U+D800, a lone surrogate"),
    ({"stop": LONE}, "sampling.stop[0]: character 1 is U+D800, a lone surrogate"),
    ({"stop": ["ok", 5]}, "sampling.stop[1]: 5 is not text"),
    ({"stop": b"x"}, "sampling.stop: b'x' is not a list"),
    ({"priority": -(1 << 31) - 1}, "priority: -2147483649 is not in [-2147483648, 2147483647]"),
    ({"priority": 1 << 31}, "priority: 2147483648 is not in [-2147483648, 2147483647]"),
    ({"priority": 0.5}, "priority: 0.5 is not a whole number"),
    ({"model": LONE}, "model: character 1 is U+D800, a lone surrogate"),
    ({"request_id": LONE}, "request_id: character 1 is U+D800, a lone surrogate"),
    ({"tenant": 5}, "tenant: 5 is not text"),
    ({"cache_salt": b"\xff"}, "cache_salt: b'\\xff' is not text"),
    ({"timeout_seconds": math.nan}, "timeout_seconds: nan s is not a time"),
    ({"timeout_seconds": -1}, "timeout_seconds: -1.0 s is not a time"),
    ({"timeout_seconds": -math.inf}, "timeout_seconds: -inf s is not a time"),
    ({"timeout_seconds": "1"}, "timeout_seconds: '1' is not a number"),
]


@pytest.mark.fault("D", "33")
@pytest.mark.parametrize(("options", "text"), REFUSED, ids=[text.partition(":")[0] for _, text in REFUSED])
async def test_an_option_that_the_wire_cannot_carry_is_refused_by_its_path(
    options: dict[str, Any], text: str
) -> None:
    """Nothing listens at the target: it is refused here, by every method of both clients."""
    field, _, reason = text.partition(": ")
    client, sync_client = Client("127.0.0.1:1"), SyncClient("127.0.0.1:1")
    errors = []
    with pytest.raises(InvalidArgument) as caught:
        await client.generate("x", **options)
    errors.append(caught.value)
    for begin in (
        lambda: client.stream("x", **options),
        lambda: client.chat([USER], **options),
        lambda: sync_client.generate("x", **options),
        lambda: sync_client.stream("x", **options),
        lambda: sync_client.chat([USER], **options),
    ):
        with pytest.raises(InvalidArgument) as caught:
            begin()
        errors.append(caught.value)
    for error in errors:
        assert error.field == field
        assert error.reason.endswith(reason)


@pytest.mark.fault("26", "D")
@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (LONE, "prompt.text"),
        ([1, -1], "prompt.token_ids.ids[1]"),
        ([1 << 32], "prompt.token_ids.ids[0]"),
        ([USER, {"role": "user", "content": LONE}], "prompt.chat.messages[1].content"),
        ([ChatMessage(LONE, "")], "prompt.chat.messages[0].role"),
        (TextPrompt(LONE), "prompt.text"),
        (ChatPrompt((ChatMessage("user", LONE),)), "prompt.chat.messages[0].content"),
        (ChatPrompt((SYSTEM,), {LONE: 1}), f"prompt.chat.template_variables[{LONE!r}]"),
    ],
)
def test_a_prompt_that_the_wire_cannot_carry_is_refused_by_its_path(prompt: Any, field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        to_prompt(prompt)
    assert caught.value.field == field


@pytest.mark.fault("D")
async def test_arguments_of_the_other_calls_are_refused_by_their_names() -> None:
    client = Client("127.0.0.1:1")
    calls_and_fields = (
        (client.abort("ok", LONE), "request_ids[1]"),
        (client.tokenize(LONE), "prompt.text"),
        (client.tokenize("x", model=LONE), "model"),
        (client.detokenize([5, -1]), "token_ids[1]"),
        (client.detokenize([5.0]), "token_ids[0]"),  # type: ignore[list-item] # what is tried
        (client.model(LONE), "name"),
        (client.set_policies(expected_revision=-1), "expected_revision"),
        (client.set_policies({LONE: PolicySpec("fcfs")}), f"policies[{LONE!r}]"),
        (client.set_policies({"queue": PolicySpec(LONE)}), "policies[queue].name"),
        (client.set_policies(preset=LONE), "preset"),
        (client.wait_until_serving(math.nan), "timeout_seconds"),
        (client.wait_until_serving(-1), "timeout_seconds"),
    )
    for call, field in calls_and_fields:
        with pytest.raises(InvalidArgument) as caught:
            await call
        assert caught.value.field == field
    with pytest.raises(InvalidArgument, match="interval_seconds"):
        client.watch_load("often")  # type: ignore[arg-type] # what is tried


def test_a_range_is_told_in_the_servers_words() -> None:
    """Where both sides can refuse a number: the bounds differ, as only the server knows its vocabulary."""
    with pytest.raises(InvalidArgument) as server:
        SamplingParams(stop_token_ids=(1, -1)).check(vocab_size=1 << 32, max_n=8)
    with pytest.raises(InvalidArgument) as client:
        calls.generate("x", {"stop_token_ids": (1, -1)})
    assert str(client.value) == f"sampling.{server.value}"


def test_an_option_that_does_not_exist_is_a_type_error_with_a_hint() -> None:
    with pytest.raises(TypeError, match="no option 'max_token'; did you mean 'max_tokens'"):
        calls.generate("x", {"max_token": 1})  # type: ignore[typeddict-unknown-key] # what is tried


def test_options_of_none_are_left_out_and_one_stop_needs_no_list() -> None:
    request = calls.generate("x", {"seed": None, "timeout_seconds": None, "stop": "END"}).request  # type: ignore[typeddict-item] # as callers pass defaults on
    assert request == pb.GenerateRequest(prompt=pb.Prompt(text="x"), sampling=pb.SamplingParams(stop=["END"]))


def test_numpy_scalars_are_numbers() -> None:
    request = calls.generate("x", {"max_tokens": np.int64(3), "temperature": np.float32(0.5)}).request  # type: ignore[typeddict-item] # any number serves
    assert request == pb.GenerateRequest(
        prompt=pb.Prompt(text="x"), sampling=pb.SamplingParams(max_tokens=3, temperature=0.5)
    )


@pytest.mark.fault("33")
@pytest.mark.parametrize("seconds", [math.inf, 1e10, 1e30, 1e308, None])
async def test_an_infinite_or_huge_timeout_is_no_limit(seconds: float | None) -> None:
    assert to_timeout(seconds) is None
    engine = FakeEngine()
    async with serving(engine) as served:
        await served.client.generate("x", timeout_seconds=seconds)
        await served.client.wait_until_serving(math.inf)
    assert engine.requests[0].deadline_seconds is None


@pytest.mark.fault("33")
async def test_the_longest_timeout_reaches_the_engine_as_it_is() -> None:
    engine = FakeEngine()
    async with serving(engine) as served:
        await served.client.generate("x", timeout_seconds=LONGEST_TIMEOUT_SECONDS)
    assert engine.requests[0].deadline_seconds == pytest.approx(LONGEST_TIMEOUT_SECONDS, abs=60)


@pytest.mark.fault("33")
async def test_a_timeout_of_nothing_is_over() -> None:
    async with serving(FakeEngine()) as served:
        with pytest.raises(DeadlineExceeded):
            await served.client.generate("x", timeout_seconds=0)
        with pytest.raises(DeadlineExceeded):
            await served.client.wait_until_serving(0)


def test_options_of_a_policy_are_json() -> None:
    message = admin_calls.set_policies(
        {"queue": PolicySpec("p", {"a": 1.5, "b": LONE})}, {}, "", None
    ).request
    (choice,) = message.policies.values()  # type: ignore[attr-defined] # it is a SetPoliciesRequest
    assert {name: json.loads(value) for name, value in choice.options.items()} == {"a": 1.5, "b": LONE}


@pytest.mark.fault("D")
def test_a_value_that_json_has_not_is_refused_by_its_name() -> None:
    endless: list[object] = []
    endless.append(endless)
    deep: list[object] = []
    for _ in range(5000):
        deep = [deep]
    for value, reason in ((endless, "contains itself"), (deep, "nested")):
        with pytest.raises(InvalidArgument, match=reason) as caught:
            to_chat([USER], {"a": value})
        assert caught.value.field == "prompt.chat.template_variables[a]"
        with pytest.raises(InvalidArgument, match=reason) as caught:
            admin_calls.set_policies({"queue": PolicySpec("p", {"b": value})}, {}, "", None)
        assert caught.value.field == "policies[queue].options[b]"
    with pytest.raises(TypeError, match=r"template_variables\[a\]: Object of type object"):
        to_chat([USER], {"a": object()})


@pytest.mark.fault("D")
def test_a_policy_that_is_no_spec_is_refused_by_its_axis() -> None:
    policies: Any = {"queue": "fcfs"}
    with pytest.raises(TypeError, match=r"policies\[queue\] is of type str, not a PolicySpec"):
        admin_calls.set_policies(policies, {}, "", None)
