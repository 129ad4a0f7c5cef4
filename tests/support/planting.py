"""Bugs on purpose: a test suite is worth what it catches."""

from __future__ import annotations

import ctypes
import inspect
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pageturner.kernels.cpu.build import NATIVE, SOURCES, load_library


def plant(module: ModuleType, old: str, new: str) -> ModuleType:
    """A copy of `module` with `old`, which must occur exactly once in its source, replaced."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times in {module.__name__}"
    planted = ModuleType(module.__name__)
    planted.__file__ = module.__file__
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), planted.__dict__)
    return planted


@dataclass(frozen=True)
class ExpressionBug:
    """`right`, an expression that occurs once in `file`, becomes `wrong` where the bug is switched on."""

    file: str
    right: str
    wrong: str


class BuggyLibrary:
    """The C++ operations with every bug in them and none of them on: one compilation serves all."""

    def __init__(
        self,
        bugs: Sequence[ExpressionBug],
        folder: Path,
        cache_dir: Path,
        pattern: str = "*.cpp",
        machine: Sequence[str] = NATIVE,
    ) -> None:
        """pattern: of the sources to compile. machine: as `load_library` takes it."""
        for path in (*SOURCES.glob(pattern), *SOURCES.glob("*.h")):
            shutil.copy(path, folder)
        for number, bug in enumerate(bugs, start=1):
            text = (folder / bug.file).read_text()
            assert text.count(bug.right) == 1, f"{bug.right!r} occurs {text.count(bug.right)} times"
            choice = f"(planted_bug == {number} ? ({bug.wrong}) : ({bug.right}))"
            (folder / bug.file).write_text(text.replace(bug.right, choice))
        switch = "planted_bug.h"
        for name in {bug.file for bug in bugs}:
            text = (folder / name).read_text()
            (folder / name).write_text(f'#include "{switch}"\n{text}')
        (folder / switch).write_text('#pragma once\nextern "C" { inline int planted_bug = 0; }\n')
        self.library = load_library(cache_dir, sources=folder, machine=machine)
        self.bugs = tuple(bugs)
        self._switch = ctypes.c_int.in_dll(self.library, "planted_bug")

    def switch_on(self, bug: ExpressionBug) -> None:
        self._switch.value = self.bugs.index(bug) + 1

    def switch_off(self) -> None:
        self._switch.value = 0
