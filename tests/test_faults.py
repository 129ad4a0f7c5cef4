"""Every test that is marked for a fault names one that faults.txt lists."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

FOLDER = Path(__file__).parent


def listed() -> list[str]:
    """The ids of faults.txt, in its order."""
    lines = (FOLDER / "faults.txt").read_text().splitlines()
    return [line.split()[0] for line in lines if line and not line.startswith("#")]


def ids_of(node: ast.expr) -> list[str]:
    """The ids of `pytest.mark.fault(...)`; none for any other expression."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.fault":
        return [ast.literal_eval(argument) for argument in node.args]
    return []


def marked() -> dict[str, list[str]]:
    """Fault id -> the tests that bear it, themselves or by their file's `pytestmark`, as path::name."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(FOLDER.rglob("test_*.py")):
        module = ast.parse(path.read_text())
        shared = [
            fault
            for node in module.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
            for fault in ids_of(node.value)
        ]
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                own = [fault for mark in node.decorator_list for fault in ids_of(mark)]
                for fault in {*own, *shared}:
                    tests[fault].append(f"{path.relative_to(FOLDER)}::{node.name}")
    return dict(tests)


def test_a_fault_is_listed_once() -> None:
    assert len(listed()) == len(set(listed()))


def test_every_fault_has_a_test_and_every_mark_is_listed() -> None:
    assert marked().keys() == set(listed())
