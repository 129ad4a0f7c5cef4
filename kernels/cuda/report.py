"""Compiles and disassembles the shipped kernels, and says what each takes: `pageturner kernels`, and CI."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path

from pageturner.kernels.cuda import budgets, occupancy
from pageturner.kernels.cuda.compiler import Compiler
from pageturner.kernels.cuda.ptxas import read_resources
from pageturner.kernels.cuda.sass import disassemble, read_sass
from pageturner.kernels.cuda.variants import Variant


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one architecture.

    label: what tells it from the others, without its tile shape. shared_bytes: of a block, static and
    dynamic. blocks: that a multiprocessor holds at a time. instructions, shortest: as in
    `budgets.Instructions`; None where there is no main loop. loop: whether they are those of a tile.
    violations: why it is over budget.
    """

    label: str
    expression: str
    arch: str
    registers: int
    spill_bytes: int
    shared_bytes: int
    blocks: int
    instructions: int | None
    shortest: int | None
    loop: bool
    violations: tuple[str, ...]


def inspect_kernels(
    compiler: Compiler,
    nvdisasm: Path,
    variants: Sequence[Variant],
    archs: Sequence[str],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Row, ...]:
    """A row for each variant and architecture, in the order of `variants`, then `archs`.

    progress: is told (done, total) after each compiled file. Raises KernelsUnavailable where something does
    not compile.
    """
    by_source = [tuple(group) for _, group in groupby(sorted(variants, key=_SOURCE), key=_SOURCE)]
    by_source.sort(
        key=len, reverse=True
    )  # the longest first, so that none is left for one processor at the end
    tasks = [(group, arch) for group in by_source for arch in archs]
    found = dict[tuple[str, str], Row]()
    # Threads are enough: NVRTC works outside Python's lock, nvdisasm in a process of its own.
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        pending = [pool.submit(_inspect, compiler, nvdisasm, group, arch) for group, arch in tasks]
        try:
            for done, task in enumerate(as_completed(pending), start=1):
                found.update({(row.expression, row.arch): row for row in task.result()})
                if progress is not None:
                    progress(done, len(pending))
        finally:
            pool.shutdown(cancel_futures=True)
    return tuple(found[variant.expression, arch] for variant in variants for arch in archs)


_ATTENTION = frozenset({"paged_decode", "paged_prefill", "coded_decode", "coded_prefill"})


def label_of(variant: Variant) -> str:
    """Such as "paged_decode bf16 128 bounded softcap"."""
    words = variant.expression.replace("bfloat16", "bf16").replace("float16", "fp16")
    name, *arguments = re.findall(r"\w+", words)
    if variant.kernel in _ATTENTION:
        dtype, head_dim, *_, bounded, softcap = arguments
        codes = [arguments[2].removesuffix("_code")] if arguments[2].endswith("_code") else []
        flags = (("bounded", bounded), ("softcap", softcap))
        arguments = [dtype, head_dim, *codes, *(flag for flag, given in flags if given == "true")]
    return " ".join((name, *arguments))


_SOURCE = attrgetter("source")


def _inspect(compiler: Compiler, nvdisasm: Path, variants: Sequence[Variant], arch: str) -> list[Row]:
    expressions = [variant.expression for variant in variants]
    compiled = compiler.compile(variants[0].source, expressions, arch)
    resources = read_resources(compiled.log)
    kernels = read_sass(disassemble(compiled.cubin, nvdisasm))

    def rows() -> Iterator[Row]:
        for variant in variants:
            name = compiled.lowered[variant.expression]
            used, code = resources[name], kernels[name]
            instructions = budgets.instructions_of(variant, code)
            shared = variant.shared_bytes + used.static_shared_bytes
            yield Row(
                label=label_of(variant),
                expression=variant.expression,
                arch=arch,
                registers=used.registers,
                spill_bytes=used.spill_bytes,
                shared_bytes=shared,
                blocks=occupancy.MULTIPROCESSORS[arch].resident_blocks(
                    variant.threads, used.registers, shared
                ),
                instructions=None if instructions is None else instructions.all,
                shortest=None if instructions is None else instructions.shortest,
                loop=bool(budgets.products_of_tile(variant)),
                violations=budgets.violations(variant, arch, used, code),
            )

    return list(rows())
