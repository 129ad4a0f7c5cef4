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


def marked() -> dict[str, list[str]]:
    """Fault id -> the tests that bear `@pytest.mark.fault(id)`, as path::name."""
    tests: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(FOLDER.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                    for argument in mark.args:
                        tests[ast.literal_eval(argument)].append(f"{path.relative_to(FOLDER)}::{node.name}")
    return dict(tests)


def test_a_fault_is_listed_once() -> None:
    assert len(listed()) == len(set(listed()))


def test_every_mark_names_a_listed_fault() -> None:
    assert marked().keys() <= set(listed())
