"""Server reflection, so that tools need no stubs: as v1, which newer ones ask for first, and as v1alpha.

grpcio-reflection has v1alpha alone. The messages of both are the same on the wire, so that its servicer
answers for both; the descriptor of v1 is that of v1alpha under another name.
"""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = "grpc.reflection.v1.ServerReflection"


def enable_reflection(services: Iterable[str], server: grpc.aio.Server) -> None:
    """Answer for these services, by full name, and for reflection itself."""
    names = (*services, V1ALPHA, V1)
    servicer = reflection.aio.ReflectionServicer(names, pool=_pool_of(names))  # type: ignore[no-untyped-call] # has no types
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": handler}
    for name in (V1ALPHA, V1):
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(name, handlers),))
        server.add_registered_method_handlers(name, handlers)


def _pool_of(names: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """Their files and what those import. Of its own: another library may put its v1 into the common pool."""
    pool, common = descriptor_pool.DescriptorPool(), descriptor_pool.Default()
    added: set[str] = set()

    def add(file: FileDescriptor) -> None:
        if file.name not in added:
            added.add(file.name)
            for dependency in file.dependencies:
                add(dependency)
            pool.AddSerializedFile(file.serialized_pb)

    for name in names:
        if name != V1:
            add(common.FindFileContainingSymbol(name))
    pool.AddSerializedFile(_v1_file().SerializeToString())
    return pool


def _v1_file() -> FileDescriptorProto:
    text = text_format.MessageToString(
        FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb)
    )
    return text_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())
