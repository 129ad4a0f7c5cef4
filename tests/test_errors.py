"""Every typed error survives what carries errors about: pickle, copy, a pool of processes."""

from __future__ import annotations

import copy
import importlib
import inspect
import multiprocessing
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import get_type_hints

import grpc
import pytest
from support.raising import fail_with

from pageturner.kernels import errors as kernel_errors
from pageturner.service.errors import ConfigError, PageturnerError, QueueFull
from pageturner.service.rpc.status import from_status, to_status

ROOT = Path(__file__).resolve().parents[1]

SAMPLES: dict[object, object] = {str: "a text", int: 7, float: 1.5}
"""An argument of each type that a constructor may take; texts where it takes any iterable of them."""


BASES = frozenset({"PageturnerError", "PolicyError", "LoadtestError"})
PACKAGES = ("kernels", "loadtest", "policies", "service")


def kinds() -> list[type[Exception]]:
    """Every error class that leaves its package: the bases, what derives from them, those of the kernels.

    Found in the sources, so that only the modules that define one are imported.
    """
    defined = [
        (".".join(("pageturner", *path.relative_to(ROOT).with_suffix("").parts)), name, bases.split(", "))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        for name, bases in re.findall(r"^class (\w+)\(([\w, ]+)\):", path.read_text(), re.MULTILINE)
    ]
    names = set(BASES)
    while more := {name for _, name, bases in defined if names.intersection(bases)} - names:
        names |= more
    found = {
        getattr(importlib.import_module(module), name)
        for module, name, _ in defined
        if name in names or module == kernel_errors.__name__
    }
    return sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__))


def sample(kind: type[Exception]) -> Exception:
    """One made by the class's own constructor, from arguments of the types that it states."""
    if not inspect.isfunction(kind.__init__):
        return kind("what went wrong")
    hints = get_type_hints(kind.__init__)
    names = list(inspect.signature(kind).parameters)
    return kind(*(SAMPLES.get(hints[name], ("one", "two")) for name in names))


@pytest.fixture(scope="module")
def pool() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


def assert_same(back: BaseException, error: Exception) -> None:
    assert type(back) is type(error)
    assert (str(back), back.args) == (str(error), error.args)
    # Of a pool, the traceback of the other process comes along as a cause.
    assert vars(back) == vars(error)


def test_errors_of_every_package_are_found() -> None:
    found = kinds()
    assert {PageturnerError, QueueFull, ConfigError, kernel_errors.KernelArgumentError} <= set(found)
    assert {kind.__module__.split(".")[1] for kind in found} == set(PACKAGES)


@pytest.mark.fault("4")
@pytest.mark.parametrize("kind", kinds(), ids=lambda kind: kind.__name__)
def test_an_error_comes_out_of_pickle_copy_and_a_process_pool_as_it_was(
    kind: type[Exception], pool: ProcessPoolExecutor
) -> None:
    error = sample(kind)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert_same(pickle.loads(pickle.dumps(error, protocol)), error)
    assert_same(copy.copy(error), error)
    assert_same(copy.deepcopy(error), error)
    with pytest.raises(kind) as caught:
        pool.submit(fail_with, error).result()
    assert_same(caught.value, error)


@pytest.mark.fault("4")
@pytest.mark.parametrize(
    "error", [QueueFull("64 requests wait", 2.5), ConfigError("cache.block_size", "3 is odd")]
)
def test_an_error_that_came_over_the_wire_is_pickled_with_what_it_carries(error: PageturnerError) -> None:
    status = to_status(error)
    received = from_status(grpc.StatusCode.UNKNOWN, status.message, status.SerializeToString())
    assert_same(pickle.loads(pickle.dumps(received)), error)


@pytest.mark.fault("4")
def test_notes_of_an_error_are_kept() -> None:
    error = QueueFull("64 requests wait", 2.5)
    error.add_note("prompts[3]")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["prompts[3]"]
