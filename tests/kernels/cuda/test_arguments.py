"""The structs of arguments.py lie in memory as those of arguments.cuh."""

from __future__ import annotations

import ctypes
import inspect

import pytest
from support.ops import cpu_cache_dir

from pageturner.kernels.cuda import arguments
from pageturner.kernels.cuda.emulation.build import Builder

STRUCTS: dict[str, type[ctypes.Structure]] = {
    name: kind
    for name, kind in inspect.getmembers(arguments, inspect.isclass)
    if issubclass(kind, ctypes.Structure)
}


def layout(struct: type[ctypes.Structure]) -> list[int]:
    """Its size, then offset and size of each field."""
    fields = [getattr(struct, name) for name, *_ in struct._fields_]
    return [ctypes.sizeof(struct), *(number for field in fields for number in (field.offset, field.size))]


def layout_in_cpp(name: str, struct: type[ctypes.Structure]) -> str:
    fields = [field for field, *_ in struct._fields_]
    numbers = [f"offsetof({name}, {field}), sizeof({name}::{field})" for field in fields]
    values = ", ".join([f"sizeof({name})", *numbers])
    exported = 'extern "C" __attribute__((visibility("default")))'
    return f"{exported} constexpr uint64_t {name}_layout[] = {{{values}}};"


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    exports = [layout_in_cpp(name, struct) for name, struct in STRUCTS.items()]
    text = "\n".join(('#include "simt.h"', '#include "arguments.cuh"', "#include <cstddef>", *exports, ""))
    (path,) = Builder(cpu_cache_dir()).build_texts([text])
    return ctypes.CDLL(str(path))


@pytest.mark.parametrize("name", STRUCTS)
def test_a_struct_lies_in_memory_as_its_mirror(library: ctypes.CDLL, name: str) -> None:
    wanted = layout(STRUCTS[name])
    found = (ctypes.c_uint64 * len(wanted)).in_dll(library, f"{name}_layout")
    assert list(found) == wanted


def test_every_struct_of_a_launch_is_looked_at() -> None:
    assert len(STRUCTS) == 9
