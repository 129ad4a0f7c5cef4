"""Writes README.md, the reference of the wire contract, from the .proto files' own comments.

    python protos/reference.py < descriptors.binpb > protos/README.md

The descriptors are a FileDescriptorSet with source information; `protos/regenerate` hands them over.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)

HEAD = """# The wire contract

Every RPC, message and enum of `pageturner.v1`, generated from the comments of `pageturner/v1/*.proto` by
`make protos`. An `optional` field tells an absent value from its default; a field of a `oneof` excludes the
others. `pageturner/v1/contract.txt` lists what was ever published: removing or renumbering a field fails the
tests.
"""

# Where descriptor.proto keeps what: a comment's path is made of these field numbers and of indices.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS, _METHODS, _VALUES = 2, 3, 4, 2, 2

_Path = tuple[int, ...]


def reference(files: FileDescriptorSet) -> str:
    """The whole page, services first."""
    pages = [_File(file) for file in files.file]
    lines = [HEAD, "## Services", ""]
    for page in pages:
        lines += page.services()
    lines += ["## Messages and enums", ""]
    for page in pages:
        lines += page.types()
    return "\n".join(lines).rstrip() + "\n"


class _File:
    """One .proto file and its comments by path."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split())
            for location in file.source_code_info.location
        }

    def services(self) -> Iterator[str]:
        for index, service in enumerate(self._file.service):
            yield from self._service(service, (_SERVICES, index))

    def types(self) -> Iterator[str]:
        yield from self._types(self._file.message_type, self._file.enum_type, "", (_MESSAGES,), (_ENUMS,))

    def _service(self, service: ServiceDescriptorProto, path: _Path) -> Iterator[str]:
        yield f"### {service.name}"
        yield ""
        yield from self._comment(path)
        yield "| RPC | request | response | |"
        yield "|---|---|---|---|"
        for index, method in enumerate(service.method):
            request = self._link(method.input_type, is_stream=method.client_streaming)
            response = self._link(method.output_type, is_stream=method.server_streaming)
            text = self._cell((*path, _METHODS, index))
            yield f"| `{method.name}` | {request} | {response} | {text} |"
        yield ""

    def _types(
        self,
        messages: Sequence[DescriptorProto],
        enums: Sequence[EnumDescriptorProto],
        scope: str,
        messages_at: _Path,
        enums_at: _Path,
    ) -> Iterator[str]:
        for index, message in enumerate(messages):
            if message.options.map_entry:
                continue
            path, name = (*messages_at, index), f"{scope}{message.name}"
            yield from self._message(message, name, path)
            yield from self._types(
                message.nested_type,
                message.enum_type,
                f"{name}.",
                (*path, _NESTED),
                (*path, _NESTED_ENUMS),
            )
        for index, enum in enumerate(enums):
            yield from self._enum(enum, f"{scope}{enum.name}", (*enums_at, index))

    def _message(self, message: DescriptorProto, name: str, path: _Path) -> Iterator[str]:
        yield f"### {name}"
        yield ""
        yield from self._comment(path)
        if not message.field:
            yield "No fields."
            yield ""
            return
        yield "| field | type | |"
        yield "|---|---|---|"
        for index, field in enumerate(message.field):
            kind = self._kind(message, field)
            yield f"| `{field.name}` = {field.number} | {kind} | {self._cell((*path, _FIELDS, index))} |"
        yield ""

    def _enum(self, enum: EnumDescriptorProto, name: str, path: _Path) -> Iterator[str]:
        yield f"### {name}"
        yield ""
        yield from self._comment(path)
        yield "| value | |"
        yield "|---|---|"
        for index, value in enumerate(enum.value):
            yield f"| `{value.name}` = {value.number} | {self._cell((*path, _VALUES, index))} |"
        yield ""

    def _kind(self, message: DescriptorProto, field: FieldDescriptorProto) -> str:
        entry = next(
            (nested for nested in message.nested_type if field.type_name.endswith(f".{nested.name}")), None
        )
        if entry is not None and entry.options.map_entry:
            key, value = (self._type(part) for part in entry.field)
            return f"map of {key} to {value}"
        kind = self._type(field)
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {kind}"
        if field.proto3_optional:
            return f"optional {kind}"
        if field.HasField("oneof_index"):
            return f"{kind}, oneof `{message.oneof_decl[field.oneof_index].name}`"
        return kind

    def _type(self, field: FieldDescriptorProto) -> str:
        if field.type_name:
            return self._link(field.type_name)
        return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()

    def _link(self, full_name: str, *, is_stream: bool = False) -> str:
        """A link within the page; another package's types are named only."""
        own = f".{self._file.package}."
        stream = "stream of " if is_stream else ""
        if not full_name.startswith(own):
            return f"{stream}{full_name.lstrip('.')}"
        name = full_name.removeprefix(own)
        return f"{stream}[{name}](#{name.lower().replace('.', '')})"

    def _comment(self, path: _Path) -> Iterator[str]:
        if self._comments.get(path):
            yield self._comments[path]
            yield ""

    def _cell(self, path: _Path) -> str:
        return self._comments.get(path, "").replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference(FileDescriptorSet.FromString(sys.stdin.buffer.read())))
