"""What buf's STANDARD asks and the issue adds, checked on the descriptors: the suite needs no buf."""

from __future__ import annotations

import pytest
from google.protobuf.descriptor import Descriptor, EnumDescriptor, MethodDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto

from pageturner.v1 import admin_pb2, generation_pb2, model_pb2

FILES = tuple(module.DESCRIPTOR for module in (admin_pb2, generation_pb2, model_pb2))
MESSAGES: tuple[Descriptor, ...] = tuple(m for file in FILES for m in file.message_types_by_name.values())
ENUMS: tuple[EnumDescriptor, ...] = tuple(e for file in FILES for e in file.enum_types_by_name.values())
METHODS: tuple[MethodDescriptor, ...] = tuple(
    method for file in FILES for service in file.services_by_name.values() for method in service.methods
)


def test_every_service_ends_in_service() -> None:
    assert {name for file in FILES for name in file.services_by_name} == {
        "GenerationService",
        "ModelService",
        "AdminService",
    }


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_has_a_request_and_a_response_of_its_own(method: MethodDescriptor) -> None:
    assert method.input_type.name == f"{method.name}Request"
    assert method.output_type.name == f"{method.name}Response"


@pytest.mark.parametrize("enum", ENUMS, ids=lambda enum: enum.name)
def test_every_enum_starts_unspecified_and_carries_its_prefix(enum: EnumDescriptor) -> None:
    prefix = "".join(f"_{letter}" if letter.isupper() else letter.upper() for letter in enum.name)[1:]
    assert enum.values_by_number[0].name == f"{prefix}_UNSPECIFIED"
    assert all(value.name.startswith(f"{prefix}_") for value in enum.values)


def _scalars(message: Descriptor) -> list[FieldDescriptorProto]:
    described = DescriptorProto()
    message.CopyToProto(described)
    return [
        field
        for field in described.field
        if field.label != field.LABEL_REPEATED and field.type != field.TYPE_MESSAGE
    ]


@pytest.mark.parametrize(
    "message",
    [
        *(method.input_type for method in METHODS),
        generation_pb2.DESCRIPTOR.message_types_by_name["SamplingParams"],
    ],
    ids=lambda message: message.name,
)
def test_every_scalar_with_a_default_can_be_told_from_its_zero(message: Descriptor) -> None:
    assert [field.name for field in _scalars(message) if not field.proto3_optional] == []


def test_both_ways_to_generate_take_the_same_fields() -> None:
    unary, stream = (
        [(field.name, field.number, field.type) for field in message.DESCRIPTOR.fields]
        for message in (generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)
    )
    assert unary == stream
