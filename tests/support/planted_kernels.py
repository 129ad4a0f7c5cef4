"""Bugs planted in the CUDA kernels: every bug in one copy of the sources, none of them on."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pageturner.kernels.cuda.emulation.build import KERNELS, Builder
from pageturner.kernels.cuda.emulation.runtime import EmulatedKernel, EmulatedRuntime
from pageturner.kernels.cuda.emulation.schedule import IN_ORDER, Schedule
from pageturner.kernels.cuda.runtime import Dim3, Kernel, Launcher, Struct
from pageturner.kernels.cuda.variants import Variant

_SWITCH = 'extern "C" { __attribute__((visibility("default"))) int planted_bug = 0; }'


@dataclass(frozen=True)
class Edit:
    """In `file`, `right` becomes `wrong`: an expression, or statements, which end with a semicolon.

    within: a text that occurs once in the file and holds `right` once, where `right` alone occurs elsewhere.
    """

    file: str
    right: str
    wrong: str
    within: str = ""

    def span(self, text: str) -> tuple[int, int]:
        """Where `right` is in the text of the file. Raises LookupError if it is not there once."""
        within = self.within or self.right
        if text.count(within) != 1:
            raise LookupError(f"{within!r} occurs {text.count(within)} times in {self.file}")
        if within.count(self.right) != 1:
            raise LookupError(f"{self.right!r} occurs {within.count(self.right)} times in {within!r}")
        start = text.index(within) + within.index(self.right)
        return start, start + len(self.right)


@dataclass(frozen=True)
class Bug:
    """check: what must fail for it."""

    edits: tuple[Edit, ...]
    check: Callable[[Launcher], object]


def bug(file: str, right: str, wrong: str, check: Callable[[Launcher], object], *, within: str = "") -> Bug:
    """Of one edit."""
    return Bug((Edit(file, right, wrong, within),), check)


def copy_kernels(folder: Path, edits: Sequence[Edit] = ()) -> None:
    """The kernels' sources, with `edits` made."""
    texts = _texts()
    for edit in edits:
        start, end = edit.span(texts[edit.file])
        texts[edit.file] = texts[edit.file][:start] + edit.wrong + texts[edit.file][end:]
    for file, text in texts.items():
        (folder / file).write_text(text)


class BuggyKernels:
    """Kernels in which any one of `bugs`, by name, can be switched on: one compilation of each serves all.

    folder: for the sources. races: see Builder.
    """

    def __init__(
        self, bugs: Mapping[str, Sequence[Edit]], folder: Path, cache_dir: Path, *, races: bool = False
    ) -> None:
        self._numbers = {name: number for number, name in enumerate(bugs, start=1)}
        self._lost: dict[str, LookupError] = {}
        self._builder = Builder(
            cache_dir, folder, races=races, flags=("-O1",)
        )  # compiled once, run for seconds
        texts = _texts()
        choices: dict[str, _Choices] = {file: {} for file in texts}
        for name, edits in bugs.items():
            try:
                spans = [edit.span(texts[edit.file]) for edit in edits]
            except LookupError as lost:
                self._lost[name] = lost
                continue
            for edit, span in zip(edits, spans, strict=True):
                choices[edit.file].setdefault(span, []).append((self._numbers[name], edit.wrong))
        for file, text in texts.items():
            planted = _planted(text, choices[file])
            if file == "primitives.cuh":
                planted = planted.replace("#pragma once\n", f"#pragma once\n{_SWITCH}\n")
            (folder / file).write_text(planted)

    def launcher(self, bug: str | None, schedule: Schedule = IN_ORDER) -> Launcher:
        """Raises LookupError, with bug and file, if the sources no longer have a place for the bug."""
        if bug in self._lost:
            raise LookupError(f"{bug}: {self._lost[bug]}")
        number = 0 if bug is None else self._numbers[bug]
        return Launcher(_BuggyRuntime(self._builder, schedule=schedule, bug=number))


def _texts() -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(KERNELS.glob("*.cu*"))}


_Choices = dict[tuple[int, int], list[tuple[int, str]]]
"""What stands there instead of a span of the text where which bug is on."""


def _planted(text: str, choices: _Choices) -> str:
    previous = len(text)
    for start, end in sorted(choices, reverse=True):
        assert end <= previous, f"{text[start:end]!r} reaches into the place of another edit"
        previous = start
        text = text[:start] + _choice(text[start:end], choices[start, end]) + text[end:]
    return text


def _choice(right: str, wrongs: Sequence[tuple[int, str]]) -> str:
    if right.endswith(";"):
        branches = "".join(f"if (planted_bug == {number}) {{ {wrong} }} else " for number, wrong in wrongs)
        return f"{{ {branches}{{ {right} }} }}"
    branches = "".join(f"planted_bug == {number} ? ({wrong}) : " for number, wrong in wrongs)
    return f"({branches}({right}))"


@dataclass(frozen=True)
class _Switched:
    kernel: EmulatedKernel
    bug: int

    def __call__(self, grid: Dim3, block: Dim3, args: tuple[Struct, ...], *, shared_mem: int) -> None:
        ctypes.c_int.in_dll(self.kernel.library, "planted_bug").value = self.bug
        self.kernel(grid, block, args, shared_mem=shared_mem)


@dataclass(frozen=True)
class _BuggyRuntime(EmulatedRuntime):
    bug: int = 0

    def load(self, variants: Sequence[Variant]) -> Mapping[Variant, Kernel]:
        switched: dict[Variant, Kernel] = {}
        for variant, kernel in super().load(variants).items():
            assert isinstance(kernel, EmulatedKernel)
            switched[variant] = _Switched(kernel, self.bug)
        return switched
