"""The fake model with structured output: its rows are masked as the service masks them.

A row with a form draws its token by the same hash, of the tokens that its mask allows. `expected_formed` says
which token is right without masks that are kept from step to step: it begins a grammar anew for each sequence
and takes in one token after the other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from time import perf_counter

import numpy as np

from pageturner.service.core.outputs import (
    SampledSequence,
    SampledToken,
    SampleRow,
    ScheduledSequence,
    SchedulerOutput,
    TokenLogprob,
)
from pageturner.service.core.sampling_params import BeamSearch
from pageturner.service.core.structured_output import StructuredOutput
from pageturner.service.errors import NonFiniteLogits, PageturnerError
from pageturner.service.grammars.compiler import Allowed, GrammarCompiler, Words
from pageturner.service.grammars.grammars import Grammars
from pageturner.service.grammars.options import GrammarOptions
from pageturner.service.grammars.step_masks import StepMasks
from pageturner.service.model.verification import drafted_rows, verified
from support.beam_reference import Answer, searched
from support.core_harness import CoreHarness, Record
from support.fake_model import Array, FakeModel, Stop, asked_candidates, candidates_of, content_of

TEXTS = (
    *(b"a", b"b", b"c"),  # what prompts are made of
    *(b"{", b"}", b"[", b"]", b'"', b":", b",", b" ", b"-", b"0", b"1", b"true", b"false", b"null"),
    *(b'{"', b'":', b'"a"', b'["', b"ab", b"\xc3", b"\xa9"),
    b"",
)
"""The text of each token: what JSON is made of, in pieces and in pieces joined, a character in two tokens."""

END = len(TEXTS) - 1
"""The end token; it has no text."""

VOCAB_SIZE = len(TEXTS)


def grammars_of(texts: tuple[bytes, ...] = TEXTS, **options: int) -> Grammars:
    """Of a model with these tokens."""
    chosen = GrammarOptions(**options)  # type: ignore[arg-type] # tests give numbers alone
    compiler = GrammarCompiler(lambda: texts, len(texts), chosen)
    return Grammars(compiler, chosen.max_cached, perf_counter, "test")


GRAMMARS = grammars_of()


def text_of(token_ids: Iterable[int], texts: tuple[bytes, ...] = TEXTS) -> str:
    """What tokens say."""
    return b"".join(texts[token_id] for token_id in token_ids).decode()


def ids_in(words: Words) -> list[int]:
    """The tokens whose bits are set."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    return np.flatnonzero(bits).tolist()


def pick(content: Array, seed: int, index: int, position: int, allowed: list[int]) -> int:
    """content: float32 [positions, layers, 2, record] as read."""
    digest = hashlib.blake2b(content.tobytes(), digest_size=8)
    digest.update(f"{seed}/{index}/{position}".encode())
    return allowed[int.from_bytes(digest.digest(), "little") % len(allowed)]


@lru_cache(maxsize=4096)
def expected_formed(
    prompt: tuple[int, ...], seed: int, index: int, stop: Stop, form: StructuredOutput
) -> tuple[int, ...]:
    """Outputs of one choice with unlimited memory and no scheduler."""
    place = GRAMMARS.compile(form).start()
    tokens = list(prompt)
    for num_outputs in range(stop.max_tokens):
        allowed = allowed_ids(place.allowed(), num_outputs, stop)
        token = pick(content_of(tokens), seed, index, len(tokens), allowed)
        tokens.append(token)
        if token in stop.stop_ids:
            break
        place.take((token,))
    return tuple(tokens[len(prompt) :])


def searched_formed(
    prompt: tuple[int, ...], search: BeamSearch, stop: Stop, form: StructuredOutput
) -> list[Answer]:
    """Answers of a beam search with unlimited memory, by a grammar that is begun anew for every beam."""

    def offer(outputs: list[int]) -> list[TokenLogprob]:
        place = GRAMMARS.compile(form).start()
        place.take(outputs)
        allowed = allowed_ids(place.allowed(), len(outputs), stop)
        ranked = candidates_of(content_of([*prompt, *outputs]), VOCAB_SIZE)
        return [each for each in ranked if each.token_id in allowed]

    return searched(search, stop.stop_ids, stop.max_tokens, offer)


def allowed_ids(found: Allowed, num_outputs: int, stop: Stop) -> list[int]:
    """The tokens that may follow so many outputs."""
    others = [i for i in ids_in(found.words) if i not in stop.stop_ids]
    may_end = found.may_end and (num_outputs >= stop.min_tokens or not others)
    return sorted({*others, *stop.stop_ids} if may_end else others)


class FormedModel(FakeModel):
    """Masks are begun before each forward and asked for behind it, as the engine has it."""

    def __init__(
        self, num_blocks: int, num_host_blocks: int, block_size: int, window: int | None = None
    ) -> None:
        super().__init__(num_blocks, num_host_blocks, block_size, window)
        self.masks = StepMasks(GRAMMARS, perf_counter)

    def compute(self, output: SchedulerOutput) -> tuple[SampledSequence, ...]:
        self.masks.begin(output)
        return super().compute(output)

    def _sample(self, sequence: ScheduledSequence, row: SampleRow) -> SampledSequence:
        if row.params.structured_output is None:
            return super()._sample(sequence, row)
        if sequence.request_id in self.poisoned_requests:
            return SampledSequence(row.seq_id, row.epoch, (), NonFiniteLogits("poisoned"))
        if not sequence.num_drafts:
            return self._sample_row(sequence, row, sequence.end)
        _, rows, positions = drafted_rows([sequence])
        sampled = [self._sample_row(sequence, *asked) for asked in zip(rows, positions, strict=True)]
        return verified(sampled, [sequence])[0]

    def _sample_row(self, sequence: ScheduledSequence, row: SampleRow, position: int) -> SampledSequence:
        (mask,) = self.masks.of([row])
        if isinstance(mask, PageturnerError):
            return SampledSequence(row.seq_id, row.epoch, (), mask)
        content, allowed = self._content(sequence, position), ids_in(mask)
        if row.params.beam_search is not None:
            ranked = [each for each in candidates_of(content, VOCAB_SIZE) if each.token_id in allowed]
            return SampledSequence(row.seq_id, row.epoch, asked_candidates(ranked, row.params))
        token = pick(content, row.seed, row.index, position, allowed)
        return SampledSequence(row.seq_id, row.epoch, (SampledToken(token),))


class FormedHarness(CoreHarness):
    """The harness over `FormedModel`. Requests with a form have `END` for their end token."""

    model_class = FormedModel

    def expected(self, record: Record, index: int) -> list[int]:
        new, form = record.new, record.new.params.structured_output
        if form is None or record.answers is not None:
            return super().expected(record, index)
        return list(expected_formed(new.prompt_token_ids, new.seed, index, record.stop, form))

    def expected_answers(self, record: Record, search: BeamSearch) -> list[Answer]:
        new, form = record.new, record.new.params.structured_output
        if form is None:
            return super().expected_answers(record, search)
        return searched_formed(new.prompt_token_ids, search, record.stop, form)

    def check_finished(self) -> None:
        super().check_finished()
        for record in self.records.values():
            assert record.end is not None
            error = record.end.error
            assert "structured_output" not in str(error), f"form: {error}"
