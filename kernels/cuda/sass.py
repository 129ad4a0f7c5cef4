"""What the machine code of each kernel consists of: its instructions, and the loops of its tensor cores.

Read from what `nvdisasm` prints. Loops are natural loops of the flow graph, not spans of text: the compiler
puts rare paths behind the end of a kernel, from where they jump back, and a jump back alone is no loop.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from pageturner.kernels.errors import KernelsUnavailable

PACKAGE = "nvidia-cuda-nvdisasm"
INSTALL = 'pip install "pageturner[kernel-tools]"'

_SECTION = re.compile(r"\s*\.section\s+\.text\.([\w$.]+)")
_OTHER_SECTION = re.compile(r"\s*\.section\s")
_LABEL = re.compile(r"(\.L_\w+):")
_INSTRUCTION = re.compile(r"\s+/\*[0-9a-f]{4,}\*/\s+(?:@(!?\w+)\s+)?([A-Z][\w.]*)\s*(.*?)\s*;")
_TARGET = re.compile(r"`\((\.L_\w+)\)")


@dataclass(frozen=True, slots=True)
class Instruction:
    """opcode: with its modifiers, such as LDGSTS.E.BYPASS.LTC128B.128. target: the label it may jump to.
    conditional: it does so, or has its effect, only sometimes."""

    opcode: str
    target: str | None
    conditional: bool

    @property
    def name(self) -> str:
        return self.opcode.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Loop:
    """One turn of a loop.

    instructions: with all its paths, and the loops inside once. products: its HMMA instructions. shortest:
    instructions of the shortest way round that passes the products, as where nothing rare happens (a mask is
    applied, say) and nothing is left to be fetched.
    """

    instructions: int
    products: int
    shortest: int


@dataclass(frozen=True, slots=True)
class KernelCode:
    """opcodes: in order, without the padding behind the end. loops: those that hold an HMMA, and no smaller
    loop that does, in order."""

    opcodes: tuple[str, ...]
    loops: tuple[Loop, ...]

    def count(self, pattern: str) -> int:
        """How many opcodes match the regular expression from their first letter on."""
        compiled = re.compile(pattern)
        return sum(compiled.match(opcode) is not None for opcode in self.opcodes)


def find_nvdisasm() -> Path:
    """The program in PyPI's package. Raises KernelsUnavailable, naming the package."""
    try:
        files = metadata.files(PACKAGE) or ()
    except metadata.PackageNotFoundError as error:
        raise KernelsUnavailable(f"{PACKAGE} is not installed; {INSTALL}") from error
    for file in files:
        if file.stem == "nvdisasm":
            return Path(str(file.locate()))
    raise KernelsUnavailable(f"{PACKAGE} is installed without its program; reinstall it")


def disassemble(cubin: bytes, nvdisasm: Path) -> str:
    """The text of all kernels. Raises KernelsUnavailable if the program fails, say for being too old, or if
    there is no room for its file."""
    try:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            # The program is the package's own, with a file that we just wrote.
            done = subprocess.run(  # noqa: S603
                [nvdisasm, "--print-code", file.name], capture_output=True, text=True, check=True, timeout=300
            )
    except (OSError, subprocess.SubprocessError) as error:
        detail = (getattr(error, "stderr", None) or str(error)).strip()
        raise KernelsUnavailable(f"nvdisasm failed: {detail[-500:]}") from error
    return done.stdout


def read_sass(text: str) -> dict[str, KernelCode]:
    """The kernels of a disassembly by lowered name. Raises ValueError for text of another kind."""
    found = {name: _kernel_code(lines) for name, lines in _sections(text)}
    if not found:
        raise ValueError("no code section in this disassembly")
    return found


def _sections(text: str) -> Iterator[tuple[str, list[str]]]:
    name, lines = None, list[str]()
    for line in text.splitlines():
        if _OTHER_SECTION.match(line):
            if name is not None:
                yield name, lines
            section = _SECTION.match(line)
            name, lines = section[1] if section else None, []
        else:
            lines.append(line)
    if name is not None:
        yield name, lines


def _kernel_code(lines: Sequence[str]) -> KernelCode:
    instructions, labels = list[Instruction](), dict[str, int]()
    for line in lines:
        if label := _LABEL.match(line):
            labels[label[1]] = len(instructions)
        elif match := _INSTRUCTION.match(line):
            predicate, opcode, operands = match.groups()
            target = _TARGET.search(operands)
            # An operand before the target, as in "BRA.U UP0, `(...)", is a condition too.
            conditional = predicate is not None or bool(target and target.start())
            instructions.append(Instruction(opcode, target[1] if target else None, conditional))
    while instructions and instructions[-1].name == "NOP":
        instructions.pop()
    if instructions and instructions[-1].name == "BRA":  # the trap behind the last exit: it jumps to itself
        instructions.pop()
    return KernelCode(
        tuple(instruction.opcode for instruction in instructions),
        tuple(_product_loops(instructions, labels)),
    )


