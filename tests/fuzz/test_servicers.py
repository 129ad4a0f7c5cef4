"""Every method of every service, with messages and bytes of any kind: no call ends as a fault of the server.

The methods come from the descriptors of the services that the server registers, the messages from theirs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.fake_model import Stop, expected_tokens
from support.real_service import SERVER_FINGERPRINT, RealService, real_service
from support.service_thread import InThread, in_thread
from support.tiny_tokenizers import byte_level_bpe
from support.wire_messages import JSON, Words, bodies, messages

from pageturner.policies import registry
from pageturner.policies.interfaces import AXES
from pageturner.policies.presets import PRESETS
from pageturner.service.engine.api import EngineHealth
from pageturner.service.engine.chat_template import ChatTemplate
from pageturner.service.engine.fingerprint import Fingerprint
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.rpc import generation, interceptors
from pageturner.service.rpc.health import HealthServicer
from pageturner.v1 import admin_pb2, generation_pb2, model_pb2, transfer_pb2

FILES = (generation_pb2, model_pb2, admin_pb2, transfer_pb2, health_pb2, reflection_pb2)
METHODS: tuple[MethodDescriptor, ...] = tuple(
    method
    for file in FILES
    for service in file.DESCRIPTOR.services_by_name.values()
    for method in service.methods
)

FAULTS = {
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.DATA_LOSS,
    grpc.StatusCode.UNAVAILABLE,
}
"""What no message may lead to. UNAVAILABLE: the engine or the connection died of it."""

END_SECONDS = 60.0
"""Of a call that has no end by itself."""

SHORT_SECONDS = 0.1
"""Of a stream that is read for as long: a watch has no end of its own."""

PROMPT = generation_pb2.Prompt(token_ids=generation_pb2.TokenIds(ids=[1, 2, 3]))
SAMPLING = generation_pb2.SamplingParams(max_tokens=3, seed=1)
CHAT = generation_pb2.Prompt(
    chat=generation_pb2.Chat(
        messages=[generation_pb2.ChatMessage(role="user", content="the quick")],
        template_variables={"extra": "[1]"},
    )
)
RECLAIM = admin_pb2.PolicyChoice(name="cost-model", options={"swap_weight": "2"})
FINGERPRINT = Fingerprint(SERVER_FINGERPRINT, is_exact=True).of_prompt(PROMPT.token_ids.ids)
RESUME = generation_pb2.Resume(
    seed=1, fingerprint=FINGERPRINT, choices=[generation_pb2.ReceivedChoice(token_ids=[2])], max_tokens=3
)
GOOD: Mapping[str, tuple[Message, ...]] = {
    "GenerateRequest": tuple(
        generation_pb2.GenerateRequest(prompt=prompt, sampling=SAMPLING) for prompt in (PROMPT, CHAT)
    ),
    "GenerateStreamRequest": (
        *(generation_pb2.GenerateStreamRequest(prompt=p, sampling=SAMPLING) for p in (PROMPT, CHAT)),
        generation_pb2.GenerateStreamRequest(prompt=PROMPT, sampling=SAMPLING, resume=RESUME),
    ),
    "TokenizeRequest": tuple(generation_pb2.TokenizeRequest(prompt=prompt) for prompt in (PROMPT, CHAT)),
    "SetPoliciesRequest": (admin_pb2.SetPoliciesRequest(policies={"reclaim": RECLAIM}),),
}
"""Requests that are served as they are: what is set over them is met behind the first checks."""

WORDS: Words = {
    "model": ("tiny", ""),
    "request_id": ("r",),
    "request_ids": ("r",),
    "tenant": ("a", "b"),
    "role": ("user", "assistant", "system"),
    "ids": (0, 1, 2, 420, 421),
    "token_ids": (0, 1, 2, 420, 421),
    "fingerprint": (FINGERPRINT, SERVER_FINGERPRINT, ";", "weights=x"),
    "text_characters": (0, 1),
    "stop_token_ids": (0, 1, 2, 420, 421),
    "logit_bias": (0, 1, 420, 421),
    "logit_bias[]": (0.0, 100.0, -100.0),
    "policies": AXES,
    "shadows": AXES,
    "name": ("tiny", *(policy.name for axis in AXES for policy in registry.describe(axis))),
    "options": tuple(
        option.name for axis in AXES for policy in registry.describe(axis) for option in policy.options
    ),
    "options[]": JSON,
    "template_variables": ("extra", "messages", "bos_token"),
    "template_variables[]": JSON,
    "preset": tuple(PRESETS),
    "expected_revision": (1, 2),
    "service": ("", "pageturner.v1.GenerationService", "grpc.health.v1.Health"),
    "file_by_filename": tuple(file.DESCRIPTOR.name for file in FILES),
    "file_containing_symbol": ("pageturner.v1.Load.num_waiting", "pageturner.v1.AdminService"),
    "containing_type": ("pageturner.v1.Load",),
}
"""By field, what the service knows."""

METADATA = (
    ("authorization", "Bearer x"),
    ("authorization", "bearer"),
    ("authorization", "Basic " + "A" * 4000),
    ("traceparent", "00-" + "a" * 32 + "-" + "b" * 16 + "-01"),
    ("traceparent", "ff-" + "0" * 32),
    ("tracestate", "," * 500),
    ("baggage", "a=%%%,b=;;;=" * 20),
    ("x-request-id", "r" * 1000),
    ("grpc-previous-rpc-attempts", "many"),
    ("endpoint-load-metrics-bin", b"\xff\x00"),
    ("x-bin", b""),
)

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ extra }}{% endfor %}"
    "{% for x in extra or [] %}{{ x }}{% endfor %}"
)


@dataclass(frozen=True, slots=True)
class Call:
    """What is sent to a method: bodies as many as it takes, what goes beside them, how long, and how much of
    the answer is read (None: all of it)."""

    bodies: tuple[bytes, ...]
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    timeout_seconds: float | None = None
    num_read: int | None = None

    def __repr__(self) -> str:
        """Of each body no more than a line: Hypothesis warns of a longer one, and can replay it anyhow."""
        shown = ", ".join(f"{body[:100]!r} of {len(body)} bytes" for body in self.bodies)
        return f"Call([{shown}], {self.metadata}, {self.timeout_seconds}, {self.num_read})"


def calls(method: MethodDescriptor) -> st.SearchStrategy[Call]:
    """Calls of a method; half of them with a body that is no good message."""
    bases = (None, *GOOD.get(method.input_type.name, ()))
    good = st.sampled_from(bases).flatmap(lambda base: messages(method.input_type, WORDS, base))
    body = st.one_of(good.map(lambda message: message.SerializeToString()), bodies(good))
    most = 3 if method.client_streaming else 1
    return st.builds(
        Call,
        st.lists(body, min_size=most if most == 1 else 0, max_size=most).map(tuple),
        st.lists(st.sampled_from(METADATA), max_size=2).map(tuple),
        st.sampled_from((None, None, None, 0.0, 0.001, 0.005)),
        st.sampled_from((0, 1, 1, None)) if method.server_streaming else st.none(),
    )


def answer_of(channel: grpc.Channel, method: MethodDescriptor, call: Call) -> grpc.StatusCode:
    """Its status; CANCELLED for a stream that was left."""
    kinds = {False: "unary", True: "stream"}
    name = f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"
    invoke = getattr(channel, name)(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=bytes,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    timeout = call.timeout_seconds
    if timeout is None:
        timeout = SHORT_SECONDS if method.server_streaming and call.num_read is None else END_SECONDS
    try:
        answer = invoke(
            iter(call.bodies) if method.client_streaming else call.bodies[0],
            metadata=call.metadata,
            timeout=timeout,
        )
        if method.server_streaming:
            for _ in islice(answer, call.num_read):
                pass
            if call.num_read is not None:
                answer.cancel()
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return grpc.StatusCode.OK


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """A service, and a channel to it."""

    service: InThread[RealService]
    channel: grpc.Channel

    def check(self, method: MethodDescriptor, call: Call) -> None:
        """No fault is answered."""
        code = answer_of(self.channel, method, call)
        assert code not in FAULTS, f"{method.full_name} ended {code.name}: {call}"

    def check_aftermath(self) -> None:
        """The engine is well, nothing lives, every block is back, an ordinary request is answered right."""

        async def look(service: RealService) -> list[int]:
            await service.until_idle()
            while service.num_live:  # the last end crosses to the loop behind the engine's figures
                await service.client.load()
            assert service.engine.health is EngineHealth.SERVING
            answer = await service.client.generate((1, 2, 3), max_tokens=5, seed=7)
            return [token.token_id for token in answer.choices[0].tokens]

        assert self.service.run(look) == expected_tokens((1, 2, 3), 7, 0, Stop(5))


@contextmanager
def fuzzed() -> Iterator[Fuzzed]:
    """Of a model with a chat template, and little memory."""
    tokenizer = Tokenizer(byte_level_bpe(), chat_template=ChatTemplate(TEMPLATE))
    with (
        in_thread(lambda: real_service(num_blocks=24, num_host_blocks=8, tokenizer=tokenizer)) as service,
        grpc.insecure_channel(service.service.target) as channel,
    ):
        yield Fuzzed(service, channel)


@pytest.fixture(scope="module")
def shared() -> Iterator[Fuzzed]:
    with fuzzed() as service:
        yield service


COMMON = settings(deadline=None, suppress_health_check=list(HealthCheck))
ENDING = frozenset({"Drain"})
"""Methods that end the service: each meets one of its own."""


def fuzz(method: MethodDescriptor, service: Fuzzed, budget: settings, *, has_deadlines: bool = True) -> None:
    """So many calls, each of which must end without a fault."""
    made = calls(method)

    @budget
    @given(made if has_deadlines else made.map(lambda call: replace(call, timeout_seconds=None)))
    def check(call: Call) -> None:
        service.check(method, call)

    check()


LASTING = [method for method in METHODS if method.name not in ENDING]


@pytest.mark.parametrize("method", LASTING, ids=lambda method: method.full_name)
def test_no_message_is_answered_by_a_fault(method: MethodDescriptor, shared: Fuzzed) -> None:
    fuzz(method, shared, settings(COMMON, max_examples=100))
    shared.check_aftermath()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("method", LASTING, ids=lambda method: method.full_name)
def test_no_message_is_answered_by_a_fault_at_length(method: MethodDescriptor, shared: Fuzzed) -> None:
    fuzz(method, shared, settings(COMMON, max_examples=3000))
    shared.check_aftermath()


def test_methods_that_end_the_service_answer_no_message_by_a_fault() -> None:
    faults = FAULTS - {grpc.StatusCode.UNAVAILABLE}

    @settings(COMMON, max_examples=20)
    @given(st.data())
    def check(data: st.DataObject) -> None:
        code = answer_of(service.channel, method, data.draw(calls(method)))
        assert code not in faults, f"{method.full_name} ended {code.name}"

    for method in METHODS:
        if method.name in ENDING:
            with fuzzed() as service:
                check()


def _method(name: str) -> MethodDescriptor:
    (method,) = (method for method in METHODS if method.name == name)
    return method


def _without_list(self: object, request: object, context: object) -> None:
    raise NotImplementedError


def _json_or_index_error(text: str) -> object:
    try:
        return LOADS(text)
    except ValueError as error:
        raise IndexError(text) from error


LOADS = json.loads
PLANTED = settings(
    COMMON,
    max_examples=3000,
    database=None,
    derandomize=True,
    phases=(Phase.generate,),
    report_multiple_bugs=False,
)


@pytest.mark.parametrize(
    ("owner", "attribute", "mistake", "name"),
    [
        (interceptors, "DecodeError", KeyError, "Tokenize"),
        (json, "loads", _json_or_index_error, "Tokenize"),
        (json, "loads", _json_or_index_error, "SetPolicies"),
        (HealthServicer, "List", _without_list, "List"),
        (generation, "find_model", lambda engine, name: {"tiny": 0, "": 0}[name], "Detokenize"),
    ],
    ids=["bad-bytes", "bad-json", "bad-json-of-policies", "method-missing", "unknown-model"],
)
def test_a_planted_fault_is_found(
    owner: Any, attribute: str, mistake: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, attribute, mistake)
    with fuzzed() as service, pytest.raises(AssertionError, match=f"{name} ended"):
        fuzz(_method(name), service, PLANTED, has_deadlines=False)  # a call that is late shows nothing
