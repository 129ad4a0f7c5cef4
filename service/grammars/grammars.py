"""The grammars of one model: compiled once, found by what was asked for, kept while in use and for a while
after."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from threading import Lock
from weakref import WeakValueDictionary

from pageturner.service.core.structured_output import StructuredOutput
from pageturner.service.grammars.compiler import CompiledGrammar, GrammarCompiler
from pageturner.service.panics import panics_are_errors


@dataclass(frozen=True, slots=True)
class GrammarFigures:
    """Since start, but for num_cached, of this moment.

    num_hits: grammars asked for that were there. mask_seconds: that masks took in their thread. wait_seconds:
    that steps waited for masks behind their forward, making those included that were not begun before it.
    """

    num_cached: int = 0
    num_compilations: int = 0
    compile_seconds: float = 0.0
    num_hits: int = 0
    num_masks: int = 0
    mask_seconds: float = 0.0
    wait_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Unavailable:
    """In the place of grammars, why there are none."""

    reason: str


class Grammars:
    """May be asked from any thread. identity: of what decides which tokens a grammar allows, code and
    options.

    A grammar lives as long as anyone holds it: each request that obeys it does, from before it is queued to
    its end. Beside those the last `num_kept` to be asked for are held here.
    """

    def __init__(
        self, compiler: GrammarCompiler, num_kept: int, timer: Callable[[], float], identity: str = ""
    ) -> None:
        self.identity = identity
        self._compiler = compiler
        self._num_kept = num_kept
        self._timer = timer
        self._lock = Lock()
        self._living: WeakValueDictionary[StructuredOutput, CompiledGrammar] = WeakValueDictionary()
        self._kept: OrderedDict[StructuredOutput, CompiledGrammar] = OrderedDict()
        self._figures = GrammarFigures()

    @property
    def has_any(self) -> bool:
        """Whether a grammar was ever asked for that may still be obeyed."""
        return bool(self._living)

    def find(self, wanted: StructuredOutput) -> CompiledGrammar | None:
        """The grammar if it is compiled; costs nothing."""
        with self._lock:
            grammar = self._living.get(wanted)
            if grammar is not None:
                self._figures = replace(self._figures, num_hits=self._figures.num_hits + 1)
                self._keep(wanted, grammar)
            return grammar

    @panics_are_errors("a grammar")
    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """The grammar, compiled if it is not. Raises InvalidArgument where that is impossible."""
        if (found := self.find(wanted)) is not None:
            return found
        began = self._timer()
        grammar = self._compiler.compile(wanted)
        seconds = self._timer() - began
        with self._lock:
            self._figures = replace(
                self._figures,
                num_compilations=self._figures.num_compilations + 1,
                compile_seconds=self._figures.compile_seconds + seconds,
            )
            self._living[wanted] = grammar
            self._keep(wanted, grammar)
        return grammar

    def count_masks(self, num_masks: int, mask_seconds: float, wait_seconds: float) -> None:
        """Masks were made, or waited for."""
        with self._lock:
            figures = self._figures
            self._figures = replace(
                figures,
                num_masks=figures.num_masks + num_masks,
                mask_seconds=figures.mask_seconds + mask_seconds,
                wait_seconds=figures.wait_seconds + wait_seconds,
            )

    def figures(self) -> GrammarFigures:
        """Of this moment."""
        with self._lock:
            return replace(self._figures, num_cached=len(self._living))

    def _keep(self, wanted: StructuredOutput, grammar: CompiledGrammar) -> None:
        self._kept[wanted] = grammar
        self._kept.move_to_end(wanted)
        while len(self._kept) > self._num_kept:
            self._kept.popitem(last=False)