def _product_loops(instructions: Sequence[Instruction], labels: dict[str, int]) -> Iterator[Loop]:
    graph = _FlowGraph(instructions, labels)
    bodies = graph.natural_loops()
    loops = dict[int, Loop]()
    for header, body in sorted(bodies.items()):
        size, products = map(sum, zip(*(graph.weight(block) for block in body), strict=True))
        if products:
            shortest, passed = graph.shortest_turn(header, body)
            # Where products stand on alternative paths, a turn passes only some of them.
            loops[header] = Loop(size, products, round(shortest * products / max(passed, 1)))
    for header, loop in loops.items():
        if not any(other != header and other in bodies[header] for other in loops):
            yield loop


class _FlowGraph:
    """Basic blocks, numbered in the order of the text, with the jumps between them."""

    # sm_80 also uses CALL as a far jump; only that names a label, a call of a function names the function.
    _JUMPS = frozenset({"BRA", "JMP", "CALL"})
    _ENDS = frozenset({"EXIT", "RET", "BRX", "JMX"})

    def __init__(self, instructions: Sequence[Instruction], labels: dict[str, int]) -> None:
        self._instructions = instructions
        leaders = {0, *(at for at in labels.values() if at < len(instructions))}
        for at, instruction in enumerate(instructions[:-1]):
            if instruction.name in self._JUMPS | self._ENDS:
                leaders.add(at + 1)
        self._starts = sorted(leaders)
        self._ends = [*self._starts[1:], len(instructions)]
        block_at = {start: block for block, start in enumerate(self._starts)}
        self._successors = list[list[int]]()
        for block, end in enumerate(self._ends):
            successors = list[int]()
            last = instructions[end - 1] if end else None
            jumps = last is not None and last.name in self._JUMPS and last.target is not None
            if last is not None and last.target is not None and jumps:
                successors.append(block_at[labels[last.target]])
            leaves = last is not None and (jumps or last.name in self._ENDS) and not last.conditional
            if not leaves and block + 1 < len(self._starts):
                successors.append(block + 1)
            self._successors.append(successors)

    def weight(self, block: int) -> tuple[int, int]:
        """Its instructions, and how many of them are products."""
        inside = self._instructions[self._starts[block] : self._ends[block]]
        return len(inside), sum(instruction.name == "HMMA" for instruction in inside)

    def natural_loops(self) -> dict[int, set[int]]:
        """Header -> the blocks from which its back edges are reached without passing it, itself included."""
        dominators, predecessors = self._dominators(), self._predecessors()
        loops = dict[int, set[int]]()
        for block, successors in enumerate(self._successors):
            for header in successors:
                if not dominators[block] >> header & 1:
                    continue
                body = loops.setdefault(header, {header})
                reached = [block]
                while reached:
                    at = reached.pop()
                    if at not in body:
                        body.add(at)
                        reached += predecessors[at]
        return loops

    def shortest_turn(self, header: int, body: set[int]) -> tuple[int, int]:
        """Instructions and products of the way from the header back to it that passes the most products, and
        among those the fewest instructions. Loops inside are passed once."""
        dominators = self._dominators()

        @cache
        def rest(block: int) -> tuple[int, int] | None:
            """From this block on; None where all ways leave the loop."""
            successors = self._successors[block]
            ways = [(0, 0)] if header in successors else []
            for successor in successors:
                inner_turn = dominators[block] >> successor & 1
                if successor in body and not inner_turn and (way := rest(successor)) is not None:
                    ways.append(way)
            if not ways:
                return None
            size, products = self.weight(block)
            shortest, passed = min(ways, key=lambda way: (-way[1], way[0]))
            return size + shortest, products + passed

        turn = rest(header)
        assert turn is not None, "a header is reached from its back edge"
        return turn

    def _predecessors(self) -> list[list[int]]:
        predecessors = [list[int]() for _ in self._successors]
        for block, successors in enumerate(self._successors):
            for successor in successors:
                predecessors[successor].append(block)
        return predecessors

    def _dominators(self) -> list[int]:
        """For each block, a bit for every block that all paths to it from the entry pass; 0: unreachable."""
        everything = (1 << len(self._successors)) - 1
        reachable, waiting = set[int](), [0]
        while waiting:
            block = waiting.pop()
            if block not in reachable:
                reachable.add(block)
                waiting += self._successors[block]
        predecessors = self._predecessors()
        dominators = [everything if block in reachable else 0 for block in range(len(self._successors))]
        dominators[0] = 1
        changed = True
        while changed:
            changed = False
            for block in sorted(reachable - {0}):
                common = everything
                for predecessor in predecessors[block]:
                    if predecessor in reachable:
                        common &= dominators[predecessor]
                if common | 1 << block != dominators[block]:
                    dominators[block] = common | 1 << block
                    changed = True
        return dominators
