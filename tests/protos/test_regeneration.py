"""The committed stubs are what the .proto files say, and no published field is missing."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import re
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto, FileDescriptorSet

from pageturner.v1 import admin_pb2, generation_pb2, model_pb2, transfer_pb2

ROOT = Path(__file__).resolve().parents[2]
MODULES = (admin_pb2, generation_pb2, model_pb2, transfer_pb2)


def _load_script() -> ModuleType:
    loader = SourceFileLoader("regenerate", str(ROOT / "protos" / "regenerate"))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = written
    return module


regenerate = _load_script()


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stubs made now, by the tools of this environment."""
    folder = tmp_path_factory.mktemp("generated")
    regenerate.generate(Path(sys.executable), folder)
    return Path(folder) / "pageturner" / "v1"


def _files_in_use() -> FileDescriptorSet:
    files = FileDescriptorSet()
    for module in MODULES:
        module.DESCRIPTOR.CopyToProto(files.file.add())
    return files


def test_the_stubs_carry_what_the_proto_files_say(tmp_path: Path) -> None:
    now = FileDescriptorSet.FromString(regenerate.describe(Path(sys.executable), tmp_path))
    committed = {file.name: _plain(file) for file in _files_in_use().file}
    assert {file.name: _plain(file) for file in now.file} == committed


def test_the_reference_says_what_the_proto_files_say(tmp_path: Path) -> None:
    python = Path(sys.executable)
    page = regenerate.reference(python, regenerate.describe(python, tmp_path))
    assert page == regenerate.REFERENCE.read_text(), "run `make protos`"


def test_the_reference_has_every_name_of_the_contract() -> None:
    page = regenerate.REFERENCE.read_text()
    for module in MODULES:
        for kinds in (module.DESCRIPTOR.message_types_by_name, module.DESCRIPTOR.enum_types_by_name):
            assert all(f"\n### {name}\n" in page for name in kinds)
        for service in module.DESCRIPTOR.services_by_name.values():
            assert all(f"| `{method.name}` |" in page for method in service.methods)


def _plain(file: FileDescriptorProto) -> FileDescriptorProto:
    """Without comments, and without the default JSON names that protoc writes out and Python does not."""
    file.ClearField("source_code_info")

    def strip(messages: object) -> None:
        for message in messages:  # type: ignore[attr-defined] # a repeated field of DescriptorProto
            for field in message.field:
                field.ClearField("json_name")
            strip(message.nested_type)

    strip(file.message_type)
    return file


def test_regeneration_changes_nothing(generated: Path) -> None:
    """Byte for byte with the pinned tools. Other versions write other words around the same names, so
    then the names are compared: every method, serializer, field and class, in order."""
    pinned = all(importlib.metadata.version(name) == version for name, version in regenerate.PINS.items())
    names = sorted(path.name for path in generated.iterdir())
    committed = sorted(path.name for path in regenerate.PACKAGE.iterdir() if "_pb2" in path.name)
    assert names == committed
    for name in names:
        fresh, old = (generated / name).read_text(), (regenerate.PACKAGE / name).read_text()
        if pinned:
            assert fresh == old, name
        else:
            assert _names(fresh, name) == _names(old, name), name


def _names(source: str, name: str) -> list[str]:
    if name.endswith("_pb2_grpc.pyi"):
        return source.splitlines()  # written by mypy-protobuf, whose version is the same everywhere
    if name.endswith(".pyi"):
        return [line for line in source.splitlines() if "def __init__" not in line]
    if name.endswith("_pb2_grpc.py"):
        return re.findall(
            r"'/[\w./]+'|_pb2\.\w+\.\w+|^class \w+|^ +def \w+|unary_\w+|stream_\w+", source, re.M
        )
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    serialized = [
        call.args[0]
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "AddSerializedFile"
    ]
    return [ast.unparse(value) for value in serialized]


def test_a_changed_proto_is_noticed(generated: Path) -> None:
    """The comparison above can fail: one field renamed in each kind of file."""
    for name in ("model_pb2.py", "model_pb2.pyi"):
        source = (generated / name).read_text()
        planted = source.replace("rchitecture", "rchitectura")
        assert planted != source
        assert _names(planted, name) != _names(source, name)
    source = (generated / "model_pb2_grpc.py").read_text()
    assert _names(source.replace("ListModels", "LostModels"), "model_pb2_grpc.py") != _names(
        source, "model_pb2_grpc.py"
    )


def test_nothing_published_is_gone() -> None:
    """contract.txt is the memory of the wire: what it lists must hold, and it lists all there is."""
    published = regenerate.CONTRACT.read_text().splitlines()
    now = regenerate.contract_lines(_files_in_use())
    assert [line for line in published if line not in now] == [], "broken for clients that use it"
    assert [line for line in now if line not in published] == [], "run protos/regenerate"


@pytest.mark.parametrize(
    "planted", ["removed", "renumbered", "retyped", "repeated", "presence", "value", "method"]
)
def test_a_broken_contract_is_noticed(planted: str) -> None:
    files = _files_in_use()
    generation = next(file for file in files.file if file.name.endswith("generation.proto"))
    sampling = next(message for message in generation.message_type if message.name == "SamplingParams")
    match planted:
        case "removed":
            del sampling.field[0]
        case "renumbered":
            sampling.field[0].number = 99
        case "retyped":
            sampling.field[0].type = sampling.field[0].TYPE_FLOAT
        case "repeated":
            sampling.field[0].label = sampling.field[0].LABEL_REPEATED
            sampling.field[0].proto3_optional = False
            sampling.field[0].ClearField("oneof_index")
        case "presence":
            sampling.field[0].proto3_optional = False
            sampling.field[0].ClearField("oneof_index")
        case "value":
            generation.enum_type[0].value[1].number = 7
        case "method":
            generation.service[0].method[1].server_streaming = False
    published = regenerate.CONTRACT.read_text().splitlines()
    lost = set(published) - set(regenerate.contract_lines(files))
    assert len(lost) == 1, "the planted change, and it alone"


def test_grpc_39912_pins_and_lower_bounds_agree() -> None:
    """Generated code runs with its own release of the tools and later: so says the package's metadata."""
    pyproject = (ROOT / "pyproject.toml").read_text()
    version = regenerate.PINS["grpcio-tools"]
    for package in ("grpcio", "grpcio-status", "grpcio-health-checking", "grpcio-reflection"):
        assert f'"{package}>={version}"' in pyproject
    source = (regenerate.PACKAGE / "model_pb2.py").read_text()
    match = re.search(r"# Protobuf Python Version: (\d+)\.(\d+)", source)
    assert match is not None
    major, minor = map(int, match.groups())
    assert f'"protobuf>={major}.{minor},<{major + 2}"' in pyproject
    assert f"GRPC_GENERATED_VERSION = '{version}'" in (regenerate.PACKAGE / "model_pb2_grpc.py").read_text()
