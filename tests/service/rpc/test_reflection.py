"""Reflection as a tool meets it that has no stubs: by v1 as by v1alpha, every service can be described."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection_pb2
from support.fake_engine import FakeEngine
from support.serving import serving

from pageturner.v1 import generation_pb2

SERVICES = {
    "pageturner.v1.GenerationService",
    "pageturner.v1.ModelService",
    "pageturner.v1.AdminService",
    "pageturner.v1.TransferService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1alpha.ServerReflection",
    "grpc.reflection.v1.ServerReflection",
}
LIST_SERVICES = b"\x3a\x00"
"""A ServerReflectionRequest as it is on the wire in either version: field 7, an empty text."""


async def reflect(channel: grpc.aio.Channel, version: str, *requests: bytes) -> list[bytes]:
    """Raw messages there and back: the client has no stubs of v1."""

    async def sent() -> AsyncIterator[bytes]:
        for request in requests:
            yield request

    call = channel.stream_stream(
        f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo",
        request_serializer=bytes,
        response_deserializer=bytes,
    )
    return [answer async for answer in call(sent())]


def files_of(answer: bytes) -> list[bytes]:
    response = reflection_pb2.ServerReflectionResponse.FromString(answer)
    return list(response.file_descriptor_response.file_descriptor_proto)


@pytest.mark.fault("M")
@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_lists_the_services_and_gives_their_files(version: str) -> None:
    symbol = reflection_pb2.ServerReflectionRequest(file_containing_symbol="pageturner.v1.GenerationService")
    async with serving(FakeEngine()) as served:
        listing, file = await reflect(served.channel, version, LIST_SERVICES, symbol.SerializeToString())
    listed = reflection_pb2.ServerReflectionResponse.FromString(listing).list_services_response.service
    assert {service.name for service in listed} == SERVICES
    assert generation_pb2.DESCRIPTOR.serialized_pb in files_of(file)


@pytest.mark.fault("M")
@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize("service", sorted(SERVICES))
async def test_every_listed_service_can_be_described_from_its_files_alone(service: str, version: str) -> None:
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
    async with serving(FakeEngine()) as served:
        (answer,) = await reflect(served.channel, version, request.SerializeToString())
    files = {file.name: file for file in map(FileDescriptorProto.FromString, files_of(answer))}
    pool = DescriptorPool()

    def add(name: str) -> None:
        file = files.pop(name, None)
        if file is not None:
            for dependency in file.dependency:
                add(dependency)
            pool.Add(file)

    for name in list(files):
        add(name)
    assert pool.FindServiceByName(service).methods[0].input_type is not None
