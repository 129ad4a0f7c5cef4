"""What operators' tools do with any gRPC server: health probes, and calls by reflection without a stub."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from support.fake_model import Stop, expected_tokens
from support.patience import PATIENCE_SECONDS
from support.real_service import RealService, real_service
from support.service_thread import InThread, in_thread


@pytest.fixture(scope="module")
def service() -> Iterator[InThread[RealService]]:
    with in_thread(lambda: real_service()) as running:
        yield running


@pytest.fixture(scope="module")
def channel(service: InThread[RealService]) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(service.service.target) as channel:
        yield channel


class Reflected:
    """A tool without stubs: all that it knows of a server it was told by reflection."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._database = ProtoReflectionDescriptorDatabase(channel)
        self._pool = DescriptorPool(self._database)

    def services(self) -> list[str]:
        """`grpcurl list`."""
        return sorted(self._database.get_services())

    def methods(self, service: str) -> list[MethodDescriptor]:
        """`grpcurl describe`."""
        return list(self._pool.FindServiceByName(service).methods)

    def call(self, method: MethodDescriptor, request: dict[str, object]) -> list[dict[str, object]]:
        """`grpcurl -d JSON`: all answers."""
        invoke = getattr(self._channel, "unary_stream" if method.server_streaming else "unary_unary")(
            f"/{method.containing_service.full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        answer = invoke(ParseDict(request, GetMessageClass(method.input_type)()), timeout=60)
        messages = list(answer) if method.server_streaming else [answer]
        return [MessageToDict(message, preserving_proto_field_name=True) for message in messages]


def test_every_service_and_method_is_told(channel: grpc.Channel) -> None:
    tool = Reflected(channel)
    services = tool.services()
    assert {"pageturner.v1.GenerationService", "grpc.health.v1.Health"} <= set(services)
    for service in services:
        if not service.endswith(".v1.ServerReflection"):  # whose messages grpcio's own stubs do not have
            assert tool.methods(service)


def test_a_tool_generates_with_what_reflection_told_it(channel: grpc.Channel) -> None:
    tool = Reflected(channel)
    by_name = {method.name: method for method in tool.methods("pageturner.v1.GenerationService")}
    request: dict[str, object] = {
        "prompt": {"token_ids": {"ids": [1, 2, 3]}},
        "sampling": {"max_tokens": 5, "seed": "7"},
    }
    messages = tool.call(by_name["GenerateStream"], request)
    streamed = [
        token
        for message in messages
        for token in message.get("delta", {}).get("token_ids", [])  # type: ignore[attr-defined] # of JSON
    ]
    (answer,) = tool.call(by_name["Generate"], request)
    choices = answer["choices"]
    assert streamed == expected_tokens((1, 2, 3), 7, 0, Stop(5))
    assert choices[0]["token_ids"] == streamed  # type: ignore[index] # of JSON
    with pytest.raises(grpc.RpcError) as caught:
        tool.call(by_name["Generate"], {"sampling": {"top_p": 7.0}})
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("name", ["", "pageturner.v1.GenerationService", "pageturner.v1.ModelService"])
def test_a_probe_is_answered(name: str, channel: grpc.Channel) -> None:
    """As kubelet and grpc_health_probe ask: one Check with a deadline, on a connection of its own."""
    stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call] # has no types
    answer = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_SECONDS)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.fault("W")
def test_a_list_tells_the_health_of_every_service(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call] # has no types
    statuses = stub.List(health_pb2.HealthListRequest(), timeout=PATIENCE_SECONDS).statuses
    own = {f"pageturner.v1.{name}Service" for name in ("Generation", "Model", "Admin", "Transfer")}
    assert {"", "liveness", *own} == set(statuses)
    assert {health.status for health in statuses.values()} == {health_pb2.HealthCheckResponse.SERVING}


def test_a_probe_for_a_service_that_is_not_there_is_told_so(channel: grpc.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)  # type: ignore[no-untyped-call] # has no types
    with pytest.raises(grpc.RpcError) as caught:
        stub.Check(health_pb2.HealthCheckRequest(service="pageturner.v2.Nothing"), timeout=PATIENCE_SECONDS)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
