"""The grammars of a model that was loaded: of its tokenizer, under the options of structured output."""

from __future__ import annotations

import time
from functools import partial
from importlib import metadata

from pageturner.service.core.structured_output import FIELD
from pageturner.service.engine.token_texts import NoTokenTexts
from pageturner.service.engine.tokenizer import Tokenizer
from pageturner.service.errors import InvalidArgument
from pageturner.service.grammars.compiler import GrammarCompiler
from pageturner.service.grammars.grammars import Grammars, Unavailable
from pageturner.service.grammars.options import GrammarOptions

LIBRARY = "llguidance"


def make_grammars(
    options: GrammarOptions, tokenizer: Tokenizer | None, vocab_size: int
) -> Grammars | Unavailable:
    """Nothing is read of the tokenizer before the first grammar. vocab_size: the width of the model's
    logits."""
    if not options.enabled:
        return Unavailable("this server serves no structured output (grammars.enabled)")
    if tokenizer is None:
        return Unavailable("the model has no tokenizer, hence no text that could have a form")
    version = _library_version()
    if version is None:
        return Unavailable(f"this server lacks the package {LIBRARY}, which obeys it")
    compiler = GrammarCompiler(partial(_vocabulary, tokenizer, vocab_size), vocab_size, options)
    identity = f"{LIBRARY}-{version}-{options.max_json_whitespace}"
    return Grammars(compiler, options.max_cached, time.perf_counter, identity)


def _library_version() -> str | None:
    try:
        return metadata.version(LIBRARY)
    except metadata.PackageNotFoundError:
        return None


def _vocabulary(tokenizer: Tokenizer, vocab_size: int) -> tuple[bytes, ...]:
    try:
        return tokenizer.texts_of_tokens(vocab_size)
    except NoTokenTexts as error:
        raise InvalidArgument(FIELD, str(error)) from error
