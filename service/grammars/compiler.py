"""From what a request asks for to an automaton over the model's tokens, by `llguidance`.

An automaton is made lazily: compiling parses and checks, and what a state allows is found out when it is
first met. Everything is bounded by counts of work (`_limits`), so that the most hostile schema costs some
tens of milliseconds and megabytes, then fails alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from pageturner.service.core.structured_output import OutputForm, StructuredOutput
from pageturner.service.errors import InvalidArgument
from pageturner.service.grammars.options import GrammarOptions
from pageturner.service.grammars.schema_places import place_of_fault

if TYPE_CHECKING:
    import llguidance

MAX_REASON_CHARACTERS = 400

_OPTIONS = '\n%llguidance {"no_forcing": true}\n'
"""Where a grammar leaves no choice of text, every way to write it in tokens is allowed all the same: the
model chooses, as it would have without the grammar."""

Words = np.ndarray[tuple[int, ...], np.dtype[np.int32]]
"""A bit for each token, the lowest of the first word for token 0."""


class GrammarCompiler:
    """Of one model. Calls may come from several threads.

    vocabulary: for each of `vocab_size` ids, the bytes it adds to a text, none for control tokens and ids
    without a token; asked for once, when the first grammar is compiled. It may raise InvalidArgument, which
    every grammar is refused with then.
    """

    def __init__(
        self, vocabulary: Callable[[], Sequence[bytes]], vocab_size: int, options: GrammarOptions
    ) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._options = options
        self._lock = Lock()
        self._made_tokens: llguidance.LLTokenizer | InvalidArgument | None = None

    def compile(self, wanted: StructuredOutput) -> CompiledGrammar:
        """Raises InvalidArgument, naming the field and the place in it, for what can't be compiled."""
        if wanted.num_characters > self._options.max_characters:
            bound = self._options.max_characters
            raise InvalidArgument(wanted.field, f"{wanted.num_characters} characters; at most {bound}")
        if wanted.form is OutputForm.JSON_SCHEMA:
            return self._compile_schema(wanted)
        grammar = self._compiled(self._source(wanted))
        if isinstance(grammar, str):
            raise InvalidArgument(wanted.field, _shortened(grammar))
        return grammar

    def _source(self, wanted: StructuredOutput) -> str:
        """In llguidance's variant of Lark."""
        from llguidance import regex_to_lark

        match wanted.form:
            case OutputForm.JSON_OBJECT:
                return self._schema_source({"type": "object"})
            case OutputForm.REGEX:
                return f"start: /{regex_to_lark(wanted.source, use_ascii='')}/"
            case OutputForm.CHOICE:
                return f"start: /{'|'.join(map(_literal, wanted.choices))}/"
            case _:
                return wanted.source

    def _compile_schema(self, wanted: StructuredOutput) -> CompiledGrammar:
        try:
            schema = json.loads(wanted.source)
        except (ValueError, RecursionError) as error:
            reason = f"is not JSON: {_shortened(str(error))}"
            if isinstance(error, RecursionError):
                reason = "is nested too deeply"
            elif "set_int_max_str_digits" in reason:
                reason = f"has a number of more than {sys.get_int_max_str_digits()} digits"
            raise InvalidArgument(wanted.field, reason) from error
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        found = self._compiled_schema(schema)
        if isinstance(found, CompiledGrammar):
            return found
        place, reason = place_of_fault(schema, self._fault_of_schema)
        raise InvalidArgument(wanted.field, f"{_shortened(reason or found)} at {place}")

    def _compiled_schema(self, schema: Any) -> CompiledGrammar | str:
        if not isinstance(schema, dict):
            return "is not an object"
        try:
            return self._compiled(self._schema_source(schema))
        except ValueError as error:  # nested more deeply than the library reads
            return str(error)

    def _fault_of_schema(self, schema: Any) -> str:
        found = self._compiled_schema(schema)
        return found if isinstance(found, str) else ""

    def _schema_source(self, schema: dict[str, Any]) -> str:
        most = self._options.max_json_whitespace
        options: dict[str, object] = {"lenient": False, "whitespace_flexible": most > 0}
        if most:
            options["whitespace_pattern"] = rf"[\x20\x0A\x0D\x09]{{1,{most}}}"
        return f"start: %json {json.dumps({**schema, 'x-guidance': options})}"

    def _compiled(self, source: str) -> CompiledGrammar | str:
        """The grammar, or what is wrong with it."""
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokens, source + _OPTIONS, log_level=0, limits=_limits())
        if matcher.is_error():
            return _reason_of(matcher.get_error())
        grammar = CompiledGrammar(matcher, self._vocab_size)
        position = grammar.start()
        try:
            allowed = position.allowed()
            if not allowed.may_end and not allowed.words.any():
                return "no text fits it"
            # Where many things may follow, as in an object of many optional properties, that is mostly so
            # behind the first token: better found now than in the middle of an answer.
            if allowed.words.any():
                position.take([_lowest(allowed.words)])
                position.allowed()
        except GrammarTooComplex as error:
            return str(error)
        return grammar

    @property
    def _tokens(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._made_tokens is None:
                try:
                    self._made_tokens = _tokens(self._vocabulary(), self._vocab_size)
                except InvalidArgument as error:
                    self._made_tokens = error
            if isinstance(self._made_tokens, InvalidArgument):
                raise self._made_tokens
            return self._made_tokens


class GrammarTooComplex(Exception):
    """The bound on work at one token is reached, or a token came that the grammar does not know."""


@dataclass(frozen=True, slots=True)
class Allowed:
    """words: the tokens that may follow, end tokens apart. may_end: the text so far is whole."""

    words: Words
    may_end: bool


class CompiledGrammar:
    """One grammar over one model's tokens; a sequence that obeys it has a `Position` in it."""

    __slots__ = ("__weakref__", "_matcher", "_vocab_size")

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size

    def start(self) -> Position:
        """Before the first token. Of any thread."""
        return Position(self._matcher.deep_copy(), self._vocab_size)


class Position:
    """How far a text has come in a grammar. Of one thread at a time."""

    __slots__ = ("_vocab_size", "matcher", "num_tokens")

    def __init__(self, matcher: llguidance.LLMatcher, vocab_size: int, num_tokens: int = 0) -> None:
        self.matcher = matcher
        self.num_tokens = num_tokens
        self._vocab_size = vocab_size

    def copy(self) -> Position:
        """Another one at the same place."""
        return Position(self.matcher.deep_copy(), self._vocab_size, self.num_tokens)

    def count_fitting(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens may follow, one after the other; none of them is taken."""
        return self.matcher.validate_tokens(list(token_ids))

    def take(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens. Raises GrammarTooComplex, after which this is of no use."""
        if token_ids and not self.matcher.consume_tokens(list(token_ids)):
            raise GrammarTooComplex(self.trouble())
        self.num_tokens += len(token_ids)

    def allowed(self) -> Allowed:
        """What may follow. Raises GrammarTooComplex."""
        words = np.frombuffer(self.matcher.compute_bitmask(), dtype=np.int32).copy()
        if self.matcher.is_error():
            raise GrammarTooComplex(self.trouble())
        return split_mask(words, self._vocab_size)

    def trouble(self) -> str:
        """Why nothing can follow, in words that hold nothing of the text; empty if all is well."""
        if not self.matcher.is_error():
            return ""
        told = f"{self.matcher.stop_reason()} {self.matcher.get_error()}"  # which may quote the text
        if wide := _WIDE.search(told):
            return f"the grammar has {wide[1]} ways to go on at one place; at most {MAX_WAYS} are kept apart"
        found = [trouble for name, trouble in _TROUBLES.items() if name in told]
        return found[0] if found else "no token of the model's goes on with the text"


MAX_WAYS = 1_000
"""Items of one row of the parser (Earley's): rules that may go on there, about four for an optional property
of a JSON object and one for an alternative."""

_WIDE = re.compile(r"Current row has (\d+) items")

_TROUBLES = {
    "ParserTooComplex": "the grammar is so ambiguous that the next token takes too much work",
    "LexerTooComplex": "its regular expressions are so large that the next token takes too much work",
}


def split_mask(words: Words, vocab_size: int) -> Allowed:
    """The bit behind the model's ids is that of the end."""
    word, bit = divmod(vocab_size, 32)
    may_end = bool(words[word] >> bit & 1)
    words[word] &= (1 << bit) - 1
    return Allowed(words, may_end)


def _lowest(words: Words) -> int:
    """The first token of a mask that has one: of byte-level vocabularies a single byte."""
    place = int(np.flatnonzero(words)[0])
    word = int(words[place]) & 0xFFFFFFFF
    return 32 * place + (word & -word).bit_length() - 1


def _tokens(vocabulary: Sequence[bytes], vocab_size: int) -> llguidance.LLTokenizer:
    """The model's tokens as llguidance knows them. Behind them stands one more, which stands for every end
    token: a model may have several, and a request may name its own."""
    import llguidance

    assert len(vocabulary) == vocab_size, f"{len(vocabulary)} tokens for {vocab_size} logits"
    wrapped = llguidance.TokenizerWrapper(_Vocabulary((*vocabulary, b""), vocab_size))
    return llguidance.LLTokenizer(wrapped, eos_token=vocab_size)


class _Vocabulary:
    """What llguidance asks of a tokenizer. It has no text read where nothing is forced (`_OPTIONS`)."""

    bos_token_id = None

    def __init__(self, tokens: Sequence[bytes], end: int) -> None:
        self.tokens = tokens
        self.eos_token_id = end
        self.special_token_ids: Sequence[int] = ()

    def __call__(self, text: bytes | str) -> list[int]:
        return []


def _limits() -> llguidance.LLParserLimits:
    """Bounds in counts of work, hence the same on every machine. Of a token, some milliseconds at most; of
    what is remembered of a grammar, some 20 MB."""
    import llguidance

    return llguidance.LLParserLimits(
        step_lexer_fuel=100_000,
        step_max_items=20_000,
        max_lexer_states=20_000,
        max_items_in_row=MAX_WAYS,
        max_grammar_size=200_000,
    )


def _reason_of(error: str) -> str:
    """What the library says, without the listing of the grammar below it and the place of what we wrote."""
    told = re.split(r"\n *\d+ \| ", error.strip())[0]
    told = re.sub(
        r"^at 1\(8\): (failed to compile JSON schema: |invalid regex .* \(in regex\): )", "", told, flags=re.S
    )
    return told or "cannot be compiled"


def _literal(text: str) -> str:
    """A regular expression that this text alone fits; one of Rust's, where `re.escape` writes Python's."""
    return re.sub(r"[^0-9A-Za-z]", lambda found: rf"\x{{{ord(found[0]):x}}}", text)


def _shortened(reason: str) -> str:
    reason = " ".join(reason.partition("<backtrace>")[0].split())  # of a panic that the library caught
    bound = MAX_REASON_CHARACTERS
    return reason if len(reason) <= bound else f"{reason[:bound]}..."
